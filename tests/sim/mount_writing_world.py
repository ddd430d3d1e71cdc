"""A seeded world around a mount that is written to.

Programs write whole files in sequence, sync, close, rename, remove and read them, several on one name; the origin and
the disk fail, answers are lost or come late, programs get signals and are killed, and the daemon dies between any two
things. What the origin gets is compared with what programs have made whole, and what it has in the end, and what
readers see, with what programs were told.
"""

from __future__ import annotations

import errno
import tempfile
from collections import Counter
from pathlib import Path

from stoker.base.rng import Rng
from tests.mount.calls import File
from tests.mount.driver import TICK_S
from tests.mount.kernel import Task, init
from tests.mount.source import content_of
from tests.mount.writing_calls import WritingCalls
from tests.mount.writing_kernel import WritingKernel
from tests.mount.writing_source import WritingDriver, WritingSource
from tests.sim.mount_writing_onlookers import Onlookers
from tests.sim.mount_writing_truth import (
    FOLDERS,
    MADE,
    NOT_DONE,
    PATHS,
    SETTINGS,
    Content,
    Draft,
    Killed,
    Program,
    T,
)  # fmt: skip


class MountWritingWorld(Onlookers):
    """One mount, and those who write there."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed = seed
        self.rng = rng = Rng(seed)
        self.story: list[str] = []
        self.kernel = WritingKernel(rng.fork(1))
        self.source = WritingSource(rng.fork(2), self.kernel, folder)
        self.driver = WritingDriver(self.kernel, self.source, SETTINGS, rng.fork(3))
        self.calls = WritingCalls(self.kernel)
        self.tasks: list[Task] = []
        self.killed: set[Task] = set()
        self.programs = 0
        self.drafts: list[Draft] = []
        self.may_be: dict[str, set[Content] | None] = {}
        self.touching: Counter[str] = Counter()
        self.touched: Counter[str] = Counter()
        self.path_count = rng.choice([1, 2, len(PATHS)])
        self.signal_chance = rng.choice([0.0, 0.0, 0.1, 0.3])
        self.shrink_chance = rng.choice([0.0, 0.05, 0.3])
        self.driver.death_chance = rng.choice([0.0, 0.0, 0.002, 0.02])
        self.driver.failure_chance = rng.choice([0.0, 0.0, 0.05])
        self.driver.late_chance = rng.choice([0.0, 0.0, 0.05])
        self.driver.delay_s = rng.choice([0.002, 0.02, 0.2])
        self.source.failure_chance = rng.choice([0.0, 0.0, 0.1])
        self.source.full_chance = rng.choice([0.0, 0.0, 0.1])
        self.is_faultless = not (
            self.driver.failure_chance or self.driver.late_chance or self.source.failure_chance
        )
        self.is_full = bool(self.source.full_chance)
        self.driver.on_decided = self.compare
        self.source.on_put = self.check_put

    # -- the story -------------------------------------------------------------------------------------------------

    def run(self) -> str:
        """Returns a line about it. Raises AssertionError with its story if something is wrong."""
        rng, driver, source = self.rng, self.driver, self.source
        for path in PATHS:
            self.may_be[path] = {None}
            if rng.chance(0.5):
                self.may_be[path] = {source.contents[path, source.write(path)]}
        source.write("a/here")
        source.notice("")
        self.kernel.start(_mount(), lambda _: None)
        driver.run(1_000_000)
        for _ in range(10 + rng.below(30)):
            self.happens()
            driver.run(1 + rng.below(30))
            if rng.chance(0.1):
                driver.now += rng.uniform(0.0, 2 * TICK_S)
            self.check_waiting()
        self.end()
        return f"mount writing world {self.seed}: fine after {driver.deaths} deaths, {self.programs} programs"

    def happens(self) -> None:
        """Something."""
        rng = self.rng
        if rng.chance(0.7):
            self.begins()
        if rng.chance(self.shrink_chance):
            self.kernel.shrink(1 + rng.below(20))
        if rng.chance(0.05):
            self.driver.rewrite_log()
        self.tasks = [task for task in self.tasks if not task.is_over]
        if self.tasks and rng.chance(self.signal_chance):
            task = rng.choice(self.tasks)
            is_killed = rng.chance(0.5)
            self.say(f"{self.kernel.processes[task]} {'is killed' if is_killed else 'gets a signal'}")
            if is_killed:
                self.killed.add(task)
                self.kernel.kill(task)
            else:
                self.kernel.interrupt(task)

    def begins(self) -> None:
        """A program."""
        rng = self.rng
        self.programs += 1
        process, which, path = 1000 + self.programs, rng.below(16), self.some_path()
        program: Program[None]
        if which < 5:
            program = self.writes(process, path)
        elif which < 7:
            program = self.renames(path, self.some_path(), process)
        elif which < 8:
            program = self.unlinks(path)
        elif which < 11:
            program = self.reads(path)
        elif which < 12:
            program = self.makes_a_folder(rng.choice(MADE))
        else:
            program = self.lists(rng.choice(FOLDERS))
        self.tasks.append(self.kernel.start_as(process, self.ends(program)))

    def ends(self, program: Program[None]) -> Program[None]:
        """Whoever is killed says nothing more."""
        try:
            yield from program
        except Killed:
            self.kernel.seen["a program is killed"] += 1

    def some_path(self) -> str:
        """Few, so that they meet."""
        return PATHS[self.rng.below(self.path_count)]

    def end(self) -> None:
        """Peace: all programs end, and nothing is left."""
        driver, kernel, source = self.driver, self.kernel, self.source
        driver.death_chance = driver.failure_chance = driver.late_chance = 0.0
        source.failure_chance = source.full_chance = 0.0
        driver.settle()
        self.check(all(task.is_over for task in self.tasks), "a program waits for ever")
        self.check(not kernel.sent, "a request is never answered")
        self.check_counts()
        self.compare_states()
        for path in PATHS:
            self.check_state(path, source.content(path), "the origin has")
        while len(kernel.inodes) > 1:
            kernel.shrink(100)
            driver.settle()
        self.check(not self.core.state.waiting, "somebody waits who is gone")
        staged = [one.path for one in self.core.state.staged.all()]
        self.check(len(staged) <= kernel.lost_opens, f"{staged} are being written, and nobody does")
        left = set(source.staging.left()) - source.kept
        if not driver.deaths:
            self.check(not left, f"files {left} are left on the disk")
            self.check(not len(self.core.state.handles), "all is closed, and the daemon has it open")

    # -- programs --------------------------------------------------------------------------------------------------

    def doing(self, process: int, call: Program[T]) -> Program[T]:
        """A system call of a process, which may be killed meanwhile."""
        try:
            result = yield from call
        except OSError as error:
            if process in self.kernel.killed:
                raise Killed from error
            raise
        if process in self.kernel.killed and not isinstance(result, File):
            raise Killed
        return result

    def writes(self, process: int, path: str) -> Program[None]:
        """A file, from its beginning to its end."""
        size_bytes = self.rng.choice([0, 10, 60, 200])
        draft = Draft(process, path, {path}, content_of(path, f"by {process}", size_bytes))
        for other in self.drafts:
            if other.is_active and path in other.names:
                other.is_loose = draft.is_loose = True
        self.drafts.append(draft)
        draft.touches = path
        self.touch(path)
        try:
            file = yield from self.doing(process, self.calls.open_to_write(path))
        except OSError as error:
            self.excuse(path, error)
            draft.is_active = False
            self.touching[draft.touches] -= 1
            draft.touches = ""
            return
        draft.is_open = True
        self.say(f"{process} has {path} open")
        try:
            if process in self.kernel.killed:
                raise Killed
            yield from self.goes_on_writing(draft, file)
        except Killed:
            pass  # which closes it all the same
        draft.is_active = False
        yield from self.closes(draft, file)
        self.touching[draft.touches] -= 1
        draft.touches = ""

    def goes_on_writing(self, draft: Draft, file: File) -> Program[None]:
        rng, process, at = self.rng, draft.process, 0
        while at < len(draft.plan):
            chunk = draft.plan[at : at + 1 + rng.below(100)]
            try:
                yield from self.doing(process, self.calls.write(file, at, chunk))
            except (OSError, Killed) as error:
                draft.tail = max(draft.tail, chunk, key=len)
                if isinstance(error, Killed):
                    raise
                self.excuse(draft.path or "", error)
                if error.errno == errno.EINTR and rng.chance(0.7):
                    continue  # as Python does
                return
            at += len(chunk)
            draft.content, draft.tail = draft.plan[:at], draft.tail[len(chunk) :]
            if rng.chance(0.3):
                try:
                    yield from self.syncs(draft, file, self.calls.fsync(file))
                except OSError as error:
                    self.excuse(draft.path or "", error)
            if rng.chance(0.2):
                yield from self.reads_own(draft, file)

    def reads_own(self, draft: Draft, file: File) -> Program[None]:
        try:
            data = yield from self.doing(draft.process, self.calls.read(file, 0, 1000))
        except OSError as error:
            self.excuse(draft.path or "", error)
            return
        if not draft.is_loose and not draft.tail:
            self.check(
                data == draft.content, f"{draft.process} has written {draft.content!r}, and reads {data!r}"
            )

    def syncs(self, draft: Draft, file: File, call: Program[None]) -> Program[None]:
        """FSYNC or FLUSH: the origin has it, if that is what is said."""
        path, process = draft.path, draft.process
        draft.ready.append((draft.content, draft.tail))
        draft.syncs, draft.in_sync, draft.is_refused = draft.syncs + 1, True, False
        touched = self.touched[path or ""]
        try:
            yield from self.doing(process, call)
        except (OSError, Killed) as error:
            draft.is_refused = isinstance(error, OSError)
            if draft.is_refused:
                self.say(f"{process} cannot sync {path}")
                draft.ready.clear()
            self.also(path, draft)
            raise
        finally:
            draft.in_sync = False
        if path is None or draft.path != path or draft.is_loose or not draft.content:
            self.also(path, None)
        elif self.touching[path] == 1 and self.touched[path] == touched and path in draft.names:
            self.say(f"{process} has synced {path}: {len(draft.content)} bytes")
            got = self.source.content(path)
            is_it = got is not None and draft.may_be_whole(got) and got.startswith(draft.content)
            self.check(is_it, f"{process} has synced {path}: {draft.content!r}, and the origin has {got!r}")
            # Whether bytes of a write that failed are in it, the mount and the origin may say otherwise.
            self.may_be[path] = None if draft.tail else {got}
        else:
            self.also(path, None)

    def closes(self, draft: Draft, file: File) -> Program[None]:
        """As whoever ends does. The origin gets an empty file, and what was not flushed, when all have closed it."""
        process = draft.process
        is_living = process not in self.kernel.killed
        try:
            if not is_living:
                try:
                    yield from self.calls.flush(file)
                except OSError as error:
                    self.say(f"{process} was killed: {error.errno}")
            elif draft.content or draft.tail:
                yield from self.syncs(draft, file, self.calls.flush(file))
            else:
                yield from self.calls.flush(file)
        except OSError as error:
            self.excuse(draft.path or "", error)
        except Killed:
            pass
        if is_living and not draft.is_refused:
            draft.ready.append((draft.content, draft.tail))
            if not draft.content:
                self.also(draft.path, draft)
        yield from self.calls.close(file)
        self.say(f"{process} has closed {draft.path}")

    def unlinks(self, path: str) -> Program[None]:
        yield from self.moves(path, None, self.calls.unlink(path))

    def renames(self, path: str, to: str, process: int) -> Program[None]:
        if path == to or self.rng.chance(0.5):
            path = f"{path}.new" if self.rng.chance(0.5) else path
            if path not in self.may_be:
                self.may_be[path] = None
            yield from self.writes(process, path)
            if process in self.kernel.killed:
                return
        if path != to:
            yield from self.moves(path, to, self.calls.rename(path, to))

    def moves(self, path: str, to: str | None, call: Program[None]) -> Program[None]:
        """The name goes, to be that of another or of nothing."""
        names = [path] if to is None else [path, to]
        for name in names:
            self.touch(name)
        began = [self.touched[name] for name in names]
        is_first = all(self.touching[name] == 1 for name in names)
        syncs = {draft: draft.syncs for draft in self.drafts if draft.path in names}
        opened = {draft for draft in syncs if draft.is_open}
        if to is not None:
            self.moves_perhaps(path, to)
        try:
            yield from call
        except OSError as error:
            self.excuse(path, error)
            if error.errno not in NOT_DONE:
                for name in names:
                    self.may_be[name] = None
                for draft in syncs:
                    draft.is_loose = True
            return
        finally:
            for name in names:
                self.touching[name] -= 1
        self.say(f"{path} is {to} now")
        is_alone = is_first and all(
            not self.touching[name] and self.touched[name] == count
            for name, count in zip(names, began, strict=True)
        )
        if to is not None:
            self.may_be[to] = self.may_be[path] if is_alone else None
        self.may_be[path] = {None} if is_alone else None
        if to is not None:
            self.moves_perhaps(path, to)
        for draft in [draft for draft in self.drafts if draft.path in names]:
            if draft.in_sync or syncs.get(draft) != draft.syncs or draft not in opened:
                draft.is_loose, draft.path = True, None
            elif draft.path == path and to is not None:
                draft.path = to
                if draft.touches == path:
                    draft.touches = to
                    self.touching[path] -= 1
                    self.touching[to] += 1
            else:
                draft.path = None
                draft.ready.clear()


def _mount() -> Program[None]:
    code, _ = yield init()
    assert not code


def run_world(seed: int) -> str:
    """Run one world; returns a line about it. Raises AssertionError with its story if an invariant breaks."""
    with tempfile.TemporaryDirectory(prefix="stoker-world-") as folder:
        return MountWritingWorld(seed, Path(folder)).run()
