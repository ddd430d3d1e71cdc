"""How the sums of all ranks become one, in the order of the tree: each rank adds up one piece of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from stoker.train.exact.flat import Flat
from stoker.train.exact.tree import Node, fold, nodes_of


def combine(own: dict[Node, Flat], empty: Flat, count: int, is_empty: Callable[[int], bool]) -> Flat:
    """The sum over all virtual ranks, the same to the bit on every rank. A collective.

    `own`: this rank's sums, as `nodes_of` names them. `empty`: zeros, for a batch that nobody has a record of, and to
    know the types. Raises RuntimeError when a peer dies.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if world_size == 1:
        return fold(own, count, _add_flats) or empty
    of_rank = [nodes_of(one, world_size, count, is_empty) for one in range(world_size)]
    ordered = [own[node] for node in of_rank[rank]]
    return {
        dtype: _combine([flat[dtype] for flat in ordered], zeros, of_rank, rank, count)
        for dtype, zeros in sorted(empty.items(), key=lambda item: str(item[0]))
    }


def _combine(
    own: Sequence[torch.Tensor], zeros: torch.Tensor, of_rank: list[list[Node]], rank: int, count: int
) -> torch.Tensor:
    world_size, size = len(of_rank), zeros.numel()
    if size == 0:
        return zeros
    piece = -(-size // world_size)
    sent = zeros.new_zeros(world_size, len(own), piece)
    for number, held in enumerate(own):
        padded = sent.new_zeros(world_size * piece)
        padded[:size] = held
        sent[:, number] = padded.view(world_size, piece)
    nodes = [node for some in of_rank for node in some]
    came = zeros.new_empty(len(nodes) * piece)
    dist.all_to_all_single(
        came,
        sent.view(-1),
        output_split_sizes=[len(some) * piece for some in of_rank],
        input_split_sizes=[len(own) * piece] * world_size,
    )
    pieces = dict(zip(nodes, came.view(len(nodes), piece).unbind(0), strict=True))
    summed = fold(pieces, count, torch.add)
    whole = zeros.new_empty(world_size * piece)
    _all_gather(whole, zeros.new_zeros(piece) if summed is None else summed.contiguous())
    return whole[:size]


def _all_gather(whole: torch.Tensor, piece: torch.Tensor) -> None:
    gather = (
        getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    )  # the name before PyTorch 2.13
    gather(whole, piece)


def _add_flats(left: Flat, right: Flat) -> Flat:
    return {dtype: held + right[dtype] for dtype, held in left.items()}
