"""What to do about a worker that ended: a function of why it ended, what is left of the budgets, and the world. PURE.

The rules are DLRover's (an error of the script is not relaunched unless told so, want of memory with more memory up to
a limit, what was taken away always, the rest up to a budget), with budgets that forgive after progress, a node that is
blamed only with cause, and a stop as soon as no success is possible.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from stoker.base.backoff import backoff_s
from stoker.base.rng import Rng
from stoker.base.units import format_bytes
from stoker.job.relaunch_budgets import Budgets, WorldFacts
from stoker.job.relaunch_reasons import classify, describe, describe_exit, fingerprint
from stoker.wire.exits import ExitFacts, Reason

__all__ = [
    "RULES",
    "Action",
    "Budgets",
    "Decision",
    "RelaunchConfig",
    "RelaunchPolicy",
    "WorldFacts",
    "classify",
    "describe",
    "describe_exit",
]

Action = Literal["done", "replace", "shrink", "cordon", "stop"]
Account = Literal["", "job", "oom"]
Way = Literal["restart", "leave-node", "stop"]
MIB = 1024 * 1024
NEAR_LIMIT = 0.9
"""A worker whose most memory stayed under this share of its limit was not killed for that limit."""


class Decision(NamedTuple):
    """What happens now, and why."""

    action: Action
    """`done`; `replace` on the same node; `shrink`: go on without it; `cordon`: the node runs no more workers; `stop`:
    the job fails."""
    why: str
    delay_s: float = 0.0
    """Seconds before the replacement starts."""
    memory_bytes: int = 0
    """The replacement's memory limit; 0: none."""


class Rule(NamedTuple):
    """One row of the policy, for elastic scripts."""

    way: Way
    """`restart` while the budgets last; `leave-node`: do without the node; `stop`."""
    account: Account
    """The budget, besides the node's, on which a restart goes; empty: the node's alone."""
    repeats: bool
    """It may be the step's own fault, so a row of it at one commit is a sign that nothing will help."""
    mend: str
    """What the user can do."""


_BUG = "look at what the step does with its batch"
_MEMORY = "give workers more memory (--worker-memory), or use fewer loader processes or a smaller batch"
_DEVICE_MEMORY = (
    "use a smaller batch, recompute activations, or set PYTORCH_ALLOC_CONF=expandable_segments:True"
)
_DISK = "free space there, or put checkpoints, logs and cache elsewhere"
_HARDWARE = "look at `nvidia-smi -q` and `dmesg` on that node, and repair it or take it out"
_NODE = "look at that node's load and logs"

RULES: dict[Reason, Rule] = {
    "evicted": Rule("restart", "", False, "keep this node free of whoever takes its workers away"),
    "oom": Rule("restart", "oom", True, _MEMORY),
    "device-oom": Rule("restart", "oom", True, _DEVICE_MEMORY),
    "user-error": Rule("stop", "job", True, "mend the script"),
    "crashed": Rule("restart", "job", True, _BUG),
    "device-error": Rule("restart", "job", True, _BUG),
    "hung": Rule("restart", "job", True, "the stacks of all ranks, taken when it hung, say where"),
    "stopped": Rule("restart", "job", False, "find out who sends SIGSTOP to workers"),
    "not-ready": Rule("restart", "job", False, _NODE),
    "hardware": Rule("leave-node", "", False, _HARDWARE),
    "disk-full": Rule("leave-node", "", False, _DISK),
}
"""Every reason but `finished`."""


@dataclass(frozen=True)
class RelaunchConfig:
    """What the user may set. Times in seconds, sizes in bytes."""

    max_restarts: int | None = None
    """Restarts of the job that are not forgiven yet. None: 3 for elastic scripts, 0 for others as torchrun has it."""
    max_node_restarts: int = 10
    """Restarts on one node, evictions among them, that are not forgiven yet."""
    oom_limit: int = 3
    """Restarts for want of memory, on host or device, that are not forgiven yet."""
    forgive_after_s: float = 3600.0
    """Progress after which a restart is forgiven."""
    relaunch_errors: bool = False
    """Restart after an error of the script, too."""
    repeat_limit: int = 3
    """Failures in a row at one commit after which the job stops early."""
    memory_bytes: int = 0
    """A worker's memory limit at first; 0: none."""
    memory_max_bytes: int = 0
    """What it may grow to; at most the first: it does not grow."""
    memory_factor: float = 1.5
    """What it grows by after each kill for want of memory."""
    cordon_s: float | None = None
    """How long a node is cordoned the first time, each next time twice as long; broken hardware always, and None: for
    ever."""
    backoff_first_s: float = 1.0
    backoff_limit_s: float = 60.0
    window_s: float = 600.0
    """Failures of one place within this time make its next start wait longer."""

    def restarts(self, *, elastic: bool) -> int:
        """The job's budget."""
        return self.max_restarts if self.max_restarts is not None else (3 if elastic else 0)


@dataclass(frozen=True)
class _Case:
    """One decision under way."""

    reason: Reason
    facts: ExitFacts
    budgets: Budgets
    world: WorldFacts
    now: float
    what: str

    @property
    def mend(self) -> str:
        return RULES[self.reason].mend

    @property
    def node_account(self) -> str:
        return f"node {self.world.node}"

    @property
    def holds_without_node(self) -> bool:
        return self.world.other_nodes >= self.world.min_nodes

    @property
    def holds_without_slot(self) -> bool:
        return self.world.other_nodes + (self.world.others_here > 0) >= self.world.min_nodes


class RelaunchPolicy:
    """Decides about workers that ended. Holds no state: that is in `Budgets`."""

    def __init__(self, config: RelaunchConfig) -> None:
        self.config = config

    def decide(
        self, reason: Reason, facts: ExitFacts, budgets: Budgets, world: WorldFacts, now: float, rng: Rng
    ) -> Decision:
        """What to do about a worker that ended for this reason; the budgets are charged.

        For each worker that ends it is asked once. The nodes that may run no workers are known to
        `budgets.cordon_reason`.
        """
        if reason == "finished":
            return Decision("done", "it finished")
        budgets.interrupt()
        budgets.forgive(self.config.forgive_after_s)
        case = _Case(reason, facts, budgets, world, now, f"it {describe(reason, facts)}")
        if why := budgets.cordon_reason(world.node, now):
            return Decision("cordon", f"{case.what}; its node is cordoned: {why}")
        if not world.elastic:
            return self._decide_plain(case, rng)
        rule = RULES[reason]
        if rule.way == "leave-node":
            return self._without_node(case, case.what)
        if rule.way == "stop" and world.is_new:
            return self._without_node(case, f"{case.what} before it was in any world, while others train")
        if rule.way == "stop" and not self.config.relaunch_errors:
            return Decision("stop", f"{case.what}: an error of the script itself would come again")
        return self._early(case) or self._restart(case, rng)

    # -- elastic scripts ----------------------------------------------------------------------------------

    def _restart(self, case: _Case, rng: Rng) -> Decision:
        """Replace the worker while the budgets last."""
        config, budgets, generation = self.config, case.budgets, case.world.generation
        if config.restarts(elastic=True) == 0:
            return self._without_slot(case, f"{case.what}; no restarts are wanted")
        account = RULES[case.reason].account
        limit = config.oom_limit if account == "oom" else config.restarts(elastic=True)
        of = " for want of memory" if account == "oom" else ""
        if account and budgets.used(account) >= limit and not budgets.is_charged(account, generation):
            return self._without_slot(case, f"{case.what}; all {limit} restarts{of} are used")
        on_node, node_limit = case.node_account, config.max_node_restarts
        if budgets.used(on_node) >= node_limit and not budgets.is_charged(on_node, generation):
            return self._without_node(
                case, f"{case.what}; all {node_limit} restarts of node {case.world.node} are used"
            )
        budgets.charge(on_node, generation)
        left = f"restart {budgets.used(on_node)} of {node_limit} on {case.world.node}"
        if account:
            budgets.charge(account, generation)
            left = f"restart {budgets.used(account)} of {limit}{of}"
        return self._replace(case, left, rng)

    def _replace(self, case: _Case, left: str, rng: Rng) -> Decision:
        current = self._memory_bytes(case.budgets)
        memory_bytes = max(current, self._grown_bytes(case))
        more = ""
        if memory_bytes > current:
            more = f" with {format_bytes(memory_bytes)} instead of {format_bytes(current)}"
            case.budgets.memory_bytes = memory_bytes
        elif 0 < current <= case.facts.memory_limit_bytes and case.facts.oom_killed:
            more = f" with {format_bytes(current)}, the most that it may have"
        delay_s = self._delay_s(case, rng)
        wait = f", in {delay_s:.1f} s" if delay_s >= 0.1 else ""
        return Decision("replace", f"{case.what}; {left}{more}{wait}", delay_s, memory_bytes)

    def _delay_s(self, case: _Case, rng: Rng) -> float:
        """Workers that failed together, and as often as each other, come back together."""
        config, budgets, generation = self.config, case.budgets, case.world.generation
        before = budgets.attempt(case.world.place, case.now, config.window_s)
        known = budgets.drawn
        if known is not None and generation > 0 and known[:2] == (generation, before):
            return known[2]
        delay_s = backoff_s(before, rng, first_s=config.backoff_first_s, limit_s=config.backoff_limit_s)
        budgets.drawn = (generation, before, delay_s)
        return delay_s

    def _memory_bytes(self, budgets: Budgets) -> int:
        """The memory limit of a worker that starts now; 0: none."""
        return max(self.config.memory_bytes, budgets.memory_bytes)

    def _grown_bytes(self, case: _Case) -> int:
        """The memory limit that this exit asks for; 0: it asks for none.

        Only a kill by the kernel at the worker's own limit asks for more: no memory of the host helps a device, and
        a larger limit does not help against a full host. A worker that ran under less than what others have by now
        asks for no more than that.
        """
        config, facts = self.config, case.facts
        current = self._memory_bytes(case.budgets)
        under = facts.memory_limit_bytes or current
        elsewhere = 0 < facts.memory_peak_bytes < NEAR_LIMIT * under
        if case.reason != "oom" or not facts.oom_killed or current == 0 or elsewhere:
            return 0
        wanted = -int(-under * config.memory_factor // MIB) * MIB
        return max(current, min(config.memory_max_bytes, wanted))

    def _early(self, case: _Case) -> Decision | None:
        """Stop, or leave a place, because one more try would only fail again."""
        rule, budgets, world = RULES[case.reason], case.budgets, case.world
        if case.reason in ("user-error", "device-oom") and (mark := fingerprint(case.facts)):
            places = budgets.note_error(mark, world.place, case.now, self.config.window_s)
            if places > 1:
                return Decision("stop", f"{case.what}; {places} ranks ended with the same error: {case.mend}")
        more_memory = self._grown_bytes(case) > case.facts.memory_limit_bytes > 0
        if not rule.repeats or more_memory:
            return None
        times = budgets.note_stuck(world)
        if times < self.config.repeat_limit:
            return None
        row = f"{case.what}; failure {times} in a row at commit {world.commits}"
        nodes = {place.rsplit("/", 1)[0] for place in budgets.stuck_places}
        if len(nodes) == 1 and case.holds_without_node:
            return self._without_node(case, f"{row}, each on node {world.node}")
        if len(budgets.stuck_places) == 1 and world.others_here and case.holds_without_slot:
            return self._without_slot(case, f"{row}, each at slot {world.slot} of node {world.node}")
        return Decision("stop", f"{row}: {case.mend}")

    # -- doing without ------------------------------------------------------------------------------------

    def _without_slot(self, case: _Case, why: str) -> Decision:
        world = case.world
        if case.reason == "device-oom":
            return Decision(
                "stop", f"{why}, and fewer workers would need still more memory each: {case.mend}"
            )
        if case.holds_without_slot:
            return Decision("shrink", f"{why}: going on without it")
        if world.newcomers:
            return Decision("shrink", f"{why}: waiting for another node")
        return self._hopeless(case, why, world.other_nodes)

    def _without_node(self, case: _Case, why: str) -> Decision:
        world = case.world
        comes_again = self._cordon_s(case) is not None
        if case.holds_without_node or ((world.newcomers or comes_again) and not self._can_shrink(case)):
            wait = "" if case.holds_without_node else "; waiting for another node"
            self._cordon(case, why)
            return Decision("cordon", f"{why}: node {world.node} runs no more workers{wait}")
        if self._can_shrink(case):
            return Decision(
                "shrink", f"{why}: no node can stand in for this one, going on without the worker"
            )
        return self._hopeless(case, why, world.other_nodes)

    def _cordon(self, case: _Case, why: str) -> None:
        case.budgets.cordon(case.world.node, why, case.now, self._cordon_s(case))

    def _cordon_s(self, case: _Case) -> float | None:
        return None if case.reason == "hardware" else self.config.cordon_s

    def _can_shrink(self, case: _Case) -> bool:
        """Whether the node's other workers may go on; they would find the same full disk."""
        return case.reason != "disk-full" and case.world.others_here > 0 and case.holds_without_slot

    def _hopeless(self, case: _Case, why: str, nodes: int) -> Decision:
        least = case.world.min_nodes
        return Decision(
            "stop", f"{why}; {nodes} of at least {least} nodes are left and no other may join: {case.mend}"
        )

    # -- other scripts ------------------------------------------------------------------------------------

    def _decide_plain(self, case: _Case, rng: Rng) -> Decision:
        """Scripts that do not use Stoker: as torchrun, any failure restarts all, up to the job's budget.

        Nothing is forgiven, as they report no progress.
        """
        budgets, generation = case.budgets, case.world.generation
        limit = self.config.restarts(elastic=False)
        if budgets.used("job") >= limit and not budgets.is_charged("job", generation):
            return Decision("stop", f"{case.what} and all {limit} restarts are used")
        leaves = RULES[case.reason].way == "leave-node"
        comes_again = case.world.newcomers or self._cordon_s(case) is not None
        if leaves and not case.holds_without_node and not comes_again:
            return self._hopeless(case, case.what, case.world.other_nodes)
        budgets.charge("job", generation)
        left = f"restart {budgets.used('job')} of {limit} of all workers"
        if leaves:
            self._cordon(case, case.what)
            return Decision("cordon", f"{case.what}; {left}, without node {case.world.node}")
        return self._replace(case, left, rng)
