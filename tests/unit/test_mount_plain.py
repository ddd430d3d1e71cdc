"""Files that are opened without a decision: who answers what is asked of them, and that the kernel never has one open
in two ways."""

from __future__ import annotations

import dataclasses
import errno
import os
import socket
import struct
from collections.abc import Iterator

import pytest

from stoker._native import PlainFiles, read_request
from stoker.cache.mount.answers import Open
from stoker.cache.mount.core import MountCore
from stoker.cache.mount.files import PLAIN
from stoker.cache.mount.nodes import Node, NodeTable
from stoker.cache.mount.questions import Ask, Back, Effect, Find, Put, Remember, StageSize
from stoker.cache.mount.records import records
from stoker.cache.mount.requests import RESENT, ROOT, Init, Opcode, parse
from stoker.cache.mount.source_port import Found
from tests.mount.kernel import FLAGS, Asked, packed, unpacked_entry
from tests.unit.test_mount_files import BY_REQUESTS, Opened, way
from tests.unit.test_mount_putting import Writers, found

SMALL_BYTES, LARGE_BYTES = 100, 4 << 20
ATTRIBUTES = b"user.stoker."
IOCTL = 39


class Reader:
    """A device that is a socket, and who reads it."""

    def __init__(self) -> None:
        self.kernel, self.device = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.kernel.settimeout(10.0)
        self.device.setblocking(False)
        self.plain = PlainFiles()
        self.buffer = memoryview(bytearray(8192))

    def hands_on(self, *asked: Asked, attributes: bytes = ATTRIBUTES) -> list[int]:
        """The numbers of those that need a decision."""
        for unique, one in enumerate(asked, start=1):
            self.kernel.send(packed(2 * unique, one))
        left: list[int] = []
        while True:
            try:
                size_bytes = read_request(self.device.fileno(), self.buffer, attributes, self.plain)
            except BlockingIOError:
                return left
            left.append(parse(self.buffer[:size_bytes]).header.unique // 2)

    def answers(self) -> list[tuple[int, int, bytes]]:
        """The number of the request, a reason out of `errno`, a body."""
        found: list[tuple[int, int, bytes]] = []
        self.kernel.setblocking(False)
        while True:
            try:
                data = self.kernel.recv(8192)
            except BlockingIOError:
                return found
            length, code, unique = struct.unpack_from("=IiQ", data)
            assert length == len(data)
            found.append((unique // 2, -code, data[16:]))


@pytest.fixture
def reader() -> Iterator[Reader]:
    reader = Reader()
    yield reader
    reader.kernel.close()
    reader.device.close()


def opens(node: int, flags: int = os.O_RDONLY) -> Asked:
    return Asked(Opcode.OPEN, node, struct.pack("=II", flags, 0))


def closes(node: int, handle: int) -> Asked:
    return Asked(Opcode.RELEASE, node, struct.pack("=QIIQ", handle, 0, 0, 0))


def attribute(name: bytes) -> Asked:
    return Asked(Opcode.GETXATTR, 7, struct.pack("=II", 100, 0) + name + b"\0")


def test_plain_files_are_opened_and_closed_by_who_reads(reader: Reader) -> None:
    reader.plain.add(7)
    assert reader.hands_on(opens(7), closes(7, PLAIN), opens(8), closes(7, 5)) == [3, 4]
    opened = struct.pack("=QIi", PLAIN, BY_REQUESTS, 0)
    assert reader.answers() == [(1, 0, opened), (2, 0, b"")]
    reader.plain.discard(7)
    assert reader.hands_on(opens(7)) == [1]


def test_what_is_opened_again_after_a_daemons_death_is_handed_on(reader: Reader) -> None:
    """It may have been opened under a number of its own."""
    reader.plain.add(7)
    reader.kernel.send(packed(2 | RESENT, opens(7)))
    assert read_request(reader.device.fileno(), reader.buffer, ATTRIBUTES, reader.plain)
    assert reader.answers() == []


def test_what_a_daemon_before_opened_otherwise_is_open_so() -> None:
    """It was large then, or was being written, and is a plain file for the next daemon."""
    mount = Opened(size_bytes=SMALL_BYTES, packed_bytes_max=10)
    (asked,) = mount.open()
    assert isinstance(asked, Ask)
    (reply,) = mount.answer(asked, None)
    handle, request = way(reply)[0], mount.unique
    snapshot = [record for data in mount.core.snapshot() for record in records(data)]
    following = MountCore(dataclasses.replace(mount.core.state.settings, packed_bytes_max=1000))
    following.restore(snapshot)
    following.begin(2, mount.now)
    assert mount.node in following.state.nodes.plain
    effects = following.step(parse(packed(request | RESENT, opens(mount.node))), mount.now)
    assert way(effects[-1]) == (handle, BY_REQUESTS, 0)


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_TRUNC])
def test_who_wants_to_change_one_is_handed_on(reader: Reader, flags: int) -> None:
    reader.plain.add(7)
    assert reader.hands_on(opens(7, flags)) == [1]


def test_what_nobody_grants_is_refused_by_who_reads(reader: Reader) -> None:
    terminal = Asked(IOCTL, 7, struct.pack("=QIIQII", 0, 0, 0x5401, 0, 0, 0))
    names = (b"security.selinux", b"user.stoker.version", b"user.stoker", b"user.stokes.x")
    assert reader.hands_on(terminal, *map(attribute, names)) == [3]
    refused = [(1, errno.ENOTTY, b""), *((number, errno.ENODATA, b"") for number in (2, 4, 5))]
    assert reader.answers() == refused


def test_that_there_are_no_attributes_the_kernel_is_to_be_told_once(reader: Reader) -> None:
    assert reader.hands_on(attribute(b"security.selinux"), attributes=b"") == [1]
    assert reader.answers() == []


def test_what_is_cut_off_is_handed_on(reader: Reader) -> None:
    """Whoever decides says what is wrong with it."""
    reader.plain.add(7)
    for asked in (
        Asked(Opcode.OPEN, 7, bytes(4)),
        Asked(Opcode.RELEASE, 7, bytes(4)),
        Asked(Opcode.GETXATTR, 7, b""),
    ):
        reader.kernel.send(packed(2, asked))
        read = read_request(reader.device.fileno(), reader.buffer, ATTRIBUTES, reader.plain)
        assert read == len(packed(2, asked))
    assert reader.answers() == []


def test_a_device_that_is_gone_is_an_error(reader: Reader) -> None:
    with pytest.raises(BlockingIOError):
        read_request(reader.device.fileno(), reader.buffer, ATTRIBUTES, reader.plain)
    with pytest.raises(OSError) as raised:
        read_request(-1, reader.buffer, ATTRIBUTES, reader.plain)
    assert raised.value.errno == errno.EBADF
    with pytest.raises((ValueError, TypeError, BufferError)):
        read_request(reader.device.fileno(), memoryview(b"not to be written to"), ATTRIBUTES, reader.plain)


def test_which_files_are_plain() -> None:
    table = NodeTable(100, SMALL_BYTES)
    small, _ = table.look_up("small", size_bytes=SMALL_BYTES, version="v")
    large, _ = table.look_up("large", size_bytes=SMALL_BYTES + 1, version="v")
    folder, _ = table.look_up("folder", is_folder=True)
    special, _ = table.look_up("", kind=".stoker-status")

    def plain(*nodes: Node) -> list[bool]:
        return [node.number in table.plain for node in nodes]

    assert plain(small, large, folder, special) == [True, False, False, False]
    small.is_settled = False
    table.mark(small)
    assert plain(small) == [False], "somebody writes it"
    small.is_settled = True
    table.mark(small)
    assert plain(small) == [True]
    table.forget(small.number, 1)
    assert plain(small) == [False]


def test_where_the_kernel_does_not_ask_it_has_to_be_told_so() -> None:
    """Whoever opened plain files in the core's place would keep that from it."""
    mount = Opened(size_bytes=SMALL_BYTES, flags=FLAGS | Init.NO_OPEN_SUPPORT, wants_passthrough=False)
    assert mount.core.state.is_without_opens
    assert mount.node not in mount.core.state.nodes.plain
    following = MountCore(mount.core.state.settings)
    following.restore([record for data in mount.core.snapshot() for record in records(data)])
    assert mount.node not in following.state.nodes.plain


def replace(mount: Opened, size_bytes: int) -> None:
    """Somebody writes the file anew."""

    def answered(effects: list[Effect], answer: object) -> list[Effect]:
        (asked,) = (effect for effect in effects if isinstance(effect, Ask))
        assert isinstance(asked.question, StageSize | Put)
        return mount.answer(asked, answer)

    handle = way(answered(mount.ask(opens(mount.node, os.O_WRONLY | os.O_TRUNC)), None)[0])[0]
    size = struct.pack("=IIQQQQQQIIIIIIII", 1 << 3 | 1 << 6, 0, handle, size_bytes, *(0,) * 12)
    answered(mount.ask(Asked(Opcode.SETATTR, mount.node, size)), None)
    effects = mount.close(handle)
    answered(effects, Found(False, size_bytes, "v2"))


@pytest.mark.parametrize("is_taken_over", [False, True])
def test_what_may_be_open_by_requests_unknown_to_all_is_never_read_by_the_kernel(is_taken_over: bool) -> None:
    """It fails an OPEN by another way than that by which somebody has the same node open."""
    mount = Opened(size_bytes=SMALL_BYTES, is_writable=True, file_mode=0o644)
    assert way(mount.open()[0]) == (PLAIN, BY_REQUESTS, 0)
    replace(mount, LARGE_BYTES)
    if is_taken_over:
        following = MountCore(mount.core.state.settings)
        following.restore([record for data in mount.core.snapshot() for record in records(data)])
        following.begin(2, mount.now)
        mount.core = following
    handle, flags, _ = way(mount.open()[0])
    assert flags == BY_REQUESTS
    assert handle != PLAIN, "it is not one any more"
    new = Opened(size_bytes=LARGE_BYTES)
    assert isinstance(new.open()[0], Ask), "as others of its size are asked for"


class Rewritten(Writers):
    """A large file, which is written anew."""

    def __init__(self) -> None:
        super().__init__()
        unique = self.ask(Opcode.LOOKUP, ROOT, b"a\0")
        self.answer(Find("a"), found(LARGE_BYTES))
        self.node = unpacked_entry(self.said[unique][1]).node

    def begin(self, size_bytes: int) -> int:
        """A handle."""
        flags = struct.pack("=II", os.O_WRONLY | os.O_TRUNC, 0)
        code, said = self.said[self.ask(Opcode.OPEN, self.node, flags)]
        assert not code
        handle = int(struct.unpack_from("=Q", said)[0])
        self.ask(
            Opcode.SETATTR,
            self.node,
            struct.pack("=IIQQQQQQIIIIIIII", 1 << 3 | 1 << 6, 0, handle, size_bytes, *(0,) * 12),
        )
        return handle

    def end(self, handle: int, size_bytes: int, version: str) -> None:
        self.close(self.node, handle)
        self.answer(self.puts()[0], found(size_bytes, version))
        self.release(self.node, handle)

    def opened(self) -> int:
        """The OPEN of who reads it."""
        return self.ask(Opcode.OPEN, self.node, bytes(8))


def test_what_was_plain_for_a_while_the_next_daemon_knows_while_it_is_written_anew() -> None:
    mount = Rewritten()
    mount.end(mount.begin(SMALL_BYTES), SMALL_BYTES, "v2")
    assert mount.node in mount.core.state.nodes.plain, "somebody opens it, and nobody hears of it"
    handle = mount.begin(LARGE_BYTES)
    mount.restart()
    mount.end(handle, LARGE_BYTES, "v3")
    _, said = mount.said[mount.opened()]
    assert struct.unpack("=QIi", said)[1] == BY_REQUESTS


def test_what_was_to_be_read_by_the_kernel_and_is_plain_by_then_is_not() -> None:
    mount = Rewritten()
    unique = mount.opened()
    (back,) = (question for question in mount.asked if isinstance(question, Back))
    mount.end(mount.begin(SMALL_BYTES), SMALL_BYTES, "v2")
    assert mount.node in mount.core.state.nodes.plain
    mount.answer(back, 7)
    _, said = mount.said[unique]
    assert struct.unpack("=QIi", said)[1:] == (BY_REQUESTS, 0)


def test_nothing_is_written_down_of_a_plain_file_that_is_opened() -> None:
    core = Opened(size_bytes=SMALL_BYTES).core
    for asked in (opens(node := core.state.nodes.number_of("a", version="v1")), closes(node, PLAIN)):
        assert not [one for one in core.step(parse(packed(100, asked)), 1.0) if isinstance(one, Remember)]
    assert Open.KEEP_CACHE & BY_REQUESTS
    assert ROOT not in core.state.nodes.plain
