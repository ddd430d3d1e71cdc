"""The worker's end of the socket to its agent, read by a thread of its own."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

import msgspec

from stoker.errors import EXIT_FAILED, ConfigError, JobError, MasterUnreachable, StokerError, WireError
from stoker.wire.frames import FrameCodec
from stoker.wire.job import REFUSAL, Answer, Call, Failure, Hello, Order, ToWorker, WorkerState

log = logging.getLogger("stoker.train")
LateAnswer = Callable[[bytes], bytes | None]
"""Takes an answer that nobody waits for any more; returns the body of another call to make of it, or None."""


class AgentChannel:
    """Sends states and calls, receives orders and answers. `on_order`, `on_lost`: called in the reading thread."""

    def __init__(self, path: str, worker: str) -> None:
        self._codec: FrameCodec[ToWorker] = FrameCodec(ToWorker)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._lock = threading.Lock()
        self._answered = threading.Condition()
        self._answers: dict[int, Answer | None] = {}
        """By the number of their call; None: there is none yet."""
        self._late: dict[int, Callable[[Answer], None]] = {}
        """By the number of a call that nobody waits for any more: what to do about its answer."""
        self._numbers = itertools.count(1)
        self._pid = os.getpid()
        self._is_lost = False
        self._refusal = ""
        """Why this process cannot speak for the worker, as the agent says."""
        self._unsent = b""
        self._on_beat: Callable[[], None] = lambda: None
        self._beat_s = 1.0
        self._beat_at = 0.0
        """When the next beat is due, however much is heard meanwhile."""
        try:
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise ConfigError(
                f"no agent answers at STOKER_AGENT_SOCKET={path} ({error.strerror}): start the script with "
                "`stoker run`, or unset that variable to run it alone"
            ) from None
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._send(Hello(worker=worker, pid=os.getpid()))

    def start(
        self,
        on_order: Callable[[Order], None],
        on_lost: Callable[[], None],
        *,
        on_beat: Callable[[], None] = lambda: None,
        beat_s: float = 1.0,
    ) -> None:
        """Begin to listen. `on_beat` is called in the reading thread, every `beat_s` seconds."""
        self._on_beat, self._beat_s = on_beat, beat_s
        self._beat_at = time.monotonic() + beat_s
        thread = threading.Thread(
            target=self._listen, args=(on_order, on_lost), name="stoker-orders", daemon=True
        )
        thread.start()

    def say(self, state: WorkerState) -> None:
        """Tell the agent what this worker is. Never waits: an agent that does not read misses this, and hears the
        next."""
        frame = self._codec.encode(state)
        with self._lock, contextlib.suppress(OSError):
            if self._finish(socket.MSG_DONTWAIT):
                sent = self._socket.send(frame, socket.MSG_DONTWAIT)
                self._unsent = frame[sent:]

    def fail(self, message: str) -> None:
        """Tell the agent why this worker is about to end."""
        if os.getpid() == self._pid:
            self._send(Failure(message=message))

    def call(
        self,
        service: str,
        body: bytes,
        check: Callable[[], None] = lambda: None,
        on_late: LateAnswer | None = None,
    ) -> bytes:
        """Ask a service of the master's and wait for the answer, however long its master is away.

        `check` is called whenever this worker has been told something, and may raise to end the waiting. The answer
        comes all the same: `on_late` is given it then, in the reading thread, and may return another call to make of
        it, whose answer nobody waits for.

        Raises JobError for a call that the service refuses, MasterUnreachable when the agent is gone, ConfigError in a
        process that the worker has forked off or started.
        """
        if os.getpid() != self._pid:
            raise ConfigError(
                "a process that a worker has forked off cannot speak for it: use stoker.shards, barrier and sync in "
                "the training process, and hand what they say to its data-loading processes"
            )
        number = next(self._numbers)
        with self._answered:
            self._answers[number] = None
        try:
            self._send(Call(number=number, service=service, body=body))
            with self._answered:
                while (answer := self._answers[number]) is None:
                    if self._is_lost:
                        raise self.loss()
                    check()
                    self._answered.wait()
        except BaseException:
            self._abandon(number, service, on_late)
            raise
        with self._answered:
            del self._answers[number]
        if answer.error:
            raise JobError(answer.error)
        return answer.body

    def tell(self, service: str, body: bytes) -> None:
        """Ask a service of the master's something whose answer is of no interest."""
        if os.getpid() == self._pid:
            self._send(Call(number=next(self._numbers), service=service, body=body))

    def loss(self) -> StokerError:
        """Why nothing is heard of the agent any more."""
        if self._refusal:
            return ConfigError(
                f"{self._refusal}: use @stoker.elastic, stoker.shards, barrier and sync in the training process only"
            )
        return MasterUnreachable("this worker's agent is gone")

    def wake(self) -> None:
        """Have those who wait for an answer look whether they still should."""
        with self._answered:
            self._answered.notify_all()

    def _send(self, message: msgspec.Struct) -> None:
        with self._lock, contextlib.suppress(OSError):  # the reading thread reports a lost agent
            self._finish(0)
            self._codec.send(self._socket, message)

    def _finish(self, flags: int) -> bool:
        """Send the rest of a frame that was cut off; whether all of it is sent."""
        while self._unsent:
            sent = self._socket.send(self._unsent, flags)
            self._unsent = self._unsent[sent:]
        return True

    def _wait(self) -> None:
        """Until there is something to read."""
        while True:
            left_s = self._beat_at - time.monotonic()
            # Not `select`, which knows no descriptor above 1023: a script may hold any number of files open.
            if left_s > 0 and self._poll.poll(math.ceil(left_s * 1000)):
                return
            if left_s <= 0:
                self._on_beat()
                self._beat_at = time.monotonic() + self._beat_s

    def _listen(self, on_order: Callable[[Order], None], on_lost: Callable[[], None]) -> None:
        try:
            while (message := self._receive()) is not None:
                if isinstance(message, Order):
                    on_order(message)
                    self.wake()
                else:
                    self._on_answer(message)
        except BaseException as error:  # noqa: BLE001 (whatever it is: nobody would hear the agent any more)
            self._end_process(error)
        with self._lock:
            self._socket.close()
        with self._answered:
            self._is_lost = True
            self._answered.notify_all()
        on_lost()

    def _receive(self) -> ToWorker | None:
        """The next message; None when the agent is gone."""
        self._wait()
        try:
            return self._codec.receive(self._socket)
        except (WireError, OSError) as error:
            log.warning("nothing more can be heard of this worker's agent: %s", error)
            return None

    def _end_process(self, error: BaseException) -> NoReturn:
        """A worker that hears nothing any more would train on in a world that is over, or wait for ever."""
        text = "".join(traceback.format_exception(error))
        try:
            with contextlib.suppress(OSError):
                sys.stderr.write(text)
                sys.stderr.flush()
                sys.stdout.flush()
            self.fail(text)
        finally:
            os._exit(EXIT_FAILED)

    def _on_answer(self, answer: Answer) -> None:
        with self._answered:
            if answer.number == REFUSAL:
                self._refusal = answer.error
                return
            if answer.number in self._answers:
                self._answers[answer.number] = answer
                self._answered.notify_all()
                return
            on_late = self._late.pop(answer.number, None)
        if on_late is not None:
            on_late(answer)

    def _abandon(self, number: int, service: str, on_late: LateAnswer | None) -> None:
        """Nobody waits for this answer any more, which may be here already."""

        def take(answer: Answer) -> None:
            reply = on_late(answer.body) if on_late is not None and not answer.error else None
            if reply is not None:
                self._send(Call(number=next(self._numbers), service=service, body=reply))

        with self._answered:
            answer = self._answers.pop(number)
            if answer is None:
                self._late[number] = take
        if answer is not None:
            take(answer)
