"""A seeded world around the shipping core of dynamic shards.

Workers of uneven speed come, hang, fail and die; messages are lost, doubled and delayed; the master dies at any point
and goes on from nothing but what it was told to keep; a checkpoint's progress is loaded in the middle of it all. Beside
the core runs a naive model of what must be true, and after every event the two are compared.
"""

from __future__ import annotations

from collections.abc import Callable

from stoker.job.shards import Decision, FailJob, Reply, Shards
from stoker.wire.shards import (
    AddRecords,
    DatasetSpec,
    EndStream,
    ExportShards,
    ImportShards,
    LeaseShard,
    NoMoreShards,
    Outcome,
    RecordSplit,
    RegisterDataset,
    ReportShard,
    Shard,
    ShardAnswer,
    ShardCall,
    ShardLeased,
    ShardRefused,
    ShardState,
    Split,
    StreamSplit,
    TableSplit,
    decode_answer,
    decode_call,
    encode,
)
from tests.sim.loop import Loop
from tests.sim.shard_model import Model

LIMIT_S = 3000.0
TICK_S = 0.5
FEEDER = "feeder"
LAST_REWIND_S = 80.0


class SimThread:
    """One thread of a worker: takes shards of each dataset until there are no more."""

    def __init__(self, worker: SimWorker, datasets: list[str]) -> None:
        self.worker, self.world = worker, worker.world
        self.datasets = datasets
        self.is_done = False

    def start(self) -> None:
        self.register(list(self.datasets))

    def register(self, names: list[str]) -> None:
        if names:
            spec = self.world.specs[names[0]]
            self.worker.call(RegisterDataset(names[0], spec), lambda _: self.register(names[1:]))
        else:
            self.lease()

    def lease(self) -> None:
        if not self.datasets:
            self.is_done = True
            return
        self.worker.call(LeaseShard(self.datasets[0]), self.leased)

    def leased(self, answer: ShardAnswer) -> None:
        world, worker, dataset = self.world, self.worker, self.datasets[0]
        if isinstance(answer, NoMoreShards):
            # A dataset that may be put back is asked for again and again.
            self.datasets = [*self.datasets[1:], *([dataset] if world.may_rewind else [])]
            worker.later(world.rng.uniform(0.5, 2.0) if world.may_rewind else 0.0, self.lease)
            return
        if isinstance(answer, ShardRefused):
            world.check(answer.job_failed, f"{worker.name} is refused: {answer.why}")
            self.is_done = True
            return
        assert isinstance(answer, ShardLeased)
        shard, lease = answer.shard, answer.lease
        timeout_s = world.specs[dataset].lease_timeout_s
        hangs = world.rng.chance(world.hang_chance)
        seconds = timeout_s * 1.5 if hangs else world.rng.uniform(0.05, 0.6) * worker.slowness
        worker.later(seconds, lambda: self.finish(dataset, shard, lease))

    def finish(self, dataset: str, shard: Shard, lease: int) -> None:
        world = self.world
        outcome: Outcome = "done"
        if world.is_poison(dataset, shard) or world.rng.chance(world.fail_chance):
            outcome = "failed"
        elif world.rng.chance(world.return_chance):
            outcome = "returned"
        reason = f"ValueError in {self.worker.name}" if outcome == "failed" else ""
        report = ReportShard(dataset, shard.number, lease, outcome, reason, shard.rewinds)
        self.worker.call(report, lambda _: self.lease())


class SimWorker:
    """A worker process: repeats its calls until they are answered, drops answers to calls that are not open."""

    def __init__(self, world: ShardWorld, name: str, threads: int) -> None:
        self.world, self.name = world, name
        self.alive = True
        self.slowness = world.rng.choice([0.5, 1.0, 1.0, 4.0])
        self.next_request = 0
        self.open: dict[int, Callable[[ShardAnswer], None]] = {}
        self.threads = [SimThread(self, list(world.specs)) for _ in range(threads)]
        for thread in self.threads:
            thread.start()

    def later(self, delay_s: float, callback: Callable[[], None]) -> None:
        self.world.loop.after(delay_s, lambda: callback() if self.alive else None)

    def call(self, call: ShardCall, on_answer: Callable[[ShardAnswer], None]) -> None:
        self.next_request += 1 + self.world.rng.below(self.world.number_gap)
        self.open[self.next_request] = on_answer
        self.send(self.next_request, encode(call))

    def send(self, request: int, body: bytes) -> None:
        if request in self.open:
            self.world.to_master(self.name, request, body)
            self.later(self.world.rng.uniform(1.0, 3.0), lambda: self.send(request, body))

    def receive(self, request: int, body: bytes) -> None:
        on_answer = self.open.pop(request, None) if self.alive else None
        if on_answer is not None:
            on_answer(decode_answer(body))


class ShardWorld:
    """One job: a master that may die, workers, a feeder for streams, a network."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.loop = Loop(seed)
        self.rng = rng = self.loop.rng
        self.log: list[str] = []
        self.store: dict[str, bytes] = {}
        self.core: Shards | None = Shards()
        self.failed = ""
        self.crashes_left = rng.choice([0, 0, 1, 3, 8])
        self.crash_chance = rng.choice([0.002, 0.02, 0.1])
        self.lose_chance = rng.choice([0.0, 0.02, 0.2])
        self.double_chance = rng.choice([0.0, 0.05, 0.3])
        self.delay_s = rng.choice([0.01, 0.3, 2.0])
        self.number_gap = rng.choice([1, 1, 3])
        self.fail_chance = rng.choice([0.0, 0.0, 0.03, 0.2])
        self.return_chance = rng.choice([0.0, 0.1])
        self.hang_chance = rng.choice([0.0, 0.0, 0.03])
        self.blame_chance = rng.choice([0.0, 0.3])
        self.may_rewind = rng.chance(0.25)
        self.specs = {f"data-{n}": self.make_spec() for n in range(1 + rng.below(2))}
        self.model = Model(self.specs, self.check)
        self.poison = rng.chance(0.1)
        """Shard 0 of every dataset fails whoever gets it."""
        self.workers: dict[str, SimWorker] = {}
        self.workers_wanted = 1 + rng.below(5)
        self.deaths_left = rng.choice([0, 0, 2, 6])
        self.workers_seen = 0
        self.gone: set[str] = set()
        self.unnoticed: dict[str, str] = {}

    def make_spec(self) -> DatasetSpec:
        rng = self.rng
        size, epochs = 1 + rng.below(7), 1 + rng.below(3)
        low, count = rng.below(100) - 50, 1 + rng.below(40)
        shuffle, seed = rng.chance(0.5), rng.below(1000)
        splits: list[Split] = [
            RecordSplit(count, size, epochs, shuffle=shuffle, seed=seed),
            TableSplit("id", low, low + count, size, epochs, shuffle=shuffle, seed=seed),
            StreamSplit(size),
        ]
        split = splits[rng.below(len(splits))]
        return DatasetSpec(split, lease_timeout_s=rng.choice([8.0, 20.0]), max_failures=1 + rng.below(4))

    # -- the story ----------------------------------------------------------------------------------------

    def run(self) -> str:
        loop, rng = self.loop, self.rng
        for _ in range(self.workers_wanted):
            loop.after(rng.uniform(0.0, 5.0), self.worker_joins)
        for _ in range(self.deaths_left):
            loop.after(rng.uniform(0.5, 60.0), self.worker_dies)
        if self.may_rewind:
            for _ in range(1 + rng.below(3)):
                loop.after(rng.uniform(1.0, 40.0), self.checkpoint)
        self.feed()
        self.ticking()
        loop.run(LIMIT_S, lambda: bool(self.failed) or self.is_over())
        if not self.failed:
            self.check(self.is_over(), "the job neither ends nor fails")
            self.check(
                not self.poison or not any(shard.number == 0 for shard in self.model.shards.values()),
                "poison",
            )
            for name in self.specs:
                self.check(self.model.is_complete(name), f"{name} is not complete")
        verdict = "job failed" if self.failed else "finished"
        return f"shard world {self.seed}: {verdict} after {loop.now:.0f} s, {len(self.model.done)} records"

    def is_over(self) -> bool:
        if self.may_rewind:
            return self.loop.now > LAST_REWIND_S and all(self.model.is_complete(name) for name in self.specs)
        if len(self.workers) <= self.workers_wanted:
            return False
        return all(not w.open and all(t.is_done for t in w.threads) for w in self.workers.values())

    def is_poison(self, dataset: str, shard: Shard) -> bool:
        return self.poison and shard.number == 0

    def worker_joins(self) -> None:
        self.workers_seen += 1
        name = f"worker-{self.workers_seen}"
        self.say(f"{name} joins")
        self.workers[name] = SimWorker(self, name, 1 + self.rng.below(2))

    def worker_dies(self) -> None:
        names = [name for name in self.workers if name != FEEDER]
        if not names:
            return
        name = self.rng.choice(names)
        self.say(f"{name} dies")
        self.workers.pop(name).alive = False
        self.unnoticed[name] = "killed by signal 9"
        self.loop.after(self.rng.uniform(0.1, 3.0), self.notice)
        self.loop.after(self.rng.uniform(0.1, 5.0), self.worker_joins)

    def notice(self) -> None:
        """The master hears of the dead; one that is down hears of them when it is back."""
        for name, why in list(self.unnoticed.items()):
            if self.core is not None and self.tell_gone(name, why):
                self.gone.add(name)
                del self.unnoticed[name]

    def tell_gone(self, name: str, why: str) -> bool:
        core, now, blame = self.core, self.loop.now, self.rng.chance(self.blame_chance)
        assert core is not None
        return self.step(
            f"{name} gone",
            lambda: core.worker_gone(name, now, why, blame=blame),
            lambda _: self.model.worker_gone(name, blame=blame),
        )

    def feed(self) -> None:
        """Somebody tells the master of a stream's records, in pieces that overlap."""
        feeder = self.workers[FEEDER] = SimWorker(self, FEEDER, 0)
        for dataset, spec in self.specs.items():
            if not isinstance(spec.split, StreamSplit):
                continue
            calls: list[ShardCall] = [RegisterDataset(dataset, spec)]
            for partition in ("p0", "p/1")[: 1 + self.rng.below(2)]:
                begin = end = self.rng.below(50)
                for _ in range(self.rng.below(5)):
                    start = max(begin, end - self.rng.below(4))
                    end += self.rng.below(12)
                    calls.append(AddRecords(dataset, end, partition, start))
                self.model.totals[dataset] += end - begin
            calls.append(EndStream(dataset))
            self.feed_next(feeder, calls)

    def feed_next(self, feeder: SimWorker, calls: list[ShardCall]) -> None:
        if calls:
            feeder.call(
                calls[0],
                lambda _: feeder.later(self.rng.uniform(0.0, 4.0), lambda: self.feed_next(feeder, calls[1:])),
            )

    def checkpoint(self) -> None:
        """Somebody keeps a dataset's progress, and puts it back later."""
        names = [name for name in self.workers if name != FEEDER]
        if not names:
            return
        worker = self.workers[self.rng.choice(names)]
        dataset = self.rng.choice(list(self.specs))

        def put_back(answer: ShardAnswer) -> None:
            if isinstance(answer, ShardState):
                worker.later(
                    self.rng.uniform(0.0, 20.0), lambda: worker.call(ImportShards(answer), lambda _: None)
                )

        worker.call(ExportShards(dataset), put_back)

    # -- network ------------------------------------------------------------------------------------------

    def deliver(self, callback: Callable[[], None]) -> None:
        if self.rng.chance(self.lose_chance):
            return
        self.loop.after(self.rng.uniform(0.0, self.delay_s), callback)
        if self.rng.chance(self.double_chance):
            self.loop.after(self.rng.uniform(0.0, 5 * self.delay_s), callback)

    def to_master(self, worker: str, request: int, body: bytes) -> None:
        self.deliver(lambda: self.master_receives(worker, request, body))

    def to_worker(self, reply: Reply) -> None:
        body = encode(reply.answer)

        def arrive() -> None:
            worker = self.workers.get(reply.worker)
            if worker is not None:
                worker.receive(reply.request_id, body)

        self.deliver(arrive)

    # -- the master ---------------------------------------------------------------------------------------

    def ticking(self) -> None:
        core, now = self.core, self.loop.now
        if core is not None:
            self.step("tick", lambda: core.tick(now), lambda _: self.model.tick(now))
        self.loop.after(TICK_S, self.ticking)

    def master_receives(self, worker: str, request: int, body: bytes) -> None:
        core, now = self.core, self.loop.now
        if core is None or worker in self.gone:
            return
        call = decode_call(body)
        self.step(
            f"{worker}#{request} {call}",
            lambda: core.call(worker, request, call, now),
            lambda decision: self.model.call((worker, request), call, decision),
        )

    def step(self, what: str, decide: Callable[[], Decision], tell_model: Callable[[Decision], None]) -> bool:
        """One event of the master, which may die before the records are kept, or before anybody hears of them."""
        decision = decide()
        if what != "tick" or decision.effects:
            self.say(f"{what}: {decision.why}")
        if self.crashes():
            return False
        for key, value in decision.keep:
            if value is None:
                self.store.pop(key, None)
            else:
                self.store[key] = value
        tell_model(decision)
        self.model.observe(decision, self.loop.now)
        assert self.core is not None
        failed = self.model.has_failed()
        self.check(failed == bool(self.core.failed), "a shard that failed too often does not fail the job")
        if self.crashes():
            return True
        for effect in decision.effects:
            if isinstance(effect, Reply):
                self.to_worker(effect)
            elif isinstance(effect, FailJob):
                self.failed = effect.why
        self.check_core()
        return True

    def crashes(self) -> bool:
        if self.core is None or self.crashes_left == 0 or not self.rng.chance(self.crash_chance):
            return False
        self.crashes_left -= 1
        self.say("the master dies")
        self.core = None
        self.loop.after(self.rng.uniform(0.1, 15.0), self.restart)
        return True

    def restart(self) -> None:
        self.say(f"the master is back, with {len(self.store)} records")
        core, now = Shards(), self.loop.now
        self.core = core
        decision = core.restore(self.store, now)
        self.model.master_restarted(now)
        self.check(not decision.keep, "a restore changes records")
        for effect in decision.effects:
            if isinstance(effect, FailJob):
                self.failed = effect.why
        self.check_core()
        self.notice()

    # -- what must be true --------------------------------------------------------------------------------

    def check_core(self) -> None:
        assert self.core is not None
        self.model.compare(self.core, self.store, known=self.workers.keys() | self.unnoticed.keys())
        if self.rng.chance(0.05):
            self.model.compare_twin(self.core, self.store, self.loop.now)

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            raise AssertionError(self.tell(what))

    def tell(self, what: str) -> str:
        story = "\n  ".join(self.log[-40:])
        return f"shard world {self.seed}, the last events:\n  {story}\n  {self.loop.now:.2f} VIOLATED: {what}"

    def say(self, what: str) -> None:
        self.log.append(f"{self.loop.now:8.2f} {what}")


def run_world(seed: int) -> str:
    """Run one world; returns a line about it. Raises AssertionError with its story if an invariant breaks."""
    return ShardWorld(seed).run()
