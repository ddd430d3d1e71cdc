"""What Linux keeps of a FUSE mount, and the device between it and the daemon. `calls.py` has its system calls.

It is as strict as fs/fuse is, and says in `faults` where a daemon does what Linux answers with EIO to somebody who is
not to blame for it.
"""

from __future__ import annotations

import errno
import struct
from collections import Counter, deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import NamedTuple

from stoker.base.rng import Rng
from stoker.cache.mount.answers import Notice
from stoker.cache.mount.requests import RESENT, ROOT, Init, Opcode

PAGE_BYTES = 16
"""Small, so that small files have many."""
FLAGS = (
    Init.ASYNC_READ | Init.BIG_WRITES | Init.DO_READDIRPLUS | Init.READDIRPLUS_AUTO | Init.PARALLEL_DIROPS
    | Init.MAX_PAGES | Init.INIT_EXT | Init.HAS_RESEND | Init.PASSTHROUGH | Init.AUTO_INVAL_DATA
)  # fmt: skip
_HEADER = struct.Struct("=IIQQIIIHH")
_OUT = struct.Struct("=IiQ")
_ENTRY = struct.Struct("=QQQQII")
_ATTR = struct.Struct("=QQQQQQIIIIIIIIII")
_INTERRUPT = 1


class Asked(NamedTuple):
    """What a system call waits for."""

    opcode: int
    node: int
    body: bytes = b""


Answered = tuple[int, bytes]
"""A reason out of `errno`, or 0, and what was said."""
Call = Generator[Asked, Answered, object]


class Entry(NamedTuple):
    """The answer to LOOKUP."""

    node: int
    name_valid_s: float
    attr_valid_s: float
    size_bytes: int
    mode: int


@dataclass(slots=True)
class Inode:
    """`names`: dentries that show it; `children`: those below it; `pins`: who else holds it."""

    node: int
    lookups: int = 0
    size_bytes: int = 0
    mode: int = 0
    attr_until: float = 0.0
    names: int = 0
    children: int = 0
    pins: int = 0
    by_requests: int = 0
    backed: int = 0
    backing_id: int = 0
    pages: dict[int, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class Dentry:
    """A name. `is_hashed`: who looks it up finds it."""

    parent: int
    name: bytes
    node: int
    until: float
    is_hashed: bool = True


class Task:
    """A system call under way. `unique`: the request that it waits for."""

    def __init__(self, call: Call, done: Callable[[object], None]) -> None:
        self.call = call
        self.done = done
        self.unique = 0
        self.is_over = False


@dataclass(slots=True)
class _Sent:
    task: Task
    asked: Asked
    data: bytes
    is_read: bool = False
    is_interrupted: bool = False
    is_ending: bool = False
    read_at: float = 0.0


class FakeKernel:
    """The kernel's half. Whoever plays the daemon reads and writes; time is what it is told."""

    def __init__(self, rng: Rng) -> None:
        self.rng = rng
        self.now = 0.0
        self.inodes = {ROOT: Inode(ROOT, lookups=1, pins=1, mode=0o040555)}
        self.below: dict[int, dict[bytes, Dentry]] = {}
        self.locks: Counter[int] = Counter()
        self.backing: dict[int, bytes] = {}
        self.backing_next = 1
        self.faults: list[str] = []
        self.changes = 0
        self.seen: Counter[str] = Counter()
        self.sent: dict[int, _Sent] = {}
        self._pending: deque[int] = deque()
        self._forgets: deque[tuple[int, int]] = deque()
        self._interrupts: deque[int] = deque()
        self._next_unique = 0

    # -- tasks -----------------------------------------------------------------------------------------------------

    def start(self, call: Call, done: Callable[[object], None] = lambda _: None) -> Task:
        """Somebody makes a system call. `done` hears what came of it: OSError, or what it returned."""
        task = Task(call, done)
        self._go_on(task, None)
        return task

    def interrupt(self, task: Task) -> None:
        """Whoever made it gets a signal, and waits on."""
        sent = self.sent.get(task.unique)
        if sent is None or sent.is_interrupted or sent.asked.opcode in (Opcode.RELEASE, Opcode.RELEASEDIR):
            return
        sent.is_interrupted = True
        if sent.is_read:
            self._interrupts.append(task.unique)

    def is_ending(self, unique: int) -> bool:
        """Whether who has asked that was killed."""
        sent = self.sent.get(unique)
        return sent is not None and sent.is_ending

    def kill(self, task: Task) -> None:
        """Whoever made it is killed: what no daemon has read yet is never asked."""
        sent = self.sent.get(task.unique)
        if sent is not None:
            sent.is_ending = True
        if sent is None or sent.asked.opcode in (Opcode.RELEASE, Opcode.RELEASEDIR):
            return  # nobody waits for these
        if not sent.is_read:
            if sent.asked.opcode in (Opcode.OPEN, Opcode.OPENDIR) and task.unique & RESENT:
                kind = "an OPEN" if sent.asked.opcode == Opcode.OPEN else "an OPENDIR"
                self.seen[f"killed in {kind} that was read before"] += 1
            self.seen["killed before it was read"] += 1
            del self.sent[task.unique]
            self._pending.remove(task.unique)
            self._go_on(task, (errno.EINTR, b""))
        else:
            self.interrupt(task)

    def _go_on(self, task: Task, answered: Answered | None) -> None:
        try:
            asked = next(task.call) if answered is None else task.call.send(answered)
        except StopIteration as stop:
            task.is_over = True
            task.done(stop.value)
            return
        except OSError as error:
            task.is_over = True
            task.done(error)
            return
        self._ask(task, asked)

    def _ask(self, task: Task, asked: Asked) -> None:
        self._next_unique += 2
        task.unique = unique = self._next_unique
        self.sent[unique] = _Sent(task, asked, packed(unique, asked))
        self._pending.append(unique)

    # -- the device ------------------------------------------------------------------------------------------------

    @property
    def has_requests(self) -> bool:
        """Whether the daemon would not wait."""
        return bool(self._interrupts or self._pending or self._forgets)

    def read(self) -> bytes:
        """One request: interrupts first, of the others and what is forgotten either."""
        if self._interrupts:
            return interrupt(self._interrupts.popleft())
        if self._forgets and (not self._pending or self.rng.chance(0.5)):
            return self._read_forgets()
        unique = self._pending.popleft()
        sent = self.sent[unique]
        sent.is_read, sent.read_at = True, self.now
        if sent.is_interrupted:
            self._interrupts.append(unique)
        return sent.data

    def write(self, data: bytes) -> int:
        """An answer or a notice; the daemon's error. EAGAIN: the notice would wait."""
        size_bytes, code, unique = _OUT.unpack_from(data)
        assert size_bytes == len(data), (size_bytes, len(data))
        body = data[_OUT.size :]
        if not unique:
            return self._notice(code, body)
        sent = self.sent.get(unique)
        if sent is None or not sent.is_read:
            return errno.ENOENT
        if code == -errno.EINTR and not sent.is_ending:
            self.faults.append(f"{Opcode(sent.asked.opcode).name} ends by a signal that ends nobody")
        del self.sent[unique]
        self._go_on(sent.task, (-code, body))
        return 0

    def open_backing(self, content: bytes) -> int:
        """What the ioctl does."""
        number, self.backing_next = self.backing_next, self.backing_next + 1
        self.backing[number] = content
        return number

    def close_backing(self, number: int) -> int:
        """What the ioctl does."""
        return errno.ENOENT if self.backing.pop(number, None) is None else 0

    def _read_forgets(self) -> bytes:
        count = min(len(self._forgets), 1 + self.rng.below(4))
        forgets = [self._forgets.popleft() for _ in range(count)]
        if count == 1:
            node, lookups = forgets[0]
            return packed(0, Asked(Opcode.FORGET, node, struct.pack("=Q", lookups)))
        body = struct.pack("=II", count, 0) + b"".join(struct.pack("=QQ", *one) for one in forgets)
        return packed(0, Asked(Opcode.BATCH_FORGET, 0, body))

    def _notice(self, code: int, body: bytes) -> int:
        self.seen[f"notice {Notice(code).name}"] += 1
        if code == Notice.RESEND:
            self._resend()
            return 0
        if code == Notice.INVAL_INODE:
            inode = self.inodes.get(struct.unpack_from("=Q", body)[0])
            if inode is not None:
                inode.pages.clear()
                inode.attr_until = 0.0
            return 0 if inode is not None else errno.ENOENT
        parent, length, _ = struct.unpack_from("=QII", body)
        assert code == Notice.INVAL_ENTRY
        assert len(body) == 16 + length + 1
        if parent not in self.inodes:
            return errno.ENOENT
        if self.locks[parent]:
            return errno.EAGAIN
        dentry = self.dentry(parent, body[16 : 16 + length])
        if dentry is None:
            return errno.ENOENT
        self.drop(dentry)
        return 0

    def _resend(self) -> None:
        """As they lie in a table by their numbers: in any order."""
        again = [unique for unique, sent in self.sent.items() if sent.is_read]
        self.rng.shuffle(again)
        for unique in again:
            sent = self.sent.pop(unique)
            sent.is_read = False
            number = unique | RESENT
            sent.data = sent.data[:8] + struct.pack("=Q", number) + sent.data[16:]
            sent.task.unique = number
            self.sent[number] = sent
            self._pending.appendleft(number)
        if again:
            self.seen["resent"] += 1

    # -- names and nodes -------------------------------------------------------------------------------------------

    def dentry(self, parent: int, name: bytes) -> Dentry | None:
        """Who is called so in a folder, as far as the kernel knows."""
        return self.below.get(parent, {}).get(name)

    def pin(self, node: int) -> Inode:
        """Somebody holds it."""
        inode = self.inodes[node]
        inode.pins += 1
        return inode

    def unpin(self, node: int) -> None:
        """No more."""
        self.inodes[node].pins -= 1
        self._evict(node)

    def instantiate(self, parent: int, name: bytes, entry: Entry) -> Inode:
        """A name was looked up."""
        inode = self.counted(entry)
        old = self.dentry(parent, name)
        if old is not None and old.node == entry.node:
            old.until = self.now + entry.name_valid_s
            return inode
        inode.pins += 1
        if old is not None:
            self.drop(old)
        dentry = Dentry(parent, name, entry.node, self.now + entry.name_valid_s)
        self.below.setdefault(parent, {})[name] = dentry
        self.inodes[parent].children += 1
        inode.names += 1
        inode.pins -= 1
        return inode

    def as_is(self, entry: Entry, asked_at: int) -> Entry:
        """An entry that was asked for after so many `changes` of this machine, with what is true of it now."""
        return entry

    def counted(self, entry: Entry) -> Inode:
        """The inode of an entry, which was looked up once more."""
        inode = self.inodes.get(entry.node)
        if inode is None:
            inode = self.inodes[entry.node] = Inode(entry.node, size_bytes=entry.size_bytes, mode=entry.mode)
        if (inode.size_bytes, inode.mode) != (entry.size_bytes, entry.mode):
            self.faults.append(f"node {entry.node} is another file than before")
        inode.lookups += 1
        inode.attr_until = self.now + entry.attr_valid_s
        return inode

    def forget(self, node: int, lookups: int) -> None:
        """The daemon is told in its time."""
        self._forgets.append((node, lookups))

    def drop(self, dentry: Dentry) -> None:
        """Nobody finds that name any more, nor what lies below, as far as nobody holds it."""
        for below in list(self.below.get(dentry.node, {}).values()):
            if not self.inodes[below.node].pins:
                self.drop(below)
        if not dentry.is_hashed:
            return
        dentry.is_hashed = False
        names = self.below[dentry.parent]
        del names[dentry.name]
        if not names:
            del self.below[dentry.parent]
        self.inodes[dentry.node].names -= 1
        self._evict(dentry.node)
        self.inodes[dentry.parent].children -= 1
        self._evict(dentry.parent)

    def shrink(self, count: int) -> None:
        """Memory is short: some names go that nobody holds."""
        free = [
            one
            for names in self.below.values()
            for one in names.values()
            if not self.inodes[one.node].pins and not self.inodes[one.node].children
        ]
        for _ in range(min(count, len(free))):
            at = self.rng.below(len(free))
            free[at], free[-1] = free[-1], free[at]
            self.drop(free.pop())

    def _evict(self, node: int) -> None:
        inode = self.inodes.get(node)
        if inode is None or inode.pins or inode.names or inode.children:
            return
        del self.inodes[node]
        self._forgets.append((node, inode.lookups))


def packed(unique: int, asked: Asked) -> bytes:
    """A request as it is read from the device."""
    size_bytes = _HEADER.size + len(asked.body)
    return _HEADER.pack(size_bytes, asked.opcode, unique, asked.node, 1000, 100, 42, 0, 0) + asked.body


def interrupt(unique: int) -> bytes:
    """That whoever has asked that got a signal."""
    return packed(unique | _INTERRUPT, Asked(Opcode.INTERRUPT, 0, struct.pack("=Q", unique)))


def init(flags: int = FLAGS) -> Asked:
    """The first request."""
    flags = int(flags)
    body = struct.pack("=IIIII44x", 7, 45, 131072, flags & 0xFFFFFFFF, flags >> 32)
    return Asked(Opcode.INIT, 0, body)


def unpacked_entry(body: bytes, at: int = 0) -> Entry:
    """What the answer to LOOKUP says."""
    node, _, name_s, attr_s, name_ns, attr_ns = _ENTRY.unpack_from(body, at)
    attr = _ATTR.unpack_from(body, at + _ENTRY.size)
    return Entry(node, name_s + name_ns / 1e9, attr_s + attr_ns / 1e9, attr[1], attr[9])
