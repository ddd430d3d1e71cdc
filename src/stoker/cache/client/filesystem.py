"""`stoker://bucket/key` for fsspec: read only, and safe after a fork."""

from __future__ import annotations

import io
from typing import Any

from fsspec.spec import AbstractFileSystem

from stoker.cache.client.client import CacheClient
from stoker.cache.client.fleet import open_client
from stoker.errors import ConfigError, ObjectNotFound
from stoker.settings import cache_settings
from stoker.wire.cache_api import LIST_LIMIT_MAX, ObjectInfo

_READ_AHEAD_BYTES = 4 * 1024 * 1024


class StokerFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """The objects of a cache server. `endpoint` and `token` default to the settings.

    Raises ConfigError without an endpoint; missing objects are FileNotFoundError, as fsspec expects.
    """

    protocol = "stoker"
    root_marker = ""

    def __init__(self, endpoint: str | None = None, token: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        settings = cache_settings()
        where = endpoint or settings.endpoint
        if where is None:
            raise ConfigError(
                "no cache endpoint: pass endpoint='http://HOST:PORT', or set STOKER_CACHE_ENDPOINT"
            )
        self._client = open_client(where, token or settings.token)

    @property
    def fsid(self) -> str:
        return f"stoker-{self._client.endpoint}"

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        bucket, key = _split(self._strip_protocol(path))
        if not key:
            if bucket and bucket not in self._buckets():
                raise FileNotFoundError(path)
            return _folder(bucket)
        try:
            return _file(bucket, self._client.stat(bucket, key))
        except ObjectNotFound as error:
            if self._client.list_page(bucket, f"{key}/", None, 1).objects:
                return _folder(f"{bucket}/{key}")
            raise FileNotFoundError(path) from error

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        bucket, key = _split(self._strip_protocol(path))
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
        **kwargs: Any,
    ) -> Any:
        if maxdepth is not None or withdirs:
            return super().find(path, maxdepth=maxdepth, withdirs=withdirs, detail=detail, **kwargs)
        bucket, key = _split(self._strip_protocol(path))
        if not bucket:
            return super().find(path, detail=detail, **kwargs)
        infos = [_file(bucket, info) for info in self._client.list_objects(bucket, f"{key}/" if key else "")]
        if not infos and key and (found := self.info(path))["type"] == "file":
            infos = [found]
        return {info["name"]: info for info in infos} if detail else [info["name"] for info in infos]

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        bucket, key = _split(self._strip_protocol(path))
        try:
            if (start or 0) < 0 or (end is not None and end < 0):
                size_bytes = self._client.stat(bucket, key).size_bytes
                start = max(0, size_bytes + start) if (start or 0) < 0 and start is not None else start
                end = max(0, size_bytes + end) if end is not None and end < 0 else end
            first = start or 0
            return self._client.read(bucket, key, first, None if end is None else max(first, end))
        except ObjectNotFound as error:
            raise FileNotFoundError(path) from error

    def checksum(self, path: str) -> str:
        return str(self.info(path).get("version", path))

    def _open(self, path: str, mode: str = "rb", **_: Any) -> io.BufferedReader:
        if mode != "rb":
            raise PermissionError("stoker:// is read only: open with mode 'rb'")
        bucket, key = _split(self._strip_protocol(path))
        try:
            info = self._client.stat(bucket, key)
        except ObjectNotFound as error:
            raise FileNotFoundError(path) from error
        return io.BufferedReader(_ObjectFile(self._client, bucket, info), _READ_AHEAD_BYTES)

    def _buckets(self) -> list[str]:
        return [bucket.name for bucket in self._client.status().buckets]

    def _children(self, bucket: str, prefix: str) -> list[dict[str, Any]]:
        """The entries right below a prefix; what lies under a sub-folder is skipped, not listed."""
        entries: list[dict[str, Any]] = []
        after: str | None = None
        while True:
            try:
                page = self._client.list_page(bucket, prefix, after, LIST_LIMIT_MAX)
            except ObjectNotFound as error:
                raise FileNotFoundError(bucket) from error
            after = page.after
            for info in page.objects:
                name, slash, _ = info.key[len(prefix) :].partition("/")
                if not slash:
                    entries.append(_file(bucket, info))
                    continue
                folder = _folder(f"{bucket}/{prefix}{name}")
                if not entries or entries[-1] != folder:
                    entries.append(folder)
                if after is not None:
                    after = max(after, f"{prefix}{name}/\U0010ffff")
            if page.after is None:
                return entries


class _ObjectFile(io.RawIOBase):
    """One version of one object: a reader gets its bytes or ObjectChanged, never a mixture."""

    def __init__(self, client: CacheClient, bucket: str, info: ObjectInfo) -> None:
        super().__init__()
        self._client = client
        self._bucket = bucket
        self._info = info
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._info.size_bytes}[whence]
        if base + offset < 0:
            raise ValueError(f"cannot seek to {base + offset}")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        stop = min(self._position + len(buffer), self._info.size_bytes)
        if self._position >= stop:
            return 0
        data = self._client.read(
            self._bucket, self._info.key, self._position, stop, version=self._info.version
        )
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def _split(path: str) -> tuple[str, str]:
    bucket, _, key = path.strip("/").partition("/")
    return bucket, key


def _file(bucket: str, info: ObjectInfo) -> dict[str, Any]:
    return {"name": f"{bucket}/{info.key}", "size": info.size_bytes, "type": "file", "version": info.version}


def _folder(path: str) -> dict[str, Any]:
    return {"name": path, "size": 0, "type": "directory"}
