"""All that one job's machine knows, and the few moves that every part of it makes. PURE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

from stoker.errors import EXIT_FAILED, ConfigError
from stoker.job.events import Effect, End, Keep, Record
from stoker.job.generations import Generations, Limits
from stoker.job.records import JobRecord, Notebook, Phase, decode_records
from stoker.job.relaunch import RelaunchConfig
from stoker.job.relaunch_budgets import Budgets
from stoker.job.roster import Roster, Worker
from stoker.job.scaling import Mode
from stoker.job.scaling_advice import DEFAULT_TARGET_EFFICIENCY
from stoker.wire.job import Outcome, WorkerState

KIND_KNOWN_S = 30.0
"""At most so long after their start workers that have not said hello may still be importing."""
RETURNS_PER_S = 500.0
"""Nodes that come back to a restarted master in a second: it waits for them longer by what they need."""


@dataclass(frozen=True)
class JobConfig:
    """What the user asked for; times in seconds."""

    job: str = "none"
    min_nodes: int = 1
    max_nodes: int = 1
    node_unit: int = 1
    """A world's nodes are a whole multiple of this."""
    relaunch: RelaunchConfig = field(default_factory=RelaunchConfig)
    check_nodes: bool = False
    """Nodes are checked before they run workers."""
    exclude_stragglers: bool = False
    """Slow nodes are done without while the others hold the minimum."""
    hang_after_s: float = 60.0
    """Least seconds without any progress after which the world is looked at."""
    auto_scale: Mode = "off"
    target_efficiency: float = DEFAULT_TARGET_EFFICIENCY
    """Share of a node's usual work that the last nodes must still add (auto-scale)."""
    outlives_nodes: bool = False
    """No node hosts the master: where all were taken away it waits for others."""
    timeout_s: float = 300.0
    beat_timeout_s: float = 5.0
    park_s: float = 300.0
    last_call_s: float = 1.0

    def __post_init__(self) -> None:
        if self.node_unit < 1 or self.min_nodes % self.node_unit:
            raise ConfigError(
                f"--nnodes {self.min_nodes}:{self.max_nodes} does not fit --node-unit {self.node_unit}: the unit must "
                "be at least 1, and MIN a multiple of it"
            )


@dataclass
class JobState:
    """The machine's memory. `effects` is what is to be done, `touched` whose records and directives may differ."""

    config: JobConfig
    roster: Roster = field(default_factory=Roster)
    generations: Generations = field(default_factory=Generations)
    phase: Phase = "waiting"
    restarts: int = 0
    """Workers that were started in another's place, in all."""
    budgets: Budgets = field(default_factory=Budgets)
    regroups: int = 0
    target_nodes: int = 1
    outcome: Outcome | None = None
    restored: tuple[int, int] = (0, 0)
    """The newest generation, and that of the newest world, in the journal which this master took up."""
    epoch: int = 0
    """Number of this mastership, where there may be several."""
    note: str = ""
    """What the job is waiting for, for people."""
    launched_at: float = -inf
    """When workers were last started in every slot."""
    is_kind_known: bool = False
    """They have had the time to say that they use Stoker."""
    effects: list[Effect] = field(default_factory=list)
    touched: set[str] = field(default_factory=set)
    retold: set[str] = field(default_factory=set)
    """Nodes that are to be told again what they were told before."""
    is_news: bool = True
    """Something happened that may call for a decision."""
    is_roster_news: bool = True
    """It may have changed who is there, or who may run workers: all nodes are to be looked at again."""
    are_budgets_touched: bool = False
    notebook: Notebook = field(default_factory=Notebook)

    @property
    def limits(self) -> Limits:
        """What a world must and may be."""
        config = self.config
        return Limits(config.min_nodes, self.target_nodes, config.node_unit, config.park_s, config.timeout_s)

    @property
    def runs_plain(self) -> bool:
        """Whether workers run that cannot change worlds in the process, or are not known to."""
        return bool(self.roster.workers) and not self.roster.elastic and self.phase in ("forming", "running")

    def is_kind_open(self, now: float) -> bool:
        """Whether the scripts may turn out to use Stoker: none of the workers has said so yet, nor had time to."""
        patience_s = min(KIND_KNOWN_S, self.config.timeout_s / 4)
        return not (self.roster.elastic or self.is_kind_known) and now - self.launched_at < patience_s

    @property
    def is_ending(self) -> bool:
        """Whether some have come to the end of the script: nobody new is needed any more."""
        return bool(self.roster.through) or any(w.finished for w in self.roster.workers.values())

    def record(self, kind: str, why: str, **details: Any) -> None:
        """A line of the event log."""
        self.effects.append(Record(kind, why, {"generation": self.generations.number, **details}))

    def remove(self, worker: Worker) -> None:
        """Forget a worker, but not that its node has come to the end."""
        worker.ended = True
        if worker.finished:
            self.roster.through.add(worker.node)
        self.generations.note(worker)
        self.roster.remove_worker(worker)
        self.touched |= {worker.worker, worker.node}

    def begin_forming(self, why: str, now: float, stop_at_commit: int = -1) -> None:
        """Name the next generation."""
        self.phase = "forming"
        self.generations.begin(why, now, self.roster.live(), stop_at_commit)
        self.regroups += 1
        self.record("generation", why, stop_at_commit=stop_at_commit)

    def rank_of(self, worker: Worker) -> int:
        """Its rank in the newest world; -1: it is in no world yet; before the first one, what it was started with."""
        members = self.generations.members
        member = members.get(worker.worker)
        return member.rank if member is not None else -1 if members else worker.spec.rank

    def name_of(self, worker: Worker) -> str:
        """The worker as people know it."""
        rank, name = self.rank_of(worker), f"{worker.worker} on {worker.node}"
        return f"rank {rank} ({name})" if rank >= 0 else f"{name}, in no world yet"

    def fail(self, exit_code: int, why: str) -> None:
        self.end(Outcome(success=False, exit_code=exit_code or EXIT_FAILED, why=why))

    def end(self, outcome: Outcome) -> None:
        """The job is over."""
        if self.phase == "ended":
            return
        self.phase, self.note = "ended", ""
        self.outcome = outcome
        self.record("ended", outcome.why, success=outcome.success, exit_code=outcome.exit_code)
        self.effects.append(End(outcome))

    # -- what is kept -------------------------------------------------------------------------------------

    def changed_records(self) -> list[Effect]:
        """What has to be written into the journal since the last time."""
        roster, generations = self.roster, self.generations
        job = JobRecord(
            phase=self.phase,
            generation=generations.number,
            stop_at_commit=generations.stop_at_commit,
            why=generations.why,
            fruitless=generations.fruitless,
            last_start=generations.last_start,
            restarts=self.restarts,
            nodes_seen=roster.nodes_seen,
            workers_seen=roster.workers_seen,
            elastic=roster.elastic,
            target_nodes=self.target_nodes,
            regroups=self.regroups,
            outcome=self.outcome,
        )
        keeps: list[Effect] = []
        for name in sorted(self.touched):
            node, worker = roster.nodes.get(name), roster.workers.get(name)
            for key, record in (
                (f"node/{name}", node.record() if node is not None else None),
                (f"worker/{name}", worker.record() if worker is not None else None),
            ):
                if self.notebook.note(key, record):
                    keeps.append(Keep(key, record))
        self.touched.clear()
        if self.notebook.note("world", generations.world):
            keeps.append(Keep("world", generations.world))
        budgets = self.budgets.kept() if self.are_budgets_touched else None
        if budgets is not None and self.notebook.note("budgets", budgets):
            keeps.append(Keep("budgets", budgets))
        self.are_budgets_touched = False
        if self.notebook.note("job", job):
            keeps.append(Keep("job", job))
        return keeps

    @classmethod
    def restore(cls, config: JobConfig, records: Mapping[str, bytes], now: float) -> JobState:
        """What the master before has kept. Raises WireError for records that cannot be read."""
        state = cls(config, target_nodes=config.max_nodes)
        known = decode_records(records)
        if known.job is None:
            return state
        job, roster, generations = known.job, state.roster, state.generations
        state.phase, state.outcome = job.phase, job.outcome
        state.restarts, state.regroups = job.restarts, job.regroups
        if known.budgets is not None:
            state.budgets = Budgets.restore(known.budgets, now)
            state.notebook.note("budgets", known.budgets)
        state.target_nodes = min(max(job.target_nodes, config.min_nodes), config.max_nodes)
        roster.nodes_seen, roster.workers_seen, roster.elastic = job.nodes_seen, job.workers_seen, job.elastic
        wait_s = config.beat_timeout_s + len(known.nodes) / RETURNS_PER_S
        for node in known.nodes.values():
            restored = roster.restore_node(node, now, wait_s)
            restored.check = restored.check if config.check_nodes else "passed"
            kept_node = restored.record()
            state.notebook.note(f"node/{node.join.node}", kept_node)
        holders = (
            {m.worker for m in known.world.members if not m.copy_state} if known.world is not None else ()
        )
        for kept in known.workers.values():
            worker = Worker(kept.spec, kept.node, ended=kept.ended, finished=kept.finished)
            if worker.worker in holders:
                worker.state = WorkerState(fresh=False)
            state.notebook.note(f"worker/{worker.worker}", roster.add_worker(worker).record())
        generations.number, generations.why = job.generation, job.why
        state.restored = job.generation, known.world.generation if known.world is not None else 0
        generations.stop_at_commit = job.stop_at_commit
        generations.fruitless, generations.last_start = job.fruitless, job.last_start
        generations.stuck_since = now
        generations.take(known.world)
        state.notebook.note("world", known.world)
        if roster.workers:
            state.launched_at = now
        if known.world is not None:
            roster.highest_commit = known.world.commits
        if state.phase == "forming":
            generations.resume(roster.live(), now)
        if state.outcome is not None:
            state.effects.append(End(state.outcome))
        state.record("master-restored", f"{len(roster.nodes)} nodes are to come back")
        return state
