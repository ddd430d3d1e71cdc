"""Keeps the pieces of sharded models at commits, here and at a neighbour, and puts them together in the next world.

A commit N of a world with sharded models:

1. Each rank copies its pieces to the host and gives them to the next rank, too.
2. All ranks meet. Who comes out of that knows that everybody has the pieces of N in two places.
3. Only then is N counted, and what was kept for N - 1 dropped.

So whoever has counted N can rely on the survivors to have N, and where nobody has, all have N - 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import torch
import torch.distributed as dist

from stoker.errors import EnvironmentProblem
from stoker.train.dtensors import Target
from stoker.train.sharded_wire import (
    Held,
    broadcast_bytes,
    decode,
    encode,
    everybody_is_here,
    gather_bytes,
    give_to_next,
    tensor_of,
)

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
        self._generation = 0
        self._device = torch.device("cpu")

    def add(self, model: Sharded) -> None:
        self._models.append(model)
        self._kept.append([])

    @property
    def is_empty(self) -> bool:
        return not self._models

    def commit(self, commits: int) -> None:
        """Keep what this step has made, here and at a neighbour. Raises RuntimeError when a peer dies."""
        if self.is_empty:
            return
        taken = [self._take(model, commits) for model in self._models]
        for kept, new in zip(self._kept, taken, strict=True):
            kept += new
        everybody_is_here(self._device)
        self._kept = taken

    def enter(self, commits: int, generation: int, device: torch.device) -> None:
        """Make the models in a new world's group, as of a commit. Raises RuntimeError when a peer dies.

        Raises EnvironmentProblem where pieces of that commit are lost.
        """
        if self.is_empty:
            return
        self._generation, self._device = generation, device
        for model, kept in zip(self._models, self._kept, strict=True):
            model.make(device)
            mine = [held for held in kept if held.commits == commits]
            _restore(model, mine, commits, device)
        self.commit(commits)

    def forget(self) -> None:
        """The group goes away."""
        for model in self._models:
            model.forget()

    def _take(self, model: Sharded, commits: int) -> list[Held]:
        header, body = encode(model.image(commits))
        mine = Held(commits, self._generation, dist.get_rank(), dist.get_world_size(), header, body)
        return [mine, give_to_next(mine, self._device)] if mine.size > 1 else [mine]


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


def _restore(model: Sharded, mine: list[Held], commits: int, device: torch.device) -> None:
    """Fill a model of the new world from the pieces that its ranks hold."""
    said = gather_bytes(msgspec.msgpack.encode([held.place for held in mine]), device)
    inventories = [[(g, s, r) for g, s, r in msgspec.msgpack.decode(raw)] for raw in said]
    givers = choose(inventories)
    if givers is None and commits == 0:
        return  # the run begins
    if givers is None:
        raise EnvironmentProblem(
            f"pieces of the sharded model as of commit {commits} are lost: workers next to each other have ended at "
            "once, or the run was started anew; begin it again from what the script has saved"
        )
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
