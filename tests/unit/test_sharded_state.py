"""Tensors divided over ranks: boxes, pieces, who gives what, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from stoker.errors import ConfigError, WireError
from stoker.train.checkpoints.checkpointer import Checkpointer
from stoker.train.checkpoints.image import image_of
from stoker.train.dtensors import Box, Target, box_of, local_of
from stoker.train.packing import encode_header, pack
from stoker.train.sharded_model import Sharded
from stoker.train.sharded_parts import choose, stride_of
from stoker.train.sharded_wire import decode, encode, tensor_of
from stoker.train.state import State

CPU = torch.device("cpu")


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Of rank 1 of 3; nothing is exchanged."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=3)
    yield init_device_mesh("cpu", (3,))
    dist.destroy_process_group()


def divided(whole: torch.Tensor, mesh: Any, placement: Any) -> DTensor:
    return distribute_tensor(whole, mesh, [placement], src_data_rank=None)


def test_an_image_of_a_divided_tensor_is_the_piece_that_is_here(mesh: Any) -> None:
    whole = torch.arange(35.0).reshape(5, 7)
    state = {
        "rows": divided(whole, mesh, Shard(0)),
        "columns": divided(whole, mesh, Shard(1)),
        "copy": divided(whole, mesh, Replicate()),
        "none": divided(whole[:1], mesh, Shard(0)),
        "plain": whole,
    }
    pieces = {piece.name: piece for piece in image_of(3, state).pieces}
    assert [(p.shape, p.offsets, p.is_whole) for p in pieces.values()] == [
        ((5, 7), (2, 0), False),
        ((5, 7), (0, 3), False),
        ((5, 7), (0, 0), True),
        ((1, 7), (1, 0), False),
        ((5, 7), (0, 0), True),
    ]
    assert torch.equal(pieces["rows"].tensor, whole[2:4])
    assert torch.equal(pieces["columns"].tensor, whole[:, 3:6])
    assert pieces["none"].tensor.shape == (0, 7)
    assert not isinstance(pieces["copy"].tensor, DTensor)
    with pytest.raises(WireError, match="rows is a piece of"):
        image_of(3, state).state()


def test_a_part_of_a_sum_is_no_piece(mesh: Any) -> None:
    tensor = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
    with pytest.raises(ConfigError, match="Partial"):
        image_of(0, {"x": tensor})


def test_divided_tensors_are_not_copied_as_if_they_were_whole(mesh: Any) -> None:
    tensors: list[torch.Tensor] = []
    plain = pack({"x": divided(torch.ones(6), mesh, Shard(0))}, tensors)
    with pytest.raises(ConfigError, match=r"stoker\.Sharded"):
        encode_header(plain, tensors)


@pytest.mark.usefixtures("fresh_process")
def test_a_state_refuses_a_module_that_is_divided(mesh: Any) -> None:
    module = torch.nn.Linear(6, 6)
    state = State(net=module)
    state.seal()
    module.weight = torch.nn.Parameter(divided(module.weight.detach(), mesh, Shard(0)))
    with pytest.raises(ConfigError, match=r"net has been divided.*State\(net=stoker\.Sharded"):
        state.seal()


def test_targets_take_from_each_piece_what_is_theirs(mesh: Any) -> None:
    """Of any way to cut, into any other."""
    whole = torch.arange(35.0).reshape(5, 7)
    for model, size in itertools.product((divided(whole, mesh, Shard(1)), whole), (1, 2, 3, 4, 6)):
        target = Target.like(whole.shape, whole.dtype, model, CPU)
        at = 0
        for piece in torch.chunk(whole, size):
            target.fill(piece, Box((at, 0), tuple(piece.shape)))
            at += len(piece)
        assert torch.equal(local_of(target.tensor), local_of(model))
        assert box_of(target.tensor) == target.box


def test_pieces_go_through_bytes_and_back(mesh: Any) -> None:
    state = {
        "odd": torch.tensor([True, False, True]),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "x": divided(torch.arange(35.0).reshape(5, 7), mesh, Shard(0)),
        "empty": torch.zeros(0, 3),
        "step": torch.tensor(7.0),
    }
    image = image_of(3, state)
    header, body = encode(image)
    plain, parts = decode(header)
    assert plain == image.plain
    at = 0
    for piece, part in zip(image.pieces, parts, strict=True):
        assert (part.name, part.whole.shape, part.box.offsets) == (piece.name, piece.shape, piece.offsets)
        assert torch.equal(tensor_of(body[at : at + part.size_bytes], part), piece.tensor)
        at += part.size_bytes
    assert at == len(body)
    with pytest.raises(WireError):
        decode(header[:-3])


def test_pieces_come_from_the_newest_world_that_is_whole() -> None:
    assert choose([[], []]) is None
    assert choose([[(1, 2, 0)], []]) is None
    assert choose([[(1, 3, 0), (1, 3, 2)], [(1, 3, 1), (1, 3, 0)]]) == [
        ((1, 3, 0), 0),
        ((1, 3, 1), 1),
        ((1, 3, 2), 0),
    ]
    newer = [[(1, 1, 0), (2, 2, 0)], [(2, 2, 1)]]
    assert choose(newer) == [((2, 2, 0), 0), ((2, 2, 1), 1)]
    assert choose([newer[0], []]) == [((1, 1, 0), 0)], "the newer is not whole"


@pytest.mark.parametrize("sizes", [[1, 1], [2, 2], [4, 4, 4], [1, 3], [3, 1], [2, 3, 2]])
def test_the_second_copy_lies_on_another_node_where_there_is_room(sizes: list[int]) -> None:
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    stride = stride_of([sizes[node] for node in nodes])
    kept_at_home = sum(nodes[(rank + stride) % len(nodes)] == node for rank, node in enumerate(nodes))
    assert kept_at_home <= max(0, 2 * max(sizes) - len(nodes)), "no more than must be"


def test_on_one_node_it_lies_with_the_next_worker() -> None:
    assert stride_of([4, 4, 4, 4]) == 1


@pytest.mark.usefixtures("fresh_process")
def test_a_sharded_model_is_there_in_a_world_only() -> None:
    sharded = Sharded(lambda: (torch.nn.Linear(1, 1), None))  # type: ignore[arg-type, return-value]
    state = State(net=sharded)
    with pytest.raises(ConfigError, match=r"inside the @stoker\.elastic function"):
        _ = state.net.model
    with pytest.raises(ConfigError, match="returns a model and its optimizer"):
        sharded.make(CPU)
    with pytest.raises(ConfigError, match="give the Checkpointer a folder that all nodes share"):
        State(net=sharded, checkpointer=Checkpointer(every_s=1))
    with pytest.raises(ConfigError, match="takes a function"):
        Sharded(3)  # type: ignore[arg-type]
