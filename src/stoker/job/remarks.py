"""What workers want to be in the event log, as one of the master's services. PURE."""

from __future__ import annotations

from collections.abc import Iterable

from stoker.job.events import Record
from stoker.job.services import Served
from stoker.wire.exits import Reason
from stoker.wire.job import Answer, WorkerAnswer, World
from stoker.wire.remarks import TEXT_CHARS_MAX, decode_remark


class Remarks:
    """Writes each remark down once."""

    failure = ""
    work_done = 0

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}
        """Number of each worker's newest call: an older or repeated one is only answered."""
        self._answers: list[WorkerAnswer] = []
        self._events: list[Record] = []

    def call(self, worker: str, number: int, body: bytes, now: float) -> None:
        """See the port. Raises WireError."""
        remark = decode_remark(body)
        if number > self._newest.get(worker, 0):
            self._newest[worker] = number
            text = remark.text[:TEXT_CHARS_MAX]
            figures = {"figures": remark.figures} if remark.figures else {}
            self._events.append(Record(remark.kind, text, {"worker": worker, **figures}))
        self._answers.append(WorkerAnswer(worker, Answer(number=number)))

    def on_world(self, world: World | None, live: Iterable[str], now: float) -> None:
        """Those that live no more say nothing more."""
        alive = set(live)
        self._newest = {worker: number for worker, number in self._newest.items() if worker in alive}

    def on_left(self, worker: str) -> None:
        return

    def on_finished(self, worker: str) -> None:
        return

    def on_exit(self, worker: str, reason: Reason, why: str, now: float) -> None:
        return

    def on_tick(self, now: float) -> None:
        return

    def take(self) -> Served:
        """See the port."""
        served = Served(tuple(self._answers), {}, tuple(self._events))
        self._answers, self._events = [], []
        return served
