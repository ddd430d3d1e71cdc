"""Files that are written through a mount: which of them the origin is told of, when, and under which name."""

from __future__ import annotations

import errno
import struct
from collections import deque

import pytest

from stoker.cache.mount.core import MountCore
from stoker.cache.mount.questions import (
    Ask,
    Effect,
    Find,
    Put,
    Question,
    Read,
    Remember,
    Remove,
    Rename,
    Reply,
    Stage,
    StageDrop,
    StageKeep,
    StageRead,
    StageSize,
    Tell,
)
from stoker.cache.mount.records import records
from stoker.cache.mount.requests import RESENT, ROOT, Header, Opcode, Request, parse
from stoker.cache.mount.source_port import Found
from stoker.cache.mount.state import MountSettings
from stoker.cache.mount.waiting import Failed
from tests.mount.kernel import Asked, init, packed, unpacked_entry

WRITER, OTHER = 50, 60
WRITE_ONLY, TRUNCATE = 0o1, 0o1000


class Writers:
    """A mount that can be written to. What is asked of the origin waits in `asked` until a test answers it; files that
    are staged need no answer."""

    def __init__(self) -> None:
        self.settings = MountSettings(is_writable=True, timeout_s=10.0)
        self.core = MountCore(self.settings)
        self.log = b""
        self.now = 100.0
        self.unique = 0
        self.asked: dict[Question, int] = {}
        self.said: dict[int, tuple[int, bytes]] = {}
        self.is_slow = False
        """What is staged needs an answer as well."""
        self.carry_out(self.core.begin(10**18, self.now))
        self.ask(Opcode.INIT, 0, init().body)

    def carry_out(self, effects: list[Effect]) -> None:
        left = deque(effects)
        while left:
            effect = left.popleft()
            if isinstance(effect, Remember):
                self.log += effect.record
            elif isinstance(effect, Reply):
                data = b"".join(effect.parts)
                _, code, unique = struct.unpack_from("=IiQ", data)
                self.said[unique] = -code, data[16:]
            elif isinstance(effect, Ask):
                is_slow = self.is_slow and isinstance(effect.question, Stage | StageSize | StageRead)
                if is_slow:
                    self.asked[effect.question] = effect.number
                elif isinstance(
                    effect.question, Stage | StageSize | StageRead | StageDrop | StageKeep | Tell
                ):
                    answer = b"bytes" if isinstance(effect.question, StageRead) else None
                    left.extend(self.core.answered(effect.number, answer, self.now))
                if not isinstance(effect.question, Stage | StageSize | StageRead | Tell):
                    self.asked[effect.question] = effect.number

    def ask(self, opcode: int, node: int, body: bytes, *, pid: int = WRITER, unique: int = 0) -> int:
        """A request; its number."""
        self.now += 1
        self.unique = unique or (self.unique & ~RESENT) + 2
        request = parse(packed(self.unique, Asked(opcode, node, body)))
        header: Header = request.header._replace(pid=pid)
        self.carry_out(self.core.step(Request(header, request.body), self.now))
        return self.unique

    def answer(self, question: Question, answer: object) -> None:
        self.carry_out(self.core.answered(self.asked.pop(question), answer, self.now))

    def puts(self) -> list[Put]:
        return [question for question in self.asked if isinstance(question, Put)]

    def answer_put(self, answer: object) -> None:
        """Of the only file that is being put."""
        (put,) = self.puts()
        self.answer(put, answer)

    def kept(self) -> list[str]:
        """Files that are laid aside, as nobody puts them any more."""
        return [question.path for question in self.asked if isinstance(question, StageKeep)]

    def create(self, name: str, unique: int = 0) -> tuple[int, int]:
        """Node and handle."""
        body = struct.pack("=IIII", WRITE_ONLY, 0o644, 0, 0) + name.encode() + b"\0"
        code, said = self.said[self.ask(Opcode.CREATE, ROOT, body, unique=unique)]
        assert code == 0
        return unpacked_entry(said).node, struct.unpack_from("=Q", said, 128)[0]

    def write(self, node: int, handle: int, data: bytes, offset: int = 0) -> None:
        body = struct.pack("=QQIIQII", handle, offset, len(data), 0, 0, 0, 0) + data
        assert self.said[self.ask(Opcode.WRITE, node, body)][0] == 0

    def close(self, node: int, handle: int, *, pid: int = WRITER) -> int:
        """FLUSH; its number."""
        return self.ask(Opcode.FLUSH, node, struct.pack("=QIIQ", handle, 0, 0, 0), pid=pid)

    def sync(self, node: int, handle: int) -> int:
        return self.ask(Opcode.FSYNC, node, struct.pack("=QII", handle, 0, 0))

    def release(self, node: int, handle: int) -> None:
        self.ask(Opcode.RELEASE, node, struct.pack("=QIIQ", handle, 0, 0, 0))

    def unlink(self, name: str) -> int:
        return self.ask(Opcode.UNLINK, ROOT, name.encode() + b"\0")

    def rename(self, name: str, to: str, unique: int = 0) -> int:
        body = struct.pack("=Q", ROOT) + name.encode() + b"\0" + to.encode() + b"\0"
        return self.ask(Opcode.RENAME, ROOT, body, unique=unique)

    def code(self, unique: int) -> int | None:
        """How a request was answered; None: it was not."""
        return self.said[unique][0] if unique in self.said else None

    def restart(self) -> None:
        self.core = MountCore(self.settings)
        self.core.restore(records(self.log))
        self.asked.clear()
        self.carry_out(self.core.begin(2 * 10**18, self.now))


def found(size_bytes: int, version: str = "v1") -> Found:
    return Found(False, size_bytes, version, 1.0)


def test_close_waits_for_the_origin_whatever_signals_come() -> None:
    mount = Writers()
    node, handle = mount.create("a")
    mount.write(node, handle, b"x" * 10)
    flush = mount.close(node, handle)
    (put,) = mount.puts()
    assert put.path == "a"
    mount.carry_out(mount.core.interrupt(flush))
    mount.now += 1000
    mount.carry_out(mount.core.tick(mount.now))
    assert mount.code(flush) is None
    mount.answer(put, found(10))
    assert mount.code(flush) == 0
    mount.release(node, handle)
    assert not mount.puts()
    assert len(mount.core.state.staged) == 0


def test_what_is_changed_meanwhile_is_put_after_that_and_never_two_at_once() -> None:
    mount = Writers()
    node, handle = mount.create("a")
    mount.write(node, handle, b"x" * 10)
    first = mount.sync(node, handle)
    (put,) = mount.puts()
    mount.write(node, handle, b"y" * 10, 10)
    second = mount.close(node, handle)
    mount.release(node, handle)
    assert mount.puts() == [put]
    mount.answer(put, found(10))
    (again,) = mount.puts()
    assert (again.stage, again.revision > put.revision) == (put.stage, True)
    assert (mount.code(first), mount.code(second)) == (None, None), (
        "fsync has the bytes before it, and may have more"
    )
    mount.answer(again, found(20, "v2"))
    assert (mount.code(first), mount.code(second)) == (0, 0)
    assert mount.core.state.known.get("a", mount.now)[1] == found(20, "v2")
    assert len(mount.core.state.staged) == 0


def test_a_file_that_is_written_anew_does_not_lie_where_it_is_being_read() -> None:
    mount = Writers()
    node, handle = mount.create("a")
    mount.write(node, handle, b"x" * 10)
    assert mount.code(mount.close(node, handle, pid=OTHER)) == 0
    mount.release(node, handle)
    (put,) = mount.puts()
    opened = mount.ask(Opcode.OPEN, node, struct.pack("=II", WRITE_ONLY | TRUNCATE, 0), pid=OTHER)
    other = struct.unpack_from("=Q", mount.said[opened][1])[0]
    mount.write(node, other, b"z")
    mount.answer(put, found(10))
    assert StageDrop(put.stage) in mount.asked
    mount.close(node, other, pid=OTHER)
    (again,) = mount.puts()
    assert again.stage != put.stage
    mount.answer(again, found(1, "v2"))
    mount.release(node, other)
    assert len(mount.core.state.staged) == 0


@pytest.mark.parametrize("answer", [found(10), Failed(errno.EIO)])
def test_who_writes_a_file_anew_waits_for_those_who_wait_for_what_it_was(answer: object) -> None:
    """Or what is half written would be put for them, where theirs fails first, or theirs would never be put."""
    mount = Writers()
    node, handle = mount.create("a")
    mount.write(node, handle, b"x" * 10)
    sync = mount.sync(node, handle)
    (put,) = mount.puts()
    opened = mount.ask(Opcode.OPEN, node, struct.pack("=II", WRITE_ONLY | TRUNCATE, 0), pid=OTHER)
    assert mount.code(opened) is None
    mount.answer(put, answer)
    assert mount.code(sync) == (answer.code if isinstance(answer, Failed) else 0)
    other = struct.unpack_from("=Q", mount.said[opened][1])[0]
    mount.write(node, other, b"z")
    assert not mount.puts(), "nobody has made it whole"
    mount.close(node, other, pid=OTHER)
    (again,) = mount.puts()
    assert again.stage != put.stage
    assert StageDrop(put.stage) in mount.asked


def test_copies_of_a_descriptor_and_empty_files_make_nothing_whole() -> None:
    mount = Writers()
    node, handle = mount.create("a")
    assert mount.code(mount.close(node, handle)) == 0
    mount.write(node, handle, b"x")
    assert mount.code(mount.close(node, handle, pid=OTHER)) == 0
    assert not mount.puts()
    mount.release(node, handle)
    mount.answer_put(found(1))
    assert len(mount.core.state.staged) == 0


def test_who_is_killed_has_written_nothing() -> None:
    mount = Writers()
    node, handle = mount.create("a")
    mount.write(node, handle, b"x")
    assert mount.code(mount.close(node, handle, pid=-OTHER)) == 0, "a copy of somebody else"
    assert mount.code(mount.close(node, handle, pid=-WRITER)) == 0
    mount.restart()
    mount.release(node, handle)
    assert not mount.puts()
    assert [type(question) for question in mount.asked] == [StageKeep]


def test_what_was_said_to_have_failed_is_not_done_later() -> None:
    mount = Writers()
    node, handle = mount.create("a")
    mount.write(node, handle, b"x")
    flush = mount.close(node, handle)
    mount.answer_put(Failed(errno.ENOSPC))
    assert mount.code(flush) == errno.ENOSPC
    assert mount.code(mount.sync(node, handle)) is None, "who asks again is heard"
    mount.answer_put(Failed(errno.EIO))
    mount.release(node, handle)
    assert not mount.puts()
    assert mount.kept() == ["a"]


def test_a_file_without_a_name_is_not_put_and_another_may_have_the_name() -> None:
    mount = Writers()
    node, handle = mount.create("a")
    mount.write(node, handle, b"x")
    sync = mount.sync(node, handle)
    unlink = mount.unlink("a")
    (put,) = mount.puts()
    assert Remove("a") not in mount.asked, "or the origin would have it again"
    mount.answer(put, found(1))
    assert mount.code(sync) == 0
    mount.answer(Remove("a"), Failed(errno.EACCES))
    assert mount.code(unlink) == errno.EACCES
    unlink = mount.unlink("a")
    mount.answer(Remove("a"), None)
    assert mount.code(unlink) == 0
    mount.restart()
    other, second = mount.create("a")
    assert other != node
    mount.write(node, handle, b"y")
    mount.write(other, second, b"zz")
    reading = struct.pack("=QQIIQII", handle, 0, 10, 0, 0, 0, 0)
    assert mount.said[mount.ask(Opcode.READ, node, reading)] == (0, b"bytes")
    assert mount.code(mount.close(node, handle)) == 0
    mount.release(node, handle)
    flush = mount.close(other, second)
    mount.answer_put(found(2))
    assert mount.code(flush) == 0
    assert mount.core.state.known.get("a", mount.now)[1] == found(2)


def test_a_name_that_is_given_before_the_origin_knows_of_the_file() -> None:
    mount = Writers()
    node, handle = mount.create("temporary")
    assert mount.code(mount.rename("temporary", "final")) == 0
    mount.write(node, handle, b"x")
    mount.restart()
    flush = mount.close(node, handle, pid=WRITER)
    (put,) = mount.puts()
    assert put.path == "final"
    rename = mount.rename("final", "at last")
    assert (mount.code(rename), Rename("final", "at last", True) in mount.asked) == (None, False)
    mount.answer(put, found(1))
    assert mount.code(flush) == 0
    mount.answer(Rename("final", "at last", True), (found(1), found(1, "v2")))
    assert mount.code(rename) == 0
    mount.release(node, handle)
    assert not mount.puts()


def test_a_reader_of_an_older_version_is_not_given_what_was_renamed() -> None:
    mount = Writers()
    nodes = []
    for version in ("v1", "v2"):
        mount.now += 1000
        lookup = mount.ask(Opcode.LOOKUP, ROOT, b"k\0")
        mount.answer(Find("k"), found(100, version))
        nodes.append(unpacked_entry(mount.said[lookup][1]).node)
    rename = mount.rename("k", "k2")
    mount.answer(Rename("k", "k2", True), (found(100, "v2"), found(100, "v3")))
    assert mount.code(rename) == 0
    for node, question in zip(nodes, (Read("k", "v1", 0, 10), Read("k2", "v3", 0, 10)), strict=True):
        mount.ask(Opcode.READ, node, struct.pack("=QQIIQII", 0, 0, 10, 0, 0, 0, 0))
        mount.answer(question, b"")


def test_what_a_daemon_did_not_live_to_answer_is_done_once() -> None:
    mount = Writers()
    node, handle = mount.create("a", unique=70)
    mount.restart()
    assert mount.create("a", unique=70 | RESENT) == (node, handle)
    mount.write(node, handle, b"x")
    flush = mount.close(node, handle)
    mount.restart()
    flush = mount.ask(Opcode.FLUSH, node, struct.pack("=QIIQ", handle, 0, 0, 0), unique=flush | RESENT)
    mount.answer_put(found(1))
    assert mount.code(flush) == 0
    mount.release(node, handle)
    rename = mount.rename("a", "b", unique=90 | RESENT)
    mount.answer(Rename("a", "b", True), Failed(errno.ENOENT))
    mount.answer(Find("b"), found(1, "v2"))
    assert mount.code(rename) == 0
    moved = mount.core.state.nodes.get(node)
    assert moved is not None
    assert (moved.path, moved.version) == ("b", "v2"), "the kernel has moved its name"
    assert mount.code(mount.rename("a", "b")) is None
    mount.answer(Rename("a", "b", True), Failed(errno.ENOENT))
    assert mount.code(mount.unique) == errno.ENOENT


def test_after_fsync_and_a_restart_a_file_is_still_being_written() -> None:
    mount = Writers()
    node, handle = mount.create("a")
    mount.write(node, handle, b"x")
    mount.sync(node, handle)
    mount.answer_put(found(1))
    mount.restart()
    mount.write(node, handle, b"y" * 9, 1)
    said = mount.said[mount.ask(Opcode.GETATTR, node, bytes(16))][1]
    assert struct.unpack_from("=QIIQQ", said)[0] == 0, "for no time"
    assert struct.unpack_from("=QIIQQ", said)[4] == 10


def test_a_new_file_that_a_daemon_before_has_renamed_is_renamed() -> None:
    """The origin knows nothing of it under either name."""
    mount = Writers()
    node, handle = mount.create("a")
    mount.write(node, handle, b"x" * 10)
    first = mount.rename("a", "b")
    assert mount.code(first) == 0
    mount.restart()
    again = mount.rename("a", "b", unique=first | RESENT)
    mount.answer(Rename("a", "b", True), Failed(errno.ENOENT))
    assert mount.code(again) == 0
    mount.close(node, handle)
    assert [put.path for put in mount.puts()] == ["b"]
