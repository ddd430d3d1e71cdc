"""Node check: which nodes may join, found out before they do, by trial in small groups.

Round 0 puts the nodes into pairs, oldest first (the last group has three if they are odd; one node checks itself
alone). A group that succeeds clears its nodes. When one fails, each of its nodes is tried again, in the next round,
with a node that is known good: who fails again is faulty. A failure before the group has met (no device, a wrong
product) is the node's own and needs no second trial. With nobody known good yet, the suspects are first tried alone,
then with partners they have not failed with; if that clears nobody, the oldest that works alone stays and the others
are faulty, since nothing can tell whose fault it is.

A group that fails while the stream of one of its nodes to the master is broken, before that node's result is there, is
tried again: the node may have been told too late, and is not faulty for want of a connection.

A good node is *slow* when its matrix product or its group's all-reduce takes more than `straggler_ratio` times the
median of all nodes measured so far. Products are compared from three nodes on: of two, nothing says which is the normal
one. All-reduces are compared from two groups on. A slow node is tried once more, with another partner; its better time
of the two counts, so that one hiccup makes no straggler.

The pairing and its second round are DLRover's (Wang et al., "DLRover: resource optimization for deep recommendation
models training in the cloud", 2024, and its network check); here, nodes may vanish while they are checked, newcomers
are checked among themselves while others run, and a node whose own device failed accuses nobody else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from stoker.wire.health import CheckGroup, CheckResult

STRAGGLER_RATIO = 1.5
MEDIAN_OF_NODES = 3
"""Fewest nodes whose median is a yardstick."""
MAX_ROUNDS = 16
RESULT_GRACE_S = 5.0
"""Seconds beyond the check's own timeout that its result may take to arrive."""
TRIES = 3
"""Times that a group is tried whose nodes' streams break, before its failure counts all the same."""

VerdictKind = Literal["good", "faulty", "straggler"]


@dataclass(frozen=True)
class Verdict:
    """What the check says about a node. It comes once per node and check."""

    node: str
    kind: VerdictKind
    why: str


CheckEffect = CheckGroup | Verdict
"""A group to be told to its nodes, or a verdict. A node's newest group replaces its older one."""


@dataclass
class _Node:
    node: str
    standing: Literal["unknown", "good", "faulty"] = "unknown"
    works_alone: bool = False
    failed_with: set[str] = field(default_factory=set)
    """Nodes with which it failed in a pair."""
    failures: list[str] = field(default_factory=list)
    partners: set[str] = field(default_factory=set)
    matmul_s: float = 0.0
    link_s: float = 0.0
    """Best all-reduce time, as it would be in a group of two."""
    tried_again: bool = False
    checks: int = 0
    why: str = ""

    def measure(self, result: CheckResult, size: int) -> None:
        """Keep the better of two checks' times; of an all-reduce as it would be between two nodes.

        A ring moves 2(n-1)/n of the data through each node (nccl-tests, PERFORMANCE.md).
        """
        self.matmul_s = _better(self.matmul_s, result.matmul_s)
        if size > 1:
            self.link_s = _better(self.link_s, result.allreduce_s * size / (2 * (size - 1)))


@dataclass
class _Group:
    told: CheckGroup
    deadline: float
    helpers: frozenset[str]
    """Nodes of it that were known good before."""
    results: dict[str, CheckResult] = field(default_factory=dict)
    tries: int = 1
    is_disturbed: bool = False
    """The stream of one of its nodes broke before its result was there."""

    def is_excused(self) -> bool:
        """Whether its failure says nothing about its nodes."""
        results = self.results.values()
        own_fault = any(_is_own_fault(result) for result in results)
        passed = all(result.ok for result in results)
        return self.is_disturbed and self.tries < TRIES and not (own_fault or passed)


@dataclass
class _Batch:
    """Nodes that are checked together."""

    nodes: dict[str, _Node]
    """Oldest first."""
    round: int = 0
    groups: dict[int, _Group] = field(default_factory=dict)

    def having(self, standing: str) -> list[_Node]:
        return [node for node in self.nodes.values() if node.standing == standing]


class NodeCheck:
    """Plans the groups of every check of one job and judges their results. Pure: `now` is an argument.

    `timeout_s` is what the check program of one group may take, `grace_s` what its results may take beyond that.
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        grace_s: float = RESULT_GRACE_S,
        straggler_ratio: float = STRAGGLER_RATIO,
    ) -> None:
        self.timeout_s = timeout_s
        self.grace_s = grace_s
        self.straggler_ratio = straggler_ratio
        self._batches: list[_Batch] = []
        self._last_group = 0
        self._matmul_s: dict[str, float] = {}
        self._link_s: dict[str, float] = {}
        self._effects: list[CheckEffect] = []

    def begin(self, nodes: Sequence[str], now: float) -> list[CheckEffect]:
        """Check these nodes, oldest first, among themselves. Nodes that are being checked already are left out."""
        fresh = [node for node in dict.fromkeys(nodes) if not self.is_checking(node)]
        if not fresh:
            return []
        batch = _Batch({node: _Node(node) for node in fresh})
        self._batches.append(batch)
        for group in _pairs(fresh):
            self._open(batch, group, (), now)
        return self._take_effects()

    def result(self, node: str, group: int, result: CheckResult, now: float) -> list[CheckEffect]:
        """A node's result; doubled ones and those of a group that is no more change nothing."""
        for batch in self._batches:
            found = batch.groups.get(group)
            if found is not None and node in found.told.nodes and node not in found.results:
                found.results[node] = result
                self._advance(batch, now)
                break
        return self._take_effects()

    def gone(self, node: str, now: float) -> list[CheckEffect]:
        """A node is no more: it gets no verdict, and its group's other nodes are grouped anew."""
        self._matmul_s.pop(node, None)
        self._link_s.pop(node, None)
        for batch in list(self._batches):
            if batch.nodes.pop(node, None) is None:
                continue
            for number, group in list(batch.groups.items()):
                if node in group.told.nodes:
                    del batch.groups[number]
                    left = [n for n in group.told.nodes if n in batch.nodes]
                    if len(left) > 1:
                        self._open(batch, left, group.helpers, now)
            self._advance(batch, now)
        return self._take_effects()

    def disturb(self, node: str) -> None:
        """A node's stream to the master is broken."""
        for batch in self._batches:
            for group in batch.groups.values():
                if node in group.told.nodes and node not in group.results:
                    group.is_disturbed = True

    def tick(self, now: float) -> list[CheckEffect]:
        """Judge the groups whose time is over: a node that gave no result has failed."""
        for batch in list(self._batches):
            for group in batch.groups.values():
                if now < group.deadline:
                    continue
                for node in group.told.nodes:
                    why = f"it gave no result within {self.timeout_s + self.grace_s:.0f} s"
                    group.results.setdefault(node, CheckResult(ok=False, why=why, stage="meet"))
            self._advance(batch, now)
        return self._take_effects()

    def is_checking(self, node: str) -> bool:
        """Whether this node waits for its verdict."""
        return any(node in batch.nodes for batch in self._batches)

    @property
    def checking(self) -> tuple[str, ...]:
        """The nodes that wait for their verdict."""
        return tuple(node for batch in self._batches for node in batch.nodes)

    # -- groups -------------------------------------------------------------------------------------------

    def _open(
        self, batch: _Batch, nodes: Sequence[str], helpers: Iterable[str], now: float, tries: int = 1
    ) -> None:
        # By the clock, so that no result of a group of the master before is taken for one of this one's
        self._last_group = max(self._last_group + 1, int(now * 1000))
        told = CheckGroup(group=self._last_group, round=batch.round, nodes=tuple(nodes))
        deadline = now + self.timeout_s + self.grace_s
        batch.groups[told.group] = _Group(told, deadline, frozenset(helpers), tries=tries)
        self._effects.append(told)

    def _advance(self, batch: _Batch, now: float) -> None:
        """Judge the groups that are complete; once no group is open, plan the next round or end."""
        for number, group in list(batch.groups.items()):
            if len(group.results) < len(group.told.nodes):
                continue
            del batch.groups[number]
            if group.is_excused():
                self._open(batch, group.told.nodes, group.helpers, now, group.tries + 1)
            else:
                self._judge(batch, group)
        while batch.nodes and not batch.groups:
            self._plan(batch, now)
        if not batch.nodes and batch in self._batches:
            self._batches.remove(batch)

    def _judge(self, batch: _Batch, group: _Group) -> None:
        names, results = group.told.nodes, group.results
        passed = all(result.ok for result in results.values())
        guilty = {n for n in names if _is_own_fault(results[n]) or (len(names) == 1 and not passed)}
        said = "; ".join(f"{name}: {result.why}" for name, result in results.items() if not result.ok)
        for name in names:
            node, others = batch.nodes[name], [n for n in names if n != name]
            node.checks += 1
            node.partners.update(others)
            node.works_alone = node.works_alone or (results[name].ok and not others)
            if not _is_own_fault(results[name]):
                node.measure(results[name], len(names) if passed else 1)
            if name in guilty:
                node.standing, node.why = "faulty", results[name].why or "its check failed"
            elif passed and (others or len(batch.nodes) == 1):
                node.standing, node.why = "good", _praise(others)
            elif not passed and not guilty and name not in group.helpers:
                self._suspect(node, group, said)

    def _suspect(self, node: _Node, group: _Group, said: str) -> None:
        """A node whose group failed, and nothing says through whom."""
        others = [n for n in group.told.nodes if n != node.node]
        if group.helpers and node.standing == "unknown":
            node.standing = "faulty"
            node.why = _accusation(node.failures, ", ".join(others), said)
        else:
            node.standing = "unknown"
        node.failures.append(f"together with {', '.join(others)} ({said})")
        if len(others) == 1:
            node.failed_with.update(others)

    # -- rounds -------------------------------------------------------------------------------------------

    def _plan(self, batch: _Batch, now: float) -> None:
        """Open the next round's groups, and let go of every node that is decided and not needed for them."""
        for node in batch.having("faulty"):
            self._release(batch, node, "faulty", node.why)
        good, unknown = batch.having("good"), batch.having("unknown")
        # Whatever is wrong with the network of those not decided yet: their products are a yardstick as well
        self._matmul_s.update({n.node: n.matmul_s for n in (*good, *unknown) if n.matmul_s > 0})
        self._link_s.update({n.node: n.link_s for n in good if n.link_s > 0})
        slow = self._slow(good)
        again = [n for n in good if n.node in slow and not n.tried_again]
        batch.round += 1
        if batch.round < MAX_ROUNDS:
            if good:
                self._try_with_helpers(
                    batch, [*unknown, *again], [n for n in good if n.node not in slow] or good, now
                )
            else:
                self._try_without_helpers(batch, unknown, now)
        if not batch.groups:
            self._give_up(batch, unknown)
            again = []
        kept = {name for group in batch.groups.values() for name in group.told.nodes} | {
            n.node for n in again
        }
        for node in batch.having("good"):
            if node.node in kept:
                continue
            if node.node in slow:
                self._release(batch, node, "straggler", slow[node.node])
            else:
                self._release(batch, node, "good", node.why)

    def _try_with_helpers(
        self, batch: _Batch, suspects: list[_Node], helpers: list[_Node], now: float
    ) -> None:
        """A known good node for each suspect while they last; the good one comes first: it hosts the store."""
        free = {helper.node: helper for helper in helpers}
        placed: set[str] = set()
        for suspect in suspects:
            choice = [h for h in free.values() if h is not suspect]
            alone = suspect.standing == "good" and len(batch.having("good")) == 1
            if suspect.node in placed or not (choice or alone):
                continue
            suspect.tried_again = True
            free.pop(suspect.node, None)
            if choice:
                helper = min(choice, key=lambda h: h.node in suspect.partners)
                del free[helper.node]
                placed.add(helper.node)
                self._open(batch, (helper.node, suspect.node), (helper.node,), now)
            else:  # a slow node that has nobody to be tried with
                self._open(batch, (suspect.node,), (), now)

    def _try_without_helpers(self, batch: _Batch, unknown: list[_Node], now: float) -> None:
        """With nobody known good: first each alone, then with partners that they have not failed with."""
        untried = [node for node in unknown if not node.works_alone]
        for node in untried:
            self._open(batch, (node.node,), (), now)
        free = [] if untried else sorted(unknown, key=lambda node: len(node.failed_with))
        while free:
            node = free.pop(0)
            partner = next((p for p in free if p.node not in node.failed_with), None)
            if partner is not None:
                free.remove(partner)
                self._open(batch, (node.node, partner.node), (), now)

    def _give_up(self, batch: _Batch, unknown: list[_Node]) -> None:
        """Nothing more can be found out: the oldest that works alone stays, unless others are known good."""
        stays = None if batch.having("good") else next((n for n in unknown if n.works_alone), None)
        for node in unknown:
            failed = f"failed {', and '.join(node.failures)}" if node.failures else "found no partner"
            if node is not stays:
                why = f"it {failed}; no node known good is left to tell whose fault it is"
                self._release(batch, node, "faulty", why)
            elif node.failures:
                node.standing, node.why = (
                    "good",
                    f"it {failed}; it works alone, and the oldest such node stays",
                )
            else:
                node.standing, node.why = "good", "it works alone"

    def _release(self, batch: _Batch, node: _Node, kind: VerdictKind, why: str) -> None:
        del batch.nodes[node.node]
        if kind == "faulty":
            self._matmul_s.pop(node.node, None)
            self._link_s.pop(node.node, None)
        self._effects.append(Verdict(node.node, kind, why))

    # -- slow nodes ---------------------------------------------------------------------------------------

    def _slow(self, good: Sequence[_Node]) -> dict[str, str]:
        """The slow ones of these nodes, and why they count as slow."""
        slow: dict[str, str] = {}
        measures = (
            ("an all-reduce", self._link_s, MEDIAN_OF_NODES + 1),
            ("a matrix product", self._matmul_s, MEDIAN_OF_NODES),
        )
        for what, measured, fewest in measures:
            if len(measured) < fewest:
                continue
            middle_s = median(measured.values())
            for node in good:
                own_s = measured.get(node.node, 0.0)
                if own_s > self.straggler_ratio * middle_s:
                    often = f" in the best of {node.checks} checks" if node.checks > 1 else ""
                    slow[node.node] = (
                        f"{what} takes it {own_s * 1000:.1f} ms{often}, {own_s / middle_s:.1f} x the median of "
                        f"{middle_s * 1000:.1f} ms of {len(measured)} nodes"
                    )
        return slow

    def _take_effects(self) -> list[CheckEffect]:
        effects, self._effects = self._effects, []
        return effects


def _pairs(nodes: Sequence[str]) -> list[tuple[str, ...]]:
    """Pairs of neighbours; the last group has three nodes if they are odd."""
    starts = list(range(0, len(nodes) - 1, 2)) or [0]
    ends = [*starts[1:], len(nodes)]
    return [tuple(nodes[start:end]) for start, end in zip(starts, ends, strict=True)]


def _is_own_fault(result: CheckResult) -> bool:
    return not result.ok and result.stage in ("start", "matmul")


def _better(known_s: float, new_s: float) -> float:
    return min(known_s, new_s) if known_s > 0 and new_s > 0 else max(known_s, new_s)


def _praise(others: Sequence[str]) -> str:
    return f"its check passed together with {', '.join(others)}" if others else "its check passed"


def _accusation(failures: Sequence[str], helper: str, said: str) -> str:
    before = f"it failed {', and '.join(failures)}, and again" if failures else "it failed"
    return f"{before} together with {helper}, which is known good ({said})"
