"""`hvd.elastic.ElasticSampler`: an epoch's records over a world that changes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch.utils.data

from stoker.compat.horovod.basics import horovod_world


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Divides what is left of an epoch over the ranks, again after each change of the world.

    `record_batch` after each step says how far the epoch has come. As all ranks step together, that is known of all of
    them, so that nothing is read twice because the rank that had read it is gone. Put it into the state:
    `hvd.elastic.TorchState(sampler=sampler, …)`.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.processed_num = 0
        """Records from the epoch's beginning that are done, in its order."""
        self.processed_indices: set[int] = set()
        """Others that `record_indices` has named."""
        self.remaining_indices: list[int] = []
        self.rank, self.num_replicas, self.num_samples, self.total_size = 0, 1, 0, 0
        self._batch: int | None = None
        """The one that was recorded last since the records were divided."""
        self._done = 0
        """Records of all ranks since then."""
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch. The one that is under way goes on where it is, so that it may be called at either end."""
        if epoch != self.epoch:
            self.epoch, self.processed_num = epoch, 0
            self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """All ranks have done a batch of this size. A number said twice in turn counts once."""
        if batch_idx == self._batch:
            return
        self._batch = batch_idx
        self._done += batch_size * self.num_replicas
        if self.processed_indices:
            self.processed_indices.update(self.remaining_indices[: self._done])
        else:
            self.processed_num += batch_size * self.num_replicas

    def record_indices(self, indices: Iterable[int]) -> None:
        """This rank has done these records; the others hear of it when the world changes. Not with `record_batch`."""
        self.processed_indices.update(indices)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """This rank's records of a batch."""
        begin = batch_idx * batch_size
        return self._own()[begin : begin + batch_size]

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "processed_num": self.processed_num,
            "processed_indices": sorted(self.processed_indices),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.processed_indices = set(state_dict.get("processed_indices", ()))
        self.reset()

    def reset(self) -> None:
        """Divide what is left over the ranks that there are now."""
        world = horovod_world()
        if world.is_initialized:
            self.rank, self.num_replicas = world.place.rank, world.place.size
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self._batch, self._done = None, 0
        left = order[self.processed_num :]
        self.remaining_indices = [index for index in left if index not in self.processed_indices]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        return iter(self._own())

    def __len__(self) -> int:
        return self.num_samples

    def _own(self) -> list[int]:
        """Every rank has as many: the first ones are there twice where they do not divide."""
        left = self.remaining_indices
        more = self.total_size - len(left)
        padded = left + (left * math.ceil(more / len(left)))[:more] if left else []
        return padded[self.rank : self.total_size : self.num_replicas]
