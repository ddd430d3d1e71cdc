"""What a file system for fsspec is whose objects are read only: every way of writing is refused, and says so."""

from __future__ import annotations

from typing import Any, NoReturn

from fsspec.spec import AbstractFileSystem

from stoker.cache.client.os_errors import read_only


class ReadOnlyFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Refuses with PermissionError (EROFS). fsspec's own methods would pass over some of it in silence.

    What writes files (`pipe`, `put`, `touch`, …) opens them, and is refused there.
    """

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> NoReturn:
        raise read_only(path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        if not (exist_ok and self.isdir(path)):
            raise read_only(path)

    def rmdir(self, path: str) -> NoReturn:
        raise read_only(path)

    def cp_file(self, path1: str, path2: str, **_: Any) -> NoReturn:
        raise read_only(path2)

    def rm_file(self, path: str) -> NoReturn:
        raise read_only(path)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> NoReturn:
        raise read_only(path)

    def mv(
        self, path1: Any, path2: Any, recursive: bool = False, maxdepth: int | None = None, **_: Any
    ) -> NoReturn:
        raise read_only(path2)
