"""Who is in the world, in which order, and whose state counts: plain functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from stoker.wire.job import Member, World


class Candidate(NamedTuple):
    """A worker that has acknowledged the coming generation and stands ready."""

    worker: str
    node: str
    node_age: int
    """Order in which its node joined; the oldest is 0."""
    slot: int
    commits: int
    clean: bool
    fresh: bool
    store: str
    restored: str = ""
    """What a fresh one has loaded its state from; see `WorkerState`."""


def select_nodes(oldest_first: Sequence[str], *, target: int, unit: int) -> list[str]:
    """The nodes that a world may have: at most `target`, a whole multiple of `unit`, the oldest first."""
    count = min(len(oldest_first), target)
    return list(oldest_first[: count - count % unit])


class NoSource(NamedTuple):
    """No candidate stands at a commit, so nobody's state may be copied."""

    why: str


def form_world(generation: int, candidates: Sequence[Candidate]) -> World | NoSource:
    """Give every candidate its rank and choose whose state the others copy.

    Ranks: nodes oldest first, then by slot. Source: of those whose state stands exactly at a commit the one
    with the most commits; a survivor before a newcomer; then the lowest rank. Survivors with equal commits
    copy nothing, nor do newcomers that have all loaded the same.
    """
    ordered = sorted(candidates, key=lambda c: (c.node_age, c.node, c.slot, c.worker))
    source = _source_rank(ordered)
    if source is None:
        return NoSource("no survivor stands at a commit")
    best = ordered[source]
    group_rank: dict[str, int] = {}
    per_node: dict[str, int] = {}
    for candidate in ordered:
        group_rank.setdefault(candidate.node, len(group_rank))
        per_node[candidate.node] = per_node.get(candidate.node, 0) + 1
    local: dict[str, int] = {}
    members = []
    for rank, candidate in enumerate(ordered):
        local_rank = local.get(candidate.node, 0)
        local[candidate.node] = local_rank + 1
        is_equal = candidate.clean and candidate.commits == best.commits
        same = is_equal and (not candidate.fresh or _loaded_the_same(candidate, best))
        members.append(
            Member(
                worker=candidate.worker,
                node=candidate.node,
                rank=rank,
                local_rank=local_rank,
                local_world_size=per_node[candidate.node],
                group_rank=group_rank[candidate.node],
                copy_state=rank != source and not same,
            )
        )
    return World(
        generation=generation,
        members=tuple(members),
        source=source,
        commits=best.commits,
        store=ordered[0].store,
    )


def _loaded_the_same(one: Candidate, source: Candidate) -> bool:
    """Not where the source has been in a world since: nobody knows what was made of it there."""
    return source.fresh and bool(one.restored) and one.restored == source.restored


def _source_rank(ordered: Sequence[Candidate]) -> int | None:
    clean = [(c.commits, not c.fresh, -rank) for rank, c in enumerate(ordered) if c.clean]
    return -max(clean)[2] if clean else None
