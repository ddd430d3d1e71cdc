"""What the core of a mount wants to be found out or done, and what it has the shell do at once. Pure."""

from __future__ import annotations

from typing import NamedTuple


class Find(NamedTuple):
    """What is there? Answered by a Found, or None."""

    path: str


class List(NamedTuple):
    """A page of a folder. Answered by a Page."""

    path: str
    after: str | None
    limit: int


class Read(NamedTuple):
    """These bytes of that version."""

    path: str
    version: str
    start: int
    stop: int


class Back(NamedTuple):
    """Have the kernel read this version in the daemon's place. Answered by a number for answers to OPEN, or None: it
    cannot be done."""

    node: int
    path: str
    version: str


class Fetch(NamedTuple):
    """Have all of it held soon. Nobody waits."""

    path: str
    version: str


class Held(NamedTuple):
    """How many bytes of it are held."""

    path: str
    version: str


class Room(NamedTuple):
    """Capacity of the cache, and what it holds, in bytes."""


class Refresh(NamedTuple):
    """The next reader of each key below asks the origin. Answered by how many keys."""

    path: str


class Status(NamedTuple):
    """How things are, for people to read. Answered by text."""

    path: str


class Tell(NamedTuple):
    """Write these notices to the kernel, where that may wait: for who looks a name up, the kernel holds the folder that
    a notice is about. Never by who answers requests."""

    notices: tuple[bytes, ...]


class Stage(NamedTuple):
    """Write to a file that is not at the origin yet; `stage`: which."""

    stage: int
    offset: int
    data: bytes


class StageSize(NamedTuple):
    """Have it so long; one that is not there is made."""

    stage: int
    size_bytes: int


class StageRead(NamedTuple):
    """Bytes of it, fewer at its end."""

    stage: int
    start: int
    stop: int


class Put(NamedTuple):
    """Have the origin take it whole, as it is. `revision`: how often it was changed. Answered by a Found."""

    stage: int
    path: str
    revision: int


class StageDrop(NamedTuple):
    """It is needed no more."""

    stage: int


class StageKeep(NamedTuple):
    """It could not be put as that: it stays where it lies, and whoever looks after the machine is told."""

    stage: int
    path: str


class Remove(NamedTuple):
    """A file; at the origin."""

    path: str


class MakeFolder(NamedTuple):
    """An empty one; at the origin."""

    path: str


class RemoveFolder(NamedTuple):
    """Where it is empty."""

    path: str


class Rename(NamedTuple):
    """A file; at the origin. `replaces`: what there is under the new name, or it fails. Answered by
    what it was, and what it is (two Found)."""

    path: str
    to: str
    replaces: bool


Question = (
    Find | List | Read | Back | Fetch | Held | Room | Refresh | Status | Tell | Stage | StageSize | StageRead | Put
    | StageDrop | StageKeep | Remove | MakeFolder | RemoveFolder | Rename
)  # fmt: skip


class Reply(NamedTuple):
    """Write this answer to the device: one write of all parts."""

    parts: tuple[bytes | memoryview, ...]


class Ask(NamedTuple):
    """Find out, beside; `number` goes with the answer."""

    number: int
    question: Question


class Remember(NamedTuple):
    """For the next daemon, before what follows is done."""

    record: bytes


class CloseBacking(NamedTuple):
    """The kernel uses this number for no further OPEN."""

    backing_id: int


class CloseOtherBackings(NamedTuple):
    """Nor any but these: whoever had them made did not live to use or to close them."""

    kept: frozenset[int]


class Agreed(NamedTuple):
    """INIT is answered, and the mount is there."""

    readahead_bytes: int


Effect = Reply | Ask | Remember | CloseBacking | CloseOtherBackings | Agreed
