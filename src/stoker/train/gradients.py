"""The mean gradient over the global batch, whatever the ranks' shares of it.

No postponed annotations here: DistributedDataParallel checks the hook's by identity.
"""

import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from stoker.data.session import Session
from stoker.train.accumulation import Accumulation


class Reduction(NamedTuple):
    """What reducing gradients needs to know, and what needs to know of it."""

    live: Session
    accumulation: Accumulation


def weighted_mean(reduction: Reduction, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook: the sum of gradients, each weighted by its rank's share of the global batch."""
    live, buffer = reduction.live, bucket.buffer()
    live.progress += 1
    if bucket.is_last():
        live.ready_at = time.perf_counter()
        reduction.accumulation.forget()
    share = live.share
    if share is None or share.batch_records == 0:
        buffer.div_(live.world_size)
    elif share.records == 0:
        buffer.zero_()
    else:
        buffer.mul_(share.records / share.batch_records)
    work = dist.all_reduce(buffer, async_op=True)
    assert work is not None
    averaged: torch.futures.Future[torch.Tensor] = work.get_future().then(_first)
    return averaged


def _first(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    return done.value()[0]
