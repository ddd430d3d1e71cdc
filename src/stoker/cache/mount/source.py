"""What a mount shows, from a cache: a server on the same machine, or a fleet."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from io import BytesIO
from typing import BinaryIO

from stoker.cache.client.asked import ByteRange
from stoker.cache.client.client import CacheClient
from stoker.cache.client.entries import FolderPage, folder_page
from stoker.cache.mount.names import REFRESH, STATUS
from stoker.cache.mount.source_port import Found, Page
from stoker.errors import BadKey, ObjectChanged, ObjectNotFound, StokerError, WireError
from stoker.wire.cache_api import LIST_LIMIT_MAX, ONLY, ObjectInfo
from stoker.wire.cache_writes import Written
from stoker.wire.http import KEY_BYTES_MAX

log = logging.getLogger("stoker.cache.mount")
NAME_BYTES_MAX = 255
TIMES_MAX = 65_536
MAPPED_FROM_BYTES = 512 * 1024
_ONLY_FOLDER = Found(True)
_NO_NAMES = frozenset(("", ".", "..", REFRESH, STATUS))


class CacheSource:
    """See `source_port.Source`. `prefix`: what lies below it is shown, as if it were all there is."""

    def __init__(self, client: CacheClient, bucket: str, prefix: str = "") -> None:
        prefix = prefix.strip("/")
        self._client = client
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._times: OrderedDict[tuple[str, str], float] = OrderedDict()
        """When versions were written that lists told of: where the origin is asked for one alone, not all tell it."""
        self._has_said = False

    def find(self, path: str) -> Found | None:
        if not path:
            return _ONLY_FOLDER
        key = self._prefix + path
        if not _is_path(path) or len(key.encode()) >= KEY_BYTES_MAX:
            return None
        known = self._client.look_up(self._bucket, key)
        if known is not None and known.size_bytes:
            return self._file(known)
        if self._is_folder(key):
            return _ONLY_FOLDER
        return None if known is None else self._file(known)

    def page(self, path: str, after: str | None, limit: int) -> Page:
        if path and not _is_path(path):
            return Page([], None)
        prefix = f"{self._prefix}{path}/" if path else self._prefix
        last, hidden = _read_mark(after)
        while True:
            found = folder_page(
                partial(self._client.list_page, self._bucket),
                prefix,
                None if last is None else prefix + last,
                min(limit, LIST_LIMIT_MAX),
            )
            entries = self._entries(found, prefix, hidden)
            if found.after is None:
                return Page(entries, None)
            last = found.after[len(prefix) :]
            if entries:
                return Page(entries, _mark(last, hidden))

    def read(self, path: str, version: str, start: int, stop: int) -> bytes | memoryview:
        if start >= stop:
            return b""
        key = self._prefix + path
        try:
            # What is mapped is read from the disk with all that the disk reads ahead: too much for a small piece. And
            # to ask for one costs half of what a batch costs.
            if stop - start < MAPPED_FROM_BYTES:
                return self._client.read(self._bucket, key, start, stop, version=version)
            wanted = [ByteRange(key, start, stop, version)]
            return self._client.read_ranges(self._bucket, wanted, views=True)[0]
        except ObjectNotFound as error:
            raise ObjectChanged(f"{path!r} is not there any more: {error}") from error

    def whole_file(self, path: str, version: str) -> int | None:
        with suppress(StokerError):  # who reads it another way then is told
            return self._client.whole_file(self._bucket, self._prefix + path, version)
        return None

    def fetch(self, path: str, version: str) -> None:
        with suppress(StokerError):
            self._client.begin_load(self._bucket, [self._prefix + path])

    def refresh(self, path: str) -> int:
        if not path:
            return self._client.refresh(self._bucket, self._prefix)
        key = self._prefix + path
        below = self._client.refresh(self._bucket, f"{key}/")
        return below + self._client.refresh(self._bucket, key + ONLY)

    def held_bytes(self, path: str, version: str) -> int:
        try:
            held = self._client.held(self._bucket, self._prefix + path)
        except (ObjectNotFound, WireError):  # the second: an older server, which does not tell
            return 0
        return held.held_bytes if held.version == version else 0

    def room(self) -> tuple[int, int]:
        statuses = [client.status() for client in self._client.servers()]
        return sum(one.capacity_bytes for one in statuses), sum(one.held_bytes for one in statuses)

    def put(self, path: str, file: BinaryIO, size_bytes: int) -> Found:
        return self._wrote(path, self._client.put(self._bucket, self._key(path), file, size_bytes))

    def remove(self, path: str) -> None:
        self._client.remove(self._bucket, self._key(path))

    def copy(self, path: str, to: str) -> Found:
        return self._wrote(to, self._client.copy(self._bucket, self._key(path), self._key(to)))

    def make_folder(self, path: str) -> None:
        self._client.put(self._bucket, self._key(f"{path}/"), BytesIO(), 0)

    def _key(self, path: str) -> str:
        if not _is_path(path.removesuffix("/")):
            raise BadKey(f"{path[:300]!r} is no name of a file here")
        return self._prefix + path

    def _wrote(self, path: str, written: Written) -> Found:
        modified_s = written.modified_s or time.time()  # the origin may tell it later
        return self._listed(ObjectInfo(self._prefix + path, written.size_bytes, written.version, modified_s))

    def _entries(self, page: FolderPage, prefix: str, hidden: list[str]) -> list[tuple[str, Found]]:
        """What of a page can be shown. `hidden`: files that hide folders which may still come, also from the page
        before; each is the beginning of the next one, and of the last entry in the end."""
        shown: list[tuple[str, Found]] = []
        names = [(one if isinstance(one, str) else one.key)[len(prefix) :] for one in page.entries]
        for place, (name, entry) in enumerate(zip(names, page.entries, strict=True)):
            while hidden and not name.startswith(hidden[-1]):
                hidden.pop()
            if isinstance(entry, str):
                folder = name.removesuffix("/")
                if folder in hidden or not self._can_be_shown(folder):
                    continue
                shown.append((folder, _ONLY_FOLDER))
            elif name and self._can_be_shown(name):
                if not entry.size_bytes and self._is_folder_too(names, place, page.after is None, prefix):
                    continue
                hidden.append(name)
                shown.append((name, self._listed(entry)))
        return shown

    def _is_folder_too(self, names: Sequence[str], place: int, is_last: bool, prefix: str) -> bool:
        """Whether an entry is the name of a folder as well, which would come after it."""
        name = names[place]
        for following in _from(names, place + 1):
            if following == f"{name}/":
                return True
            if not following.startswith(name) or following > f"{name}/":
                return False
        return not is_last and self._is_folder(prefix + name)

    def _is_folder(self, key: str) -> bool:
        return bool(self._client.list_page(self._bucket, f"{key}/", None, 1).objects)

    def _can_be_shown(self, name: str) -> bool:
        if is_name(name):
            return True
        if not self._has_said:
            self._has_said = True
            log.warning(
                "%s: keys such as %r are no names of files, and are not shown", self._bucket, name[:300]
            )
        return False

    def _file(self, known: ObjectInfo) -> Found:
        modified_s = known.modified_s or self._times.get((known.key, known.version), 0.0)
        return Found(False, known.size_bytes, known.version, modified_s)

    def _listed(self, info: ObjectInfo) -> Found:
        """As `find` would say it: in whole seconds."""
        modified_s = float(int(info.modified_s))
        if modified_s:
            self._times[info.key, info.version] = modified_s
            while len(self._times) > TIMES_MAX:
                with suppress(KeyError):  # another thread was faster
                    self._times.popitem(last=False)
        return Found(False, info.size_bytes, info.version, modified_s)


def is_name(name: str) -> bool:
    """Whether a file can be called so."""
    if name in _NO_NAMES or "\0" in name or "/" in name or len(name) > NAME_BYTES_MAX:
        return False
    try:
        return len(name.encode()) <= NAME_BYTES_MAX
    except UnicodeEncodeError:
        return False  # the system's name is not UTF-8: no key is called so


def _is_path(path: str) -> bool:
    return all(map(is_name, path.split("/")))


def _from(names: Sequence[str], first: int) -> Iterator[str]:
    return (names[place] for place in range(first, len(names)))


def _mark(last: str, hidden: Sequence[str]) -> str:
    """What the next page is asked for with: behind which entry it begins, and which of the files before hide folders in
    it. They are beginnings of that entry: their lengths say which."""
    return "".join(f"{len(name)}," for name in hidden if last.startswith(name)) + f"/{last}"


def _read_mark(after: str | None) -> tuple[str | None, list[str]]:
    if after is None:
        return None, []
    lengths, _, last = after.partition("/")
    return last, [last[: int(length)] for length in lengths.split(",") if length]
