"""How the sums of all ranks become one, in the order of the tree: each rank adds up one piece of all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from stoker.train.exact.flat import Flat
from stoker.train.exact.tree import Node, fold, nodes_of


class Exchange:
    """Of one script's global batches; keeps the memory that it works in."""

    def __init__(self, virtual_ranks: int) -> None:
        self._count = virtual_ranks
        self._scratch: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def combine(self, own: Mapping[Node, Flat], whole: Flat, is_empty: Callable[[int], bool]) -> None:
        """The sum over all virtual ranks into `whole`, the same to the bit on every rank. A collective.

        `own`: this rank's sums, as `nodes_of` names them; they may be changed. Raises RuntimeError when a peer dies.
        """
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if world_size == 1:
            summed = fold(own, self._count, Flat.add)
            if summed is None:
                whole.zero()
            else:
                whole.copy(summed)  # not added to zeros, which would lose the sign of a zero
            return
        of_rank = [nodes_of(one, world_size, self._count, is_empty) for one in range(world_size)]
        for dtype in sorted(whole.tensors, key=str):
            some = [own[node].tensors[dtype] for node in of_rank[rank]]
            self._combine(some, whole.tensors[dtype], of_rank, rank, whole.spare)

    def _combine(
        self,
        own: Sequence[torch.Tensor],
        whole: torch.Tensor,
        of_rank: Sequence[Sequence[Node]],
        rank: int,
        spare: int,
    ) -> None:
        world_size = len(of_rank)
        piece = -(-(whole.numel() - spare) // world_size)
        even = world_size * piece
        if len(own) == 1:
            sent = own[0][:even]
        else:
            sent = self._room("sent", whole, len(own) * even)
            for number, held in enumerate(own):
                sent.view(world_size, len(own), piece)[:, number] = held[:even].view(world_size, piece)
        nodes = [node for some in of_rank for node in some]
        came = self._room("came", whole, len(nodes) * piece)
        piece_bytes = piece * whole.itemsize
        dist.all_to_all_single(  # as bytes: backends know few types
            came.view(torch.uint8),
            sent.view(torch.uint8),
            output_split_sizes=[len(some) * piece_bytes for some in of_rank],
            input_split_sizes=[len(own) * piece_bytes] * world_size,
        )
        pieces = dict(zip(nodes, came.view(len(nodes), piece).unbind(0), strict=True))
        summed = fold(pieces, self._count, torch.Tensor.add_)
        if summed is None:
            summed = self._room("nothing", whole, piece).zero_()
        _all_gather(whole[:even].view(torch.uint8), summed.view(torch.uint8))

    def _room(self, name: str, like: torch.Tensor, size: int) -> torch.Tensor:
        held = self._scratch.get((name, like.dtype))
        if held is None or held.numel() < size or held.device != like.device:
            held = self._scratch[name, like.dtype] = like.new_empty(size)
        return held[:size]


def _all_gather(whole: torch.Tensor, piece: torch.Tensor) -> None:
    gather = (
        getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    )  # the name before PyTorch 2.13
    gather(whole, piece)
