"""An entry of the event log in words. PURE."""

from __future__ import annotations

from typing import Any


def sentence(kind: str, why: str, details: dict[str, Any]) -> str:
    """An entry of the event log for people."""
    if kind == "generation":
        return f"generation {details['generation']} forms: {why}"
    if kind == "world":
        return f"generation {details['generation']} runs: {why}"
    if "shard" in details:
        return f"shard {details['shard']} of {details['dataset']}: {why}"
    if "worker" in details:
        rank = f" (rank {details['rank']})" if "rank" in details else ""
        return f"{details['worker']}{rank}: {why}"
    return f"{details['node']}: {why}" if "node" in details else f"{kind}: {why}"
