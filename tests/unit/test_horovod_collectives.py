"""Each of Horovod's collectives against plain torch.distributed, between three real processes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

import stoker.compat.horovod.torch as hvd
from stoker.compat.horovod.basics import horovod_world
from stoker.errors import ConfigError
from tests.unit.horovod_peers import Peers

pytestmark = pytest.mark.real
SIZE = 3
NUMBERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
           torch.float32, torch.float64)  # fmt: skip
ANY = (*NUMBERS, torch.bool, torch.complex64)
SHAPES = ((4, 5), (300, 5))
"""One that travels along with the agreement, one that does not."""


@pytest.fixture(scope="module")
def peers() -> Iterator[Peers]:
    some = Peers(SIZE)
    some.all(hvd.init)
    some.all(hvd.barrier)  # makes the group, which the tests compare with, whichever of them comes first
    yield some
    some.close()


def mine(dtype: torch.dtype, *shape: int, rank: int | None = None) -> torch.Tensor:
    """A tensor of this rank's own."""
    generator = torch.Generator().manual_seed(hvd.rank() if rank is None else rank)
    return torch.randint(0, 20, shape or (4, 5), generator=generator).to(dtype)


def of_all(dtype: torch.dtype, *shape: int) -> list[torch.Tensor]:
    return [mine(dtype, *shape, rank=rank) for rank in range(SIZE)]


def plain_sum(tensor: torch.Tensor) -> torch.Tensor:
    result = tensor.clone()
    dist.all_reduce(result)
    return result


# -- places ------------------------------------------------------------------------------------------------


def check_places() -> tuple[Any, ...]:
    assert hvd.is_initialized()
    hvd.allreduce(torch.ones(1))  # the first collective makes the group
    assert (hvd.rank(), hvd.size()) == (dist.get_rank(), dist.get_world_size())
    assert hvd.is_homogeneous()
    assert hvd.gloo_built()
    assert not hvd.mpi_enabled()
    return hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()


def test_places(peers: Peers) -> None:
    assert peers.all(check_places) == [(rank, 3, rank, 3, 0, 1) for rank in range(3)]


# -- reductions --------------------------------------------------------------------------------------------


def check_sums() -> None:
    for dtype, shape in product(NUMBERS, SHAPES):
        tensor = mine(dtype, *shape)
        wide = tensor.to(torch.int32) if dtype == torch.int16 else tensor  # Gloo has no int16
        expected = plain_sum(wide).to(dtype)
        before = tensor.clone()
        assert torch.equal(hvd.allreduce(tensor, op=hvd.Sum), expected), dtype
        assert torch.equal(hvd.allreduce(tensor, average=False), expected)
        assert torch.equal(hvd.synchronize(hvd.allreduce_async(tensor, op=hvd.Sum)), expected)
        assert torch.equal(tensor, before), "only forms with an underscore change it"
        handle = hvd.allreduce_async_(tensor, op=hvd.Sum, name=f"sum.{dtype}")
        while not hvd.poll(handle):
            pass
        assert hvd.synchronize(handle) is tensor
        assert torch.equal(tensor, expected)


def test_sums(peers: Peers) -> None:
    peers.all(check_sums)


def check_other_ops() -> None:
    for dtype, shape in product((torch.int64, torch.float32, torch.float64), SHAPES):
        for op, torch_op in (
            (hvd.Min, dist.ReduceOp.MIN),
            (hvd.Max, dist.ReduceOp.MAX),
            (hvd.Product, dist.ReduceOp.PRODUCT),
        ):
            expected = mine(dtype, *shape)
            dist.all_reduce(expected, op=torch_op)
            assert torch.equal(hvd.allreduce(mine(dtype, *shape), op=op), expected)
            assert torch.equal(hvd.allreduce_(mine(dtype, *shape), op=op), expected)


def test_other_ops(peers: Peers) -> None:
    peers.all(check_other_ops)


def check_means() -> None:
    for dtype in (torch.float16, torch.float32, torch.float64):
        assert torch.allclose(hvd.allreduce(mine(dtype)), plain_sum(mine(dtype)) / SIZE)
    whole = hvd.allreduce(mine(torch.int64))
    assert torch.equal(whole, plain_sum(mine(torch.int64)) // SIZE)
    scaled = hvd.allreduce(mine(torch.float32), prescale_factor=2.0, postscale_factor=0.25)
    assert torch.allclose(scaled, plain_sum(mine(torch.float32)) / SIZE / 2)
    seven = torch.full((2,), 7)
    assert hvd.allreduce(seven, op=hvd.Sum, prescale_factor=0.5).tolist() == [9, 9], (
        "3.5 is cut off at the point"
    )
    assert hvd.allreduce(seven, op=hvd.Sum, postscale_factor=0.5).tolist() == [10, 10]
    halves = hvd.allreduce(mine(torch.float32), compression=hvd.Compression.fp16)
    assert halves.dtype == torch.float32
    assert torch.allclose(halves, plain_sum(mine(torch.float32)) / SIZE, atol=0.02)
    transposed = mine(torch.float32).t()
    hvd.allreduce_(transposed)
    assert torch.allclose(transposed, plain_sum(mine(torch.float32)).t() / SIZE), "also one that is not dense"
    assert hvd.allreduce(torch.tensor(float(hvd.rank()))).item() == 1.0
    assert hvd.allreduce(torch.zeros(0, 3)).shape == (0, 3)


def test_means_scales_and_compression(peers: Peers) -> None:
    peers.all(check_means)


def check_groups() -> None:
    tensors = [mine(torch.float32), mine(torch.float64, 3), mine(torch.float32, 2, 2)]
    expected = [plain_sum(tensor) / SIZE for tensor in tensors]
    for got in (
        hvd.grouped_allreduce(tensors),
        hvd.synchronize(hvd.grouped_allreduce_async(tensors)),
        hvd.grouped_allreduce_([t.clone() for t in tensors]),
    ):
        assert all(torch.allclose(one, other) for one, other in zip(got, expected, strict=True))
    hvd.synchronize(hvd.grouped_allreduce_async_(tensors))
    assert all(torch.allclose(one, other) for one, other in zip(tensors, expected, strict=True))


def test_groups(peers: Peers) -> None:
    peers.all(check_groups)


def check_reducescatter() -> None:
    for rows in (2, 3, 7):
        whole = plain_sum(mine(torch.float32, rows, 2))
        share, more = divmod(rows, SIZE)
        begin = hvd.rank() * share + min(hvd.rank(), more)
        expected = whole[begin : begin + share + (hvd.rank() < more)]
        assert torch.equal(hvd.reducescatter(mine(torch.float32, rows, 2), op=hvd.Sum), expected)
        mean = hvd.synchronize(hvd.reducescatter_async(mine(torch.float32, rows, 2)))
        assert torch.allclose(mean, expected / SIZE)


def test_reducescatter(peers: Peers) -> None:
    peers.all(check_reducescatter)


# -- movements ---------------------------------------------------------------------------------------------


def check_allgather() -> None:
    for dtype in ANY:
        expected = [torch.empty_like(mine(dtype)) for _ in range(SIZE)]
        dist.all_gather(expected, mine(dtype)) if dtype not in (
            torch.int16,
            torch.bool,
            torch.bfloat16,
        ) else expected.__setitem__(slice(None), of_all(dtype))
        assert torch.equal(hvd.allgather(mine(dtype)), torch.cat(expected)), dtype
        assert torch.equal(
            hvd.synchronize(hvd.allgather_async(mine(dtype), name="rows")), torch.cat(expected)
        )
    ragged = hvd.allgather(torch.full((hvd.rank(), 2), hvd.rank()))
    assert ragged.tolist() == [[1, 1], [2, 2], [2, 2]]
    ragged = hvd.allgather(torch.full((500 * hvd.rank(), 2), hvd.rank()))
    assert ragged[:, 1].tolist() == [1] * 500 + [2] * 1000, "too much for some"
    assert hvd.allgather(torch.zeros(0, 2)).shape == (0, 2)
    assert hvd.allgather(torch.tensor(hvd.rank())).tolist() == [0, 1, 2]


def test_allgather(peers: Peers) -> None:
    peers.all(check_allgather)


def check_broadcast() -> None:
    for dtype, shape in product(ANY, SHAPES):
        for root in range(SIZE):
            tensor = mine(dtype, *shape)
            expected = mine(dtype, *shape, rank=root)
            assert torch.equal(hvd.broadcast(tensor, root), expected)
            assert torch.equal(hvd.synchronize(hvd.broadcast_async(tensor, root)), expected)
            assert torch.equal(tensor, mine(dtype, *shape)), "only forms with an underscore change it"
            assert hvd.broadcast_(tensor, root) is tensor
            assert torch.equal(tensor, expected)
            again = mine(dtype, *shape)
            hvd.synchronize(hvd.broadcast_async_(again, root, name="again"))
            assert torch.equal(again, expected)


def test_broadcast(peers: Peers) -> None:
    peers.all(check_broadcast)


def check_alltoall() -> None:
    me = hvd.rank()
    for dtype, width in product(ANY, (2, 200)):
        sent = mine(dtype, 2 * SIZE, width)
        of_all = [mine(dtype, 2 * SIZE, width, rank=r) for r in range(SIZE)]
        expected = torch.cat([one[2 * me : 2 * me + 2] for one in of_all])
        assert torch.equal(hvd.alltoall(sent), expected), dtype
        assert torch.equal(hvd.synchronize(hvd.alltoall_async(sent)), expected)
    flat = torch.empty(2 * SIZE)
    dist.all_to_all_single(flat, mine(torch.float32, 2 * SIZE))
    assert torch.equal(hvd.alltoall(mine(torch.float32, 2 * SIZE)), flat)
    splits = [me, 0, 2]  # to ranks 0, 1 and 2
    for width in (1, 35, 100):  # with the second, what one rank sends is too much
        rows, received = hvd.alltoall(torch.full((me + 2, width), me), splits=torch.tensor(splits))
        assert received.tolist() == {0: [0, 1, 2], 1: [0, 0, 0], 2: [2, 2, 2]}[me]
        assert rows.shape[1] == width
        assert rows[:, -1].tolist() == [rank for rank, n in enumerate(received.tolist()) for _ in range(n)]


def test_alltoall(peers: Peers) -> None:
    peers.all(check_alltoall)


def check_objects() -> None:
    me = {"rank": hvd.rank(), "list": [1, (2, None)], "array": torch.ones(2).numpy()}
    assert hvd.broadcast_object(me, root_rank=2)["rank"] == 2
    assert [one["rank"] for one in hvd.allgather_object(me)] == [0, 1, 2]
    weights = [torch.full((2,), float(hvd.rank())), torch.full((300,), float(hvd.rank()))]
    hvd.broadcast_parameters(weights, root_rank=1)
    assert [one.unique().tolist() for one in weights] == [[1.0], [1.0]], "tensors without names"
    hvd.barrier()


def test_objects_and_barrier(peers: Peers) -> None:
    peers.all(check_objects)


def check_another_order() -> None:
    """As after the death of rank 0: its successor has the highest number."""
    world = horovod_world()
    known, order = world.place, (1, 2, 0)
    world._place = known._replace(rank=order.index(dist.get_rank()), order=order)
    try:
        me = hvd.rank()
        assert hvd.allgather(torch.tensor([me])).tolist() == [0, 1, 2]
        assert hvd.allgather_object(me) == [0, 1, 2]
        assert [hvd.broadcast(torch.tensor(me), root).item() for root in range(SIZE)] == [0, 1, 2]
        assert hvd.broadcast_object(me, root_rank=1) == 1
        assert hvd.alltoall(torch.arange(SIZE) + 10 * me).tolist() == [me, 10 + me, 20 + me]
        splits = torch.tensor([me, 0, 2])
        rows, received = hvd.alltoall(torch.full((me + 2,), me), splits=splits)
        assert rows.tolist() == [rank for rank, n in enumerate(received.tolist()) for _ in range(n)]
        assert hvd.reducescatter(torch.arange(SIZE), op=hvd.Sum).item() == SIZE * me
        state = {"weight": torch.full((2,), float(me))}
        hvd.broadcast_parameters(state, root_rank=1)
        assert state["weight"].tolist() == [1.0, 1.0]
    finally:
        world._place = known


def test_ranks_in_another_order_than_torchs(peers: Peers) -> None:
    peers.all(check_another_order)


# -- gradients through collectives -------------------------------------------------------------------------


def check_gradients() -> None:
    me = hvd.rank()
    x = torch.ones(3, requires_grad=True)
    (hvd.allreduce(x) * (me + 1)).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, torch.full((3,), 2.0)), "the mean of 1, 2 and 3"
    x = torch.ones(3, requires_grad=True)
    first, second = hvd.grouped_allreduce([x, x * 2], op=hvd.Sum)
    (first * me + second).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0 + 3 * 2.0] * 3
    x = torch.ones(2, 1, requires_grad=True)
    (hvd.allgather(x) * torch.arange(6).reshape(6, 1)).sum().backward()
    assert x.grad is not None
    assert x.grad.flatten().tolist() == [3.0 * (2 * me), 3.0 * (2 * me + 1)]
    x = torch.ones(2, requires_grad=True)
    (hvd.broadcast(x, 1) * (me + 1)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == ([6.0, 6.0] if me == 1 else [0.0, 0.0])
    x = torch.ones(SIZE, requires_grad=True)
    (hvd.alltoall(x) * (me + 1)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 2.0, 3.0]
    x = torch.ones(SIZE, requires_grad=True)
    (hvd.reducescatter(x, op=hvd.Sum) * (me + 1)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 2.0, 3.0]


def test_gradients_pass_through(peers: Peers) -> None:
    peers.all(check_gradients)


# -- join --------------------------------------------------------------------------------------------------


def check_join() -> int:
    for step in range(2 * hvd.rank()):
        working = [rank for rank in range(SIZE) if 2 * rank > step]
        for count in (1, 500):
            got = hvd.allreduce(torch.tensor([1.0, float(hvd.rank())] * count), op=hvd.Sum)
            assert got.tolist() == [len(working), sum(working)] * count
    return hvd.join()


def test_a_rank_without_data_joins(peers: Peers) -> None:
    assert peers.all(check_join) == [2, 2, 2]


def check_join_refusals() -> str:
    with pytest.raises(ConfigError) as caught:
        hvd.join() if hvd.rank() == 0 else hvd.broadcast(torch.ones(1), 0)
    return str(caught.value)


def test_what_others_may_not_do_meanwhile(peers: Peers) -> None:
    assert all(
        "ranks [0] have joined" in text and "broadcast" in text for text in peers.all(check_join_refusals)
    )


# -- errors ------------------------------------------------------------------------------------------------


def check_differences() -> list[str]:
    me, found = hvd.rank(), []
    attempts = [
        lambda: hvd.allreduce(torch.ones(2 + (me == 1), 3), name="loss"),
        lambda: hvd.allreduce(torch.ones(2, dtype=torch.float64 if me == 2 else torch.float32)),
        lambda: hvd.allreduce(torch.ones(2), name="a" if me else "b"),
        lambda: hvd.allreduce(torch.ones(2), op=hvd.Sum if me else hvd.Average),
        lambda: hvd.broadcast(torch.ones(2), root_rank=me),
        lambda: hvd.allgather(torch.ones(2, 3 + me)),
        lambda: hvd.allreduce(torch.ones(999 if me else 2)),
        lambda: hvd.allgather(torch.ones(2)) if me else hvd.barrier(),
        lambda: hvd.grouped_allreduce([torch.ones(2), torch.ones(2 + me)]),
        lambda: hvd.broadcast_parameters({"weight": torch.ones(1 + me)}),
    ]  # fmt: skip
    for attempt in attempts:
        with pytest.raises(ConfigError, match="not in the same collective") as caught:
            attempt()
        found.append(str(caught.value))
    assert hvd.allreduce(torch.ones(1)).item() == 1.0, "and they go on together"
    return found


def test_what_differs_between_ranks_is_named_on_all_of_them(peers: Peers) -> None:
    first, second, third = peers.all(check_differences)
    assert first == second == third
    assert first[0].endswith(
        "ranks 0, 2 in allreduce 'loss' of float32 [2, 3], op=Average; rank 1 in allreduce 'loss' of float32 [3, 3], "
        "op=Average"
    )
    for text, words in zip(
        first[1:],
        (
            "float64 [2]",
            "'b'",
            "op=Sum",
            "root_rank=2",
            "[5]",
            "[999]",
            "barrier",
            "[[2], [4]]",
            "weight [3]",
        ),
        strict=True,
    ):
        assert words in text


def check_refusals() -> None:
    for wrong, attempt in (
        ("op=.* or average=", lambda: hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum)),
        (
            r"op=hvd\.Average with the learning rate of that many workers",
            lambda: hvd.allreduce(torch.ones(1), op=hvd.Adasum),
        ),
        ("process_set takes an hvd.ProcessSet", lambda: hvd.allreduce(torch.ones(1), process_set=object())),
        ("not bool", lambda: hvd.allreduce(torch.ones(1, dtype=torch.bool))),
        (r"init\(comm=\[0, 1\]\): all 3 ranks", lambda: hvd.init(comm=[0, 1])),
        ("no timeline", lambda: hvd.start_timeline("timeline.json")),
        ("root_rank=3", lambda: hvd.broadcast(torch.ones(1), 3)),
        ("evenly", lambda: hvd.alltoall(torch.ones(4))),
        ("make up 3 rows", lambda: hvd.alltoall(torch.ones(3), splits=[1, 1, 2])),
        ("at most 8 dimensions", lambda: hvd.allreduce(torch.ones(*[1] * 9))),
        ("first dimension", lambda: hvd.reducescatter(torch.tensor(1.0))),
    ):
        with pytest.raises(ConfigError, match=wrong):
            attempt()
    hvd.barrier()


def test_what_no_rank_can_ask_for(peers: Peers) -> None:
    peers.all(check_refusals)


def test_before_init() -> None:
    with pytest.raises(ConfigError, match=r"hvd\.init\(\)"):
        hvd.rank()
    with pytest.raises(ConfigError, match=r"hvd\.init\(\)"):
        hvd.allreduce(torch.ones(1))
    assert not hvd.is_initialized()
