"""`stoker://bucket/key` for fsspec: read only, and safe after a fork."""

from __future__ import annotations

import errno
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from typing import Any, TypeVar

from stoker.cache.client.client import ByteRange, CacheClient
from stoker.cache.client.entries import children, objects
from stoker.cache.client.files import CachedFile, ObjectFile, ThreadsFile, open_object
from stoker.cache.client.fleet import open_client
from stoker.cache.client.os_errors import os_error, os_errors, read_only
from stoker.cache.client.read_only import ReadOnlyFileSystem
from stoker.errors import AccessDenied, CacheUnavailable, ConfigError, ObjectNotFound, StokerError
from stoker.settings import ClientTlsFiles, cache_settings
from stoker.wire.cache_api import ObjectInfo

T = TypeVar("T")
_BATCH_KEYS = 256
"""Of `cat`: the answer to a batch is there twice for a moment, as it came and as objects."""


class _Settings:
    """What the settings say now."""

    def __get__(self, instance: object, owner: type) -> tuple[str | None, str | None, ClientTlsFiles]:
        settings = cache_settings()
        return settings.endpoint, settings.token, settings.tls


class StokerFileSystem(ReadOnlyFileSystem):
    """The objects of a cache server. `endpoint`, `token` and `ca` (who signed the certificate of an `https://` server)
    default to the settings.

    Nothing is remembered of lists and objects: the server does that. What is not there is FileNotFoundError, and what a
    token may not read PermissionError, as fsspec expects; all else that fails stays what it is (CacheUnavailable,
    OriginError, …), so that nobody takes it for a file that is not there. Raises ConfigError without an endpoint.

    `threads_apart`: each thread that reads from a file has a place of its own in it, for libraries that move about in
    one file from many threads without a lock (DuckDB).
    """

    protocol = "stoker"
    root_marker = ""
    # fsspec uses one again that was made with the same arguments: not where the settings were others.
    _settings = _Settings()
    _extra_tokenize_attributes = ("_settings",)

    def __init__(
        self,
        endpoint: str | None = None,
        token: str | None = None,
        threads_apart: bool = False,
        ca: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._threads_apart = threads_apart
        settings = cache_settings()
        where = endpoint or settings.endpoint
        if where is None:
            raise ConfigError(
                "no cache endpoint: pass endpoint='http://HOST:PORT', or set STOKER_CACHE_ENDPOINT"
            )
        tls = settings.tls if ca is None else replace(settings.tls, ca=ca)
        self._client = _client(where, token or settings.token, tls)

    @property
    def fsid(self) -> str:
        return f"stoker-{self._client.endpoint}"

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        bucket, key = _split(path)
        with os_errors(path):
            if not key:
                if bucket and bucket not in self._buckets():
                    raise ObjectNotFound(f"there is no bucket {bucket!r}")
                return _folder(bucket)
            try:
                return _file(bucket, self._client.stat(bucket, key))
            except ObjectNotFound:
                if self._is_folder(bucket, key):
                    return _folder(f"{bucket}/{key}")
                raise

    def exists(self, path: str, **_: Any) -> bool:
        """Whether there is such a file or folder; a cache that cannot be asked is no answer, unlike fsspec's own."""
        try:
            self.info(path)
        except FileNotFoundError:
            return False
        return True

    def isfile(self, path: str) -> bool:
        try:
            return bool(self.info(path)["type"] == "file")
        except FileNotFoundError:
            return False

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        bucket, key = _split(path)
        with os_errors(path):
            if not bucket:
                entries = [_folder(name) for name in self._buckets()]
            else:
                entries = self._children(bucket, f"{key}/" if key else "")
        if not entries:
            found = self.info(path)
            entries = [found] if found["type"] == "file" else []
        return entries if detail else [entry["name"] for entry in entries]

    def find(
        self,
        path: str,
        maxdepth: int | None = None,
        withdirs: bool = False,
        detail: bool = False,
        prefix: str = "",
        **kwargs: Any,
    ) -> Any:
        """As fsspec's. All levels are one list of objects; `prefix`: only names right below `path` that start so."""
        bucket, key = _split(path)
        if not bucket or maxdepth not in (None, 1):
            return super().find(path, maxdepth=maxdepth, withdirs=withdirs, detail=detail, **kwargs)
        below = f"{key}/" if key else ""
        try:
            with os_errors(path):
                if maxdepth == 1:
                    found = self._children(bucket, below + prefix)
                else:
                    found = self._tree(bucket, below, prefix)
        except FileNotFoundError:
            found = []
        entries = {entry["name"]: entry for entry in found if withdirs or entry["type"] == "file"}
        if withdirs and found and not prefix:
            root = _folder(f"{bucket}/{key}" if key else bucket)
            entries[root["name"]] = root
        if not entries and key and not prefix and self.isfile(path):
            entries[f"{bucket}/{key}"] = self.info(path)
        names = sorted(entries)
        return {name: entries[name] for name in names} if detail else names

    def glob(self, path: str, maxdepth: int | None = None, **kwargs: Any) -> Any:
        """As fsspec's, but that only names are listed that begin as the pattern does."""
        before = self._strip_protocol(path)
        for magic in "*?[":
            before = before.partition(magic)[0]
        return super().glob(path, maxdepth=maxdepth, prefix=before.rpartition("/")[2], **kwargs)

    def du(
        self, path: str, total: bool = True, maxdepth: int | None = None, withdirs: bool = False, **_: Any
    ) -> Any:
        found = self.find(path, maxdepth=maxdepth, withdirs=withdirs, detail=True)
        sizes = {name: info["size"] for name, info in found.items()}
        return sum(sizes.values()) if total else sizes

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        bucket, key = _split(path)
        if not key:
            raise IsADirectoryError(errno.EISDIR, "this is a bucket", path)
        with os_errors(path):
            if (start or 0) >= 0 and (end is None or end >= 0):
                return self._client.read(
                    bucket, key, start or 0, None if end is None else max(start or 0, end)
                )
            info = self._client.stat(bucket, key)
            first, stop = _bounds(start, end, info.size_bytes)
            return self._client.read(bucket, key, first, max(first, stop), version=info.version)

    def cat(self, path: Any, recursive: bool = False, on_error: str = "raise", **kwargs: Any) -> Any:
        """As fsspec's, by few requests."""
        paths = self.expand_path(path)
        if recursive:
            paths = sorted({name for one in paths for name in self.find(one)} or paths)
        elif isinstance(path, str) and paths == [self._strip_protocol(path)]:
            return self.cat_file(path, **kwargs)
        if kwargs.get("start") is not None or kwargs.get("end") is not None:
            found = self.cat_ranges(paths, kwargs.get("start"), kwargs.get("end"), on_error=_kept(on_error))
        else:
            split = [_split(one) for one in paths]
            found = self._gather(paths, split, self._client.read_many, _kept(on_error))
        return {
            one: data
            for one, data in zip(paths, found, strict=True)
            if on_error != "omit" or isinstance(data, bytes)
        }

    def cat_ranges(
        self,
        paths: list[str],
        starts: Any,
        ends: Any,
        max_gap: int | None = None,
        on_error: str = "return",
        **_: Any,
    ) -> list[Any]:
        """As fsspec's, by one request for each bucket. Gaps are never read."""
        if not isinstance(paths, list):
            raise TypeError("paths must be a list")
        bounds = [
            list(bound) if isinstance(bound, list | tuple) else [bound] * len(paths)
            for bound in (starts, ends)
        ]
        if any(len(bound) != len(paths) for bound in bounds):
            raise ValueError("paths, starts and ends must have the same length")
        found: list[Any] = [b""] * len(paths)
        wanted: list[tuple[int, tuple[str, ByteRange]]] = []
        for place, (path, start, end) in enumerate(zip(paths, *bounds, strict=True)):
            try:
                bucket, part = self._range(path, start, end)
            except (OSError, StokerError) as error:
                if on_error == "raise":
                    raise
                found[place] = error
            else:
                if part.start < part.stop:
                    wanted.append((place, (bucket, part)))
        parts = self._gather(
            [paths[place] for place, _ in wanted],
            [one for _, one in wanted],
            self._client.read_ranges,
            on_error,
        )
        for (place, _one), data in zip(wanted, parts, strict=True):
            found[place] = data
        return found

    def checksum(self, path: str) -> str:
        """The version of an object."""
        return str(self.info(path).get("version", path))

    def modified(self, path: str) -> datetime:
        """When the origin told of the object last, which cannot have changed later: its own time is not known here.

        DuckDB asks for it to see whether a file is still the same.
        """
        bucket, key = _split(path)
        with os_errors(path):
            found = self._client.known(bucket, key)
            if found.is_absent:
                raise ObjectNotFound(f"{path!r} is not there")
        return datetime.fromtimestamp(int(time.time()) - found.age_s, UTC)

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        cache_options: dict[str, Any] | None = None,
        cache_type: str | None = None,
        **options: Any,
    ) -> ObjectFile | ThreadsFile | CachedFile:
        """`block_size`: how much is read ahead at most. `cache_type`: one of fsspec's caches instead of ours."""
        if mode != "rb":
            raise read_only(path)
        bucket, key = _split(path)
        with os_errors(path):
            try:
                if not key:
                    raise ObjectNotFound(f"{path!r} names no object")
                if cache_type is None:
                    file = open_object(self._client, bucket, key, block_size)
                    return ThreadsFile(file) if self._threads_apart else file
                info = self._client.stat(bucket, key)
            except ObjectNotFound as error:
                if self.info(path)["type"] == "directory":
                    raise IsADirectoryError(errno.EISDIR, "this is a folder", path) from error
                raise
        more = {"block_size": block_size, "cache_options": cache_options, "cache_type": cache_type}
        return CachedFile(self._client, bucket, info, self, path, mode, **more)

    def _gather(
        self,
        paths: Sequence[str],
        wanted: Sequence[tuple[str, T]],
        read: Callable[[str, list[T]], list[bytes]],
        on_error: str,
    ) -> list[Any]:
        """What `read` gives, for all of a bucket together; `wanted` are buckets, and what is wanted of them."""
        places: dict[str, list[int]] = defaultdict(list)
        for place, (bucket, _) in enumerate(wanted):
            places[bucket].append(place)
        found: list[Any] = [None] * len(wanted)
        for bucket, all_there in places.items():
            numbers = iter(all_there)
            while there := list(islice(numbers, _BATCH_KEYS)):
                batch = [one for _, one in (wanted[place] for place in there)]
                if on_error == "raise":
                    with os_errors(None):
                        items: Sequence[bytes | StokerError] = read(bucket, batch)
                else:
                    items = _read_apart(functools.partial(read, bucket), batch)
                for place, item in zip(there, items, strict=True):
                    found[place] = os_error(item, paths[place]) if isinstance(item, StokerError) else item
        return found

    def _range(self, path: str, start: int | None, end: int | None) -> tuple[str, ByteRange]:
        bucket, key = _split(path)
        if (start or 0) < 0 or end is None or end < 0:
            info = self.info(path)
            if info["type"] != "file":
                raise IsADirectoryError(errno.EISDIR, "this is a folder", path)
            start, end = _bounds(start, end, info["size"])
        return bucket, ByteRange(key, start or 0, end)

    def _buckets(self) -> list[str]:
        return [bucket.name for bucket in self._client.status().buckets]

    def _is_folder(self, bucket: str, key: str) -> bool:
        return bool(self._client.list_page(bucket, f"{key}/", None, 1).objects)

    def _children(self, bucket: str, prefix: str) -> list[dict[str, Any]]:
        """The entries right below a folder whose names start as `prefix` says."""
        found = children(functools.partial(self._client.list_page, bucket), prefix)
        # An object whose key ends with a slash stands for a folder, this one or one below.
        return [
            _folder(f"{bucket}/{one[:-1]}") if isinstance(one, str) else _file(bucket, one)
            for one in found
            if isinstance(one, str) or not one.key.endswith("/")
        ]

    def _tree(self, bucket: str, below: str, prefix: str) -> list[dict[str, Any]]:
        """All files whose keys start with `below` and `prefix`, and the folders in which they are."""
        found = objects(functools.partial(self._client.list_page, bucket), below + prefix)
        folders: dict[str, None] = {}
        files = []
        for info in found:
            folders.update(dict.fromkeys(_folders_of(info.key, len(below))))
            if not info.key.endswith("/"):
                files.append(_file(bucket, info))
        return files + [_folder(f"{bucket}/{folder}") for folder in folders]


@functools.cache
def _client(endpoint: str, token: str | None, tls: ClientTlsFiles) -> CacheClient:
    """One for all file systems of a process: fsspec makes one for each thread."""
    return open_client(endpoint, token, tls=tls)


def _read_apart(read: Callable[[list[T]], list[bytes]], wanted: list[T]) -> Sequence[bytes | StokerError]:
    """What each gives, or why it cannot be had. A batch tells of its first error only: each half of one that failed is
    asked for again."""
    try:
        return read(wanted)
    except StokerError as error:
        if len(wanted) == 1 or isinstance(error, AccessDenied | CacheUnavailable):
            return [error] * len(wanted)
    middle = len(wanted) // 2
    return [*_read_apart(read, wanted[:middle]), *_read_apart(read, wanted[middle:])]


def _kept(on_error: str) -> str:
    return "raise" if on_error == "raise" else "return"


def _split(path: str) -> tuple[str, str]:
    bucket, _, key = StokerFileSystem._strip_protocol(path).strip("/").partition("/")
    return bucket, key


def _bounds(start: int | None, end: int | None, size_bytes: int) -> tuple[int, int]:
    """As slices have them: negative ones count from the end."""
    first, stop, _ = slice(start, end).indices(size_bytes)
    return first, stop


def _folders_of(key: str, start: int) -> Iterable[str]:
    """The folders of a key from a place in it on, without their slashes."""
    end = key.find("/", start)
    while end >= 0:
        if end > start:
            yield key[:end]
        end = key.find("/", end + 1)


def _file(bucket: str, info: ObjectInfo) -> dict[str, Any]:
    # By ETag others know it: `datasets` makes what it has prepared anew when that changes.
    return {
        "name": f"{bucket}/{info.key}",
        "size": info.size_bytes,
        "type": "file",
        "version": info.version,
        "ETag": info.version,
    }


def _folder(path: str) -> dict[str, Any]:
    return {"name": path, "size": 0, "type": "directory"}
