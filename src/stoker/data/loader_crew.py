"""The loader processes of one loader, as the training process sees them."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any

from stoker.data.loader_arena import ArenaFile, ArenaReader
from stoker.data.loader_batch import Collate, reading_from
from stoker.data.loader_plan import Pass
from stoker.data.loader_process import Done, Job, Records, work
from stoker.errors import ConfigError, LoaderWorkerLost

GRACE_S = 2.0
"""How long a process that is not wanted any more may go on with the step it is at."""


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    pidfd: int
    file: ArenaFile
    arena: ArenaReader
    told: int = -1
    """Number of the pass that it knows."""
    todo: set[tuple[int, int]] = field(default_factory=set)
    """Passes and steps that it was given and has not answered."""


class Crew:
    """Started at once. Each step is given to who has the fewest, and at most `ahead` to one.

    Not for two threads at once. A forked child has no part in it.
    """

    def __init__(
        self, dataset: Records, collate: Collate | None, count: int, ahead: int, context: BaseContext | None
    ) -> None:
        self.count = count
        self._ahead = ahead
        self._owner = os.getpid()
        self._poll = select.poll()
        self._workers: list[_Worker] = []
        self._done: dict[int, Done] = {}
        self._given: set[int] = set()
        self._pass: Pass | None = None
        if multiprocessing.current_process().daemon:
            raise ConfigError(
                "num_workers must be 0 in a daemon of multiprocessing, which may not start processes"
            )
        context = context or multiprocessing.get_context()
        if context.get_start_method() == "forkserver":
            _have_forkserver_import("stoker.data.loader_process")
        try:
            for number in range(count):
                self._start(context, Job(dataset, collate, number, count, self._owner))
        except BaseException:
            self.close()
            raise

    @property
    def is_open(self) -> bool:
        """Whether steps can be given to it, here."""
        return bool(self._workers) and self._owner == os.getpid()

    @property
    def has_room(self) -> bool:
        """Whether to give it another step: as many are under way, or wait to be taken, as it should have."""
        return len(self._given) < self.count * self._ahead

    def begin(self, of: Pass) -> None:
        """From here on steps are of this pass; what is under way for another is not wanted any more."""
        self._pass = of
        self._done.clear()
        self._given.clear()
        for worker in self._workers:
            worker.file.wanted_pass = of.number

    def give(self, step: int) -> None:
        """Have a step read. Raises LoaderWorkerLost."""
        assert self._pass is not None
        while True:
            worker = min(self._workers, key=lambda one: len(one.todo))
            if len(worker.todo) < self._ahead:
                break
            self._receive(None)  # all are at what an older pass wanted
        if worker.told != self._pass.number:
            worker.told = self._pass.number
            self._tell(worker, self._pass)
        worker.todo.add((self._pass.number, step))
        self._given.add(step)
        self._tell(worker, step)

    def take(self, step: int) -> Done:
        """The step, once it is there. Raises LoaderWorkerLost."""
        while step not in self._done:
            self._receive(None)
        self._given.discard(step)
        return self._done.pop(step)

    def look(self) -> list[Done]:
        """Take in what has come, without waiting for more; all that is not taken yet. Raises LoaderWorkerLost."""
        self._receive(0)
        return list(self._done.values())

    def close(self) -> None:
        """End all processes: those at work have a moment to end their step. What was handed out stays valid."""
        workers, self._workers = self._workers, []
        self._done, self._given, self._poll = {}, set(), select.poll()
        is_owner = self._owner == os.getpid()
        for worker in workers:
            if is_owner:
                _shut(worker.connection)
            worker.connection.close()
        until = time.monotonic() + GRACE_S
        for worker in workers:
            if is_owner:
                _end(worker, until)
            os.close(worker.pidfd)
            worker.file.close()

    def _start(self, context: Any, job: Job) -> None:
        ours, theirs = multiprocessing.Pipe()
        file = ArenaFile()
        try:
            process = context.Process(
                target=work, args=(job, theirs, file), name=f"stoker-loader-{job.number}", daemon=True
            )
            _begin(process)
            pidfd = os.pidfd_open(process.pid)
        except BaseException:
            ours.close()
            file.close()
            raise
        finally:
            theirs.close()
        worker = _Worker(process, ours, pidfd, file, ArenaReader(file))
        self._workers.append(worker)
        for fd in (ours.fileno(), pidfd):
            self._poll.register(fd, select.POLLIN)

    def _tell(self, worker: _Worker, what: Pass | int) -> None:
        """A few bytes: a pipe has room for all that a busy process is told, so that this never waits for one that waits
        to be read from."""
        try:
            worker.connection.send(what)
        except OSError:
            raise self._lost(worker) from None

    def _receive(self, timeout_ms: int | None) -> None:
        ready = {fd for fd, _ in self._poll.poll(timeout_ms)}
        for worker in self._workers:
            if worker.connection.fileno() in ready:
                self._take_in(worker)
        for worker in list(self._workers):
            if worker.pidfd in ready:
                raise self._lost(worker)

    def _take_in(self, worker: _Worker) -> None:
        try:
            message = worker.connection.recv_bytes()
            with reading_from(worker.arena):
                done: Done = ForkingPickler.loads(message)
        except (EOFError, ConnectionError):
            raise self._lost(worker) from None
        except BaseException:
            self.close()  # in the midst of a message: what follows would not be understood
            raise
        worker.todo.discard((done.number, done.step))
        if self._pass is not None and done.number == self._pass.number:
            self._done[done.step] = done

    def _lost(self, worker: _Worker) -> LoaderWorkerLost:
        """The error that says so, after all others are ended as well."""
        _, step = min(worker.todo, default=(0, None))
        pid = worker.process.pid
        worker.process.join(GRACE_S)
        code = worker.process.exitcode
        self.close()
        at = "" if step is None else f" at step {step} of the loop or after"
        if code is not None and code < 0:
            name = signal.strsignal(-code) or str(-code)
            how = f"is killed by signal: {name}{at}. Mostly its memory ran out: try fewer num_workers"
        else:
            how = f"exited unexpectedly with code {code}{at}. Its standard error says why"
        return LoaderWorkerLost(f"DataLoader worker (pid {pid}) {how}")


def _have_forkserver_import(module: str) -> None:
    """Once for all processes, as PyTorch takes a second of a core. Without effect if it runs already."""
    server: Any = forkserver._forkserver
    wanted = list(getattr(server, "_preload_modules", ["__main__"]))
    if module not in wanted:
        forkserver.set_forkserver_preload([*wanted, module])


def _begin(process: BaseProcess) -> None:
    # While it imports what it needs, Ctrl-C is for the training process: it would end with a traceback of its own. What
    # a fork server starts is not only ours.
    held_back = set() if getattr(process, "_start_method", "") == "forkserver" else {signal.SIGINT}
    resource_tracker.ensure_running()  # where that is started with the first process, Ctrl-C is let through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held_back)
    try:
        process.start()
    except OSError:
        raise
    except Exception as error:
        error.add_note(
            "a loader process that is not forked is sent the dataset and collate_fn pickled: their functions and "
            "classes must be defined at a module's top level (no lambda)"
        )
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _shut(connection: Connection) -> None:
    """The other end reads its end, whoever has inherited copies of this one."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as sock:
        sock.shutdown(socket.SHUT_RDWR)


def _end(worker: _Worker, until: float) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        worker.process.join(max(0.0, until - time.monotonic()))
        if worker.process.exitcode is not None:
            break
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(worker.pidfd, number)
        until = time.monotonic() + GRACE_S
    else:
        worker.process.join()
    with suppress(ValueError):  # where the script has SIGCHLD ignored, nobody learns how it ended
        worker.process.close()
