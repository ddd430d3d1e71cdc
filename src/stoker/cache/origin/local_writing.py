"""A folder as an origin that can be written to."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterable

from stoker.cache.origin import local_files
from stoker.cache.origin.local import LocalOrigin
from stoker.cache.origin.local_files import NewFile
from stoker.cache.origin.local_staging import FileWriter, LocalStaging
from stoker.cache.origin.port import Part, not_found
from stoker.cache.origin.staged_origin import StagedOrigin
from stoker.cache.origin.staged_uploads import StagedUploads
from stoker.cache.origin.writing_port import (
    Attributes,
    Capabilities,
    Described,
    check_writable_key,
    no_conditions,
    precondition_failed,
    whole,
)
from stoker.errors import BadKey, ObjectNotFound
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
        keeps = local_files.keeps_attributes(self._root)
        self.capabilities = Capabilities(
            is_atomic=True,
            has_conditions=True,
            copies_itself=False,
            keeps_content_type=keeps,
            keeps_metadata=keeps,
            keeps_owner=True,
        )
        self._writer = FileWriter(self._root, self.url, self.counters)
        self._staging = LocalStaging(self._writer)
        self._uploads = StagedUploads(self.url, self._staging, self._put, time.time)

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
        check_writable_key(self.url, key)
        self.counters.requests += 1
        file = NewFile(self._root)

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
            check_writable_key(self.url, key)
            if self._found(key) is not None:
                local_files.remove(self._root, key)
        except (BadKey, FileNotFoundError, NotADirectoryError):
            return  # there is no such object
