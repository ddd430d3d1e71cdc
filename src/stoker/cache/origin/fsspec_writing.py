"""Any file system that fsspec opens, as an origin that can be written to.

An object is written beside the others, where nobody sees it, and moved. Where that takes the place of what was there in
one step, nobody ever sees an object in part; elsewhere what was there is removed before, where it has to be.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, TypeVar

from stoker.cache.origin import local_files
from stoker.cache.origin.fsspec_origin import FsspecOrigin, is_taken_for, written_at
from stoker.cache.origin.port import STAGING, Part
from stoker.cache.origin.staged_origin import StagedOrigin
from stoker.cache.origin.staged_uploads import Staged, StagedUploads
from stoker.cache.origin.writing_port import (
    NO_ATTRIBUTES,
    Attributes,
    Capabilities,
    Described,
    check_writable_key,
    no_conditions,
    pieces,
    whole,
)
from stoker.errors import BadKey, ConfigError, ObjectNotFound, OriginReadOnly, StokerError
from stoker.wire.cache_api import ObjectInfo

T = TypeVar("T")
_IN_ONE_STEP = frozenset(("file", "local", "sftp", "ssh", "memory"))
"""Where a file that is moved takes the place of another at once. What is not among them may do so as well."""
_PIECE_BYTES = 1024 * 1024
_TICK_S = 0.25
_TICKS_MAX = 12


class WritableFsspecOrigin(StagedOrigin, FsspecOrigin):
    """A folder of an fsspec file system that is written to, each call in a thread. It knows no conditions, and keeps
    nothing but content. Raises ConfigError for one that only reads."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        if self._is_web:
            raise ConfigError(f"{self.url} cannot be written to: a web server only reads")
        scheme = url.partition("://")[0]
        self.capabilities = Capabilities(
            is_atomic=scheme in _IN_ONE_STEP,
            has_conditions=False,
            copies_itself=False,
            keeps_content_type=False,
            keeps_metadata=False,
            keeps_owner=False,
        )
        self._hidden = f"{self._root}/{STAGING}"
        self._uploads = StagedUploads(self.url, _FsspecStaging(self), self._put, time.time)

    async def describe(self, key: str) -> Described:
        return Described(await self.stat(key), NO_ATTRIBUTES)

    async def _put(
        self,
        key: str,
        parts: AsyncIterable[Part],
        size_bytes: int | None,
        attributes: Attributes,
        if_match: str | None,
        if_none_match: bool,
    ) -> ObjectInfo:
        check_writable_key(self.url, key)
        no_conditions(self.url, if_match, if_none_match)
        if attributes.owner is not None:
            raise OriginReadOnly(f"objects in {self.url} cannot be given to an owner: write without one")
        async with aclosing(whole(self.url, key, parts, size_bytes)) as coming:
            return await self.write_file(key, lambda: self._path(key), coming, lambda: self._stat(key))

    async def write_file(
        self, key: str, path: Callable[[], str], coming: AsyncGenerator[Part, None], then: Callable[[], T]
    ) -> T:
        """What comes, at a path that is asked for in the end, and what is to be done once it is there. The requests
        of one file follow each other."""
        file = _NewFile(self._files, f"{self._hidden}/new/{secrets.token_hex(16)}")
        try:
            await self.do(key, file.open)
            async with aclosing(pieces(coming, _PIECE_BYTES)) as parts:
                async for part in parts:
                    await self.do(key, partial(file.write, part))
                    self.counters.bytes_written += len(part)
            await self.do(key, file.close)

            def publish() -> T:
                file.publish(path())
                return then()

            return await self.do(key, publish)
        finally:
            with suppress(StokerError):  # it is not seen, and is given up by its age
                await self.do(key, file.drop)

    async def delete(self, key: str) -> None:
        def remove() -> None:
            try:
                path = self._path(key)
                if self._files().isfile(path):
                    self._files().rm_file(path)
            except (FileNotFoundError, NotADirectoryError, ObjectNotFound):
                return  # there is no such object

        await self.do(key, remove)

    async def clean_up(self, now: float, age_s: float) -> int:
        def remove_unfinished() -> int:
            folder, count = f"{self._hidden}/new", 0
            for file in self.staged(folder):
                if file.written_at < now - age_s:
                    self._files().rm_file(f"{folder}/{file.name}")
                    count += 1
            return count

        return await self.do("", remove_unfinished) + await self._uploads.clean_up(now, age_s)

    async def do(self, key: str, function: Callable[[], T]) -> T:
        """Run it in the thread of this origin. Raises what is typed."""
        self.counters.requests += 1

        def typed(_: str) -> T:
            try:
                return function()
            except NotImplementedError as error:
                raise OriginReadOnly(
                    f"{self.url} cannot be written to: fsspec has no way for that"
                ) from error
            except OSError as error:
                if error.errno is None or isinstance(error, FileNotFoundError):
                    raise self._failed(key, error) from error
                raise local_files.refusal(self.url, key, error) from error

        done: T = await self._call(key, typed)
        return done

    def staged(self, folder: str) -> list[Staged]:
        """The files of a folder that nobody sees."""
        try:
            listed = self._files().ls(folder, detail=True)
        except FileNotFoundError:
            return []
        return [
            Staged(str(meta["name"]).rpartition("/")[2], int(meta["size"] or 0), written_at(meta))
            for meta in listed
            if meta["type"] == "file"
        ]


class _NewFile:
    """A file that nobody sees yet. Every method blocks. Raises what the file system raises."""

    def __init__(self, files: Callable[[], Any], path: str) -> None:
        self._files = files
        self._path = path
        self._file: Any = None
        self._is_there = False

    def open(self) -> None:
        """Make it."""
        files = self._files()
        files.makedirs(self._path.rpartition("/")[0], exist_ok=True)
        self._is_there = True
        self._file = files.open(self._path, "wb")
        if hasattr(self._file, "set_pipelined"):
            self._file.set_pipelined(
                True
            )  # SFTP: does not wait for each answer, and tells of failures when it is closed

    def write(self, data: bytes) -> None:
        """All of it, at the end."""
        view = memoryview(data)
        while view:
            count = self._file.write(view)
            view = view[len(view) if count is None else count :]

    def close(self) -> None:
        """It is whole."""
        file, self._file = self._file, None
        file.close()

    def drop(self) -> None:
        """If it got no name, it is gone."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
        if self._is_there:
            self._is_there = False
            with suppress(FileNotFoundError):
                self._files().rm_file(self._path)

    def publish(self, path: str) -> None:
        """Give it its name."""
        files = self._files()
        self._make_room(path)
        self._renew(path)
        try:
            files.mv(self._path, path)
        except Exception:
            if not files.isfile(path):
                raise
            files.rm_file(path)
            files.mv(self._path, path)
        self._is_there = False

    def _make_room(self, path: str) -> None:
        """Folders above, and no folder at its place."""
        files = self._files()
        parent = path.rpartition("/")[0]
        if not files.isdir(parent):
            above = parent
            while above:
                if files.isfile(above):
                    raise _conflict(path)
                above = above.rpartition("/")[0]
            files.makedirs(parent, exist_ok=True)
        if not files.isdir(path):
            return
        for above, _, names in files.walk(path, topdown=False):
            if names:
                raise _conflict(path)
            files.rmdir(above)

    def _renew(self, path: str) -> None:
        """See to it that it can be told from what is there, by a clock that may tick slowly."""
        files = self._files()
        for _ in range(_TICKS_MAX):
            try:
                before = files.info(path)
            except (FileNotFoundError, NotADirectoryError):
                return
            found = files.info(self._path)
            if not is_taken_for(found, before):
                return
            time.sleep(_TICK_S)
            self._write_again()

    def _write_again(self) -> None:
        files, again = self._files(), f"{self._path}-"
        with files.open(self._path, "rb") as old, files.open(again, "wb") as new:
            while data := old.read(_PIECE_BYTES):
                new.write(data)
        files.mv(again, self._path)


class _FsspecStaging:
    """As `Staging` in `staged_uploads.py`."""

    def __init__(self, origin: WritableFsspecOrigin) -> None:
        self._origin = origin
        self._root = f"{origin._hidden}/uploads"

    async def write(self, folder: str, name: Callable[[], str], parts: AsyncIterable[Part]) -> None:
        async with aclosing(whole(self._origin.url, folder, parts, None)) as coming:
            await self._origin.write_file(
                folder, lambda: f"{self._root}/{folder}/{name()}", coming, lambda: None
            )

    async def read(self, folder: str, name: str) -> AsyncGenerator[Part, None]:
        at = 0
        while part := await self._origin.do(name, partial(self._read, f"{self._root}/{folder}/{name}", at)):
            at += len(part)
            yield part

    def _read(self, path: str, at: int) -> bytes:
        files = self._origin._files()
        try:
            if at >= files.info(path)["size"]:
                return b""
            return bytes(files.cat_file(path, start=at, end=at + _PIECE_BYTES))
        except FileNotFoundError:
            raise ObjectNotFound(f"{path} is gone") from None

    async def files(self, folder: str) -> list[Staged]:
        return await self._origin.do(folder, lambda: self._origin.staged(f"{self._root}/{folder}"))

    async def folders(self) -> list[str]:
        def listed() -> list[str]:
            try:
                found = self._origin._files().ls(self._root, detail=True)
            except FileNotFoundError:
                return []
            return [
                str(meta["name"]).rstrip("/").rpartition("/")[2]
                for meta in found
                if meta["type"] == "directory"
            ]

        return await self._origin.do("", listed)

    async def remove(self, folder: str) -> None:
        def remove() -> None:
            with suppress(FileNotFoundError):
                self._origin._files().rm(f"{self._root}/{folder}", recursive=True)

        await self._origin.do(folder, remove)


def _conflict(path: str) -> BadKey:
    return BadKey(
        f"{path!r} cannot be written: in a folder there is no object beside others whose keys go on with its name "
        "and a slash"
    )
