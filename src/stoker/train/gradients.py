"""The mean gradient over the global batch, whatever the ranks' shares of it.

No postponed annotations here: DistributedDataParallel checks the hook's by identity.
"""

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from stoker.data.session import Session


def weighted_mean(live: Session, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook: the sum of gradients, each weighted by its rank's share of the global batch."""
    buffer = bucket.buffer()
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
