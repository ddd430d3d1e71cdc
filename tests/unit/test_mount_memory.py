"""A mount whose names are many keeps few of them: the kernel forgets what it is told to forget."""

from __future__ import annotations

import gc
import os
import struct
from collections.abc import Iterator

from stoker.cache.mount.core import MountCore
from stoker.cache.mount.nodes import NodeTable
from stoker.cache.mount.questions import Ask, Effect, Find, List, Reply, Tell
from stoker.cache.mount.requests import ROOT, Opcode, parse
from stoker.cache.mount.source_port import Found, Page
from stoker.cache.mount.state import MountSettings
from tests.mount.kernel import Asked, init, packed, unpacked_entry

# `make soak` has ten million.
LOOKUPS = int(os.environ.get("STOKER_MOUNT_LOOKUPS", "20000"))
SETTINGS = MountSettings(nodes_max=1000, known_max=500)


class ForgetfulKernel:
    """Only names and counts: who is told that a name is stale forgets it, which the daemon hears later."""

    def __init__(self) -> None:
        self.core = MountCore(SETTINGS)
        self.names: dict[tuple[int, bytes], int] = {}
        self.counts: dict[int, int] = {}
        self.forgets: list[tuple[int, int]] = []
        self.nodes_most = self.known_most = self.told = 0
        self._unique = 0
        self.ask(init())

    def ask(self, asked: Asked) -> bytes:
        """A request, and all that comes of it; the body of the answer."""
        self._unique += 2
        effects = self.core.step(parse(packed(self._unique, asked)), 1.0)
        said = b""
        while effects:
            effect = effects.pop(0)
            if isinstance(effect, Reply):
                said = b"".join(effect.parts)
                assert struct.unpack_from("=i", said, 4) == (0,)
            elif isinstance(effect, Ask):
                effects += self.core.answered(effect.number, self.found(effect), 1.0)
        self.nodes_most = max(self.nodes_most, len(self.core.state.nodes))
        self.known_most = max(self.known_most, len(self.core.state.known))
        return said[16:]

    def found(self, asked: Ask) -> object:
        match asked.question:
            case Find(path):
                return Found(False, len(path), "v") if "name" in path else Found(True)
            case List(path, after, limit):
                first = int(after or 0)
                last = first + limit
                names = [(f"{number:08}", Found(False, 5, "v")) for number in range(first, last)]
                return Page(names, None if last >= LOOKUPS else str(last))
            case Tell(notices):
                self.told += len(notices)
                for notice in notices:
                    self.forget(struct.unpack_from("=Q", notice, 16)[0], notice[32:-1])
                return None
        raise AssertionError(asked)

    def look_up(self, parent: int, name: bytes) -> int:
        node = unpacked_entry(self.ask(Asked(Opcode.LOOKUP, parent, name + b"\0"))).node
        self.names[parent, name] = node
        self.counts[node] = self.counts.get(node, 0) + 1
        self.say_what_is_forgotten()
        return node

    def folder(self, name: bytes) -> int:
        """Looked up again where it was forgotten."""
        return self.names.get((ROOT, name)) or self.look_up(ROOT, name)

    def forget(self, parent: int, name: bytes) -> None:
        node = self.names.pop((parent, name), 0)
        if node:
            self.forgets.append((node, self.counts.pop(node)))

    def say_what_is_forgotten(self) -> None:
        if len(self.forgets) >= 16:
            some, self.forgets = self.forgets, []
            body = struct.pack("=II", len(some), 0) + b"".join(struct.pack("=QQ", *one) for one in some)
            self.ask(Asked(Opcode.BATCH_FORGET, 0, body))


def test_a_great_many_names_take_the_room_of_a_few() -> None:
    kernel = ForgetfulKernel()
    counts: list[int] = []
    for number in range(LOOKUPS):
        kernel.look_up(kernel.folder(b"folder%d" % (number // 7 % 10)), b"name%d" % number)
        if number % (LOOKUPS // 4) == LOOKUPS // 4 - 1:
            gc.collect()
            counts.append(len(gc.get_objects()))
    assert kernel.nodes_most <= SETTINGS.nodes_max + 200
    assert kernel.known_most <= SETTINGS.known_max
    assert max(counts) < counts[0] + SETTINGS.nodes_max, counts
    assert kernel.told < 4 * LOOKUPS, "who has forgotten is told again and again"


def test_a_folder_of_very_many_names_is_read_in_the_room_of_a_few() -> None:
    """With as large a buffer as the kernel likes: it takes in more names at a time than are named to it otherwise."""
    kernel = ForgetfulKernel()
    handle = struct.unpack_from("=Q", kernel.ask(Asked(Opcode.OPENDIR, ROOT, bytes(8))))[0]
    cookie, count = 0, 0
    while True:
        asked = struct.pack("=QQIIQII", handle, cookie, 1 << 20, 0, 0, 0, 0)
        body = kernel.ask(Asked(Opcode.READDIRPLUS, ROOT, asked))
        if not body:
            break
        for node, following, name in entries(body):
            cookie = following
            if node:
                count += 1
                kernel.names[ROOT, name] = node
                kernel.counts[node] = kernel.counts.get(node, 0) + 1
        kernel.say_what_is_forgotten()
    assert count >= LOOKUPS
    assert kernel.nodes_most <= SETTINGS.nodes_max + 4 * SETTINGS.page_entries
    assert kernel.known_most <= SETTINGS.known_max


def entries(body: bytes) -> Iterator[tuple[int, int, bytes]]:
    at = 0
    while at < len(body):
        _, cookie, length, _ = struct.unpack_from("=QQII", body, at + 128)
        end = at + 152 + length
        yield unpacked_entry(body, at).node, cookie, body[end - length : end]
        at = end + -end % 8


def test_names_that_are_in_use_are_named_in_turn() -> None:
    """The kernel keeps what somebody holds: the others come up all the same."""
    table = NodeTable(100)
    for folder in ("held", "free"):
        for number in range(300):
            table.look_up(f"{folder}/{number}", version="v")
    named: set[str] = set()
    for _ in range(40):
        for node in table.superfluous():
            named.add(node.path)
            if node.path.startswith("free/"):
                table.forget(node.number, 1)
    assert {path for path in named if path.startswith("free/")} == {f"free/{number}" for number in range(300)}
    assert len(table) == 301


def test_who_must_wait_with_notices_is_not_given_more_and_more_of_them() -> None:
    """A notice waits for who looks something up in its folder; what the daemon has to tell must not grow meanwhile."""
    core = MountCore(MountSettings(nodes_max=10))
    waiting: list[Ask] = []

    def step(data: bytes) -> list[Effect]:
        effects = core.step(parse(data), 1.0)
        for asked in [effect for effect in effects if isinstance(effect, Ask)]:
            if isinstance(asked.question, Tell):
                waiting.append(asked)
            else:
                effects += told(core.answered(asked.number, Found(False, 1, "v"), 1.0))
        return effects

    def told(effects: list[Effect]) -> list[Effect]:
        waiting.extend(effect for effect in effects if isinstance(effect, Ask))
        return effects

    step(packed(2, init()))
    for number in range(1000):
        step(packed(4 + 2 * number, Asked(Opcode.LOOKUP, ROOT, b"n%d\0" % number)))
    assert len(waiting) == 1
    told(core.answered(waiting.pop().number, None, 1.0))
    step(packed(4000, Asked(Opcode.LOOKUP, ROOT, b"another\0")))
    (asked,) = waiting
    assert isinstance(asked.question, Tell)
    assert len(asked.question.notices) > 900
