"""A folder as an origin that can be written to."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import AsyncIterable, Iterator

from msgspec.structs import replace

from stoker.cache.origin import local_files, local_folders
from stoker.cache.origin.local import LocalOrigin
from stoker.cache.origin.local_files import NewFile
from stoker.cache.origin.local_staging import FileWriter, LocalStaging
from stoker.cache.origin.port import Part, not_found
from stoker.cache.origin.staged_origin import StagedOrigin
from stoker.cache.origin.staged_uploads import StagedUploads
from stoker.cache.origin.users import OriginUser
from stoker.cache.origin.writing_port import (
    Attributes,
    Capabilities,
    Described,
    Owner,
    attributes_in,
    check_writable_key,
    no_conditions,
    precondition_failed,
    told_of,
    whole,
)
from stoker.errors import BadKey, ObjectNotFound, WriteDenied
from stoker.wire.cache_api import ObjectInfo


class WritableLocalOrigin(StagedOrigin, LocalOrigin):
    """A folder whose files are replaced as a whole: written in `.stoker-writes` below it, flushed, and renamed.

    Conditions hold among all who write through Stoker, on whatever machine, where the file system has locks. A file
    that is replaced hands on its permissions, and its owner if this process is root's; folders that are made belong to
    the owner that is asked for as well. An object takes the place of a folder below which there are none.
    Content type and metadata are extended attributes, where the file system has those.
    """

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        keeps = self._keeps_attributes
        # Who lists is not told what was written with an object: asked for it alone, it says so.
        self._untold = None if keeps else ()
        self.capabilities = Capabilities(
            is_atomic=True,
            has_conditions=True,
            copies_itself=False,
            keeps_content_type=keeps,
            keeps_metadata=keeps,
            keeps_owner=True,
        )
        self._writer = FileWriter(self._place, self.url, self.counters)
        self._staging = LocalStaging(self._writer)
        self._uploads = StagedUploads(self.url, self._staging, self._put, time.time)
        self._owner: Owner | None = None

    def written_as(self, user: OriginUser) -> WritableLocalOrigin:
        """See `HasUsers`."""
        if user.owner is None:
            raise WriteDenied(f"{self.url} is a folder, and who writes has no Unix user there")
        theirs = copy.copy(self)
        theirs._owner = user.owner
        theirs._uploads = StagedUploads(self.url, self._staging, theirs._put, time.time)
        return theirs

    async def describe(self, key: str) -> Described:
        self.counters.requests += 1
        return await self._writer.call(key, lambda: self._describe(key))

    async def _put(
        self,
        key: str,
        parts: AsyncIterable[Part],
        size_bytes: int | None,
        attributes: Attributes,
        if_match: str | None,
        if_none_match: bool,
    ) -> ObjectInfo:
        if self._owner is not None:
            attributes = replace(attributes, owner=self._owner)
        if local_folders.is_folder(key):
            return await self._put_folder(key, parts, attributes, if_match, if_none_match)
        check_writable_key(self.url, key)
        self.counters.requests += 1
        file = NewFile(self._root, attributes.owner)

        def publish() -> ObjectInfo:
            local_files.dress(file, attributes, self._found(key))
            local_files.publish(
                file,
                self._root,
                key,
                attributes.owner,
                lambda alone: self._check(key, if_match, if_none_match, alone),
            )
            return self._info(key, os.fstat(file.fd))

        try:
            if if_match is not None or if_none_match:  # before the body comes as well
                await self._writer.call(key, lambda: self._check(key, if_match, if_none_match, True))
            await self._writer.fill(file, key, whole(self.url, key, parts, size_bytes))
            return await self._writer.call(key, publish)
        finally:
            await self._writer.call(key, file.drop)

    async def _put_folder(
        self,
        key: str,
        parts: AsyncIterable[Part],
        attributes: Attributes,
        if_match: str | None,
        if_none_match: bool,
    ) -> ObjectInfo:
        check_writable_key(self.url, key[:-1])
        self.counters.requests += 1
        async for part in parts:
            if part:
                raise BadKey(f"{key[:200]!r} in {self.url} is a folder, which has no content of its own")

        def make() -> ObjectInfo | None:
            self._place.check()
            return local_folders.make(
                self._root, key, attributes, lambda alone: self._check(key, if_match, if_none_match, alone)
            )

        info = await self._writer.call(key, make)
        if info is None:
            raise BadKey(f"{key[:200]!r} cannot be written to {self.url}: a folder there cannot be an object")
        return info

    async def delete(self, key: str) -> None:
        self.counters.requests += 1
        await self._writer.call(key, lambda: self._remove(key))

    async def clean_up(self, now: float, age_s: float) -> int:
        unfinished = await self._staging.remove_unfinished(now - age_s)
        return unfinished + await self._uploads.clean_up(now, age_s)

    async def close(self) -> None:
        await super().close()
        self._writer.close()

    def _describe(self, key: str) -> Described:
        if local_folders.is_folder(key):
            info = self._stat(key)
            return Described(info, attributes_in(dict(info.headers or ())))
        fd = self._open(key)
        try:
            return Described(self._info(key, os.fstat(fd)), local_files.attributes_of(fd))
        finally:
            os.close(fd)

    def _found(self, key: str) -> os.stat_result | None:
        """The file that is there; None also where something else is."""
        try:
            fd = self._open(key)
        except ObjectNotFound:
            return None
        try:
            found = os.fstat(fd)
            self._info(key, found)
        except ObjectNotFound:
            return None
        finally:
            os.close(fd)
        return found

    def _check(
        self, key: str, if_match: str | None, if_none_match: bool, is_alone: bool
    ) -> os.stat_result | None:
        """What is there. Raises PreconditionFailed; ObjectNotFound if there is nothing to match."""
        if not is_alone:
            no_conditions(self.url, if_match, if_none_match)
        found, version = None, self._folder_version(key)
        if not local_folders.is_folder(key):
            found = self._found(key)
            version = None if found is None else self._info(key, found).version
        if if_match is not None:
            if version is None:
                raise not_found(self.url, key)
            if if_match not in ("*", version):
                raise precondition_failed(self.url, key, if_match, version)
        if if_none_match and version is not None:
            raise precondition_failed(self.url, key, None, version)
        return found

    def _remove(self, key: str) -> None:
        try:
            if local_folders.is_folder(key):
                check_writable_key(self.url, key[:-1])
                if self._folder_version(key) is not None:
                    local_folders.remove(self._root, key)
                return
            check_writable_key(self.url, key)
            if self._found(key) is not None:
                local_files.remove(self._root, key)
        except BadKey:
            return  # there is no such object
        except (FileNotFoundError, NotADirectoryError):
            self._place.check()

    def _stat(self, key: str) -> ObjectInfo:
        if not local_folders.is_folder(key):
            return super()._stat(key)
        info = self._folder(key)
        if info is None:
            raise self._missing(key)
        return info

    def _folder(self, key: str) -> ObjectInfo | None:
        """A folder as an object, with what is said of it; None: it is none."""
        if not self._keeps_attributes or not self._is_inside(f"{key}x"):
            return None
        try:
            fd = local_files.enter(self._root, key[:-1], makes=False)
        except OSError:
            return None
        try:
            info = local_folders.found(fd, key)
            return info and replace(info, headers=told_of(local_files.attributes_of(fd)))
        finally:
            os.close(fd)

    def _folder_version(self, key: str) -> str | None:
        info = self._folder(key) if local_folders.is_folder(key) else None
        return None if info is None else info.version

    def _folder_itself(self, key: str, prefix: str, after: str | None) -> Iterator[ObjectInfo]:
        if not key.startswith(prefix) or (after is not None and key <= after) or not self._keeps_attributes:
            return
        info = local_folders.found(f"{self._root}/{key}", key)
        if info is not None:
            yield replace(info, headers=None)
