"""S3 and its relatives through obstore (the Rust object_store library)."""

from __future__ import annotations

import asyncio
import importlib
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from msgspec.structs import replace

from stoker.cache.origin.content import tag_of_version, told_attributes, version_of_tag
from stoker.cache.origin.port import (
    Opened,
    OriginCounters,
    Part,
    begun,
    changed,
    check_length,
    not_found,
    open_in_two,
    wrong_length,
)
from stoker.cache.origin.s3_direct import DirectReads, Found
from stoker.cache.origin.s3_opening import PART_BYTES
from stoker.errors import ObjectChanged, OriginError, StokerError
from stoker.wire.cache_api import ObjectInfo

_NO_RANGE = ("416 Range Not Satisfiable", "NotPartial")
"""What is said of an empty object, of which there is no range, and of a server that sends all whatever it is asked."""

_HIGHEST = chr(0x10FFFF)
_CONTROL = re.compile("[\x00-\x1f\x7f]")
KEY_BYTES_MAX = 1024
"""S3 takes no longer ones."""


class _OutOfOrderError(Exception):
    """The server lists in another order than that of the keys."""


class ObstoreOrigin:
    """An obstore store below a prefix, and `direct` reads where those are possible. The version of an object is its
    entity tag, without its quotes."""

    def __init__(self, url: str, store: Any, prefix: str, direct: DirectReads | None = None) -> None:
        self.url = url
        self.counters = OriginCounters()
        self._api = importlib.import_module("obstore")
        self._store = store
        self._direct = direct
        # Some servers list folder by folder; S3 itself lists in the order of keys.
        self._is_sorted = True
        self._prefix = prefix.rstrip("/") + "/" if prefix.strip("/") else ""

    async def stat(self, key: str) -> ObjectInfo:
        self.counters.requests += 1
        try:
            # `head` of obstore tells no attributes.
            answer = await self._api.get_async(self._store, self._path(key), options={"head": True})
            return self._described(answer)
        except Exception as error:
            raise self._wrap(key, error) from error

    async def read(self, key: str, start: int, stop: int, version: str) -> bytes:
        async with aclosing(self.stream(key, start, stop, version)) as parts:
            data = b"".join([part async for part in parts])
        return check_length(self.url, key, data, start, stop)

    async def stream(self, key: str, start: int, stop: int, version: str) -> AsyncGenerator[Part, None]:
        """Must be taken within the store's time limit for one request; what comes later is an OriginError."""
        version = version_of_tag(version)
        found = await self._ask(key, start, stop, version)
        if found is not None:
            async with aclosing(await begun(self._counted(key, found))) as parts:
                async for part in parts:
                    yield part
            return
        answer = await self._get(key, start, stop, version)
        async with aclosing(self._exactly(key, start, stop, answer)) as parts:
            async for part in parts:
                yield part

    async def open(self, key: str, stop: int) -> Opened:
        found = await self._ask(key, 0, stop)
        if found is not None:
            info = ObjectInfo(key, found.size_bytes, found.version, found.modified_s, found.headers)
            return Opened(info, await begun(self._counted(key, found)))
        self.counters.requests += 1
        try:
            answer = await self._api.get_async(self._store, self._path(key), options={"range": (0, stop)})
        except Exception as error:
            problem = self._wrap(key, error)
            if isinstance(problem, OriginError) and any(sign in str(error) for sign in _NO_RANGE):
                return await open_in_two(self, key, stop)
            raise problem from error
        info = self._described(answer)
        return Opened(info, self._exactly(key, 0, min(stop, info.size_bytes), answer))

    async def _ask(self, key: str, start: int, stop: int, version: str = "") -> Found | None:
        """What was asked for, its bytes still to come; None: by another way. Raises as `stream`."""
        path = self._prefix + key
        is_direct = key != "" and start < stop and len(path) <= KEY_BYTES_MAX
        if self._direct is None or not is_direct or not self._direct.can_name(path):
            return None
        self.counters.requests += 1
        found = await self._direct.get(path, start, stop, version)
        if found is None or found.status == 416:
            return None
        if found.status == 404:
            raise not_found(self.url, key)
        if found.status == 412:
            raise ObjectChanged(f"{key!r} in {self.url} changed while it was read")
        try:
            if version and found.version != version:
                raise changed(self.url, key, version, found.version)
            last = stop if version else min(stop, found.size_bytes)
            if (found.start, found.stop) != (start, last):
                raise wrong_length(self.url, key, found.stop - found.start, start, last)
        except StokerError:
            self._direct.leave(found)
            raise
        return found

    async def _counted(self, key: str, found: Found) -> AsyncGenerator[Part, None]:
        """What is found, and after a failure what is missing of it, which obstore tries for several times."""
        assert self._direct is not None
        start = found.start
        try:
            yield b""
        except BaseException:
            self._direct.leave(found)
            raise
        try:
            async with aclosing(self._direct.parts(found)) as parts:
                async for part in parts:
                    self.counters.bytes_read += len(part)
                    start += len(part)
                    yield part
            return
        except OriginError:
            if start == found.stop:
                raise  # nothing is missing that could be asked for again
        answer = await self._get(key, start, found.stop, found.version)
        async with aclosing(self._exactly(key, start, found.stop, answer)) as rest:
            async for more in rest:
                yield more

    async def _exactly(self, key: str, start: int, stop: int, answer: Any) -> AsyncGenerator[Part, None]:
        left_bytes = stop - start
        last: Part = b""
        async with aclosing(self._body(key, answer)) as parts:
            async for part in parts:
                left_bytes -= len(part)
                if left_bytes < 0:
                    raise wrong_length(self.url, key, stop - start - left_bytes, start, stop)
                if left_bytes:
                    yield part
                else:
                    # Held until the body ends: one that is too long is no answer to what was asked.
                    last = part
        if left_bytes:
            raise wrong_length(self.url, key, stop - start - left_bytes, start, stop)
        if last:
            yield last

    async def _get(self, key: str, start: int, stop: int, version: str) -> Any:
        """An answer of that version, its body still to come."""
        self.counters.requests += 1
        try:
            options = {"range": (start, stop), "if_match": tag_of_version(version)}
            answer = await self._api.get_async(self._store, self._path(key), options=options)
        except Exception as error:
            raise self._wrap(key, error) from error
        found = _version(answer.meta)
        if found != version:
            raise changed(self.url, key, version, found)
        return answer

    async def _body(self, key: str, answer: Any) -> AsyncGenerator[Part, None]:
        """The parts of a body, none of them empty."""
        parts = aiter(answer.stream(min_chunk_size=PART_BYTES))
        while True:
            try:
                part = bytes(await anext(parts))
            except StopAsyncIteration:
                return
            except Exception as error:
                raise self._wrap(key, error) from error
            self.counters.bytes_read += len(part)
            if part:
                yield part

    async def _pages(
        self, prefix: str, after: str | None, limit: int
    ) -> AsyncGenerator[list[ObjectInfo], None]:
        page: list[ObjectInfo] = []
        last = after
        async with aclosing(self._all(prefix, after)) as infos:
            async for info in infos:
                if last is not None and info.key <= last:
                    raise _OutOfOrderError
                last = info.key
                page.append(info)
                if len(page) == limit:
                    yield page
                    page = []
        if page:
            yield page

    async def list(
        self, prefix: str, after: str | None = None, limit: int = 1000
    ) -> AsyncGenerator[list[ObjectInfo], None]:
        if self._is_sorted:
            async with aclosing(self._pages(prefix, after, limit)) as pages:
                is_first = after is None
                try:
                    async for page in pages:
                        yield page
                        is_first = False
                    return
                except _OutOfOrderError as error:
                    self._is_sorted = False
                    if not is_first:
                        # What sorts before the pages that are out would be missing from the list.
                        raise OriginError(
                            f"{self.url} does not list in the order of keys; list again"
                        ) from error
        found = [info async for info in self._all(prefix, None) if after is None or info.key > after]
        found.sort(key=lambda info: info.key)
        for first in range(0, len(found), limit):
            yield found[first : first + limit]

    async def _all(self, prefix: str, after: str | None) -> AsyncGenerator[ObjectInfo, None]:
        """What the server lists, in its order."""
        # object_store lists by whole path segments: the last part of the prefix is matched here. Whatever the order is
        # in, names of one folder that begin alike lie together.
        folder, _, name = prefix.rpartition("/")
        inside = len(folder) + 1 if folder else 0
        offset = None if after is None else self._prefix + after
        if name and self._is_sorted:
            offset = max(offset or "", self._prefix + _before(prefix))
        offset = None if offset is None else _beginning(offset)
        folder = _beginning(f"{self._prefix}{folder}/", is_folder=True)
        try:
            async for chunk in self._api.list(
                self._store, prefix=folder or None, offset=offset, chunk_size=1000
            ):
                self.counters.requests += 1
                for meta in chunk:
                    info = self._info(meta)
                    if after is not None and info.key <= after and offset != self._prefix + after:
                        continue  # it was asked for from further before
                    if info.key.startswith(prefix):
                        yield info
                    elif name and info.key[inside:].partition("/")[0] > name:
                        return
        except Exception as error:
            raise self._wrap(prefix, error) from error

    async def close(self) -> None:
        if self._direct is not None:
            self._direct.close()
        self._store = None

    def _path(self, key: str) -> str:
        # object_store would normalise these into another object's name, or takes them for none: that is no failure of
        # the origin, which would be left alone after some of them.
        path = self._prefix + key
        is_odd = not key or any(part in ("", ".", "..") for part in key.split("/")) or _CONTROL.search(key)
        if is_odd or len(path.encode()) > KEY_BYTES_MAX:
            raise not_found(self.url, key)
        return path

    def _info(self, meta: Any) -> ObjectInfo:
        key = meta["path"].removeprefix(self._prefix)
        return ObjectInfo(key, int(meta["size"]), _version(meta), meta["last_modified"].timestamp(), None)

    def _described(self, answer: Any) -> ObjectInfo:
        return replace(self._info(answer.meta), headers=told_attributes(answer.attributes))

    def _wrap(self, key: str, error: Exception) -> StokerError:
        if isinstance(error, (StokerError, asyncio.CancelledError)):
            return error
        if isinstance(error, FileNotFoundError) or type(error).__name__ == "NotFoundError":
            return not_found(self.url, key)
        if type(error).__name__ == "PreconditionError":
            return ObjectChanged(f"{key!r} in {self.url} changed while it was read")
        return OriginError(f"{self.url}: {key!r}: {_first_line(error)}")


def _beginning(path: str, *, is_folder: bool = False) -> str:
    """As much of the beginning of a path as object_store takes for one: no empty part, none of dots, no control
    character. What comes after that is still to come after the whole path."""
    parts: list[str] = []
    for part in path.split("/"):
        odd = _CONTROL.search(part)
        plain = part if odd is None else "" if is_folder else part[: odd.start()]
        if plain in ("", ".", ".."):
            break
        parts.append(plain)
        if odd is not None:
            break
    return "/".join(parts)


def _before(prefix: str) -> str:
    """A name before all that begin with the prefix, and after nearly all others that are before them."""
    last = ord(prefix[-1]) - 1
    if 0xD800 <= last <= 0xDFFF:
        last = 0xD7FF  # surrogates are no characters
    return prefix[:-1] + (chr(last) + _HIGHEST if last > 0 else "")


def _version(meta: Any) -> str:
    tag = version_of_tag(str(meta.get("e_tag") or ""))
    return tag if tag else f"{meta['size']}-{meta['last_modified'].timestamp()}"


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__
