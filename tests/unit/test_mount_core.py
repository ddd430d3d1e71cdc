"""Requests of the kernel in, answers out, byte for byte: what a mount says of names, files that are none, and all that
cannot be done."""

from __future__ import annotations

import errno
import struct
from collections import deque

import pytest

from stoker.cache.mount import answers
from stoker.cache.mount.answers import Attr, Notice, Open
from stoker.cache.mount.core import READAHEAD_BYTES, MountCore
from stoker.cache.mount.names import REFRESHED
from stoker.cache.mount.questions import (
    Agreed,
    Ask,
    CloseOtherBackings,
    Effect,
    Find,
    Held,
    List,
    Question,
    Read,
    Refresh,
    Remember,
    Reply,
    Room,
    Status,
    Tell,
)
from stoker.cache.mount.records import records
from stoker.cache.mount.requests import RESENT, ROOT, Init, Opcode, parse
from stoker.cache.mount.source_port import Found, Page
from stoker.cache.mount.state import MountSettings
from stoker.cache.mount.waiting import Failed
from tests.mount.kernel import FLAGS, Asked, init, packed, unpacked_entry

SETTINGS = MountSettings(uid=7, gid=8, kernel_ttl_s=60.0, timeout_s=10.0)
STARTED_NS = 1_600_000_000_000_000_005
FILE = Found(False, 100, "v1", 1.5e9)


class Script:
    """A mount, asked one thing after the other. `now`: as the test has it."""

    def __init__(self, settings: MountSettings = SETTINGS) -> None:
        self.settings = settings
        self.core = MountCore(settings)
        self.log = b""
        self.now = 100.0
        self.unique = 0
        self.begun = self.kept(self.core.begin(STARTED_NS, self.now))
        self.agreed = self.ask(init())

    def kept(self, effects: list[Effect]) -> list[Effect]:
        self.log += b"".join(effect.record for effect in effects if isinstance(effect, Remember))
        return [effect for effect in effects if not isinstance(effect, Remember)]

    def ask(self, asked: Asked, unique: int = 0) -> list[Effect]:
        """What is to be done at once, but for what is written down."""
        self.unique = unique or (self.unique & ~RESENT) + 2
        return self.kept(self.core.step(parse(packed(self.unique, asked)), self.now))

    def answer(self, ask: Effect, answer: object) -> list[Effect]:
        assert isinstance(ask, Ask)
        return self.kept(self.core.answered(ask.number, answer, self.now))

    def look_up(self, parent: int, name: bytes, found: Found | None = None) -> int:
        """The node of a name."""
        effects = deque(self.ask(Asked(Opcode.LOOKUP, parent, name + b"\0")))
        body = b""
        while effects:
            effect = effects.popleft()
            if isinstance(effect, Ask):
                effects += self.answer(effect, found)
            else:
                body = said(effect)
        return unpacked_entry(body).node

    def restart(self) -> None:
        """Another daemon goes on."""
        self.core = MountCore(self.settings)
        self.core.restore(records(self.log))
        self.begun = self.kept(self.core.begin(STARTED_NS + 1, self.now))


def said(effect: Effect) -> bytes:
    """The body of an answer that is no refusal."""
    assert isinstance(effect, Reply)
    data = b"".join(effect.parts)
    size_bytes, code, _ = struct.unpack_from("=IiQ", data)
    assert (size_bytes, code) == (len(data), 0)
    return data[16:]


def refusal(script: Script, code: int) -> list[Effect]:
    return [Reply((answers.refusal(script.unique, code),))]


def reading(handle: int, offset: int, size_bytes: int) -> bytes:
    return struct.pack("=QQIIQII", handle, offset, size_bytes, 0, 0, 0, 0)


def asks(effects: list[Effect]) -> list[Question]:
    return [effect.question for effect in effects if isinstance(effect, Ask)]


def test_init_agrees_on_what_both_can() -> None:
    script = Script()
    reply, agreed = script.agreed
    assert agreed == Agreed(READAHEAD_BYTES)
    fields = struct.unpack("=IIIIHHIIHHII24x", said(reply))
    flags = fields[3] | fields[10] << 32
    assert flags == script.core.state.flags == FLAGS & ~Init.AUTO_INVAL_DATA
    assert flags & Init.PASSTHROUGH
    without = Script(MountSettings(wants_passthrough=False))
    assert not without.core.state.flags & Init.PASSTHROUGH


@pytest.mark.parametrize(("major", "minor"), [(6, 40), (8, 0), (7, 30)])
def test_another_protocol_is_refused(major: int, minor: int) -> None:
    script = Script()
    assert script.ask(Asked(Opcode.INIT, 0, struct.pack("=IIII", major, minor, 0, 0))) == refusal(
        script, errno.EPROTO
    )


def test_a_name_is_found_out_once_and_told_as_stat_has_it() -> None:
    script = Script()
    (asked,) = script.ask(Asked(Opcode.LOOKUP, ROOT, b"a\0"))
    assert asked == Ask(1, Find("a"))
    unique = script.unique
    assert script.ask(Asked(Opcode.LOOKUP, ROOT, b"a\0")) == []
    node = script.core.state.nodes.number_of("a", version="v1")
    attr = Attr(node, 100, 1_500_000_000_000_000_000, 0o100444, 7, 8)
    entry = answers.entry(node, attr, 60.0, 10 * 365 * 86400.0)
    assert script.answer(asked, FILE) == [
        Reply((answers.head(number, len(entry)), entry)) for number in (unique, unique + 2)
    ]
    assert script.ask(Asked(Opcode.LOOKUP, ROOT, b"a\0")) == [
        Reply((answers.head(script.unique, len(entry)), entry))
    ]
    (reply,) = script.ask(Asked(Opcode.GETATTR, node, bytes(16)))
    assert said(reply) == answers.attributes(attr, 10 * 365 * 86400.0)
    (reply,) = script.ask(Asked(Opcode.GETATTR, ROOT, bytes(16)))
    assert struct.unpack_from("=QQ", said(reply), 16) == (ROOT, 0)
    assert script.core.state.nodes.get(node).lookups == 3  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "code"),
    [
        (b"x" * 256, errno.ENAMETOOLONG),
        (b"\xff\xfe", errno.ENOENT),
        ("ü".encode("latin-1"), errno.ENOENT),
    ],
)
def test_names_that_no_key_has_are_not_asked_for(name: bytes, code: int) -> None:
    script = Script()
    assert script.ask(Asked(Opcode.LOOKUP, ROOT, name + b"\0")) == refusal(script, code)


def test_a_path_that_is_longer_than_a_key_can_be_is_too_long() -> None:
    script = Script()
    node = ROOT
    for _ in range(4):
        node = script.look_up(node, b"d" * 250, Found(True))
    assert script.ask(Asked(Opcode.LOOKUP, node, b"x" * 21 + b"\0")) == refusal(script, errno.ENAMETOOLONG)
    (asked,) = script.ask(Asked(Opcode.LOOKUP, node, b"x" * 20 + b"\0"))
    assert isinstance(asked, Ask)


@pytest.mark.parametrize(
    ("opcode", "body"),
    [
        (Opcode.LOOKUP, b"a\0"),
        (Opcode.GETATTR, bytes(16)),
        (Opcode.OPEN, bytes(8)),
        (Opcode.OPENDIR, bytes(8)),
        (Opcode.READ, reading(1, 0, 10)),
        (Opcode.GETXATTR, struct.pack("=II", 0, 0) + b"user.a\0"),
        (Opcode.LISTXATTR, struct.pack("=II", 0, 0)),
    ],
)
def test_who_asks_of_a_node_that_is_not_known_has_to_look_it_up_again(opcode: int, body: bytes) -> None:
    script = Script()
    assert script.ask(Asked(opcode, 4711, body)) == refusal(script, errno.ESTALE)


def test_a_file_is_no_folder() -> None:
    script = Script()
    node = script.look_up(ROOT, b"a", FILE)
    assert script.ask(Asked(Opcode.LOOKUP, node, b"b\0")) == refusal(script, errno.ENOTDIR)
    assert script.ask(Asked(Opcode.OPENDIR, node, bytes(8))) == refusal(script, errno.ENOTDIR)


@pytest.mark.parametrize("folder_first", [True, False])
def test_a_name_that_becomes_another_kind_is_another_node(folder_first: bool) -> None:
    script = Script()
    kinds = [Found(True), FILE] if folder_first else [FILE, Found(True)]
    first = script.look_up(ROOT, b"a", kinds[0])
    script.now += SETTINGS.ttl_s + 1
    second = script.look_up(ROOT, b"a", kinds[1])
    assert first != second
    for node, found in ((first, kinds[0]), (second, kinds[1])):
        (reply,) = script.ask(Asked(Opcode.GETATTR, node, bytes(16)))
        (mode,) = struct.unpack_from("=I", said(reply), 16 + 60)
        assert mode == (0o040555 if found.is_folder else 0o100444)


@pytest.mark.parametrize(
    "opcode",
    [Opcode.SETATTR, Opcode.MKDIR, Opcode.UNLINK, Opcode.RMDIR, Opcode.RENAME, Opcode.RENAME2, Opcode.WRITE,
     Opcode.CREATE, Opcode.REMOVEXATTR],
)  # fmt: skip
def test_what_would_write_is_refused(opcode: Opcode) -> None:
    bodies = {
        Opcode.SETATTR: bytes(88), Opcode.MKDIR: bytes(8) + b"a\0", Opcode.RENAME: bytes(8) + b"a\0b\0",
        Opcode.RENAME2: bytes(16) + b"a\0b\0", Opcode.WRITE: bytes(40), Opcode.CREATE: bytes(16) + b"a\0",
    }  # fmt: skip
    script = Script()
    assert script.ask(Asked(opcode, ROOT, bodies.get(opcode, b"a\0"))) == refusal(script, errno.EROFS)


@pytest.mark.parametrize("opcode", [5, 6, 8, 13, 21, 31, 37, 39, 46, 49, 4711])
def test_what_is_not_known_here_is_not_done(opcode: int) -> None:
    script = Script()
    body = struct.pack("=QQII", 1, 0, 3, 0)
    assert script.ask(Asked(opcode, ROOT, body)) == refusal(script, errno.ENOSYS)


@pytest.mark.parametrize("opcode", [Opcode.FORGET, Opcode.INTERRUPT])
def test_some_have_no_answer(opcode: Opcode) -> None:
    assert Script().ask(Asked(opcode, 4711, struct.pack("=Q", 1))) == []


def test_attributes_say_which_version_it_is_and_how_much_is_held() -> None:
    script = Script()
    node = script.look_up(ROOT, b"a", FILE)

    def attribute(name: bytes, size_bytes: int, of: int = node) -> list[Effect]:
        return script.ask(Asked(Opcode.GETXATTR, of, struct.pack("=II", size_bytes, 0) + name + b"\0"))

    version, held = b"user.stoker.version", b"user.stoker.held_bytes"
    assert said(attribute(version, 0)[0]) == struct.pack("=II", 2, 0)
    assert said(attribute(version, 2)[0]) == b"v1"
    assert attribute(version, 1) == refusal(script, errno.ERANGE)
    for size_bytes, told in ((0, struct.pack("=II", 2, 0)), (2, b"64"), (100, b"64")):
        (asked,) = attribute(held, size_bytes)
        assert asks([asked]) == [Held("a", "v1")]
        assert said(script.answer(asked, 64)[0]) == told
    (asked,) = attribute(held, 1)
    assert script.answer(asked, 64) == refusal(script, errno.ERANGE)
    (asked,) = attribute(held, 1)
    assert script.answer(asked, Failed(errno.EIO)) == refusal(script, errno.EIO)
    assert attribute(b"user.other", 0) == refusal(script, errno.ENODATA)
    assert attribute(version, 0, ROOT) == refusal(script, errno.ENODATA)
    names = version + b"\0" + held + b"\0"
    listing = Asked(Opcode.LISTXATTR, node, struct.pack("=II", len(names), 0))
    assert said(script.ask(listing)[0]) == names
    short = Asked(Opcode.LISTXATTR, node, struct.pack("=II", len(names) - 1, 0))
    assert script.ask(short) == refusal(script, errno.ERANGE)
    assert said(script.ask(Asked(Opcode.LISTXATTR, ROOT, struct.pack("=II", 10, 0)))[0]) == b""


def test_room_is_that_of_the_cache() -> None:
    script = Script()
    (asked,) = script.ask(Asked(Opcode.STATFS, ROOT))
    assert asks([asked]) == [Room()]
    assert said(script.answer(asked, (1 << 30, 1 << 29))[0]) == answers.statfs(1 << 30, 1 << 29, 0)
    (asked,) = script.ask(Asked(Opcode.STATFS, ROOT))
    assert said(script.answer(asked, (4096, 1 << 29))[0]) == answers.statfs(4096, 0, 0)


def test_whoever_is_interrupted_waits_no_longer_and_the_others_do() -> None:
    script = Script()
    (asked,) = script.ask(Asked(Opcode.LOOKUP, ROOT, b"a\0"))
    first = script.unique
    script.ask(Asked(Opcode.LOOKUP, ROOT, b"a\0"))
    second = script.unique
    stop = script.core.interrupt(first)
    assert stop == [Reply((answers.refusal(first, errno.EINTR),))]
    assert script.core.interrupt(first) == []
    assert script.core.interrupt(4711) == []
    (reply,) = script.answer(asked, None)
    assert reply == Reply((answers.refusal(second, errno.ENOENT),))


def test_nobody_waits_for_longer_than_is_said_and_what_comes_late_is_known() -> None:
    script = Script()
    (asked,) = script.ask(Asked(Opcode.LOOKUP, ROOT, b"a\0"))
    first = script.unique
    script.now += 6
    assert script.ask(Asked(Opcode.LOOKUP, ROOT, b"a\0")) == []
    assert script.core.tick(script.now + 3.9) == []
    assert script.core.tick(script.now + 4) == [Reply((answers.refusal(first, errno.ETIMEDOUT),))]
    script.now += 5
    assert script.ask(Asked(Opcode.LOOKUP, ROOT, b"a\0")) == refusal(script, errno.ETIMEDOUT), "for a moment"
    script.now += 10
    (again,) = script.ask(Asked(Opcode.LOOKUP, ROOT, b"a\0"))
    assert asks([again]) == [Find("a")], "what was given up is asked anew"
    assert len(script.answer(asked, FILE)) == 1
    assert script.core.tick(script.now + 9.9) == []
    assert len(script.answer(again, FILE)) == 1
    assert not script.core.state.waiting


def test_a_list_that_takes_several_questions_takes_no_longer() -> None:
    """After a restart a place far behind is come to page by page."""
    script = Script()
    (opened,) = script.ask(Asked(Opcode.OPENDIR, ROOT, bytes(8)))
    (handle,) = struct.unpack_from("=Q", said(opened))
    (asked,) = script.ask(Asked(Opcode.READDIR, ROOT, reading(handle, 50, 4096)))
    first = script.unique
    script.now += 9
    (following,) = script.answer(asked, Page([("a", FILE)], "a"))
    assert asks([following]) == [List("", "a", SETTINGS.page_entries)]
    assert script.core.tick(script.now + 1) == [Reply((answers.refusal(first, errno.ETIMEDOUT),))]


# -- refresh -----------------------------------------------------------------------------------------------------------


def refresh(script: Script, folder: int) -> list[Effect]:
    node = script.look_up(folder, b".stoker-refresh")
    return script.ask(Asked(Opcode.GETATTR, node, bytes(16)))


def test_a_refresh_is_answered_when_nobody_can_be_told_what_was() -> None:
    """The fleet first, then what the daemon knows, then what the kernel knows."""
    script = Script()
    folder = script.look_up(ROOT, b"d", Found(True))
    script.look_up(folder, b"a", FILE)
    script.look_up(ROOT, b"b", FILE)
    (asked,) = refresh(script, folder)
    unique = script.unique
    assert asks([asked]) == [Refresh("d")]
    assert script.core.state.known.get("d/a", script.now)[0]
    script.now += 1
    (told,) = script.answer(asked, 3)
    assert asks([told]) == [Tell((answers.stale_name(folder, b"a"), answers.stale_content(folder)))]
    assert not script.core.state.known.get("d/a", script.now)[0]
    assert script.core.state.known.get("b", script.now)[0]
    (reply,) = script.answer(told, None)
    assert isinstance(reply, Reply)
    assert struct.unpack_from("=IiQ", reply.parts[0])[1:] == (0, unique)
    (asked,) = refresh(script, folder)
    assert script.answer(asked, Failed(errno.EIO)) == refusal(script, errno.EIO)


def test_answers_to_what_was_asked_before_a_refresh_are_not_kept() -> None:
    script = Script()
    (late,) = script.ask(Asked(Opcode.LOOKUP, ROOT, b"a\0"))
    script.now += 1
    (asked,) = refresh(script, ROOT)
    (told,) = script.answer(asked, 0)
    assert asks([told]) == [Tell((answers.stale_content(ROOT),))]
    (reply,) = script.answer(told, None)
    assert isinstance(reply, Reply)
    script.now += 1
    (anew,) = script.ask(Asked(Opcode.LOOKUP, ROOT, b"a\0"))
    assert asks([anew]) == [Find("a")], "who comes after it does not wait with those before"
    reply, *_ = script.answer(late, FILE)
    assert unpacked_entry(said(reply)).name_valid_s == 0, "and the kernel keeps nothing of it"
    newer = Found(False, 101, "v2")
    reply, *_ = script.answer(anew, newer)
    assert unpacked_entry(said(reply))[1:4:2] == (60.0, 101)
    assert script.core.state.known.get("a", script.now) == (True, newer)


def test_a_page_from_before_a_refresh_tells_no_names_that_last() -> None:
    script = Script()
    (opened,) = script.ask(Asked(Opcode.OPENDIR, ROOT, bytes(8)))
    (handle,) = struct.unpack_from("=Q", said(opened))
    (asked,) = script.ask(Asked(Opcode.READDIRPLUS, ROOT, reading(handle, 0, 500)))
    (reply,) = script.answer(asked, Page([("a", FILE), ("b", FILE)], None))
    assert unpacked_entry(said(reply), 320).name_valid_s == 60
    script.now += 1
    (asked,) = refresh(script, ROOT)
    (told,) = script.answer(asked, 0)
    script.answer(told, None)
    (reply,) = script.ask(Asked(Opcode.READDIRPLUS, ROOT, reading(handle, 3, 500)))
    assert unpacked_entry(said(reply)).name_valid_s == 0


def test_each_refresh_is_one_of_its_own() -> None:
    """What another one has asked for was perhaps done before that which this one wants to see."""
    script = Script()
    (first,) = refresh(script, ROOT)
    (second,) = refresh(script, ROOT)
    assert asks([first, second]) == [Refresh(""), Refresh("")]
    uniques = []
    for asked in (second, first):
        (told,) = script.answer(asked, 0)
        (reply,) = script.answer(told, None)
        assert isinstance(reply, Reply)
        uniques.append(struct.unpack_from("=Q", reply.parts[0], 8)[0])
    assert uniques == [script.unique, script.unique - 4]


def test_a_refresh_waits_no_longer_than_others() -> None:
    script = Script()
    script.look_up(ROOT, b"a", FILE)
    (asked,) = refresh(script, ROOT)
    unique = script.unique
    script.now += 9
    (told,) = script.answer(asked, 1)
    assert isinstance(told, Ask)
    assert script.core.tick(script.now + 1) == [Reply((answers.refusal(unique, errno.ETIMEDOUT),))]


# -- files that are none -----------------------------------------------------------------------------------------------


def test_the_status_is_that_of_the_moment_also_after_a_restart() -> None:
    script = Script()
    node = script.look_up(ROOT, b".stoker-status")
    (asked,) = script.ask(Asked(Opcode.OPEN, node, bytes(8)))
    assert asks([asked]) == [Status("")]
    (reply,) = script.answer(asked, b"all is well\n")
    handle, flags, _ = struct.unpack("=QIi", said(reply))
    assert flags & Open.DIRECT_IO
    (reply,) = script.ask(Asked(Opcode.READ, node, reading(handle, 4, 4)))
    assert said(reply) == b"is w"
    script.restart()
    (asked,) = script.ask(Asked(Opcode.READ, node, reading(handle, 4, 4)))
    assert asks([asked]) == [Status("")]
    assert said(script.answer(asked, b"all was well\n")[0]) == b"was "
    other = script.look_up(ROOT, b".stoker-refresh")
    (reply,) = script.ask(Asked(Opcode.READ, other, reading(handle + 1, 0, 4096)))
    assert said(reply) == REFRESHED


# -- what is there no more ---------------------------------------------------------------------------------------------


def test_who_reads_what_is_gone_is_told_so_and_who_looks_next_sees_what_is_there() -> None:
    script = Script()
    node = script.look_up(ROOT, b"a", FILE)
    (reply,) = script.ask(Asked(Opcode.OPEN, node, bytes(8)))
    handle, flags, backing_id = struct.unpack("=QIi", said(reply))
    assert (flags, backing_id) == (Open.KEEP_CACHE | Open.NOFLUSH, 0)
    (asked,) = script.ask(Asked(Opcode.READ, node, reading(handle, 90, 4096)))
    assert asks([asked]) == [Read("a", "v1", 90, 100)]
    told, refused = script.answer(asked, Failed(errno.ESTALE))
    assert asks([told]) == [Tell((answers.stale_name(ROOT, b"a"),))]
    assert [refused] == refusal(script, errno.ESTALE)
    (asked,) = script.ask(Asked(Opcode.LOOKUP, ROOT, b"a\0"))
    assert asks([asked]) == [Find("a")]


def test_what_was_asked_before_it_was_seen_to_be_gone_is_asked_anew() -> None:
    """A name that was looked up before is not found again by the answer to that."""
    script = Script()
    node = script.look_up(ROOT, b"a", FILE)
    script.now += SETTINGS.ttl_s + 1
    (before,) = script.ask(Asked(Opcode.LOOKUP, ROOT, b"a\0"))
    script.now += 1
    (asked,) = script.ask(Asked(Opcode.READ, node, reading(1, 0, 10)))
    script.answer(asked, Failed(errno.ESTALE))
    script.now += 1
    (after,) = script.ask(Asked(Opcode.LOOKUP, ROOT, b"a\0"))
    assert asks([after]) == [Find("a")]
    script.answer(before, FILE)
    assert not script.core.state.known.get("a", script.now)[0]
    newer = Found(False, 101, "v2")
    script.answer(after, newer)
    assert script.core.state.known.get("a", script.now) == (True, newer)


def test_a_list_that_comes_late_does_not_say_what_was() -> None:
    script = Script()
    (opened,) = script.ask(Asked(Opcode.OPENDIR, ROOT, bytes(8)))
    (handle,) = struct.unpack_from("=Q", said(opened))
    (listed,) = script.ask(Asked(Opcode.READDIR, ROOT, reading(handle, 0, 4096)))
    script.now += 1
    newer = Found(False, 101, "v2")
    script.look_up(ROOT, b"a", newer)
    script.answer(listed, Page([("a", FILE)], None))
    assert script.core.state.known.get("a", script.now) == (True, newer)


# -- from one daemon to the next ---------------------------------------------------------------------------------------


def test_an_open_that_was_decided_and_not_answered_is_answered_so() -> None:
    """Or what it was to be answered with stays open for ever."""
    big = Found(False, 2 << 20, "v1")
    script = Script()
    node = script.look_up(ROOT, b"a", big)
    (asked,) = script.ask(Asked(Opcode.OPEN, node, bytes(8)))
    unique = script.unique
    (reply,) = script.answer(asked, 5)
    script.restart()
    assert script.begun == [CloseOtherBackings(frozenset((5,)))]
    (again,) = script.ask(Asked(Opcode.OPEN, node, bytes(8)), unique | RESENT)
    assert said(again) == said(reply)
    (handle,) = struct.unpack_from("=Q", said(again))
    assert len(script.core.state.handles) == 1
    script.ask(Asked(Opcode.RELEASE, node, struct.pack("=QIIQ", handle, 0, 0, 0)))
    assert len(script.core.state.handles) == 0
    script.restart()
    assert script.begun == [CloseOtherBackings(frozenset())]


def test_a_daemon_that_dies_in_init_has_it_asked_again() -> None:
    core = MountCore(SETTINGS)
    log = b"".join(effect.record for effect in core.begin(1, 1.0) if isinstance(effect, Remember))
    following = MountCore(SETTINGS)
    following.restore(records(log))
    following.begin(2, 2.0)
    assert not following.is_agreed
    assert following.is_taken_over
    assert not core.is_taken_over
    assert struct.unpack_from("=i", answers.send_again(), 4)[0] == Notice.RESEND


def test_a_folder_is_open_once_whoever_answers_the_program_that_opened_it() -> None:
    """A daemon wrote it down, and did not live to answer; what is sent again is not another one."""
    script, opening = Script(), Asked(Opcode.OPENDIR, ROOT, bytes(8))
    (first,) = script.ask(opening)
    unique = script.unique
    script.restart()
    (again,) = script.ask(opening, unique | RESENT)
    assert said(again) == said(first)
    handle = struct.unpack_from("=Q", said(again))[0]
    script.restart()
    script.ask(Asked(Opcode.RELEASEDIR, ROOT, struct.pack("=Q16x", handle)))
    assert len(script.core.state.handles) == 0
    (other,) = script.ask(opening, unique | RESENT)
    assert said(other) != said(first), "that one is closed"
    (opened,) = script.ask(opening)
    assert said(opened) != said(other), "and this is another request"


def test_a_folder_that_was_read_far_is_still_of_the_request_that_opened_it() -> None:
    """Also where all is written anew."""
    script = Script()
    (first,) = script.ask(Asked(Opcode.OPENDIR, ROOT, bytes(8)))
    unique, handle = script.unique, struct.unpack_from("=Q", said(first))[0]
    (listing,) = script.ask(Asked(Opcode.READDIR, ROOT, reading(handle, 0, 4096)))
    script.answer(listing, Page([("a", FILE)], "a"))
    script.log = b"".join(script.core.snapshot())
    script.restart()
    (again,) = script.ask(Asked(Opcode.OPENDIR, ROOT, bytes(8)), unique | RESENT)
    assert said(again) == said(first)
