"""How jobs, nodes, events and stacks look to people: plain values in, rich tables and text out."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from stoker.base.units import format_bytes, format_duration
from stoker.wire.control import (
    JobEvent,
    JobStatus,
    NodeStatus,
    ScaleAdvice,
    ShardStatus,
    StackThread,
    WorkerStacks,
    WorkerStatus,
)

STYLES = {
    "waiting": "yellow", "forming": "yellow", "running": "green", "ended": "bold",
    "checking": "yellow", "standby": "cyan", "active": "green", "away": "red", "leaving": "yellow", "cordoned": "red",
    "member": "green", "parked": "yellow", "exited": "red", "finished": "bold",
}  # fmt: skip
SLOW = 1.5
"""A straggler score from which a rank is shown in colour."""
_PLAIN_WIDTH = 400
_WIDTH_MIN = 120
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def console(*, redraws: bool = False) -> Console:
    """Standard output: plain and never cut where it is no terminal. Tables get some width even in a narrow terminal,
    which then folds them, unless the output `redraws` itself."""
    out = Console(highlight=False, markup=False, emoji=False)
    if not out.is_terminal:
        return Console(highlight=False, markup=False, emoji=False, width=_PLAIN_WIDTH, color_system=None)
    if not redraws:
        out.width = max(out.width, _WIDTH_MIN)
    return out


def clean(text: str) -> str:
    """Text from elsewhere without what could steer a terminal."""
    return _CONTROL.sub("?", text)


def jobs_table(rows: Sequence[tuple[str, str, JobStatus | None, str]], now_wall_s: float) -> RenderableType:
    """Rows of (job, endpoint, status, problem)."""
    table = _table("JOB", "ENDPOINT", "PHASE", ">NODES", ">WORLD", ">COMMITS", ">STEPS/S", ">AGE", "WHY")
    for job, endpoint, status, problem in rows:
        if status is None:
            table.add_row(clean(job), endpoint, Text("no answer", "red"), *[""] * 5, clean(problem))
            continue
        table.add_row(
            clean(job),
            endpoint,
            _styled(status.phase),
            f"{len(status.nodes)} of {_range(status)}",
            str(status.world_size),
            str(status.commits),
            f"{status.steps_per_s:.3g}",
            _since(status.started_wall_s, now_wall_s),
            clean(status.why),
        )
    return table


def status_view(status: JobStatus, endpoint: str, now_wall_s: float) -> RenderableType:
    """A job in full."""
    head = Text.assemble((clean(status.job), "bold"), "  ", _styled(status.phase), "  ", clean(status.why))
    parts: list[RenderableType] = [head, _facts(status, endpoint, now_wall_s)]
    if status.nodes:
        parts += ["", _nodes_table(status.nodes)]
    workers = [(node, worker) for node in status.nodes for worker in node.workers]
    if workers:
        parts += ["", _workers_table(workers)]
    if status.outcome is not None and status.outcome.error:
        parts += ["", clean(status.outcome.error.rstrip())]
    return Group(*parts)


def _facts(status: JobStatus, endpoint: str, now_wall_s: float) -> RenderableType:
    unit = f", in units of {status.node_unit}" if status.node_unit > 1 else ""
    last = "" if status.since_commit_s is None else f", the last {format_duration(status.since_commit_s)} ago"
    budget = "" if status.restarts_max is None else f" of {status.restarts_max}"
    restarts = f"{status.restarts}; {status.restarts_used}{budget} of the job's budget"
    master = status.master
    before = f", number {master.incarnation + 1}" if master.incarnation else ""
    facts = Table.grid(padding=(0, 2))
    for name, value in (
        ("generation", f"{status.generation} with {status.world_size} workers"),
        ("nodes", f"{len(status.nodes)}, target {status.nodes_target} ({_range(status)}{unit})"),
        ("commits", f"{status.commits}, {status.steps_per_s:.3g} a second{last}"),
        ("restarts", restarts),
        ("began", _since(status.started_wall_s, now_wall_s, " ago")),
        (
            "master",
            f"{endpoint}, process {master.pid}{before}, up {_since(master.started_wall_s, now_wall_s)}",
        ),
        ("journal", clean(master.journal)),
    ):
        if value:
            facts.add_row(f"  {name}", value)
    if status.outcome is not None:
        how = "success" if status.outcome.success else f"failed with exit code {status.outcome.exit_code}"
        facts.add_row("  outcome", f"{how}: {clean(status.outcome.why)}")
    return facts


def _nodes_table(nodes: Iterable[NodeStatus]) -> Table:
    table = _table("NODE", "STATE", "HOST", "ADDRESS", ">AGE", ">SLOTS", ">HEARD", "WHY")
    for node in nodes:
        table.add_row(
            clean(node.node),
            _styled(node.state),
            clean(node.host),
            clean(node.address),
            str(node.age),
            str(node.slots),
            f"{format_duration(node.silent_s)} ago",
            clean(node.why),
        )
    return table


def _workers_table(workers: Iterable[tuple[NodeStatus, WorkerStatus]]) -> Table:
    table = _table(
        ">RANK", "WORKER", "NODE", ">SLOT", ">PID", "PHASE", ">COMMITS", ">SLOWNESS", ">MEMORY", "REPORTS"
    )
    for node, worker in sorted(workers, key=lambda pair: _by_rank(pair[1].rank)):
        score, memory = worker.straggler_score, worker.memory_bytes
        slow = "red" if score is not None and score >= SLOW else ""
        table.add_row(
            "-" if worker.rank is None else str(worker.rank),
            clean(worker.worker),
            clean(node.node),
            str(worker.slot),
            str(worker.pid or "-"),
            _styled(worker.phase),
            str(worker.commits),
            Text("-" if score is None else f"{score:.2f}", slow),
            "-" if memory is None else format_bytes(memory),
            clean(" ".join(f"{name}={_figure(value)}" for name, value in worker.metrics.items())),
        )
    return table


def event_line(event: JobEvent) -> Text:
    """One event: when, in which generation, what, about whom, and why."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.wall_s))
    generation = event.details.get("generation")
    return Text.assemble(
        (f"{when}.{int(event.wall_s % 1 * 1000):03d}", "dim"),
        f"  {'' if generation is None else f'gen {generation}':<8}",
        (f"{clean(event.kind):<18}", "bold"),
        f" {clean(_about(event))}{clean(event.why)}",
    )


def _about(event: JobEvent) -> str:
    worker, node, rank = (event.details.get(name) for name in ("worker", "node", "rank"))
    shard, dataset = event.details.get("shard"), event.details.get("dataset")
    if shard is not None and dataset is not None:
        return f"shard {shard} of {dataset}: "
    if worker is not None:
        return f"{worker}{'' if rank is None else f' (rank {rank})'}: "
    return "" if node is None else f"{node}: "


def stacks_view(stacks: Sequence[WorkerStacks], *, all_threads: bool = False) -> RenderableType:
    """Stacks of all workers. Those whose main threads stand alike are shown together, the smallest group first: in a
    hang that is where to look."""
    if not stacks:
        return "no worker runs"
    groups: dict[tuple[object, ...], list[WorkerStacks]] = {}
    for stack in sorted(stacks, key=lambda s: _by_rank(s.rank)):
        shown = stack.threads if all_threads else _main(stack)
        groups.setdefault((tuple(thread.frames for thread in shown), stack.problem), []).append(stack)
    parts: list[RenderableType] = []
    for same in sorted(groups.values(), key=len):
        parts += [Text(clean(_who(same)), "bold"), *_calls(same[0], all_threads), ""]
    return Group(*parts[:-1])


def _main(stack: WorkerStacks) -> tuple[StackThread, ...]:
    return tuple(thread for thread in stack.threads if thread.is_main) or stack.threads[:1]


def _calls(stack: WorkerStacks, all_threads: bool) -> list[Text]:
    """As Python prints tracebacks: the innermost call last."""
    if stack.problem:
        return [Text(f"  {clean(stack.problem)}")]
    shown = stack.threads if all_threads else _main(stack)
    lines = []
    for thread in shown:
        if len(shown) > 1:
            lines.append(f"  thread {thread.name}{' (holds the GIL)' if thread.holds_gil else ''}")
        lines += [f'  File "{f.file}", line {f.line}, in {f.function}' for f in reversed(thread.frames)]
    others = len(stack.threads) - len(shown)
    if others > 0:
        lines.append(f"  and {others} more thread{'s' if others > 1 else ''} (--all-threads)")
    return [Text(clean(line)) for line in lines]


def _who(same: Sequence[WorkerStacks]) -> str:
    if len(same) == 1:
        (one,) = same
        rank = one.worker if one.rank is None else f"rank {one.rank} ({one.worker})"
        stopped = ", stopped" if one.state in ("T", "t") else ""
        return f"{rank} on {one.node}{f', process {one.pid}' if one.pid else ''}{stopped}"
    ranks = _runs([one.rank for one in same if one.rank is not None])
    others = [one.worker for one in same if one.rank is None]
    return f"{len(same)} workers: {', '.join(([f'ranks {ranks}'] if ranks else []) + others)}"


def _runs(ranks: Sequence[int]) -> str:
    """`0-3, 5` for 0, 1, 2, 3, 5."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def shards_view(shards: Sequence[ShardStatus]) -> RenderableType:
    """How far the dynamic shards have come."""
    if not shards:
        return "this job reads no dataset by dynamic shards"
    table = _table("DATASET", ">EPOCH", ">DONE", ">DOING", ">TODO", ">TOTAL", ">WAITING", ">FAILURES")
    for shard in shards:
        total = "stream" if shard.total < 0 else str(shard.total)
        figures = (shard.epoch, shard.done, shard.doing, shard.todo)
        table.add_row(
            clean(shard.dataset), *map(str, figures), total, str(shard.waiting), str(shard.failures)
        )
    leases = [(shard, lease) for shard in shards for lease in shard.leases]
    if not leases:
        return table
    given = _table("DATASET", ">SHARD", "WORKER", ">LEFT", ">FAILURES")
    for shard, lease in leases:
        left = format_duration(lease.left_s)
        given.add_row(clean(shard.dataset), str(lease.shard), clean(lease.worker), left, str(lease.failures))
    return Group(table, "", given)


def advice_view(advice: ScaleAdvice | None) -> RenderableType:
    """How many nodes the job should have."""
    if advice is None:
        return "no advice yet: not enough has been measured"
    size = f"{advice.nodes} nodes" if advice.nodes != 1 else "1 node"
    verdict = (
        f"stay at {size}" if advice.nodes == advice.nodes_now else f"have {size}, not {advice.nodes_now}"
    )
    lines: list[RenderableType] = [f"{verdict}: {clean(advice.why)}"]
    if advice.speedup is not None:
        lines.append(f"  {advice.speedup:.2f} times the speed (confidence {advice.confidence:.0%})")
    if advice.applies:
        lines.append("  the job changes to this size by itself")
    if advice.measured:
        table = _table(">NODES", ">STEPS/S")
        for speed in advice.measured:
            table.add_row(str(speed.nodes), f"{speed.steps_per_s:.3g}")
        lines += ["", table]
    return Group(*lines)


def _table(*columns: str) -> Table:
    """A table without lines; columns that start with `>` are set to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        name = column.removeprefix(">")
        # The last words of a row may be folded, everything else stays whole.
        table.add_column(
            name, justify="right" if name != column else "left", no_wrap=name not in ("WHY", "REPORTS")
        )
    return table


def _styled(word: str) -> Text:
    return Text(clean(word), STYLES.get(word, ""))


def _range(status: JobStatus) -> str:
    low, high = status.nodes_min, status.nodes_max
    return str(low) if low == high else f"{low}:{high}"


def _since(wall_s: float, now_wall_s: float, after: str = "") -> str:
    if wall_s <= 0:
        return ""
    days, rest_s = divmod(now_wall_s - wall_s, 86400)
    if days >= 2:
        return f"{days:.0f} d {rest_s // 3600:.0f} h{after}"
    return format_duration(max(0.0, now_wall_s - wall_s)) + after


def _figure(value: float | None) -> str:
    return "not-finite" if value is None else f"{value:.4g}"


def _by_rank(rank: int | None) -> tuple[bool, int]:
    return rank is None, rank or 0
