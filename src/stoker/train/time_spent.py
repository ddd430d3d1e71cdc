"""Where a worker's time went, for the event log: `stoker run` and `stoker job summary` join all ranks' words of it."""

from __future__ import annotations

import os

from stoker.data.loader_account import at_exit
from stoker.data.loader_report import total_of
from stoker.settings import reports_at_exit
from stoker.wire.remarks import Remark


def time_spent(rank: int, checkpoint_s: float) -> Remark | None:
    """Of all loaders of this process, since it began. None where there is nothing to tell, or nobody wants to know."""
    accounts = at_exit().accounts
    total = total_of([epoch for account in accounts for epoch in account.epochs])
    if not reports_at_exit() or not (total.steps or checkpoint_s):
        return None
    figures = {
        "rank": rank,
        "checkpoint_s": checkpoint_s,
        "steps": total.steps,
        "records": total.records,
        "size_bytes": total.size_bytes,
        "loops_s": total.wall_s,
        "waited_s": total.waited_s,
        "busy_s": total.busy_s,
        "available_s": total.available_s,
        "num_workers": max((account.num_workers for account in accounts), default=0),
        "cores": len(os.sched_getaffinity(0)),
        **{cause: seconds for cause, seconds in total.waiting.items() if seconds},
    }
    text = f"rank {rank} waited {total.waited_s:.2f} of {total.wall_s:.2f} s in its loops for data"
    return Remark("time-spent", text, {name: round(float(value), 6) for name, value in figures.items()})
