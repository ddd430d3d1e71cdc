"""Workers that wait for each other by name: `stoker.barrier` and `stoker.sync`. PURE.

A barrier belongs to a generation and a turn: its n-th use by this name since the world began. It is over when every
member of that world has come, and in vain when one has left that world without having come: at an agreed commit, to
which those who wait here cannot come. Which turns are over is kept, so that a worker whose answer was lost with a
master is answered by the next one although the others are long past it. Calls that wait are not kept: agents repeat
them.

A sync point is one per name. A worker that comes there is told at once whether all workers of the newest world have;
of all workers that live, while there has been no world.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from stoker.errors import ConfigError, WireError
from stoker.job.services import Served
from stoker.wire.exits import Reason
from stoker.wire.job import Answer, WorkerAnswer, World
from stoker.wire.meeting import Arrive, Met, decode_arrive

PREFIX = "meeting/"
TURNS = f"{PREFIX}turns"
SYNCS = f"{PREFIX}sync/"
NAMES_MAX = 1000
"""Barriers of one world, and sync points that one worker may come to: what is kept of them stays small."""


class _Turns(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The barriers of one generation that are over: the last turn of each."""

    generation: int
    turns: dict[str, int]


class Meetings:
    """The service behind barriers and sync points. Raises WireError for records that cannot be read."""

    failure = ""
    work_done = 0

    def __init__(self, records: Mapping[str, bytes] | None = None) -> None:
        self._generation = 0
        self._turns: dict[str, int] = {}
        self._syncs: dict[str, set[str]] = {}
        """Points that each worker has come to."""
        self._members: frozenset[str] = frozenset()
        """Those who are to come."""
        self._left: set[str] = set()
        """Those of them who will not come any more."""
        self._finished: set[str] = set()
        """Those of them whose training function has returned."""
        self._waiting: dict[tuple[str, int], dict[str, int]] = {}
        """Call numbers of the workers that wait, by name and turn, in the newest world."""
        self._answers: list[WorkerAnswer] = []
        self._records: dict[str, bytes | None] = {}
        for key, value in (records or {}).items():
            if key.startswith(PREFIX):
                self._restore(key, value)

    def call(self, worker: str, number: int, body: bytes, now: float) -> None:
        """See the port. Raises WireError, ConfigError."""
        arrive = decode_arrive(body)
        if arrive.kind == "sync":
            self._on_sync(worker, number, arrive.name)
        else:
            self._on_barrier(worker, number, arrive)

    def on_world(self, world: World | None, live: Iterable[str], now: float) -> None:
        """Barriers of an older world are over: their callers have been interrupted and come again."""
        alive = frozenset(live)
        generation = world.generation if world is not None else 0
        self._members = frozenset(m.worker for m in world.members) if world is not None else alive
        for worker in self._syncs.keys() - alive - self._members:
            del self._syncs[worker]
            self._records[SYNCS + worker] = None
        if generation != self._generation:
            self._generation = generation
            self._left.clear()
            self._finished.clear()
            self._waiting.clear()
            self._turns.clear()
            self._keep_turns()

    def on_left(self, worker: str) -> None:
        """Nobody need wait for it any longer: a new world follows, for those who wait, too."""
        if worker in self._members:
            self._left.add(worker)
            for place, there in list(self._waiting.items()):
                if worker not in there:
                    self._answer_all(self._waiting.pop(place), Met(all_there=False, missing=1))

    def on_finished(self, worker: str) -> None:
        """It should have come to every barrier where others wait."""
        if worker in self._members:
            self._finished.add(worker)
            for (name, turn), there in list(self._waiting.items()):
                if worker not in there:
                    self._refuse_all(name, turn)

    def on_exit(self, worker: str, reason: Reason, why: str, now: float) -> None:
        """See the port: a new world follows."""

    def on_tick(self, now: float) -> None:
        """See the port: nothing here runs out."""

    def take(self) -> Served:
        """See the port."""
        served = Served(tuple(self._answers), self._records)
        self._answers, self._records = [], {}
        return served

    def _on_sync(self, worker: str, number: int, name: str) -> None:
        points = self._syncs.setdefault(worker, set())
        if name not in points:
            if len(points) >= NAMES_MAX:
                raise ConfigError(f"a worker comes to at most {NAMES_MAX} sync points: {name!r} is one more")
            points.add(name)
            self._records[SYNCS + worker] = msgspec.msgpack.encode(sorted(points))
        missing = sum(name not in self._syncs.get(member, ()) for member in self._members)
        self._answer(worker, number, Met(all_there=missing == 0, missing=missing))

    def _on_barrier(self, worker: str, number: int, arrive: Arrive) -> None:
        if arrive.generation != self._generation or worker not in self._members:
            return  # the caller is about to learn that its world is over
        if self._turns.get(arrive.name, -1) >= arrive.turn:
            self._answer(worker, number, Met(all_there=True))
            return
        if arrive.name not in self._turns and len(self._turns) >= NAMES_MAX:
            raise ConfigError(
                f"a world has at most {NAMES_MAX} barriers: {arrive.name!r} is one more; one name serves any number of "
                "times"
            )
        there = self._waiting.setdefault((arrive.name, arrive.turn), {})
        there[worker] = number
        missing = self._left - there.keys()
        if self._finished - there.keys():
            self._refuse_all(arrive.name, arrive.turn)
        elif missing:
            self._answer_all(self._waiting.pop((arrive.name, arrive.turn)), Met(False, len(missing)))
        elif self._members <= there.keys():
            self._turns[arrive.name] = arrive.turn
            self._keep_turns()
            self._answer_all(self._waiting.pop((arrive.name, arrive.turn)), Met(all_there=True))

    def _refuse_all(self, name: str, turn: int) -> None:
        there = self._waiting.pop((name, turn))
        absent = ", ".join(sorted(self._finished - there.keys()))
        why = (
            f"{absent} has returned from the @stoker.elastic function without having come to barrier {name!r}"
            f"{f' {turn + 1} times' if turn else ''}: all workers of a world have to come equally often"
        )
        self._answers += [WorkerAnswer(w, Answer(number=number, error=why)) for w, number in there.items()]

    def _answer_all(self, there: Mapping[str, int], met: Met) -> None:
        for worker, number in there.items():
            self._answer(worker, number, met)

    def _answer(self, worker: str, number: int, met: Met) -> None:
        answer = Answer(number=number, body=msgspec.msgpack.encode(met))
        self._answers.append(WorkerAnswer(worker, answer))

    def _keep_turns(self) -> None:
        self._records[TURNS] = msgspec.msgpack.encode(_Turns(self._generation, self._turns))

    def _restore(self, key: str, value: bytes) -> None:
        try:
            if key == TURNS:
                kept = msgspec.msgpack.decode(value, type=_Turns)
                self._generation, self._turns = kept.generation, dict(kept.turns)
            else:
                self._syncs[key.removeprefix(SYNCS)] = msgspec.msgpack.decode(value, type=set[str])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise WireError(
                f"the journal's record {key!r} cannot be read: {error}; was it written by another version of Stoker? "
                "Start the job with a new journal"
            ) from None
