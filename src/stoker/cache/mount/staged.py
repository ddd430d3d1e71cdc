"""Which files are being written through a mount. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from stoker.cache.mount.questions import Effect
from stoker.cache.mount.records import FileStaged

NEVER, IN_DOUBT = -1, -2
"""Of what is written the origin has nothing, because nobody has begun to tell it; or may have some."""
Then = Callable[[float], list[Effect]]
"""What is done at a time."""


@dataclass(slots=True)
class Staged:
    """A file that is written here first.

    `process`: who began to write it, last if several did: it is theirs; `is_closed`: they have closed it since it was
    changed. `revision`: how often it was changed, `put_revision`: what the origin has of that (or NEVER, IN_DOUBT),
    while `is_putting` it is being told more. `begun`, `put_begun`: so of changes that this daemon has begun, which
    nobody writes down: those that it does not live to finish are asked for again. `handles`: how many have it open for
    writing. `is_new`: there was nothing of that name. `is_removed`: it has no name any more. `is_abandoned`: whoever
    wrote it was killed (`is_killed`), so that it is not whole, or was told that it cannot be put. `failure`: why bytes
    from `failed_at` on could not be written, out of `errno`, so that it is not whole; 0: all could. `is_ended`: nothing
    more comes of it.
    """

    stage: int
    node: int
    path: str
    process: int
    size_bytes: int = 0
    revision: int = 0
    put_revision: int = NEVER
    begun: int = 0
    put_begun: int = 0
    handles: int = 0
    is_closed: bool = False
    is_new: bool = False
    is_removed: bool = False
    is_abandoned: bool = False
    is_killed: bool = False
    failure: int = 0
    failed_at: int = 0
    is_putting: bool = False
    is_ended: bool = False
    waiting: list[int] = field(default_factory=list)
    """Requests that are answered when the origin has it."""
    after: list[Then] = field(default_factory=list)
    """Who writes it anew, and is not to be taken for what those wait for."""
    superseded: list[int] = field(default_factory=list)
    """Files that it lay in before, which are still being read."""
    before: tuple[int, int] | None = None
    """Bytes and time (nanoseconds since 1970) of the version that its node is of: again, if what is written comes to
    nothing."""

    @property
    def changes(self) -> tuple[int, int]:
        """Of two that are the same it was not changed in between."""
        return self.revision, self.begun

    @property
    def is_put(self) -> bool:
        """Whether the origin has it as it is."""
        return not self.failure and self.changes == (self.put_revision, self.put_begun)

    @property
    def is_unknown(self) -> bool:
        """Whether the origin has nothing of that name."""
        return self.is_new and self.put_revision == NEVER

    @property
    def is_at_rest(self) -> bool:
        """Whether the origin has it, or gets no more of it as it is."""
        return self.is_put or self.is_removed or self.is_abandoned or bool(self.failure)

    def fails(self, offset: int, code: int) -> None:
        """Bytes from there on could not be written."""
        self.failed_at = min(offset, self.failed_at) if self.failure else offset
        self.failure = code

    def heals(self, start: int, stop: int) -> None:
        """These are as whoever writes wants them: it is whole again, if that is where it failed."""
        if start <= self.failed_at < stop:
            self.failure = 0

    def record(self, handle: int, opener: int) -> FileStaged:
        """For the next daemon. Its process is below 0 where it was killed, as in a request."""
        process = -self.process if self.is_killed else self.process
        return FileStaged(
            handle, self.stage, self.node, self.path, process, self.size_bytes, self.revision, self.put_revision,
            self.is_new, self.is_removed, self.is_abandoned, self.failure, self.failed_at, opener, self.is_closed,
        )  # fmt: skip


class Busy:
    """Paths of which the origin is being told something: each by one at a time, or what was told last might not be what
    is done last."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Then]] = {}

    def take(self, paths: Iterable[str], again: Then) -> bool:
        """All of them, until they are left. Where one is taken: none, and `again` is done when that is left."""
        wanted = set(paths)
        for path in sorted(wanted):
            if path in self._waiting:
                self._waiting[path].append(again)
                return False
        self._waiting.update((path, []) for path in wanted)
        return True

    def leave(self, paths: Iterable[str], now: float) -> list[Effect]:
        """Who waits goes on, in the order in which they came."""
        waiting = [then for path in sorted(set(paths)) for then in self._waiting.pop(path)]
        return [effect for then in waiting for effect in then(now)]


class _Handle(NamedTuple):
    """What somebody writes, and which process has opened it so."""

    staged: Staged
    opener: int


class StagedFiles:
    """By number, node and path."""

    def __init__(self) -> None:
        self._next = 0
        self._staged: dict[int, Staged] = {}
        self._paths: dict[str, Staged] = {}
        self._nodes: dict[int, Staged] = {}
        self._handles: dict[int, _Handle] = {}

    def __len__(self) -> int:
        return len(self._staged)

    def begin(self, now_ns: int) -> None:
        """A daemon begins. Its numbers are of no daemon or mount before: what could not be put lies there for long."""
        self._next = now_ns

    def at(self, path: str) -> Staged | None:
        """What is being written under a path."""
        return self._paths.get(path)

    def has_below(self, folder: str) -> bool:
        """Whether something is being written in a folder, or in its folders."""
        return any(path.startswith(f"{folder}/") for path in self._paths)

    def new_in(self, folder: str) -> list[Staged]:
        """What is being written right in a folder, and was on no list of the origin; sorted by names."""
        some = (one for path, one in self._paths.items() if path.rpartition("/")[0] == folder and one.is_new)
        return sorted(some, key=lambda one: one.path)

    def get(self, stage: int) -> Staged | None:
        """What lies there."""
        return self._staged.get(stage)

    def of_node(self, node: int) -> Staged | None:
        """What is being written as a node, whatever it is called by now."""
        return self._nodes.get(node)

    def of(self, handle: int) -> Staged | None:
        """What somebody writes who has it open under this number."""
        opened = self._handles.get(handle)
        return None if opened is None else opened.staged

    def next_stage(self) -> int:
        """A number for one more."""
        self._next += 1
        return self._next

    def add(
        self,
        stage: int,
        node: int,
        path: str,
        process: int,
        *,
        is_new: bool = False,
        is_removed: bool = False,
    ) -> Staged:
        """It is empty, and the origin knows nothing of it."""
        staged = Staged(stage, node, path, process, is_new=is_new, is_removed=is_removed)
        self._staged[stage] = self._nodes[node] = staged
        if not is_removed:
            self._paths[path] = staged
        return staged

    def open(self, handle: int, staged: Staged, process: int) -> None:
        """Somebody writes it under this number."""
        self._handles[handle] = _Handle(staged, process)
        staged.handles += 1

    def makes_whole(self, handle: int, process: int) -> bool:
        """Whether a process that closes a file under this number makes it whole: it has opened it, not a copy of it,
        and it is theirs, or those whose it is have it open no more."""
        staged, opener = self._handles[handle]
        if opener != process:
            return False
        openers = (one.opener for one in self._handles.values() if one.staged is staged)
        return process == staged.process or staged.process not in openers

    def close(self, handle: int) -> Staged | None:
        """Nobody does any more; what it was, if it was one."""
        opened = self._handles.pop(handle, None)
        if opened is None:
            return None
        opened.staged.handles -= 1
        return opened.staged

    def close_all(self) -> None:
        """Nobody can write any more."""
        for handle in list(self._handles):
            self.close(handle)

    def restage(self, staged: Staged, stage: int) -> None:
        """It lies in another file from now on."""
        del self._staged[staged.stage]
        staged.superseded.append(staged.stage)
        staged.stage = stage
        self._staged[stage] = staged

    def move(self, staged: Staged, path: str) -> None:
        """It is to be called otherwise."""
        self.forget_path(staged)
        staged.path = path
        self._paths[path] = staged

    def forget_path(self, staged: Staged) -> None:
        """Its name is no more, or another's."""
        if self._paths.get(staged.path) is staged:
            del self._paths[staged.path]

    def end(self, staged: Staged) -> None:
        """It is written, or given up."""
        staged.is_ended = True
        self._staged.pop(staged.stage, None)
        self.forget_path(staged)
        if self._nodes.get(staged.node) is staged:
            del self._nodes[staged.node]

    def records_of(self, staged: Staged) -> list[FileStaged]:
        """All that the next daemon has to know of one."""
        handles = [handle for handle, one in self._handles.items() if one.staged is staged]
        return [self.record(staged, handle) for handle in handles or [0]]

    def record(self, staged: Staged, handle: int) -> FileStaged:
        """What of it has to do with one of those who have it open; 0: with nobody."""
        opened = self._handles.get(handle)
        return staged.record(handle, 0 if opened is None else opened.opener)

    def records(self) -> Iterator[FileStaged]:
        """And of all."""
        for staged in self._staged.values():
            yield from self.records_of(staged)

    def restore(self, record: FileStaged) -> Staged | None:
        """What a daemon before wrote down; None: it has ended."""
        staged = self._staged.get(record.stage)
        if not record.node:
            if staged is not None:
                self.end(staged)
            return None
        if staged is None and (before := self._nodes.get(record.node)) is not None:
            staged = before
            self.restage(staged, record.stage)
        if staged is None:
            staged = self.add(
                record.stage, record.node, record.path, abs(record.process), is_new=record.is_new,
                is_removed=record.is_removed,
            )  # fmt: skip
        if record.is_removed:
            # Its name may be another's by now.
            staged.is_removed = True
            self.forget_path(staged)
            staged.path = record.path
        elif staged.path != record.path:
            self.move(staged, record.path)
        staged.process, staged.size_bytes, staged.revision = (
            abs(record.process),
            record.size_bytes,
            record.revision,
        )
        staged.put_revision, staged.is_abandoned = record.put_revision, record.is_abandoned
        staged.is_killed = record.process < 0
        staged.failure, staged.failed_at = record.failure, record.failed_at
        staged.is_closed = record.is_closed
        if record.handle and record.handle not in self._handles:
            self.open(record.handle, staged, record.opener or staged.process)
        return staged

    def all(self) -> list[Staged]:
        """Each of them."""
        return list(self._staged.values())
