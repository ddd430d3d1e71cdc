"""What must be true of a mount that is written to, by what programs have made whole and were told."""

from __future__ import annotations

import errno
import re
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TypeVar

from stoker.cache.mount.core import MountCore
from stoker.cache.mount.records import records
from stoker.cache.mount.requests import Opcode
from stoker.cache.mount.state import MountSettings
from tests.mount.kernel import Answered, Asked
from tests.mount.writing_calls import TRUNCATE, WritingCalls
from tests.mount.writing_kernel import WritingKernel
from tests.mount.writing_source import WritingDriver, WritingSource
from tests.sim.mount_world import SLACK_S, MountWorld, described

FOLDERS = ("", "a")
PATHS = [f"{folder}/f{n}".lstrip("/") for folder in FOLDERS for n in range(3)]
MADE = ("a/d", "e")
SETTINGS = MountSettings(
    kernel_ttl_s=3.0, ttl_s=3.0, absent_ttl_s=0.5, timeout_s=4.0, packed_bytes_max=40, page_entries=3,
    nodes_max=12, known_max=100, is_writable=True,
)  # fmt: skip
PATIENT = (Opcode.FLUSH, Opcode.FSYNC, Opcode.UNLINK, Opcode.RMDIR, Opcode.RENAME)
"""They wait for as long as the origin takes, and so does an OPEN that truncates: for what others have written."""
NOT_DONE = (errno.EBUSY, errno.ETXTBSY, errno.EISDIR, errno.ENOTDIR, errno.EXDEV)
"""Whoever is told that has changed nothing."""
_TIMES = re.compile("modified_ns=[0-9]+, ")
"""Of a file that is being written they are those of the last write, which nobody writes down."""
Content = bytes | None
T = TypeVar("T")
Program = Generator[Asked, Answered, T]


class Killed(Exception):
    """The program ends, and closes what it has open."""


def _is_patient(asked: Asked) -> bool:
    truncates = asked.opcode == Opcode.OPEN and bool(int.from_bytes(asked.body[:4], "little") & TRUNCATE)
    return truncates or asked.opcode in PATIENT


@dataclass(eq=False, slots=True)
class Draft:
    """What a program writes. `content`: of it what was taken; `tail`: what may have been, of a write that failed.
    `ready`: what it has made whole. `is_loose`: others write there as well, or nobody knows which name it has."""

    process: int
    path: str | None
    names: set[str]
    plan: bytes
    content: bytes = b""
    tail: bytes = b""
    ready: list[tuple[bytes, bytes]] = field(default_factory=list)
    is_active: bool = True
    is_loose: bool = False
    is_refused: bool = False
    syncs: int = 0
    in_sync: bool = False
    is_open: bool = False
    touches: str = ""

    @property
    def is_lost(self) -> bool:
        """Whether nobody knows its name."""
        return self.is_loose and self.path is None

    def may_be_whole(self, content: bytes) -> bool:
        """Whether the origin may get that."""
        return any(
            content.startswith(whole) and tail.startswith(content[len(whole) :]) for whole, tail in self.ready
        )


class WritingTruth(MountWorld):
    """What the origin gets is compared with what is whole, and what is there with what was told."""

    kernel: WritingKernel
    source: WritingSource
    driver: WritingDriver
    calls: WritingCalls

    drafts: list[Draft]
    may_be: dict[str, set[Content] | None]
    touching: Counter[str]
    touched: Counter[str]
    is_full: bool

    # -- what must be true -----------------------------------------------------------------------------------------

    def touch(self, path: str) -> None:
        """Somebody begins to change what is there."""
        self.touching[path] += 1
        self.touched[path] += 1

    def moves_perhaps(self, path: str, to: str) -> None:
        """What is written as the one, or nobody knows as what, may be called the other by now."""
        for draft in self.drafts:
            if draft.path == path or (draft.is_lost and path in draft.names):
                for other in self.drafts:
                    if other is not draft and other.is_active and draft.is_active and to in other.names:
                        other.is_loose = draft.is_loose = True
                draft.names.add(to)

    def also(self, path: str | None, draft: Draft | None) -> None:
        """What is there may be that as well; None: anything."""
        if path is None or (may_be := self.may_be[path]) is None:
            return
        if draft is None or draft.is_loose or draft.tail or self.touching[path] != 1:
            self.may_be[path] = None
        else:
            self.may_be[path] = may_be | {draft.content}

    def check_state(self, path: str, found: Content, who: str) -> None:
        """What programs were told is what is."""
        may_be = self.may_be[path]
        self.check(
            may_be is None or found in may_be, f"{who} {found!r} as {path}, which was told to be {may_be}"
        )

    def check_put(self, path: str, content: bytes) -> None:
        """Nobody gets what is not whole."""
        self.say(f"the origin gets {path}: {len(content)} bytes")
        for draft in self.drafts:
            if path in draft.names and (draft.is_loose or draft.may_be_whole(content)):
                return
            if draft.is_lost and draft.may_be_whole(content):
                return
        self.check(False, f"the origin gets {content!r} as {path}, which nobody has made whole")

    def excuse(self, path: str, error: OSError) -> None:
        """Whether somebody may be told that."""
        code = error.errno or 0
        self.say(f"{path!r}: {errno.errorcode[code]}")
        may = {
            errno.ENOENT, errno.ESTALE, errno.ETIMEDOUT, errno.ETXTBSY, errno.EBUSY, errno.EEXIST, errno.ENOTEMPTY,
        }  # fmt: skip
        if self.killed:
            may.add(errno.EINTR)
        if self.is_full:
            may.add(errno.ENOSPC)
        if not self.is_faultless:
            may |= {errno.EIO, errno.EACCES, errno.ENOSPC}
        self.check(code in may, f"{path!r}: {errno.errorcode[code]}, for no reason")

    def check_waiting(self) -> None:
        """Nobody waits for too long, who does not wait for the origin."""
        now, longest_s = self.driver.now, SETTINGS.timeout_s + SLACK_S
        late = [
            one
            for one in self.kernel.sent.values()
            if one.is_read and now - one.read_at > longest_s and not _is_patient(one.asked)
        ]
        self.check(not late, f"{[Opcode(one.asked.opcode).name for one in late]} wait for too long")
        self.check(not self.kernel.faults, "; ".join(self.kernel.faults))

    def compare_states(self) -> None:
        """What the next daemon would know, out of all that was written down, and out of what it comes to."""
        was = self.known_by(self.core)
        for log in (bytes(self.driver.log), b"".join(self.core.snapshot())):
            twin = MountCore(SETTINGS)
            twin.restore(records(log))
            found = self.known_by(twin)
            wrong, missing = [x for x in found if x not in was], [x for x in was if x not in found]
            self.check(was == found, f"the next daemon would know {wrong}, not {missing}")

    def known_by(self, core: MountCore) -> list[object]:
        """Also by which names files that are written are found."""
        staged, names = core.state.staged, sorted(self.may_be)
        by_name = [(name, one.stage) for name in names if (one := staged.at(name)) is not None]
        return [*(_TIMES.sub("", str(record)) for record in described(core)), *by_name]
