"""Reading folders of a mount, page by page, also where they change while they are read."""

from __future__ import annotations

import pytest

from stoker.base.rng import Rng
from stoker.cache.mount.handles import OpenFolder
from stoker.cache.mount.questions import List
from stoker.cache.mount.records import records
from stoker.cache.mount.source_port import Found, Page
from stoker.cache.mount.state import MountSettings
from tests.mount.calls import Calls, Folder, Listed, Steps
from tests.mount.driver import Driver
from tests.mount.kernel import FakeKernel, init
from tests.mount.source import FakeSource

SETTINGS = MountSettings(page_entries=3)
FILE = Found(False, 5, "v1")


class Reader:
    """A folder of a mount that is read."""

    def __init__(self, *names: str, settings: MountSettings = SETTINGS) -> None:
        self.kernel = FakeKernel(Rng(1))
        self.source = FakeSource(Rng(2), self.kernel)
        for name in names:
            self.source.write(name)
        self.source.notice("")
        self.driver = Driver(self.kernel, self.source, settings, Rng(3))
        self.calls = Calls(self.kernel)
        self.kernel.start(self.mounted())
        self.driver.settle()
        self.folder = self.do(self.calls.opendir(""))

    def mounted(self) -> Steps[None]:
        code, _ = yield init()
        assert not code

    def do(self, call: Steps[object]) -> object:
        """A system call, until it is over."""
        said: list[object] = []
        self.kernel.start(call, said.append)
        self.driver.settle()
        (result,) = said
        if isinstance(result, OSError):
            raise result
        return result

    def read(self, cookie: int, size_bytes: int = 4096, *, is_plus: bool = False) -> list[Listed]:
        assert isinstance(self.folder, Folder)
        listed = self.do(self.calls.readdir(self.folder, cookie, size_bytes, is_plus=is_plus))
        assert isinstance(listed, list)
        return listed

    def walk(self, cookie: int = 0, size_bytes: int = 4096, *, is_plus: bool = False) -> list[str]:
        """All names from there on."""
        names: list[str] = []
        while listed := self.read(cookie, size_bytes, is_plus=is_plus):
            names += [one.name.decode() for one in listed]
            cookie = listed[-1].cookie
        return names

    @property
    def pages(self) -> list[List]:
        return [question for question in self.source.asked if isinstance(question, List)]


NAMES = [f"n{number:02}" for number in range(20)]


@pytest.mark.parametrize("is_plus", [False, True])
@pytest.mark.parametrize("size_bytes", [184, 300, 500, 4096, 65536])
def test_each_name_comes_once_however_little_is_read_at_a_time(size_bytes: int, is_plus: bool) -> None:
    reader = Reader(*NAMES)
    assert reader.walk(0, size_bytes, is_plus=is_plus) == [".", "..", *NAMES]
    assert reader.walk(0, size_bytes, is_plus=not is_plus) == [".", "..", *NAMES]


def test_a_place_in_a_folder_is_come_back_to_from_anywhere() -> None:
    reader = Reader(*NAMES)
    reader.walk()
    for cookie in (0, 1, 2, 3, 10, 21, 5, 22, 23, 1000, 4):
        assert reader.walk(cookie, 300) == [".", "..", *NAMES][cookie:], cookie


def test_a_place_in_a_folder_is_found_by_the_next_daemon() -> None:
    for cookie in range(23):
        reader = Reader(*NAMES)
        listed: list[Listed] = []
        at = 0
        while at < cookie:
            listed = reader.read(at, 300)
            at = listed[-1].cookie
        reader.driver.die()
        reader.source.asked.clear()
        assert reader.walk(at, 300) == [".", "..", *NAMES][at:]
        assert reader.pages[0].after is None or reader.pages[0].after <= NAMES[max(at - 3, 0)]
        assert at < 9 or reader.pages[0].after is not None, "it does not begin at the beginning again"


def test_who_begins_anew_sees_what_is_there_by_then() -> None:
    """Where pages began was true of the folder as it was."""
    reader = Reader(*NAMES)
    assert reader.walk() == [".", "..", *NAMES]
    added = [f"a{number}" for number in range(4)]
    for name in added:
        reader.source.write(name)
    reader.source.remove("n05")
    reader.source.notice("")
    there = sorted({*NAMES, *added} - {"n05"})
    assert reader.walk() == [".", "..", *there]
    reader.driver.die()
    assert reader.walk(12) == [".", "..", *there][12:]
    for name in there[4:]:
        reader.source.remove(name)
    reader.source.notice("")
    assert reader.walk() == [".", "..", *there[:4]]
    assert reader.walk(10) == []


def test_what_is_remembered_of_places_is_what_is_known() -> None:
    """Also of very many: every other one is forgotten, and the others are right."""
    rng = Rng(5)
    folder, twin = OpenFolder(1), OpenFolder(1)
    ends: dict[int, int] = {}
    for _ in range(20_000):
        start, after = folder.page_start(folder.starts[-1][0] if rng.chance(0.999) else rng.below(8000))
        count = 1 + rng.below(3)
        entries = [(f"{start + number:08}", FILE) for number in range(count)]
        page = Page(entries, f"{start + count - 1:08}" if rng.chance(0.99) else None)
        assert after == (f"{start - 1:08}" if start else None)
        for cookie, name in folder.turn_to(start, page, 0.0):
            twin.add_start(cookie, name)
        ends[start] = count
        assert folder.page == (start, page)
    assert twin.starts == folder.starts
    numbers = [cookie for cookie, _ in folder.starts]
    assert numbers == sorted(set(numbers))
    assert numbers[0] == 0
    assert len(numbers) <= 4096


def test_the_same_page_is_not_remembered_twice() -> None:
    reader = Reader(*NAMES, settings=MountSettings(page_entries=1))
    reader.walk()
    once = len(list(records(bytes(reader.driver.log))))
    assert reader.walk() == [".", "..", *NAMES]
    assert len(list(records(bytes(reader.driver.log)))) == once


def test_read_plus_tells_what_a_look_would() -> None:
    reader = Reader("f", "d/f")
    listed = reader.read(0, is_plus=True) + reader.read(3, is_plus=True)
    nodes = {one.name: one.node for one in listed}
    assert nodes[b"."] == nodes[b".."] == 0
    for name in ("f", "d"):
        inode = reader.do(reader.calls.stat(name))
        assert inode is reader.kernel.inodes[nodes[name.encode()]]
    kinds = {one.name: one.kind for one in listed}
    assert kinds == {b".": 4, b"..": 4, b"d": 4, b"f": 8}


def test_a_folder_that_nobody_has_open_is_not_read() -> None:
    reader = Reader("f")
    with pytest.raises(OSError, match=r"\[Errno 9\]"):
        reader.do(reader.calls.readdir(Folder(1, 4711), 0, 4096, is_plus=False))
    reader.do(reader.calls.closedir(reader.folder))  # type: ignore[arg-type]
    assert len(reader.driver.core.state.handles) == 0
