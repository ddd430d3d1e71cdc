"""What Linux keeps of a FUSE mount that is written to, beside `kernel.py`: who asks, who holds a folder, whose size is
newer than what the daemon says."""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import NamedTuple

from stoker.base.rng import Rng
from stoker.cache.mount.requests import RESENT, Opcode
from tests.mount.kernel import Answered, Asked, Entry, FakeKernel, Inode, Task

_PID = struct.Struct("=I")
_PID_AT = 32


class Locked(NamedTuple):
    """A system call waits until it has a folder: with others who look up names there, or alone."""

    folder: int
    is_alone: bool


Call = Generator[Asked | Locked, Answered, object]


@dataclass(slots=True)
class _Lock:
    shared: int = 0
    is_alone: bool = False
    queue: list[tuple[Task, bool]] = field(default_factory=list)

    def take(self, *, is_alone: bool) -> bool:
        if self.is_alone or (is_alone and self.shared):
            return False
        self.is_alone, self.shared = is_alone, self.shared + (not is_alone)
        return True


class WritingKernel(FakeKernel):
    """`written`: nodes that have been opened for writing: their size is what was written here, whatever was answered
    to what was asked before. `lost_opens`: who opened those was killed when a daemon had read that, and died."""

    def __init__(self, rng: Rng) -> None:
        super().__init__(rng)
        self.processes: dict[Task, int] = {}
        self.killed: set[int] = set()
        self.written: set[int] = set()
        self.lost_opens = 0
        self._changed_at: dict[int, int] = {}
        self._locked: dict[int, _Lock] = {}

    def start_as(self, process: int, call: Call, done: Callable[[object], None] = lambda _: None) -> Task:
        """A process makes a system call."""
        task = Task(call, done)  # type: ignore[arg-type]
        self.processes[task] = process
        self._go_on(task, None)
        return task

    def kill(self, task: Task) -> None:
        """All that the process does yet is to close what it has open; FLUSH is asked in any case."""
        self.killed.add(self.processes.get(task, 0))
        sent = self.sent.get(task.unique)
        if sent is not None and sent.asked.opcode == Opcode.FLUSH:
            sent.is_ending = True
            self.interrupt(task)
            return
        opens = sent is not None and sent.asked.opcode in (Opcode.OPEN, Opcode.CREATE)
        if opens and sent is not None and not sent.is_read and task.unique & RESENT:
            self.lost_opens += 1
        super().kill(task)

    def resized(self, inode: Inode, size_bytes: int) -> None:
        """Something was written here."""
        self.changes += 1
        self._changed_at[inode.node] = self.changes
        inode.size_bytes = size_bytes

    def told(self, node: int, size_bytes: int, asked_at: int) -> None:
        """An answer says how large a file is, to who asked after so many changes."""
        inode = self.inodes.get(node)
        if inode is None or node not in self.written or inode.size_bytes == size_bytes:
            return
        if self._changed_at.get(node, 0) <= asked_at:
            inode.size_bytes = size_bytes
            inode.pages.clear()

    def as_is(self, entry: Entry, asked_at: int) -> Entry:
        """An entry with the size that counts."""
        self.told(entry.node, entry.size_bytes, asked_at)
        inode = self.inodes.get(entry.node)
        is_here = inode is not None and entry.node in self.written
        return entry._replace(size_bytes=inode.size_bytes) if inode is not None and is_here else entry

    def unlock(self, folder: int, *, is_alone: bool) -> None:
        """Others may have it."""
        lock = self._locked[folder]
        self.locks[folder] -= 1
        if is_alone:
            lock.is_alone = False
        else:
            lock.shared -= 1
        while lock.queue and lock.take(is_alone=lock.queue[0][1]):
            task, _ = lock.queue.pop(0)
            self.locks[folder] += 1
            self._go_on(task, (0, b""))

    def _ask(self, task: Task, asked: Asked | Locked) -> None:
        if isinstance(asked, Locked):
            task.unique = 0
            lock = self._locked.setdefault(asked.folder, _Lock())
            if not lock.queue and lock.take(is_alone=asked.is_alone):
                self.locks[asked.folder] += 1
                self._go_on(task, (0, b""))
            else:
                lock.queue.append((task, asked.is_alone))
            return
        super()._ask(task, asked)
        sent, process = self.sent[task.unique], self.processes.get(task, 0)
        sent.data = sent.data[:_PID_AT] + _PID.pack(process) + sent.data[_PID_AT + _PID.size :]
