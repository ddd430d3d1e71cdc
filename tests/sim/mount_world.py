"""A seeded world around the shipping core of a mount.

Programs look up, read and list what changes meanwhile at its origin; the fleet notices late; answers fail, or come too
late; programs get signals and are killed, the kernel forgets, somebody refreshes; the daemon dies between any two
things that it does, and another one goes on with what was written down. A kernel as strict as Linux stands on one side
(`tests/mount/kernel.py`), and what was true when on the other.
"""

from __future__ import annotations

import errno
import logging
import stat
from collections.abc import Generator, Iterator
from contextlib import contextmanager

from stoker.base.rng import Rng
from stoker.cache.mount.core import MountCore
from stoker.cache.mount.records import records
from stoker.cache.mount.requests import ROOT
from stoker.cache.mount.state import MountSettings
from tests.mount.calls import Calls, File, Folder, Listed
from tests.mount.driver import TICK_S, Driver
from tests.mount.kernel import Answered, Asked, FakeKernel, Task, init
from tests.mount.source import FakeSource, names_in

FOLDERS = ("", "a", "a/b", "c")
PATHS = [f"{folder}/f{n}".lstrip("/") for folder in FOLDERS for n in range(4)]
SETTINGS = MountSettings(
    kernel_ttl_s=3.0, ttl_s=3.0, absent_ttl_s=0.5, timeout_s=4.0, packed_bytes_max=40, page_entries=3,
    nodes_max=12, known_max=10,
)  # fmt: skip
SLACK_S = 1.0
REFRESH = ".stoker-refresh"
Program = Generator[Asked, Answered, object]


class MountWorld:
    """One mount, and those who use it."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = rng = Rng(seed)
        self.story: list[str] = []
        self.kernel = FakeKernel(rng.fork(1))
        self.source = FakeSource(rng.fork(2), self.kernel)
        self.driver = Driver(self.kernel, self.source, SETTINGS, rng.fork(3))
        self.calls = Calls(self.kernel)
        self.tasks: list[Task] = []
        self.killed: set[Task] = set()
        self.programs = 0
        self.is_rewritten = False
        self.deaths_at: list[int] = []
        self.change_chance = rng.choice([0.0, 0.1, 0.6])
        self.shrink_chance = rng.choice([0.0, 0.05, 0.3])
        self.signal_chance = rng.choice([0.0, 0.0, 0.1])
        self.driver.death_chance = rng.choice([0.0, 0.0, 0.002, 0.02])
        self.driver.failure_chance = rng.choice([0.0, 0.0, 0.05])
        self.driver.late_chance = rng.choice([0.0, 0.0, 0.05])
        self.driver.delay_s = rng.choice([0.002, 0.02, 0.2])
        self.is_focused = rng.chance(0.25)
        """All look at one file, and refresh it."""
        self.is_faultless = not (self.driver.failure_chance or self.driver.late_chance)
        self.driver.on_decided = self.compare

    # -- the story -------------------------------------------------------------------------------------------------

    def run(self) -> str:
        """Returns a line about it. Raises AssertionError with its story if something is wrong."""
        with defects_shown():
            return self.happen()

    def happen(self) -> str:
        """All of it."""
        rng, driver, source = self.rng, self.driver, self.source
        for path in PATHS:
            if rng.chance(0.8):
                source.write(path)
        source.notice("")
        self.kernel.start(_mount(), lambda _: None)
        driver.run(1_000_000)
        for _ in range(10 + rng.below(40)):
            self.happens()
            driver.run(1 + rng.below(30))
            if rng.chance(0.1):
                driver.now += rng.uniform(0.0, 2 * TICK_S)
            self.check_waiting()
        self.end()
        return f"mount world {self.seed}: fine after {driver.deaths} deaths, {self.programs} programs"

    def happens(self) -> None:
        """Something."""
        rng, source = self.rng, self.source
        if rng.chance(0.7):
            self.begins()
        if rng.chance(self.change_chance):
            path = self.some_path()
            if rng.chance(0.15):
                source.remove(path)
                self.say(f"{path} is removed")
            else:
                self.say(f"{path} is written: {source.write(path)}")
        if rng.chance(0.05):
            source.notice(rng.choice(PATHS))
        if rng.chance(self.shrink_chance):
            self.kernel.shrink(1 + rng.below(20))
        if rng.chance(0.05):
            self.driver.rewrite_log()
        self.tasks = [task for task in self.tasks if not task.is_over]
        if self.tasks and rng.chance(self.signal_chance):
            task = rng.choice(self.tasks)
            if rng.chance(0.5):
                self.killed.add(task)
                self.kernel.kill(task)
            else:
                self.kernel.interrupt(task)

    def some_path(self) -> str:
        """Some are more in demand than others."""
        return PATHS[0] if self.is_focused else self.rng.choice(PATHS[: 1 + self.rng.below(len(PATHS))])

    def begins(self) -> None:
        """A program."""
        rng = self.rng
        self.programs += 1
        which = rng.choice([0, 6, 6, 8]) if self.is_focused else rng.below(10)
        if which < 4:
            program = self.reads(self.some_path())
        elif which < 6:
            program = self.lists(rng.choice(FOLDERS))
        elif which < 8:
            program = self.refreshes("" if self.is_focused else rng.choice(FOLDERS))
        elif which < 9:
            program = self.looks(self.some_path())
        else:
            program = self.asks_how_it_is(rng.choice(FOLDERS), rng.choice(PATHS))
        self.tasks.append(self.kernel.start(program))

    def end(self) -> None:
        """Peace: all programs end, and the kernel forgets all."""
        driver, kernel = self.driver, self.kernel
        driver.death_chance = driver.failure_chance = driver.late_chance = 0.0
        driver.settle()
        self.check(all(task.is_over for task in self.tasks), "a program waits for ever")
        self.check(not kernel.sent, "a request is never answered")
        self.check_counts()
        self.compare_states()
        while len(kernel.inodes) > 1:
            kernel.shrink(100)
            driver.settle()
        self.check(not self.core.state.waiting, "somebody waits who is gone")
        # A daemon cannot know that nobody waits for what one before meant to answer.
        left_by_killed = kernel.seen["killed in an OPEN that was read before"]
        self.check(
            len(kernel.backing) <= left_by_killed, f"backing files {set(kernel.backing)} are never closed"
        )
        left_by_killed += kernel.seen["killed in an OPENDIR that was read before"]
        self.check(
            len(self.core.state.handles) <= left_by_killed, "all is closed, and the daemon has it open"
        )
        if not driver.deaths:
            left = [(node.path, node.lookups) for node in self.core.state.nodes if node.number != ROOT]
            self.check(not left, f"the kernel has forgotten all, and the daemon has not: {left}")

    @property
    def core(self) -> MountCore:
        """That of the daemon that lives now."""
        return self.driver.core

    # -- programs --------------------------------------------------------------------------------------------------

    def looks(self, path: str) -> Program:
        """What there is, it was at some time."""
        yield from self.state_of(path, 0)

    def reads(self, path: str) -> Program:
        """Whoever has a version open reads it, or is told that it is gone."""
        try:
            file = yield from self.calls.open(path)
        except OSError as error:
            self.excuse(path, error)
            return
        yield from self.reads_open(path, file)

    def reads_open(self, path: str, file: File) -> Program:
        rng, source = self.rng, self.source
        version = source.version_of(path, file.inode.size_bytes)
        self.check(bool(version), f"{path} has {file.inode.size_bytes} bytes, and no version is so long")
        content = source.contents[path, version]
        try:
            for _ in range(1 + rng.below(4)):
                offset, size_bytes = rng.below(len(content) + 20), 1 + rng.below(200)
                data = yield from self.calls.read(file, offset, size_bytes)
                wanted = content[offset : offset + size_bytes]
                self.check(data == wanted, f"{path}@{version} from {offset} on is {data!r}, not {wanted!r}")
        except OSError as error:
            self.excuse(path, error)
            if error.errno == errno.ESTALE:
                self.check(source.now_is.get(path) != version, f"{path}@{version} is there, and gone")
        yield from self.calls.close(file)

    def refreshes(self, folder: str) -> Program:
        """What is looked at afterwards is not older than the refresh."""
        change = self.source.changes
        try:
            yield from self.calls.stat(f"{folder}/{REFRESH}")
        except OSError as error:
            self.excuse(folder, error)
            return
        self.say(f"{folder!r} was refreshed; asked after change {change}")
        below = [path for path in PATHS if not folder or path.startswith(f"{folder}/")]
        for _ in range(1 + self.rng.below(3)):
            yield from self.state_of(self.some_path() if self.is_focused else self.rng.choice(below), change)

    def state_of(self, path: str, since: int) -> Program:
        found = ""
        try:
            inode = yield from self.calls.stat(path)
        except OSError as error:
            self.excuse(path, error)
            if error.errno != errno.ENOENT:
                return
        else:
            found = self.source.version_of(path, inode.size_bytes)
            self.check(bool(found), f"{path} has {inode.size_bytes} bytes")
        states = self.source.states_since(path, since)
        self.check(found in states, f"{path} is {found!r}, since change {since} it was one of {states}")

    def lists(self, path: str) -> Program:
        """Each name once."""
        try:
            folder = yield from self.calls.opendir(path)
        except OSError as error:
            self.excuse(path, error)
            return
        try:
            for _ in range(1 + self.rng.below(2)):
                yield from self.walks(path, folder)
        except OSError as error:
            self.excuse(path, error)
        yield from self.calls.closedir(folder)

    def walks(self, path: str, folder: Folder) -> Program:
        """From the beginning to the end, now and then from where it was before."""
        rng, source = self.rng, self.source
        deaths, views, start = self.driver.deaths, len(source.view_changes), names_in(source.seen, path)
        is_plus, cookie, seeks = rng.chance(0.5), 0, 0
        by_place: dict[int, Listed] = {}
        got: list[str] = []
        while True:
            listed = yield from self.calls.readdir(folder, cookie, 300 + rng.below(1000), is_plus=is_plus)
            if not listed:
                break
            for one in listed:
                self.check(
                    by_place.get(one.cookie, one).name == one.name or seeks > 0, "a cookie is another name"
                )
                by_place[one.cookie] = one
            got += [one.name.decode() + ("/" if stat.S_ISDIR(one.kind << 12) else "") for one in listed]
            cookie = listed[-1].cookie
            if rng.chance(0.1) and seeks < 2:
                # Back to a place that was told, as seekdir(3) does: all from there on comes once more.
                seeks += 1
                cookie = rng.choice([0, *(one.cookie for one in listed)])
                del got[cookie:]
        changed = set(source.view_changes[views:])
        is_same = not any(one.startswith(f"{path}/" if path else "") for one in changed)
        self.check(got[:2] == ["./", "../"], f"{path!r} begins with {got[:2]}")
        names = got[2:]
        if is_same:
            self.check(names == start, f"{path!r} has {start}, and {names} were listed, with {seeks} seeks")
        elif deaths == self.driver.deaths and not seeks:
            self.check(len(names) == len(set(names)), f"{path!r} lists a name twice: {names}")
            kept = {
                n
                for n in start
                if not any(
                    f"{path}/{n}".lstrip("/").startswith(c) or c.startswith(f"{path}/{n}".lstrip("/"))
                    for c in changed
                )
            }
            self.check(kept <= set(names), f"{path!r} has {kept} all the time, and lists {names}")

    def asks_how_it_is(self, folder: str, path: str) -> Program:
        """The files that are none, and all that `stat` does not tell."""
        try:
            yield from self.calls.statfs()
            file = yield from self.calls.open(f"{folder}/.stoker-status")
        except OSError as error:
            self.excuse(folder, error)
            return
        try:
            said = yield from self.calls.read(file, 0, 4096)
            self.check(said == f"folder: /{folder}\n".encode(), f"the status of {folder!r} is {said!r}")
        except OSError as error:
            self.excuse(folder, error)
        yield from self.calls.close(file)
        try:
            version = yield from self.calls.getxattr(path, b"user.stoker.version", 100)
            self.check((path, version.decode()) in self.source.contents, f"{path} is {version!r}")
        except OSError as error:
            self.excuse(path, error)

    # -- what must be true -----------------------------------------------------------------------------------------

    def excuse(self, path: str, error: OSError) -> None:
        """Whether somebody may be told that."""
        code = error.errno or 0
        self.say(f"{path!r}: {errno.errorcode[code]}")
        may = {errno.ENOENT, errno.ESTALE, errno.ETIMEDOUT}
        if self.killed:
            may.add(errno.EINTR)
        if self.driver.failure_chance or not self.is_faultless:
            may |= {errno.EIO, errno.EACCES}
        self.check(code in may, f"{path!r}: {errno.errorcode[code]}, for no reason")

    def check_waiting(self) -> None:
        """Nobody waits for too long."""
        now = self.driver.now
        late = [
            one
            for one in self.kernel.sent.values()
            if one.is_read and now - one.read_at > SETTINGS.timeout_s + SLACK_S
        ]
        self.check(not late, f"{len(late)} requests wait for too long")
        self.check(not self.kernel.faults, "; ".join(self.kernel.faults))

    def check_counts(self) -> None:
        """What the kernel knows the daemon knows, and where none died nothing else."""
        has_died = self.driver.deaths > 0
        for inode in self.kernel.inodes.values():
            if inode.node == ROOT:
                continue
            node = self.core.state.nodes.get(inode.node)
            self.check(node is not None, f"the kernel knows node {inode.node}, and the daemon does not")
            assert node is not None
            is_right = node.lookups >= inode.lookups if has_died else node.lookups == inode.lookups
            self.check(is_right, f"{node.path} was looked up {inode.lookups} times, not {node.lookups}")

    def compare(self) -> None:
        """Now and then: what is written down is what is."""
        if self.rng.chance(0.02):
            self.compare_states()

    def compare_states(self) -> None:
        twin = MountCore(SETTINGS)
        twin.restore(records(bytes(self.driver.log)))
        was, found = described(self.core), described(twin)
        self.check(was == found, f"the next daemon would know\n{found}\nnot\n{was}")

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            story = "\n  ".join(self.story[-30:])
            raise AssertionError(f"world {self.seed}, the last events:\n  {story}\n  VIOLATED: {what}")

    def say(self, what: str) -> None:
        self.story.append(f"{self.driver.now:8.3f} {what}")


def described(core: MountCore) -> list[object]:
    """All that the next daemon has to know. Whoever reads a file that is none has it open all the same."""
    return sorted(str(record) for record in records(b"".join(core.snapshot())))


@contextmanager
def defects_shown() -> Iterator[None]:
    """What a mount survives is raised."""

    def refuse(record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[1]:
            raise record.exc_info[1]
        return True

    log = logging.getLogger("stoker.mount")
    log.addFilter(refuse)
    try:
        yield
    finally:
        log.removeFilter(refuse)


def _mount() -> Program:
    code, _ = yield init()
    assert not code


def run_world(seed: int) -> str:
    """Run one world; returns a line about it. Raises AssertionError with its story if an invariant breaks."""
    return MountWorld(seed).run()
