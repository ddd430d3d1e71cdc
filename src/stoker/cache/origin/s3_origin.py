"""S3 as an origin that is read: through obstore, and by S3's own API for folders, which obstore has no names for."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from stoker.cache.origin.content import seconds_of, told_headers, version_of_tag
from stoker.cache.origin.obstore_origin import KEY_BYTES_MAX, ObstoreOrigin
from stoker.cache.origin.port import Entries, Opened, not_found, open_in_two
from stoker.cache.origin.s3_calls import S3Calls, S3Place
from stoker.cache.origin.s3_direct import DirectReads
from stoker.cache.origin.s3_listing import listed, listed_folder
from stoker.cache.origin.s3_opening import MORE_THAN_PLAIN, OpenedS3, credentials_of, opened_s3
from stoker.cache.origin.writing_port import check_writable_key
from stoker.errors import BadKey, ObjectNotFound, OriginError, StokerError
from stoker.wire.cache_api import ObjectInfo

_OF_NO_PARTS = "-0"
"""What the tag of a folder ends with that nobody has made: servers on file systems tell of those that hold objects."""


def open_s3(url: str, query: Mapping[str, str], environment: Mapping[str, str]) -> ObstoreOrigin:
    """Open `s3://bucket/prefix`, as `s3_options` says. Raises ConfigError.

    Where obstore is to ask in ways that are its own (proxies, hosts by bucket), it is asked alone: folders are no
    objects there, and are listed without the slash.
    """
    opened = opened_s3(url, query, environment)
    store, prefix = opened.store, opened.options.prefix
    if more_than_plain(opened, environment):
        return ObstoreOrigin(url, store, prefix, opened.direct)
    return S3Origin(url, store, prefix, opened.direct, place_of(opened))


def more_than_plain(opened: OpenedS3, environment: Mapping[str, str]) -> str:
    """What keeps requests from being made without obstore; empty if nothing does."""
    config = opened.options.config
    if credentials_of(config) is None and "access_key_id" in config:
        return "secret_access_key"
    names = (*MORE_THAN_PLAIN, "HTTPS_PROXY", "https_proxy")
    return next((name for name in names if environment.get(name)), "")


def place_of(opened: OpenedS3) -> S3Place:
    """What was opened, for requests of our own."""
    config = opened.options.config
    endpoint = config.get("endpoint") or f"https://s3.{config['region']}.amazonaws.com"
    return S3Place(endpoint, opened.options.bucket, config["region"], credentials_of(config))


class S3Origin(ObstoreOrigin):
    """A bucket of S3 below a prefix. Objects without content whose keys end with a slash are folders, and objects."""

    def __init__(self, url: str, store: Any, prefix: str, direct: DirectReads | None, place: S3Place) -> None:
        super().__init__(url, store, prefix, direct)
        self._calls = S3Calls(url, place, self.counters)

    async def stat(self, key: str) -> ObjectInfo:
        if not is_folder(key):
            return await super().stat(key)
        try:
            return (await self._told(key))[0]
        except (ObjectNotFound, OriginError):
            raise
        except StokerError as error:
            raise OriginError(str(error)) from error

    async def open(self, key: str, stop: int) -> Opened:
        return await (open_in_two(self, key, stop) if is_folder(key) else super().open(key, stop))

    async def _all(self, prefix: str, after: str | None) -> AsyncGenerator[ObjectInfo, None]:
        async with aclosing(listed(self._calls, self._prefix, prefix, after)) as pages:
            async for page in pages:
                for info in page:
                    yield info

    async def folder(self, prefix: str, after: str | None, limit: int) -> Entries | None:
        """See `ListsFolders`."""
        return await listed_folder(self._calls, self._prefix, prefix, after, limit)

    async def _told(self, key: str) -> tuple[ObjectInfo, Mapping[str, str]]:
        """An object, and all that S3 says of it by headers. Raises ObjectNotFound, OriginError."""
        try:
            path = self._named_path(key)
        except BadKey as error:
            raise not_found(self.url, key) from error
        answer = await self._calls.call("HEAD", path, {}, {}, may_repeat=True)
        version = version_of_tag(answer.headers.get("etag", ""))
        size = answer.headers.get("content-length", "")
        if not version or not size.isdecimal():
            raise OriginError(f"{self.url} tells no entity tag or no length of {key!r}")
        if is_folder(key) and version.endswith(_OF_NO_PARTS):
            raise not_found(self.url, key)
        modified_s = seconds_of(answer.headers.get("last-modified", ""))
        return ObjectInfo(key, int(size), version, modified_s, told_headers(answer.headers)), answer.headers

    async def close(self) -> None:
        self._calls.close()
        await super().close()

    def _named_path(self, key: str) -> str:
        """An object's name in the bucket. Raises BadKey for what cannot be one that is read again."""
        name = key[:-1] if is_folder(key) else key
        check_writable_key(self.url, name, KEY_BYTES_MAX - len(self._prefix.encode()))
        if any(letter < " " or letter == "\x7f" for letter in key):
            raise BadKey(
                f"{key[:200]!r} cannot be written to {self.url}: control characters could not be read"
            )
        return self._prefix + key


def is_folder(key: str) -> bool:
    """Whether it is the key of a folder as clients of S3 make them: an object without content."""
    return key.endswith("/")
