"""The process that answers a mount: reads requests from the device, and carries out what the core decides.

It never looks at its own mount: to wait for oneself is to wait for ever. Where it ends without the mount having ended,
whoever holds the device starts another one, which goes on in its place (`holder.py`).
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain

from stoker._native import PlainFiles, read_request
from stoker.cache.mount import answers, device
from stoker.cache.mount.core import MountCore
from stoker.cache.mount.finding import Finding
from stoker.cache.mount.questions import (
    Agreed,
    Ask,
    CloseBacking,
    CloseOtherBackings,
    Effect,
    Question,
    Remember,
    Reply,
    StageDrop,
    StageKeep,
    Tell,
)
from stoker.cache.mount.records import Record, RequestRead, TakenAgain
from stoker.cache.mount.requests import RESENT, Body, Changing, Header, Interrupt, Opcode, Opening, parse
from stoker.cache.mount.signals import Signals
from stoker.cache.mount.state_log import StateLog
from stoker.cache.mount.threads import is_ending, is_killed, process_of
from stoker.cache.mount.unanswered import IS_SENT_AGAIN, Unanswered
from stoker.cache.mount.waiting import Failed
from stoker.cache.mount.workers import Workers
from stoker.cache.mount.writing import SIZE
from stoker.errors import WireError

log = logging.getLogger("stoker.mount")
_WORKERS_MAX = 512
"""Of which those that wait for an origin that hangs take none from the others."""
_TICK_S = 0.25
_FINISH_S, _LOOK_S = 25.0, 0.02
"""`stoker umount` waits for a little longer."""
_REQUEST_BYTES = 1024 * 1024 + 64 * 1024
_BY_PROCESS = frozenset({Opcode.CREATE, Opcode.OPEN, Opcode.FLUSH, Opcode.SETATTR})
"""What is decided by who asks, if it is about writing. The kernel names the thread."""
_GONE = frozenset({errno.ENOENT, errno.ENODEV})
"""Of an answer: nobody waits for it any more."""


class Daemon:
    """Answers the mount of this number (MAJOR:MINOR) whose requests come from `fd`, until it is unmounted. A request
    that several daemons before read and did not live to answer fails, instead of ending this one as well. `plain`:
    where the core says which files are opened without it. `follows_reload`: the one before was told to end, which no
    request is to blame for."""

    def __init__(
        self,
        fd: int,
        number: str,
        core: MountCore,
        finding: Finding,
        state_log: StateLog,
        *,
        plain: PlainFiles,
        follows_reload: bool = False,
    ) -> None:
        self._fd = fd
        self._plain = plain
        self._number = number
        self._core = core
        self._finding = finding
        self._log = state_log
        self._unanswered = Unanswered()
        self._signals = Signals(is_ending)
        self._follows_reload = follows_reload
        self._on_ready: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._workers = Workers("stoker-mount", _WORKERS_MAX)
        self._teller = Workers("stoker-mount-tell", 1)

    def run(self, on_ready: Callable[[], None]) -> None:
        """Returns once it is unmounted. `on_ready`: the kernel has agreed, now or before."""
        self._on_ready = on_ready
        self._finding.facts = self._facts
        self._core.restore(self._left())
        self._carry_out(self._core.begin(time.time_ns(), time.monotonic()))
        if self._core.is_agreed:
            on_ready()
        threading.Thread(target=self._tick, name="stoker-mount-tick", daemon=True).start()
        buffer = self._log.buffer(_REQUEST_BYTES)
        view = memoryview(buffer)
        if not self._core.is_taken_over:
            self._finding.tell_left()
        elif self._core.state.flags & IS_SENT_AGAIN:
            self._tell((answers.send_again(),))
        else:
            self._take_again(view)
        os.set_blocking(self._fd, True)
        while True:
            try:
                size_bytes = self._read(view)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    self._finish()
                    return
                if error.errno in (errno.EINTR, errno.ENOENT):
                    continue  # it was called off before it was read
                raise
            self._take(view[:size_bytes])

    def _read(self, buffer: memoryview) -> int:
        """The next request that needs a decision. The others are answered on the way; not where each is to be written
        down first."""
        if self._core.state.flags & IS_SENT_AGAIN:
            return read_request(self._fd, buffer, self._core.attributes, self._plain)
        return os.readv(self._fd, [buffer])

    def _finish(self) -> None:
        """It is unmounted: what was written goes to the origin, and nobody waits for longer than that may take."""
        with self._lock:
            effects = self._remembered(self._core.end(time.monotonic()))
        self._carry_out(effects)
        until = time.monotonic() + _FINISH_S
        while time.monotonic() < until:
            with self._lock:
                state = self._core.state
                if not state.staged.all() and not state.waiting.is_asked(StageDrop, StageKeep):
                    return
            time.sleep(_LOOK_S)
        for staged in self._core.state.staged.all():
            log.error("%s is not written in time", staged.path)
            self._finding.find(StageKeep(staged.stage, staged.path))

    def _take_again(self, last: memoryview) -> None:
        """What daemons before have read and not answered, of a kernel that does not send it again. `last` begins with
        the last one."""
        size_bytes = int.from_bytes(last[:4], "little")
        if 0 < size_bytes <= len(last):
            self._note(last[:size_bytes])
        for unique, request in self._unanswered.left():
            if device.is_waited_for(self._fd, unique):
                self._take(memoryview(request))
            else:
                self._unanswered.answered(unique)

    def _note(self, request: memoryview) -> None:
        with self._lock:
            if read := self._unanswered.read(request):
                self._log.append(read)

    def _take(self, data: memoryview) -> None:
        unique = int.from_bytes(data[8:16], "little")
        if not self._core.state.flags & IS_SENT_AGAIN:
            self._note(data)
        try:
            request = parse(data)
            if unique & RESENT and self._has_ended_others(unique):
                log.error("request %d ended the daemons before this one: it fails", request.header.opcode)
                self._write((answers.refusal(unique, errno.EIO),))
                return
            thread = request.header.pid
            if request.header.opcode in _BY_PROCESS and not _writes_nothing(request.body):
                request = request._replace(header=_of_process(request.header))
            with self._lock:
                if isinstance(request.body, Interrupt):
                    self._signals.signal(self._unanswered.number(request.body.unique))
                    effects = self._interrupted()
                else:
                    effects = self._remembered(self._core.step(request, time.monotonic()))
                    if unique in self._core.state.waiting:
                        self._signals.asks(unique, thread, self._core.state.waiting)
        except WireError as error:
            log.error("%s", error)
            self._write((answers.refusal(unique, errno.EINVAL),))
            return
        except Exception:
            # A defect costs one request, not the mount.
            log.exception("a request could not be answered")
            self._write((answers.refusal(unique, errno.EIO),))
            return
        self._carry_out(effects)

    def _interrupted(self) -> list[Effect]:
        """What those are told who got a signal and are to end."""
        core = self._core
        return [effect for one in self._signals.ending(core.state.waiting) for effect in core.interrupt(one)]

    def _left(self) -> Iterator[Record]:
        """What daemons before wrote down for the core."""
        for record in self._log.read():
            if isinstance(record, TakenAgain | RequestRead):
                self._unanswered.restore(record)
            else:
                yield record

    def _has_ended_others(self, unique: int) -> bool:
        with self._lock:
            has_ended, taken = self._unanswered.takes_again(unique, is_excused=self._follows_reload)
            if taken:
                self._log.append(taken)
        return has_ended

    def _answer(self, number: int, question: Question) -> None:
        """Find out, and do what follows. Where an origin hangs, what nobody waits for takes no time from the rest."""
        with self._lock:
            if self._core.state.waiting.gives_up(number):
                return
        answer: object = Failed(errno.EIO)
        try:
            answer = self._found(question)
        finally:
            self._carry_out(self._decided(number, answer))

    def _decided(self, number: int, answer: object) -> list[Effect]:
        """What follows of an answer."""
        with self._lock:
            return self._remembered(self._core.answered(number, answer, time.monotonic()))

    def _facts(self) -> dict[str, object]:
        with self._lock:
            return self._core.facts()

    def _found(self, question: Question) -> object:
        if isinstance(question, Tell):
            self._tell(question.notices)
            return None
        return self._finding.find(question)

    def _tick(self) -> None:
        while True:
            time.sleep(_TICK_S)
            try:
                with self._lock:
                    effects = self._remembered(self._core.tick(time.monotonic())) + self._interrupted()
                    if self._log.is_long:
                        self._log.rewrite(chain(self._core.snapshot(), self._unanswered.records()))
                self._carry_out(effects)
            except Exception:
                # Without it nobody would be told that it took too long.
                log.exception("something is wrong with the mount")

    def _remembered(self, effects: list[Effect]) -> list[Effect]:
        """Write down what is to be, in the order in which it was decided; what is left to do."""
        left: list[Effect] = []
        for effect in effects:
            if isinstance(effect, Remember):
                self._log.append(effect.record)
            else:
                left.append(effect)
        return left

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        """One after the other. What cannot be done costs no more than itself: to who waits for it, that it failed."""
        left = deque(effects)
        while left:
            effect = left.popleft()
            try:
                self._do(effect)
            except Exception:
                log.exception("what the mount is to do could not be done")
                if isinstance(effect, Ask):
                    # Not EAGAIN, which programs take for a file that has nothing to say yet.
                    left += self._decided(effect.number, Failed(errno.EIO))

    def _do(self, effect: Effect) -> None:
        match effect:
            case Reply(parts):
                self._write(parts)
            case Ask(number, question):
                workers = self._teller if isinstance(question, Tell) else self._workers
                workers.do(partial(self._answer, number, question))
            case CloseBacking(backing_id):
                self._close_backing(backing_id)
            case CloseOtherBackings(kept):
                self._close_other_backings(kept)
            case Agreed(readahead_bytes):
                self._set_readahead(readahead_bytes)
                self._on_ready()
            case Remember(record):
                self._log.append(record)

    def _write(self, parts: Sequence[bytes | memoryview]) -> None:
        unique = 0
        if self._unanswered:
            unique, parts = self._unanswered.addressed(parts)
        try:
            os.writev(self._fd, parts)
        except OSError as error:
            if error.errno not in _GONE:
                log.error("the kernel does not take an answer: %s", error.strerror)
        if unique:
            self._unanswered.answered(unique)

    def _tell(self, notices: Sequence[bytes]) -> None:
        for notice in notices:
            try:
                os.write(self._fd, notice)
            except OSError as error:
                if error.errno not in (*_GONE, errno.ENOTDIR):
                    log.warning("the kernel does not take a notice: %s", error.strerror)

    def _close_backing(self, backing_id: int) -> None:
        try:
            device.close_backing(self._fd, backing_id)
        except OSError as error:
            log.warning(
                "the kernel keeps a file open that was read in the daemon's place: %s", error.strerror
            )

    def _close_other_backings(self, kept: frozenset[int]) -> None:
        """The kernel counts them from 1 on: what it would call the next one bounds those there are."""
        try:
            newest = device.open_backing(self._fd, self._log.fileno())
        except OSError as error:
            log.warning("backing files that a daemon before left are not closed: %s", error.strerror)
            return

        def close() -> None:
            for backing_id in range(newest, 0, -1):
                if backing_id not in kept:
                    with suppress(OSError):  # most are closed
                        device.close_backing(self._fd, backing_id)

        self._workers.do(close)

    def _set_readahead(self, readahead_bytes: int) -> None:
        try:
            device.set_readahead(self._number, readahead_bytes)
        except OSError as error:
            log.info("the kernel reads ahead as much as it likes: %s", error.strerror)


def _writes_nothing(body: Body) -> bool:
    """Whether a file is opened to be read, or looks otherwise and is what it was."""
    if isinstance(body, Changing):
        return not body.valid & SIZE
    return isinstance(body, Opening) and body.flags & os.O_ACCMODE == os.O_RDONLY


def _of_process(header: Header) -> Header:
    """With the number of the process that the thread is of."""
    process = process_of(header.pid)
    if not process:
        return header
    return header._replace(pid=-process if is_killed(header.pid) else process)
