"""fsspec's own tests of file systems, against a real cache server: those of reading, as they are.

Its tests of writing (copy, put, pipe, exclusive open) need a file system that writes: `stoker://` is read only. What
each way of writing is answered is tested here instead.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.tests.abstract import AbstractFixtures, AbstractGetTests

from stoker.cache.client.filesystem import StokerFileSystem
from tests.e2e.cache_helpers import ServerProcess, client_of, served

pytestmark = pytest.mark.real
_numbers = itertools.count()


class Filled(StokerFileSystem):
    """The shipped file system; what fsspec's tests write before they read is written by somebody else: into the folder
    that the bucket `b` comes from."""

    cachable = False
    folder: Path

    def touch(self, path: str, truncate: bool = True, **_: Any) -> None:
        self.pipe_file(path, b"")

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        file = self._there(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(value)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._there(path).mkdir(parents=True, exist_ok=True)

    mkdir = makedirs

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        shutil.rmtree(self._there(path))

    def _there(self, path: str) -> Path:
        return self.folder / self._strip_protocol(path).removeprefix("b/")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("origin")


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with served(tmp_path_factory.mktemp("cache"), {"b": str(folder)}) as running:
        yield running


class StokerFixtures(AbstractFixtures):
    @pytest.fixture(scope="class")
    @classmethod
    def fs(cls, server: ServerProcess, folder: Path) -> Filled:
        fs = Filled(endpoint=server.url)
        fs.folder = folder
        return fs

    @pytest.fixture
    def fs_path(self) -> str:
        # A name that was not there is believed not to be for a while.
        return f"b/test-{next(_numbers)}"

    @pytest.fixture
    def fs_join(self) -> Callable[..., str]:
        return lambda *parts: "/".join(parts)

    @pytest.fixture
    def supports_empty_directories(self) -> bool:
        return False


class TestGet(AbstractGetTests, StokerFixtures):
    pass


def test_the_tests_of_reading_are_all_there_are() -> None:
    import fsspec.tests.abstract as abstract

    found = {name for name in vars(abstract) if name.startswith("Abstract") and name.endswith("Tests")}
    writing = {"AbstractCopyTests", "AbstractOpenTests", "AbstractPipeTests", "AbstractPutTests"}
    assert found == {"AbstractGetTests"} | writing


WRITES: dict[str, Callable[[Any, str], Any]] = {
    "open for writing": lambda fs, local: fs.open("b/w/new", "wb"),
    "open for more": lambda fs, local: fs.open("b/w/k", "ab"),
    "open exclusively": lambda fs, local: fs.open("b/w/new", "xb"),
    "open text": lambda fs, local: fs.open("b/w/new", "w"),
    "write_text": lambda fs, local: fs.write_text("b/w/new", "text"),
    "pipe_file": lambda fs, local: fs.pipe_file("b/w/new", b"data"),
    "pipe": lambda fs, local: fs.pipe({"b/w/new": b"data"}),
    "touch": lambda fs, local: fs.touch("b/w/new"),
    "put_file": lambda fs, local: fs.put_file(local, "b/w/new"),
    "put": lambda fs, local: fs.put(local, "b/w/"),
    "cp_file": lambda fs, local: fs.cp_file("b/w/k", "b/w/new"),
    "copy": lambda fs, local: fs.copy("b/w/k", "b/w/new"),
    "mv": lambda fs, local: fs.mv("b/w/k", "b/w/new"),
    "rm": lambda fs, local: fs.rm("b/w/k"),
    "rm_file": lambda fs, local: fs.rm_file("b/w/k"),
    "rm all": lambda fs, local: fs.rm("b/w", recursive=True),
    "mkdir": lambda fs, local: fs.mkdir("b/new"),
    "makedirs": lambda fs, local: fs.makedirs("b/new/deep"),
    "rmdir": lambda fs, local: fs.rmdir("b/w"),
}


@pytest.mark.parametrize("way", WRITES)
def test_every_way_of_writing_is_refused_and_changes_nothing(
    way: str, server: ServerProcess, folder: Path, tmp_path: Path
) -> None:
    (folder / "w").mkdir(exist_ok=True)
    (folder / "w" / "k").write_bytes(b"data")
    (tmp_path / "local").write_bytes(b"other")
    fs = StokerFileSystem(endpoint=server.url)
    with pytest.raises(PermissionError, match="read only") as caught:
        WRITES[way](fs, str(tmp_path / "local"))
    assert caught.value.errno == errno.EROFS
    assert {path.name for path in (folder / "w").iterdir()} == {"k"}
    assert (folder / "w" / "k").read_bytes() == b"data"
    assert not (folder / "new").exists()


# -- a naive twin: the same questions to fsspec's file system of local folders ----------------------------------------

NAMES = ["a.csv", "b.txt", "d/a.csv", "d/b.csv", "d/e/c.csv", "d/e/f/g.bin", "d.x/h.csv", "deep/e/c.csv", "z"]
PATTERNS = [
    "*", "*.csv", "?.csv", "[ab].*", "[!a].*", "d*", "d/*", "d*/*", "d/**", "**", "**/*.csv", "d/**/*.csv", "*/e/*",
    "d/", "d*/", "*/", "none", "none/*", "none/**", "d/a.csv", "d/*/c.csv", "**/e/**", "d?x/*",
]  # fmt: skip


@pytest.fixture(scope="module")
def twins(server: ServerProcess, folder: Path) -> tuple[Any, str]:
    """A bucket's file system, and the folder as the twin names it."""
    for name in NAMES:
        path = folder / "twin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode() * 100)
    return StokerFileSystem(endpoint=server.url), str(folder)


def both(twins: tuple[Any, str], ask: Callable[[Any, str], Any]) -> tuple[Any, Any]:
    """The answers of ours and of the twin, with names alike."""

    def named(value: Any, root: str) -> Any:
        if isinstance(value, str):
            return value.replace(root, "b", 1).rstrip("/")
        if isinstance(value, dict) and {"name", "size", "type"} <= set(value):
            size = value["size"] if value["type"] == "file" else 0
            return named(value["name"], root), size, value["type"]
        if isinstance(value, dict):
            return {named(key, root): named(one, root) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [named(one, root) for one in value]
        return value

    ours, root = twins
    return named(ask(ours, "b/twin"), "b"), named(ask(LocalFileSystem(), f"{root}/twin"), root)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("maxdepth", [None, 1, 2])
def test_globs_find_what_they_find_in_a_folder(
    twins: tuple[Any, str], pattern: str, maxdepth: int | None
) -> None:
    ours, local = both(twins, lambda fs, top: fs.glob(f"{top}/{pattern}", maxdepth=maxdepth, detail=True))
    assert ours == local


@pytest.mark.parametrize("below", ["", "/d", "/d/e", "/a.csv", "/none"])
@pytest.mark.parametrize("withdirs", [False, True])
@pytest.mark.parametrize("maxdepth", [None, 1, 2])
def test_trees_are_those_of_the_folder(
    twins: tuple[Any, str], below: str, withdirs: bool, maxdepth: int | None
) -> None:
    options = {"withdirs": withdirs, "maxdepth": maxdepth}
    ours, local = both(twins, lambda fs, top: fs.find(top + below, detail=True, **options))
    assert sorted(ours) == sorted(local)
    if below != "/a.csv":  # of which fsspec tells nothing but the name
        assert ours == local
    ours, local = both(twins, lambda fs, top: fs.du(top + below, total=False, maxdepth=maxdepth))
    assert ours == local
    if below != "/none":
        ours, local = both(twins, lambda fs, top: fs.expand_path(top + below, recursive=not withdirs))
        assert sorted(ours) == sorted(local)


def test_walks_and_lists_are_those_of_the_folder(twins: tuple[Any, str]) -> None:
    ours, local = both(
        twins, lambda fs, top: sorted([w[0], sorted(w[1]), sorted(w[2])] for w in fs.walk(top))
    )
    assert ours == local
    for below in ("", "/d", "/d.x", "/a.csv"):
        ours, local = both(twins, lambda fs, top, below=below: fs.ls(top + below, detail=True))
        assert sorted(ours) == sorted(local)
        ours, local = both(
            twins,
            lambda fs, top, below=below: [
                fs.exists(top + below), fs.isdir(top + below), fs.isfile(top + below), fs.info(top + below)
            ],
        )  # fmt: skip
        assert ours == local
    ours, _ = twins
    assert ours.ls("", detail=False) == ["b"]
    assert ours.isdir("b")
    assert not ours.exists("none")
    assert not ours.exists("b/twin/none")
    assert ours.du("b/twin") == sum(len(name) * 100 for name in NAMES)
    for missing in ("b/twin/none", "none", "none/k"):
        with pytest.raises(FileNotFoundError):
            ours.ls(missing)
        with pytest.raises(FileNotFoundError):
            ours.open(missing)
    for is_folder in ("b", "b/twin/d", "b/twin/d/"):
        with pytest.raises(IsADirectoryError):
            ours.open(is_folder)


def test_contents_are_those_of_the_folder(twins: tuple[Any, str]) -> None:
    def ask(fs: Any, top: str) -> Any:
        return [
            fs.cat(f"{top}/a.csv"),
            fs.cat([f"{top}/a.csv"]),
            fs.cat([f"{top}/d/a.csv", f"{top}/z", f"{top}/a.csv"]),
            fs.cat(f"{top}/d/*.csv"),
            fs.head(f"{top}/z", 10),
            fs.tail(f"{top}/z", 10),
            fs.read_text(f"{top}/b.txt"),
            fs.read_block(f"{top}/b.txt", 5, 9, b"."),
            fs.cat_ranges([f"{top}/a.csv", f"{top}/z"], [1, 2], [4, 9]),
            fs.cat_ranges([f"{top}/a.csv"] * 4, [0, 3, None, 5], [None, -3, 2, 5]),
            fs.cat_ranges([f"{top}/a.csv"] * 2, -9, None),
            fs.size(f"{top}/a.csv"),
            sorted(fs.get_mapper(f"{top}/d")),
            [
                fs.cat_file(f"{top}/a.csv", start, end)
                for start in (None, 0, 3, -3)
                for end in (None, 4, -1)
                if (start, end) != (-3, 4)  # which fsspec's own refuses
            ],
        ]

    ours, local = both(twins, ask)
    assert ours == local
    fs, _ = twins
    assert [fs.cat_file("b/twin/z", *bounds) for bounds in ((-3, 4), (999, None), (50, 40), (200, 300))] == [
        b""
    ] * 4


def test_what_is_missing_in_many_is_told_or_left_out(twins: tuple[Any, str]) -> None:
    fs, _ = twins
    names = [f"b/twin/{name}" for name in ["a.csv", "none", "z", "d/none", "b.txt"]]
    there = {"b/twin/a.csv", "b/twin/z", "b/twin/b.txt"}
    with pytest.raises(FileNotFoundError, match="none"):
        fs.cat(names)
    left = fs.cat(names, on_error="omit")
    assert set(left) == there
    assert left["b/twin/z"] == b"z" * 100
    told = fs.cat(names, on_error="return")
    assert {name for name, data in told.items() if isinstance(data, bytes)} == there
    assert told["b/twin/d/none"].filename == "b/twin/d/none"
    assert isinstance(told["b/twin/none"], FileNotFoundError)
    parts = fs.cat_ranges(names, [0] * 5, [3] * 5)
    assert [part if isinstance(part, bytes) else type(part) for part in parts] == [
        b"a.c", FileNotFoundError, b"zzz", FileNotFoundError, b"b.t"
    ]  # fmt: skip
    with pytest.raises(FileNotFoundError):
        fs.cat_ranges(names, 0, 3, on_error="raise")
    mapper = fs.get_mapper("b/twin")
    assert mapper["d/e/c.csv"] == b"d/e/c.csv" * 100
    with pytest.raises(KeyError):
        mapper["none"]
    assert set(mapper.getitems(["z", "none"], on_error="omit")) == {"z"}


def test_a_version_is_told_and_is_another_after_a_change(server: ServerProcess, folder: Path) -> None:
    fs = fsspec.filesystem("stoker", endpoint=server.url)
    (folder / "changing").write_bytes(b"one")
    before = fs.ukey("b/changing"), fs.checksum("b/changing"), fs.info("b/changing")["ETag"]
    os.utime(folder / "changing", ns=(1, 1))
    with client_of(server) as client:
        client.refresh("b", "changing")
    after = fs.ukey("b/changing"), fs.checksum("b/changing"), fs.info("b/changing")["ETag"]
    assert all(one != other for one, other in zip(before, after, strict=True))
