"""Files that are written through a mount while something else happens to them: another one takes the name, one of those
who have it open ends, the daemon ends."""

from __future__ import annotations

import errno
import struct

from stoker.cache.mount.questions import List, Put, Remove, Rename, Stage, StageDrop, StageKeep, StageSize
from stoker.cache.mount.requests import ROOT, Opcode
from stoker.cache.mount.source_port import Page
from stoker.cache.mount.waiting import Failed
from tests.mount.kernel import unpacked_entry
from tests.unit.test_mount_putting import OTHER, TRUNCATE, WRITE_ONLY, WRITER, Writers, found


def test_what_is_put_under_a_name_that_another_file_takes_is_put_before_that_one() -> None:
    mount = Writers()
    first, first_handle = mount.create("t1")
    mount.write(first, first_handle, b"old")
    mount.rename("t1", "final")
    old_close = mount.close(first, first_handle)
    (old,) = mount.puts()
    second, second_handle = mount.create("t2")
    mount.write(second, second_handle, b"newer")
    rename = mount.rename("t2", "final")
    close = mount.close(second, second_handle)
    assert mount.code(rename) is None
    temporary = next(put for put in mount.puts() if put != old)
    assert temporary.path == "t2", "the name is another file's yet"
    mount.answer(old, found(3))
    assert mount.code(old_close) == 0
    mount.answer(temporary, found(5))
    mount.answer(Rename("t2", "final", True), (found(5), found(5, "v2")))
    assert (mount.code(rename), mount.code(close)) == (0, 0)
    for node, handle in ((first, first_handle), (second, second_handle)):
        mount.release(node, handle)
    assert not [question for question in mount.asked if isinstance(question, Remove | Put)]
    assert mount.core.state.known.get("final", mount.now)[1] == found(5, "v2")


def test_an_open_file_that_is_renamed_over_what_is_being_put_waits_for_that() -> None:
    mount = Writers()
    first, first_handle = mount.create("t1")
    mount.write(first, first_handle, b"old")
    mount.rename("t1", "final")
    mount.close(first, first_handle)
    (old,) = mount.puts()
    second, second_handle = mount.create("t2")
    mount.write(second, second_handle, b"newer")
    rename = mount.rename("t2", "final")
    assert mount.code(rename) is None
    mount.answer(old, found(3))
    assert mount.code(rename) == 0
    close = mount.close(second, second_handle)
    (new,) = mount.puts()
    assert new.path == "final"
    mount.release(first, first_handle)
    mount.answer(new, found(5, "v2"))
    mount.release(second, second_handle)
    assert mount.code(close) == 0
    assert Remove("final") not in mount.asked
    assert len(mount.core.state.staged) == 0


def test_what_is_closed_while_it_is_being_removed_stays_removed() -> None:
    mount = Writers()
    node, handle = mount.create("a")
    mount.write(node, handle, b"x")
    unlink = mount.unlink("a")
    close = mount.close(node, handle)
    assert not mount.puts()
    mount.answer(Remove("a"), None)
    assert (mount.code(unlink), mount.code(close)) == (0, 0)
    mount.release(node, handle)
    assert not mount.puts()
    assert len(mount.core.state.staged) == 0


def test_what_could_not_be_removed_is_put_then() -> None:
    mount = Writers()
    node, handle = mount.create("a")
    mount.write(node, handle, b"x")
    unlink = mount.unlink("a")
    close = mount.close(node, handle)
    mount.answer(Remove("a"), Failed(errno.EACCES))
    assert mount.code(unlink) == errno.EACCES
    mount.answer_put(found(1))
    assert mount.code(close) == 0


def test_what_is_closed_while_another_is_renamed_over_it_is_not_put() -> None:
    mount = Writers()
    node, handle = opened(mount, "to")
    mount.release(node, handle)
    mount.answer_put(found(0, "v1"))
    rename = mount.rename("from", "to")
    node, handle = opened(mount, "to")
    mount.write(node, handle, b"x")
    close = mount.close(node, handle)
    mount.release(node, handle)
    assert not mount.puts()
    mount.answer(Rename("from", "to", True), (found(9), found(9, "v2")))
    assert (mount.code(rename), mount.code(close)) == (0, 0)
    assert not [question for question in mount.asked if isinstance(question, Put | Remove)]


def test_what_is_written_after_a_failure_is_put_when_all_have_closed_it() -> None:
    mount = Writers()
    node, handle = mount.create("a")
    mount.write(node, handle, b"x")
    close = mount.close(node, handle)
    mount.answer_put(Failed(errno.EIO))
    assert mount.code(close) == errno.EIO
    mount.write(node, handle, b"y" * 100)
    assert mount.code(mount.close(node, handle, pid=OTHER)) == 0
    mount.release(node, handle)
    (again,) = mount.puts()
    mount.answer(again, found(100))
    assert not [question for question in mount.asked if isinstance(question, StageKeep)]


def test_what_a_killed_process_left_is_not_made_whole_by_who_writes_on() -> None:
    mount = Writers()
    node, handle = mount.create("a")
    mount.write(node, handle, b"x")
    mount.close(node, handle, pid=-WRITER)
    mount.write(node, handle, b"y")
    mount.restart()
    mount.write(node, handle, b"z")
    mount.release(node, handle)
    assert not mount.puts()
    assert mount.kept() == ["a"]


def test_a_put_that_fails_over_what_is_written_meanwhile_is_begun_again() -> None:
    mount = Writers()
    node, handle = mount.create("a")
    mount.write(node, handle, b"x")
    close = mount.close(node, handle)
    (put,) = mount.puts()
    mount.write(node, handle, b"y")
    mount.answer(put, Failed(errno.EIO))
    assert mount.code(close) is None
    (again,) = mount.puts()
    mount.answer(again, Failed(errno.EIO))
    assert mount.code(close) == errno.EIO, "nobody has written meanwhile"


def test_a_failure_that_was_told_is_known_to_the_next_daemon() -> None:
    mount = Writers()
    node, handle = mount.create("a")
    mount.write(node, handle, b"x")
    mount.close(node, handle)
    mount.answer_put(Failed(errno.ENOSPC))
    mount.restart()
    mount.release(node, handle)
    assert not mount.puts()
    assert mount.kept() == ["a"]


def test_a_file_whose_writer_was_killed_looks_as_it_did_before() -> None:
    for restarts in (False, True):
        mount = Writers()
        node, handle = opened(mount, "a")
        before = mount.core.state.nodes.get(node)
        assert before is not None
        mount.write(node, handle, b"x" * 500)
        if restarts:
            mount.log = b"".join(mount.core.snapshot())
            mount.restart()
        assert attributes(mount, node) == (500, 0)
        mount.close(node, handle, pid=-WRITER)
        mount.release(node, handle)
        assert looked_up(mount, "a") == node
        size_bytes, valid_s = attributes(mount, node)
        assert (size_bytes, valid_s > 0) == (9, True)
        again = mount.core.state.nodes.get(node)
        assert again is not None
        assert again.modified_ns == 10**9


def test_what_was_put_long_ago_is_settled_for_the_next_daemon() -> None:
    mount = Writers()
    node, handle = mount.create("a")
    mount.write(node, handle, b"x")
    mount.close(node, handle)
    mount.answer_put(found(1))
    mount.release(node, handle)
    mount.restart()
    size_bytes, valid_s = attributes(mount, node)
    assert (size_bytes, valid_s > 0) == (1, True)


def attributes(mount: Writers, node: int) -> tuple[int, int]:
    """Its bytes, and for how many seconds they are so."""
    said = mount.said[mount.ask(Opcode.GETATTR, node, bytes(16))][1]
    valid_s, _, _, _, size_bytes = struct.unpack_from("=QIIQQ", said)
    return size_bytes, valid_s


def test_a_list_gives_no_other_node_for_what_is_being_written() -> None:
    mount = Writers()
    node, handle = mount.create("a")
    mount.write(node, handle, b"x")
    mount.sync(node, handle)
    mount.answer_put(found(1))
    opening = mount.ask(Opcode.OPENDIR, ROOT, struct.pack("=II", 0, 0))
    (folder,) = struct.unpack_from("=Q", mount.said[opening][1])
    page = Page([("a", found(1)), ("b", found(2))], None)
    for opcode, entry_bytes in ((Opcode.READDIRPLUS, 128), (Opcode.READDIR, 0)):
        reading = mount.ask(opcode, ROOT, struct.pack("=QQIIQII", folder, 0, 4096, 0, 0, 0, 0))
        (listing,) = [question for question in mount.asked if isinstance(question, List)]
        mount.answer(listing, page)
        entries, at = {}, 0
        body = mount.said[reading][1]
        while at < len(body):
            inode, _, length, _ = struct.unpack_from("=QQII", body, at + entry_bytes)
            name = body[at + entry_bytes + 24 :][:length]
            entries[name] = inode, unpacked_entry(body[at:]).node if entry_bytes else 0
            at += entry_bytes + (24 + length + 7) // 8 * 8
        assert entries[b"a"] == (node, 0)
        assert (entries[b"b"][1] != 0) == (entry_bytes > 0)
    assert unpacked_entry(mount.said[mount.ask(Opcode.LOOKUP, ROOT, b"a\0")][1]).node == node


def test_a_signal_ends_no_write() -> None:
    mount = Writers()
    node, handle = mount.create("a")
    mount.is_slow = True
    write = mount.ask(Opcode.WRITE, node, writing(handle, b"x"))
    mount.carry_out(mount.core.interrupt(write))
    assert mount.code(write) is None
    (stage,) = [question for question in mount.asked if isinstance(question, Stage)]
    mount.answer(stage, None)
    assert mount.code(write) == 0
    mount.close(node, handle)
    assert len(mount.puts()) == 1


def test_what_is_written_while_a_put_fails_over_it_is_no_failure() -> None:
    mount = Writers()
    node, handle = mount.create("a")
    mount.write(node, handle, b"x")
    close = mount.close(node, handle)
    (put,) = mount.puts()
    mount.is_slow = True
    mount.ask(Opcode.WRITE, node, writing(handle, b"y"))
    mount.answer(put, Failed(errno.EIO))
    assert mount.code(close) is None
    assert len(mount.puts()) == 1


def test_what_is_written_to_a_file_that_is_emptied_meanwhile_is_in_it() -> None:
    mount = Writers()
    node, handle = mount.create("a")
    mount.write(node, handle, b"x" * 100)
    mount.is_slow = True
    write = mount.ask(Opcode.WRITE, node, writing(handle, b"yy"))
    (before,) = [question for question in mount.asked if isinstance(question, Stage)]
    opening = mount.ask(Opcode.OPEN, node, struct.pack("=II", WRITE_ONLY | TRUNCATE, 0), pid=OTHER)
    (emptied,) = [question for question in mount.asked if isinstance(question, StageSize)]
    assert emptied.stage != before.stage
    mount.answer(emptied, None)
    assert mount.code(opening) == 0
    mount.answer(before, Failed(errno.ENOENT))
    assert mount.code(write) is None
    (after,) = [question for question in mount.asked if isinstance(question, Stage)]
    assert (after.stage, after.data) == (emptied.stage, b"yy")
    mount.answer(after, None)
    assert mount.code(write) == 0
    assert attributes(mount, node)[0] == 2


def writing(handle: int, data: bytes, offset: int = 0) -> bytes:
    return struct.pack("=QQIIQII", handle, offset, len(data), 0, 0, 0, 0) + data


def fails_to_write(mount: Writers, node: int, handle: int, data: bytes, offset: int = 0) -> None:
    """The disk is full."""
    mount.is_slow = True
    write = mount.ask(Opcode.WRITE, node, writing(handle, data, offset))
    (stage,) = [question for question in mount.asked if isinstance(question, Stage)]
    mount.answer(stage, Failed(errno.ENOSPC))
    mount.is_slow = False
    assert mount.code(write) == errno.ENOSPC


def looked_up(mount: Writers, name: str, size_bytes: int = 9, version: str = "v1") -> int:
    """The node of a file that is at the origin."""
    mount.now += 1
    mount.core.state.known.put(name, found(size_bytes, version), mount.now)
    return unpacked_entry(mount.said[mount.ask(Opcode.LOOKUP, ROOT, name.encode() + b"\0")][1]).node


def opened(mount: Writers, name: str, *, pid: int = WRITER) -> tuple[int, int]:
    """Node and handle of a file that is at the origin, and written anew."""
    node = looked_up(mount, name)
    return node, opened_node(mount, node, WRITE_ONLY | TRUNCATE, pid=pid)


def opened_node(mount: Writers, node: int, flags: int = WRITE_ONLY, *, pid: int = WRITER) -> int:
    """The handle."""
    code, said = mount.said[mount.ask(Opcode.OPEN, node, struct.pack("=II", flags, 0), pid=pid)]
    assert code == 0
    return int(struct.unpack_from("=Q", said)[0])


def test_a_write_that_failed_is_not_published_by_who_does_not_look() -> None:
    """Not even by another daemon; it is by who writes it again, or begins anew."""
    mount = Writers()
    node, handle = mount.create("a")
    mount.write(node, handle, b"x" * 10)
    fails_to_write(mount, node, handle, b"y" * 10, 10)
    assert mount.code(mount.sync(node, handle)) == errno.ENOSPC
    assert mount.code(mount.close(node, handle)) == errno.ENOSPC
    mount.restart()
    assert mount.code(mount.close(node, handle)) == errno.ENOSPC
    assert not mount.puts()
    mount.write(node, handle, b"y" * 10, 10)
    close = mount.close(node, handle)
    mount.answer_put(found(20))
    assert mount.code(close) == 0


def test_what_failed_leaves_no_room_taken() -> None:
    mount = Writers()
    node, handle = mount.create("a")
    fails_to_write(mount, node, handle, b"y" * 10)
    mount.close(node, handle)
    mount.release(node, handle)
    assert not mount.puts()
    assert not mount.kept()
    assert any(isinstance(question, StageDrop) for question in mount.asked)
    assert len(mount.core.state.staged) == 0


def test_a_node_that_the_kernel_forgot_while_it_is_put_looks_as_it_is_put() -> None:
    mount = Writers()
    node = looked_up(mount, "a", 10)
    opened = mount.ask(Opcode.OPEN, node, struct.pack("=II", WRITE_ONLY | TRUNCATE, 0))
    handle = struct.unpack_from("=Q", mount.said[opened][1])[0]
    mount.release(node, handle)
    (put,) = mount.puts()
    mount.core.state.nodes.forget(node, 1)
    assert looked_up(mount, "a", 10) == node
    mount.answer(put, found(0, "v2"))
    said = mount.said[mount.ask(Opcode.GETATTR, node, bytes(16))][1]
    assert struct.unpack_from("=QIIQQ", said)[4] == 0
