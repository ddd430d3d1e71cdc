"""Datasets behind a cache server, for tests."""

from __future__ import annotations

import contextlib
import io
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.cache.client.client import CacheClient
from stoker.data.dataset import Dataset
from stoker.settings import CacheSettings
from tests.e2e.cache_helpers import ServerProcess, client_of, served


@dataclass
class Behind:
    """A folder behind a cache server, whose bucket `b` it is."""

    server: ServerProcess
    client: CacheClient
    folder: Path
    settings: CacheSettings

    def dataset(self, prefix: str = "", **more: Any) -> Dataset:
        return Dataset(f"stoker://b/{prefix}", cache=self.settings, **more)

    @property
    def indexes(self) -> list[str]:
        """Files of indexes that are kept."""
        return sorted(path.name for path in (self.settings.directory / "indexes").glob("*.index"))

    @property
    def origin_bytes(self) -> int:
        return self.client.status().origin_bytes


@contextlib.contextmanager
def behind(tmp_path: Path, query: str = "") -> Iterator[Behind]:
    folder = tmp_path / "origin"
    folder.mkdir(exist_ok=True)
    with served(tmp_path / "d", {"b": f"{folder}{query}"}) as server, client_of(server) as client:
        yield Behind(server, client, folder, CacheSettings(server.url, None, tmp_path / "own", 10**9))


def write_tar(path: Path, files: Sequence[tuple[str, bytes]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def no_progress(_: object) -> None:
    """For who must not build an index."""
    raise AssertionError("an index is built")
