"""What a mount that is written to refuses, and what programs do that write a file anew in another way."""

from __future__ import annotations

import errno
import struct

import pytest

from stoker.cache.mount.questions import MakeFolder, Read, Remove, RemoveFolder, Room
from stoker.cache.mount.requests import ROOT, Opcode
from stoker.cache.mount.waiting import Failed
from stoker.cache.mount.writing import HANDLE, SIZE
from tests.mount.kernel import unpacked_entry
from tests.unit.test_mount_putting import WRITE_ONLY, Writers, found
from tests.unit.test_mount_putting_races import looked_up


@pytest.mark.parametrize("name", [".stoker-refresh", ".stoker-status"])
def test_special_names_are_neither_made_nor_removed_nor_moved(name: str) -> None:
    mount = Writers()
    mount.create("a")
    asked = dict(mount.asked)
    making = struct.pack("=II", 0o755, 0) + name.encode() + b"\0"
    creating = struct.pack("=IIII", WRITE_ONLY, 0o644, 0, 0) + name.encode() + b"\0"
    for request in (
        mount.rename("a", name), mount.rename(name, "b"), mount.ask(Opcode.UNLINK, ROOT, name.encode() + b"\0"),
        mount.ask(Opcode.MKDIR, ROOT, making), mount.ask(Opcode.CREATE, ROOT, creating),
    ):  # fmt: skip
        assert mount.code(request) == errno.EPERM
    assert mount.asked == asked


def test_there_are_no_links_and_no_devices() -> None:
    mount = Writers()
    for opcode in (Opcode.SYMLINK, Opcode.LINK, Opcode.MKNOD):
        assert mount.code(mount.ask(opcode, ROOT, b"a\0b\0")) == errno.EPERM


def truncation(handle: int, size_bytes: int, valid: int = SIZE | HANDLE) -> bytes:
    return struct.pack("=IIQQQQQQIIIIIIII", valid, 0, handle, size_bytes, *[0] * 12)


def opened_to_write(mount: Writers, node: int) -> int:
    """A handle, without O_TRUNC."""
    opened = mount.ask(Opcode.OPEN, node, struct.pack("=II", 2, 0))
    return int(struct.unpack_from("=Q", mount.said[opened][1])[0])


@pytest.mark.parametrize("size_bytes", [9, 0])
def test_who_empties_an_open_file_writes_it_anew(size_bytes: int) -> None:
    """As editors do: open, ftruncate, write."""
    mount = Writers()
    node = looked_up(mount, "a", size_bytes)
    handle = opened_to_write(mount, node)
    assert mount.code(mount.ask(Opcode.SETATTR, node, truncation(handle, 0))) == 0
    mount.write(node, handle, b"text")
    assert not mount.puts()
    close = mount.close(node, handle)
    (put,) = mount.puts()
    assert put.path == "a"
    mount.answer(put, found(4, "v2"))
    assert mount.code(close) == 0
    mount.release(node, handle)
    assert len(mount.core.state.staged) == 0


def test_who_emptied_it_goes_on_with_another_daemon() -> None:
    mount = Writers()
    node = looked_up(mount, "a")
    handle = opened_to_write(mount, node)
    mount.ask(Opcode.SETATTR, node, truncation(handle, 0))
    mount.restart()
    mount.write(node, handle, b"text")
    mount.close(node, handle)
    assert [put.path for put in mount.puts()] == ["a"]


def test_a_file_is_not_cut_in_part_and_not_by_its_name() -> None:
    mount = Writers()
    node = looked_up(mount, "a")
    handle = opened_to_write(mount, node)
    assert mount.code(mount.ask(Opcode.SETATTR, node, truncation(handle, 5))) == errno.EOPNOTSUPP
    assert mount.code(mount.ask(Opcode.SETATTR, node, truncation(0, 0, SIZE))) == errno.EOPNOTSUPP


def test_who_reads_what_was_tried_ahead_in_vain_does_not_wait_once_more() -> None:
    mount = Writers()
    node = looked_up(mount, "a", 100)
    handle = opened_to_write(mount, node)
    reading = struct.pack("=QQIIQII", handle, 0, 50, 0, 0, 0, 0)
    first = mount.ask(Opcode.READ, node, reading)
    question = Read("a", "v1", 0, 50)
    mount.answer(question, Failed(errno.ETIMEDOUT))
    assert mount.code(first) == errno.ETIMEDOUT
    mount.now -= 0.5
    assert mount.code(mount.ask(Opcode.READ, node, reading)) == errno.ETIMEDOUT
    mount.now -= 1
    elsewhere = mount.ask(Opcode.READ, node, struct.pack("=QQIIQII", handle, 50, 50, 0, 0, 0, 0))
    mount.answer(Read("a", "v1", 50, 100), b"y" * 50)
    assert mount.code(elsewhere) == 0, "that may be here"
    mount.now += 1
    again = mount.ask(Opcode.READ, node, reading)
    mount.answer(question, b"x" * 50)
    assert mount.code(again) == 0


def test_how_full_it_is_is_told_as_it_was_while_nobody_can_be_asked() -> None:
    mount = Writers()
    first = mount.ask(Opcode.STATFS, ROOT, b"")
    mount.answer(Room(), Failed(errno.EIO))
    assert mount.code(first) == errno.EIO, "it was never known"
    mount.ask(Opcode.STATFS, ROOT, b"")
    mount.answer(Room(), (1 << 30, 1 << 20))
    third = mount.ask(Opcode.STATFS, ROOT, b"")
    mount.carry_out(mount.core.tick(mount.now + 2.5))
    assert mount.code(third) == 0


def test_a_folder_in_which_something_is_written_is_not_empty() -> None:
    mount = Writers()
    making = mount.ask(Opcode.MKDIR, ROOT, struct.pack("=II", 0o755, 0) + b"d\0")
    mount.answer(MakeFolder("d"), None)
    folder = unpacked_entry(mount.said[making][1]).node
    creating = struct.pack("=IIII", WRITE_ONLY, 0o644, 0, 0) + b"f\0"
    said = mount.said[mount.ask(Opcode.CREATE, folder, creating)][1]
    node, handle = unpacked_entry(said).node, struct.unpack_from("=Q", said, 128)[0]
    assert mount.code(mount.ask(Opcode.RMDIR, ROOT, b"d\0")) == errno.ENOTEMPTY
    mount.ask(Opcode.UNLINK, folder, b"f\0")
    mount.answer(Remove("d/f"), None)
    mount.release(node, handle)
    removing = mount.ask(Opcode.RMDIR, ROOT, b"d\0")
    mount.answer(RemoveFolder("d"), None)
    assert mount.code(removing) == 0
