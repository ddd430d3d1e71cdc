"""Keeps the pieces of sharded models at commits, here and at a neighbour, and puts them together in the next world.

A commit N of a world with sharded models:

1. Each rank copies its pieces to the host and gives them to another rank, too, on another node if there is one.
2. All ranks meet. Who comes out of that knows that everybody has the pieces of N in two places.
3. Only then is N counted, and what was kept for N - 1 dropped.

So whoever has counted N can rely on the survivors to have N, and where nobody has, all have N - 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import torch
import torch.distributed as dist

from stoker.train.checkpoints.storage_port import RunStorage
from stoker.train.dtensors import Target
from stoker.train.sharded_storage import StoredParts
from stoker.train.sharded_wire import (
    Held,
    Part,
    broadcast_bytes,
    decode,
    encode,
    everybody_is_here,
    gather_bytes,
    give,
    tensor_of,
)
from stoker.train.transfer import bytes_of
from stoker.wire.job import WorldView

if TYPE_CHECKING:
    from stoker.train.sharded_model import Sharded

Place = tuple[int, int, int]
"""Generation and size of a world, and a rank in it."""


class ShardedParts:
    """All sharded models of this process."""

    def __init__(self) -> None:
        self._models: list[Sharded] = []
        self._kept: list[list[Held]] = []
        """For each model."""
        self.is_lost = False
        """Some of the pieces are with nobody any more."""
        self._stored: StoredParts | None = None
        self._generation = 0
        self._stride = 1
        self._device = torch.device("cpu")

    def add(self, model: Sharded) -> None:
        self._models.append(model)
        self._kept.append([])

    @property
    def is_empty(self) -> bool:
        return not self._models

    def commit(self, commits: int, confirm: Callable[[], None], *, wants: bool = False) -> bool:
        """Keep what this step has made, here and with another rank; returns whether any rank `wants` a checkpoint.

        Raises RuntimeError when a peer dies; so does `confirm` where what collectives have brought cannot be believed.
        """
        if self.is_empty:
            return wants
        taken = [self._take(model, commits) for model in self._models]
        for kept, new in zip(self._kept, taken, strict=True):
            kept += new
        is_wanted = everybody_is_here(self._device, wants=wants)
        confirm()
        self._kept = taken
        return is_wanted

    def enter(
        self, world: WorldView, local_size: int, device: torch.device, confirm: Callable[[], None]
    ) -> None:
        """Make the models in a new world's group, as of its commit. `local_size`: workers of this node.

        Raises RuntimeError when a peer dies, EnvironmentProblem where the run starts from a checkpoint whose pieces
        cannot be read.
        """
        if self.is_empty:
            return
        self._generation, self._device = world.generation, device
        try:
            self._stride = stride_of([int(n) for n in gather_bytes(b"%d" % local_size, device)])
            self._fill_all(world.commits, device)
        finally:  # what is made of it by then may have failed in any way
            confirm()
        self.is_lost = False
        self.commit(world.commits, confirm)

    def _fill_all(self, commits: int, device: torch.device) -> None:
        """From the ranks, or from a checkpoint; the run begins where there is nothing."""
        for number, (model, kept) in enumerate(zip(self._models, self._kept, strict=True)):
            model.make(device)
            mine = [held for held in kept if held.commits == commits]
            givers = _ask(mine, device)
            if givers is not None:
                _restore(model, mine, givers, device)
            elif commits > 0 and (stored := self._stored_for_all(commits, number)) is not None:
                stored.load(model, commits, number)
            elif commits > 0:
                self.is_lost = True  # `leave` says so, and the run goes back to its last checkpoint
                raise RuntimeError(
                    f"pieces of the sharded model as of commit {commits} are lost: workers that stood in for each "
                    "other have ended at once, or not every worker sees the folder of checkpoints"
                )

    def _stored_for_all(self, commits: int, number: int) -> StoredParts | None:
        """What holds the pieces as of that commit, where all ranks find them there."""
        has = self._stored is not None and self._stored.has(commits, number)
        return self._stored if all(said == b"1" for said in gather_bytes(b"%d" % has, self._device)) else None

    def save(self, commits: int, wrote: Callable[[], None]) -> bool:
        """Write all pieces, with all ranks; False where that was not possible. Raises RuntimeError when a peer dies."""
        if self._stored is None:
            return False
        return self._stored.save(self._models, commits, dist.get_rank(), self._device, wrote)

    def remove_older(self, storage: RunStorage) -> None:
        """Those whose checkpoints are gone."""
        if self._stored is not None:
            self._stored.remove_older(storage, len(self._models))

    def store_in(self, stored: StoredParts) -> None:
        """Where a run's checkpoints are."""
        self._stored = stored

    def rehearse(self, device: torch.device) -> None:
        """A warm-up begins, which ends with `forget`."""
        for model in self._models:
            model.rehearse(device)

    def put_back(self) -> None:
        """Undo what this rank has done since the last commit, steps of their optimizers too. Not a collective."""
        for model, kept in zip(self._models, self._kept, strict=True):
            if not model.is_made or not kept:
                continue
            plain, parts = decode(kept[0].header)
            targets = model.targets(plain, parts, self._device)
            _fill(targets, parts, kept[0].body)
            model.load(plain, targets)
            model.drop_gradients()

    def share(self, source: int) -> None:
        """Copy from one rank what is not divided, such as buffers. Raises RuntimeError when a peer dies."""
        for model in self._models:
            for tensor in model.whole_tensors():
                if tensor.numel() == 0:
                    continue
                there = bytes_of(tensor.to(self._device))
                dist.broadcast(there, src=source)
                with torch.no_grad():
                    tensor.copy_(there.view(tensor.dtype).reshape(tensor.shape))

    def forget(self) -> None:
        """The group goes away."""
        for model in self._models:
            model.forget()

    def _take(self, model: Sharded, commits: int) -> list[Held]:
        header, body = encode(model.image(commits))
        mine = Held(commits, self._generation, dist.get_rank(), dist.get_world_size(), header, body)
        return [mine, give(mine, self._stride, self._device)] if mine.size > 1 else [mine]


def stride_of(local_sizes: list[int]) -> int:
    """How many ranks further its pieces go: to another node, where there are several. A node's ranks are neighbours."""
    largest = max(local_sizes)
    return largest if largest < len(local_sizes) else 1


def choose(inventories: list[list[Place]]) -> list[tuple[Place, int]] | None:
    """Of the newest world whose pieces are all there, each piece and which rank gives it; None where none is whole."""
    holders: dict[Place, int] = {}
    for rank, places in enumerate(inventories):
        for place in places:
            holders.setdefault(place, rank)
    for generation, size in sorted({place[:2] for place in holders}, reverse=True):
        places = [(generation, size, rank) for rank in range(size)]
        if all(place in holders for place in places):
            return [(place, holders[place]) for place in places]
    return None


def _ask(mine: list[Held], device: torch.device) -> list[tuple[Place, int]] | None:
    """Who gives which piece, as `choose` says."""
    said = gather_bytes(msgspec.msgpack.encode([held.place for held in mine]), device)
    return choose([[(g, s, r) for g, s, r in msgspec.msgpack.decode(raw)] for raw in said])


def _fill(targets: list[Target], parts: list[Part], body: torch.Tensor) -> None:
    """With what this rank's own pieces have."""
    at = 0
    for target, part in zip(targets, parts, strict=True):
        target.fill(tensor_of(body[at : at + part.size_bytes], part), part.box)
        at += part.size_bytes


def _restore(model: Sharded, mine: list[Held], givers: list[tuple[Place, int]], device: torch.device) -> None:
    """Fill a model of the new world from the pieces that its ranks hold."""
    held_at = {held.place: held for held in mine}
    targets: list[Target] = []
    plain: object = None
    for place, giver in givers:
        held = held_at[place] if giver == dist.get_rank() else None
        plain, parts = decode(broadcast_bytes(held.header if held is not None else None, giver, device))
        if not targets:
            targets = model.targets(plain, parts, device)
        at = 0
        for target, part in zip(targets, parts, strict=True):
            size = part.size_bytes
            if size == 0:
                continue
            raw = held.body[at : at + size] if held is not None else torch.empty(size, dtype=torch.uint8)
            there = raw.to(device)
            dist.broadcast(there, src=giver)
            target.fill(tensor_of(there, part), part.box)
            at += size
    model.load(plain, targets)
