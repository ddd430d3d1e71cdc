"""Lists of folders that files are written, removed and renamed in."""

from __future__ import annotations

import errno
import struct

import pytest

from stoker.cache.mount.questions import List, MakeFolder, Remove, RemoveFolder, Rename
from stoker.cache.mount.requests import ROOT, Opcode
from stoker.cache.mount.source_port import Found, Page
from stoker.cache.mount.waiting import Failed
from tests.mount.calls import Listed, listed_in
from tests.mount.kernel import unpacked_entry
from tests.unit.test_mount_putting import Writers, found

OLD = [("a", found(1, "a1")), ("b", found(1, "b1"))]


class Folder:
    """The root of a mount, which is read. `page`: what the origin has."""

    def __init__(self, mount: Writers, *, is_plus: bool = False) -> None:
        self.mount = mount
        self.opcode = Opcode.READDIRPLUS if is_plus else Opcode.READDIR
        (self.handle,) = struct.unpack_from("=Q", mount.said[mount.ask(Opcode.OPENDIR, ROOT, bytes(8))][1])

    def ask(self, cookie: int = 0) -> int:
        asked = struct.pack("=QQIIQII", self.handle, cookie, 4096, 0, 0, 0, 0)
        return self.mount.ask(self.opcode, ROOT, asked)

    def answer(self, entries: list[tuple[str, Found]], after: str | None = None) -> None:
        question = next(question for question in self.mount.asked if isinstance(question, List))
        self.mount.answer(question, Page(entries, after))

    def entries(self, unique: int) -> list[Listed]:
        code, body = self.mount.said[unique]
        assert code == 0
        listed = [one for one, _ in listed_in(body, is_plus=self.opcode == Opcode.READDIRPLUS)]
        return [one for one in listed if one.name not in (b".", b"..")]

    def names(self, unique: int) -> list[bytes]:
        return [one.name for one in self.entries(unique)]


@pytest.mark.parametrize("is_plus", [False, True])
def test_what_is_being_written_is_listed_behind_the_others(is_plus: bool) -> None:
    mount = Writers()
    node, _ = mount.create("a2")
    folder = Folder(mount, is_plus=is_plus)
    reading = folder.ask()
    folder.answer(OLD)
    assert folder.names(reading) == [b"a", b"b", b"a2"]
    last = folder.entries(reading)[-1]
    assert (last.inode, last.node) == (node, 0), "it is looked up for what it is by then"
    assert folder.names(folder.ask(last.cookie)) == []
    assert folder.names(folder.ask(folder.entries(reading)[1].cookie)) == [b"a2"]


@pytest.mark.parametrize("is_plus", [False, True])
def test_what_is_put_while_a_folder_is_read_is_listed_once(is_plus: bool) -> None:
    """Whether the page that it comes to be on was read before that, or is read after it."""
    mount = Writers()
    files = {name: mount.create(name) for name in ("a2", "c")}
    folder = Folder(mount, is_plus=is_plus)
    first = folder.ask()
    folder.answer(OLD, after="b")
    for node, handle in files.values():
        mount.write(node, handle, b"x")
        mount.close(node, handle)
        mount.answer_put(found(1))
        mount.release(node, handle)
    second = folder.ask(folder.entries(first)[-1].cookie)
    folder.answer([("c", found(1)), ("d", found(1))])
    assert [*folder.names(first), *folder.names(second)] == [b"a", b"b", b"d", b"a2", b"c"]


def test_a_page_of_nothing_else_is_not_the_end() -> None:
    mount = Writers()
    for name in ("a", "b"):
        mount.create(name)
    folder = Folder(mount)
    reading = folder.ask()
    folder.answer(OLD, after="b")
    assert mount.code(reading) is None
    folder.answer([("d", found(1))])
    assert folder.names(reading) == [b"d", b"a", b"b"]


def test_who_reads_a_folder_again_is_told_what_is_written_then() -> None:
    mount = Writers()
    folder = Folder(mount)
    reading = folder.ask()
    folder.answer(OLD)
    mount.create("c")
    assert folder.names(reading) == [b"a", b"b"]
    reading = folder.ask()
    folder.answer(OLD)
    assert folder.names(reading) == [b"a", b"b", b"c"]


def test_what_was_removed_since_is_told_nothing_of() -> None:
    """Or the kernel would take the name to be there for as long as it keeps names."""
    mount = Writers()
    folder = Folder(mount, is_plus=True)
    reading = folder.ask()
    removing = mount.unlink("b")
    mount.answer(Remove("b"), None)
    assert mount.code(removing) == 0
    folder.answer(OLD)
    assert [(one.name, bool(one.node)) for one in folder.entries(reading)] == [(b"a", True), (b"b", False)]


def test_who_looks_after_a_change_is_not_told_what_was_asked_before_it() -> None:
    mount = Writers()
    early = Folder(mount)
    before = early.ask()
    (asked,) = mount.asked.items()
    mount.asked.clear()
    mount.unlink("b")
    mount.answer(Remove("b"), None)
    late = Folder(mount)
    after = late.ask()
    assert mount.code(after) is None
    late.answer(OLD[:1])
    assert late.names(after) == [b"a"]
    mount.asked.update([asked])
    early.answer(OLD)
    assert early.names(before) == [b"a", b"b"]


@pytest.mark.parametrize("is_taken_over", [False, True])
def test_what_may_have_been_put_is_renamed_at_the_origin(is_taken_over: bool) -> None:
    """Else what an origin took, and said it had not, would stay there under its first name."""
    mount = Writers()
    node, handle = mount.create("new")
    mount.write(node, handle, b"x")
    syncing = mount.sync(node, handle)
    (put,) = mount.puts()
    if is_taken_over:
        mount.restart()
    else:
        mount.answer(put, Failed(errno.EIO))
        assert mount.code(syncing) == errno.EIO
    assert mount.code(mount.rename("new", "a")) == errno.EBUSY, "it is not whole, and not known to be there"
    mount.close(node, handle)
    mount.answer_put(found(1))
    mount.release(node, handle)
    renaming = mount.rename("new", "a")
    mount.answer(Rename("new", "a", True), (found(1), found(1, "v2")))
    assert mount.code(renaming) == 0


def made_and_removed(mount: Writers, how_often: int) -> list[int]:
    """The nodes of a folder that is made and removed so often, and then made once more."""
    nodes = []
    for number in range(how_often + 1):
        making = mount.ask(Opcode.MKDIR, ROOT, struct.pack("=II", 0o755, 0) + b"d\0")
        mount.answer(MakeFolder("d"), None)
        nodes.append(unpacked_entry(mount.said[making][1]).node)
        if number < how_often:
            mount.ask(Opcode.RMDIR, ROOT, b"d\0")
            mount.answer(RemoveFolder("d"), None)
    return nodes


@pytest.mark.parametrize("is_taken_over", [False, True])
def test_a_folder_that_is_made_again_is_another_node_while_the_kernel_knows_the_first(
    is_taken_over: bool,
) -> None:
    """In which Linux makes nothing any more."""
    mount = Writers()
    first, second, third = made_and_removed(mount, 2)
    assert len({first, second, third}) == 3
    if is_taken_over:
        mount.restart()
    table = mount.core.state.nodes
    assert table.number_of("d", is_folder=True) == third
    for gone in (first, second):
        mount.ask(Opcode.FORGET, gone, struct.pack("=Q", 1))
        assert table.number_of("d", is_folder=True) == third, "the kernel keeps names by that"
    mount.ask(Opcode.FORGET, third, struct.pack("=Q", 1))
    assert len(table) == 1
    assert table.number_of("d", is_folder=True) == first, "as after a restart"
    assert made_and_removed(mount, 0) == [first]
