"""Files of a mount: which way each is read, and what is closed when."""

from __future__ import annotations

import errno
import struct
from functools import partial

import pytest

from stoker.cache.mount import answers
from stoker.cache.mount.answers import Open
from stoker.cache.mount.core import MountCore
from stoker.cache.mount.questions import (
    Ask,
    Back,
    CloseBacking,
    Effect,
    Fetch,
    Find,
    Read,
    Remember,
    Reply,
    Tell,
)
from stoker.cache.mount.requests import ROOT, Init, Opcode, parse
from stoker.cache.mount.source_port import Found
from stoker.cache.mount.state import MountSettings
from stoker.cache.mount.waiting import Failed
from tests.mount.kernel import FLAGS, Asked, init, packed, unpacked_entry

SIZE_BYTES = 4 << 20
BACKED, BY_REQUESTS = Open.PASSTHROUGH | Open.NOFLUSH, Open.KEEP_CACHE | Open.NOFLUSH


class Opened:
    """A mount with one file, which is opened and closed."""

    def __init__(self, *, size_bytes: int = SIZE_BYTES, flags: int = FLAGS, **settings: object) -> None:
        self.core = MountCore(MountSettings(timeout_s=10.0, **settings))  # type: ignore[arg-type]
        self.now = 1.0
        self.unique = 0
        self.core.begin(1, self.now)
        self.ask(Asked(Opcode.INIT, 0, init(flags).body))
        (asked,) = self.ask(Asked(Opcode.LOOKUP, ROOT, b"a\0"))
        (reply,) = self.answer(asked, Found(False, size_bytes, "v1"))
        self.node = unpacked_entry(body(reply)).node

    def ask(self, asked: Asked) -> list[Effect]:
        self.unique += 2
        return kept(self.core.step(parse(packed(self.unique, asked)), self.now))

    def answer(self, asked: Effect, answer: object) -> list[Effect]:
        assert isinstance(asked, Ask)
        return kept(self.core.answered(asked.number, answer, self.now))

    def open(self) -> list[Effect]:
        return self.ask(Asked(Opcode.OPEN, self.node, bytes(8)))

    def close(self, handle: int) -> list[Effect]:
        return self.ask(Asked(Opcode.RELEASE, self.node, struct.pack("=QIIQ", handle, 0, 0, 0)))[1:]

    def read(self, handle: int, offset: int, size_bytes: int) -> list[Effect]:
        asked = struct.pack("=QQIIQII", handle, offset, size_bytes, 0, 0, 0, 0)
        return self.ask(Asked(Opcode.READ, self.node, asked))


def kept(effects: list[Effect]) -> list[Effect]:
    return [effect for effect in effects if not isinstance(effect, Remember)]


def body(effect: Effect) -> bytes:
    assert isinstance(effect, Reply)
    assert struct.unpack_from("=i", effect.parts[0], 4) == (0,)
    return b"".join(effect.parts[1:])


def way(effect: Effect) -> tuple[int, int, int]:
    """Handle, flags, number of the backing file."""
    found: tuple[int, int, int] = struct.unpack("=QIi", body(effect))
    return found


def test_all_who_have_a_file_open_at_one_time_read_it_one_way() -> None:
    mount = Opened()
    (asked,) = mount.open()
    assert asked == Ask(2, Back(mount.node, "a", "v1"))
    assert mount.open() == [], "who comes meanwhile waits with the first"
    first, second = map(way, mount.answer(asked, 5))
    assert first[1:] == second[1:] == (BACKED, 5)
    third = way(mount.open()[0])
    assert third[1:] == (BACKED, 5)
    assert len({first[0], second[0], third[0]}) == 3
    assert mount.close(first[0]) == mount.close(third[0]) == []
    assert mount.close(second[0]) == [CloseBacking(5)], "with the last"
    (again,) = mount.open()
    assert isinstance(again, Ask), "and each time it is decided anew"
    (reply,) = mount.answer(again, None)
    assert way(reply)[1:] == (BY_REQUESTS, 0)
    assert way(mount.open()[0])[1:] == (BY_REQUESTS, 0)


def test_a_backing_file_that_comes_after_others_have_opened_is_closed() -> None:
    """It was asked for twice, the first time for nobody who still waits."""
    mount = Opened()
    (late,) = mount.open()
    assert mount.core.interrupt(mount.unique) == [Reply((answers.refusal(mount.unique, errno.EINTR),))]
    mount.core.state.waiting.part()
    (asked,) = mount.open()
    (opened,) = mount.answer(asked, 5)
    assert mount.answer(late, 6) == [CloseBacking(6)]
    assert mount.close(way(opened)[0]) == [CloseBacking(5)]


@pytest.mark.parametrize("answer", [None, Failed(errno.EIO), Failed(errno.EACCES)])
def test_what_the_kernel_cannot_read_is_read_by_requests(answer: object) -> None:
    mount = Opened()
    (asked,) = mount.open()
    (reply,) = mount.answer(asked, answer)
    assert way(reply)[1:] == (BY_REQUESTS, 0)


@pytest.mark.parametrize(
    "mounted",
    [
        partial(Opened, size_bytes=1 << 20),
        partial(Opened, flags=FLAGS & ~Init.PASSTHROUGH),
        partial(Opened, wants_passthrough=False),
        partial(Opened, packed_bytes_max=SIZE_BYTES),
    ],
)
def test_some_are_never_asked_for(mounted: partial[Opened]) -> None:
    (reply,) = mounted().open()
    assert way(reply)[1:] == (BY_REQUESTS, 0)


def test_a_version_that_is_gone_is_not_opened() -> None:
    mount = Opened()
    (asked,) = mount.open()
    told, refused = mount.answer(asked, Failed(errno.ESTALE))
    assert isinstance(told, Ask)
    assert told.question == Tell((answers.stale_name(ROOT, b"a"),))
    assert refused == Reply((answers.refusal(mount.unique, errno.ESTALE),))
    (asked,) = mount.ask(Asked(Opcode.LOOKUP, ROOT, b"a\0"))
    assert isinstance(asked, Ask)
    assert asked.question == Find("a")
    assert len(mount.core.state.handles) == 0


def test_a_node_that_is_opened_for_writing_is_refused() -> None:
    mount = Opened()
    assert mount.ask(Asked(Opcode.OPEN, mount.node, struct.pack("=II", 1, 0))) == [
        Reply((answers.refusal(mount.unique, errno.EROFS),))
    ]


def test_reads_end_where_the_file_does() -> None:
    mount = Opened(size_bytes=100)
    handle, _, _ = way(mount.open()[0])
    (asked,) = mount.read(handle, 90, 4096)
    assert asked == Ask(2, Read("a", "v1", 90, 100))
    assert body(mount.answer(asked, memoryview(b"0123456789"))[0]) == b"0123456789"
    for offset in (100, 5000):
        assert body(mount.read(handle, offset, 4096)[0]) == b""
    (asked,) = mount.read(handle, 0, 10)
    assert mount.answer(asked, Failed(errno.EIO)) == [Reply((answers.refusal(mount.unique, errno.EIO),))]


def fetches(effects: list[Effect]) -> int:
    return sum(isinstance(one, Ask) and isinstance(one.question, Fetch) for one in effects)


def test_who_reads_on_will_read_it_all_and_who_jumps_about_will_not() -> None:
    mount = Opened(flags=FLAGS & ~Init.PASSTHROUGH, size_bytes=1 << 30)
    handle, _, _ = way(mount.open()[0])
    piece = 1 << 17
    assert [fetches(mount.read(handle, number * piece, piece)) for number in range(6)] == [0, 0, 1, 0, 0, 0]
    jumping, _, _ = way(mount.open()[0])
    places = [0, 500, 100, 900, 300, 700]
    assert not any(fetches(mount.read(jumping, place << 20, piece)) for place in places)
