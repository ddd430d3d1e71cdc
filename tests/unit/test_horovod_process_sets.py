"""Collectives of some ranks, and batch normalisation over all, between three real processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import stoker.compat.horovod.torch as hvd
from stoker.errors import ConfigError
from tests.unit.horovod_peers import Peers

pytestmark = pytest.mark.real
SIZE = 3


@pytest.fixture(scope="module")
def peers() -> Iterator[Peers]:
    some = Peers(SIZE)
    some.all(hvd.init)
    yield some
    some.close()


def check_sets() -> None:
    me = hvd.rank()
    ends = hvd.add_process_set([2, 0])
    assert (ends.ranks, ends.size(), ends.included()) == ([0, 2], 2, me != 1)
    assert hvd.add_process_set(hvd.ProcessSet([0, 2])).process_set_id == ends.process_set_id
    assert hvd.get_process_set_ids_and_ranks() == {0: [0, 1, 2], ends.process_set_id: [0, 2]}
    assert hvd.global_process_set.size() == SIZE
    if me == 1:
        for attempt in (ends.rank, lambda: hvd.allreduce(torch.ones(1), process_set=ends)):
            with pytest.raises(ConfigError, match="rank 1 is not in"):
                attempt()
    else:
        assert ends.rank() == me // 2
        for count in (1, 500):  # small ones travel along with the agreement
            mine = torch.full((2, count), float(me))
            assert hvd.allreduce(mine, process_set=ends).unique().tolist() == [1.0]
            assert hvd.broadcast(mine, 2, process_set=ends).unique().tolist() == [2.0]
            assert hvd.allgather(mine, process_set=ends)[:, 0].tolist() == [0.0, 0.0, 2.0, 2.0]
            assert hvd.alltoall(mine, process_set=ends)[:, 0].tolist() == [0.0, 2.0]
            assert hvd.reducescatter(mine, op=hvd.Sum, process_set=ends).unique().tolist() == [2.0]
        assert hvd.allgather_object(me, process_set=ends) == [0, 2]
        assert hvd.broadcast_object(me, root_rank=2, process_set=ends) == 2
        weight = torch.full((2,), float(me))
        hvd.broadcast_parameters([weight], root_rank=2, process_set=ends)
        assert weight.tolist() == [2.0, 2.0]
        with pytest.raises(ConfigError, match=r"root_rank=1: ranks are \[0, 2\]"):
            hvd.broadcast(weight, 1, process_set=ends)
        x = torch.ones(2, requires_grad=True)
        (hvd.broadcast(x, 2, process_set=ends) * (me + 1)).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == ([4.0, 4.0] if me == 2 else [0.0, 0.0])
        hvd.barrier(process_set=ends)
    assert hvd.allreduce(torch.tensor(float(me)), process_set=hvd.global_process_set).item() == 1.0
    assert hvd.remove_process_set(ends)
    assert not hvd.remove_process_set(hvd.global_process_set)
    with pytest.raises(ConfigError, match=r"is not known: give it to hvd\.add_process_set"):
        hvd.allreduce(torch.ones(1), process_set=ends)


def test_collectives_of_some_ranks(peers: Peers) -> None:
    peers.all(check_sets)


def check_sets_differ() -> str:
    pair = hvd.add_process_set([0, 1])
    if hvd.rank() == 2:
        return ""
    with pytest.raises(ConfigError, match="not in the same collective") as caught:
        hvd.allreduce(torch.ones(2 + hvd.rank()), process_set=pair)
    return str(caught.value)


def test_differences_within_a_set_are_named_in_it(peers: Peers) -> None:
    first, second, outside = peers.all(check_sets_differ)
    assert first == second
    assert "rank 0 in allreduce of float32 [2]" in first
    assert outside == ""


def check_optimizer() -> list[float]:
    pair = hvd.add_process_set([1, 2])
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), process_set=pair)
    for _ in range(2):
        optimizer.zero_grad()
        (model(torch.ones(1, 1)) * hvd.rank()).sum().backward()
        optimizer.step()
    return [p.item() for p in model.parameters()]


def test_an_optimizer_of_some_ranks(peers: Peers) -> None:
    assert peers.all(check_optimizer) == [[0.0], [-3.0], [-3.0]]


def test_what_is_no_set() -> None:
    for wrong in ([], [0, 0], [-1], ["0"]):
        with pytest.raises(ConfigError, match="give ranks from 0 on, each once"):
            hvd.ProcessSet(wrong)


def check_groups() -> None:
    me = hvd.rank()
    one, other = hvd.grouped_allgather([torch.tensor([me]), torch.full((me, 1), me)])
    assert (one.tolist(), other.flatten().tolist()) == ([0, 1, 2], [1, 2, 2])
    handle = hvd.grouped_allgather_async([torch.tensor([me])], name="rows")
    assert [rows.tolist() for rows in hvd.synchronize(handle)] == [[0, 1, 2]]
    assert hvd.poll(handle)
    parts = hvd.grouped_reducescatter([torch.arange(3), torch.ones(3)], op=hvd.Sum)
    assert [rows.tolist() for rows in parts] == [[3 * me], [3.0]]
    parts = hvd.synchronize(hvd.grouped_reducescatter_async([torch.ones(3)], postscale_factor=2.0))
    assert parts[0].tolist() == [2.0]


def test_groups_of_gathers_and_scatters(peers: Peers) -> None:
    peers.all(check_groups)


def check_sync_batch_norm() -> None:
    torch.manual_seed(3)
    batch = torch.randn(12, 4, 5) * 3 + 100
    counts = (2, 4, 6)  # each rank has another part
    begin = sum(counts[: hvd.rank()])
    for options in ({}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}):
        whole, mine = torch.nn.BatchNorm1d(4, **options), hvd.SyncBatchNorm(4, **options)  # type: ignore[arg-type]
        part = slice(begin, begin + counts[hvd.rank()])
        x, y = batch.clone().requires_grad_(), batch[part].clone().requires_grad_()
        for _ in range(2):
            expected, got = whole(x), mine(y)
            assert torch.allclose(got, expected[part], atol=1e-4)
        expected.pow(3).sum().backward()
        got.pow(3).sum().backward()
        assert x.grad is not None
        assert y.grad is not None
        assert torch.allclose(y.grad, x.grad[part], atol=1e-3)
        for one, other in zip(mine.parameters(), whole.parameters(), strict=True):
            assert torch.allclose(hvd.allreduce(one.grad, op=hvd.Sum), other.grad, atol=1e-2)
        for one, other in zip(mine.buffers(), whole.buffers(), strict=True):
            assert torch.allclose(one, other, rtol=1e-4), options
        mine.eval(), whole.eval()
        assert torch.allclose(mine(batch[part]), whole(batch)[part], atol=1e-4)


def test_batch_norm_over_all_ranks_is_that_of_the_whole_batch(peers: Peers) -> None:
    peers.all(check_sync_batch_norm)
