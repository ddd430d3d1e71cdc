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


def check_join() -> None:
    """Each set is used as long as none of its ranks has joined, and again when all have."""
    me = hvd.rank()
    ends, alone, pair = (hvd.add_process_set(ranks) for ranks in ([0, 2], [1], [1, 2]))
    for _ in range(2):
        if me != 1:
            assert hvd.allreduce(torch.ones(500), op=hvd.Sum, process_set=ends)[0] == 2
        else:
            assert hvd.allreduce(torch.ones(1), process_set=alone) == 1
        if me != 0:  # rank 0 has joined
            assert hvd.allreduce(torch.ones(2), op=hvd.Sum, process_set=pair)[0] == 2
            for count in (1, 500):
                assert hvd.allreduce(torch.ones(count), op=hvd.Sum)[0] == 2
        if me == 2:
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum)[0] == 1
        assert hvd.join() == 2


def test_a_rank_joins_the_others_and_leaves_their_sets_alone(peers: Peers) -> None:
    peers.all(check_join)


def check_join_in_a_set() -> str:
    """A set is used without the rank that has joined; then all begin anew."""
    ends = hvd.add_process_set([0, 2])
    attempt = hvd.join if hvd.rank() != 2 else lambda: hvd.allreduce(torch.ones(500), process_set=ends)
    with pytest.raises((ConfigError, hvd.HorovodInternalError)) as caught:
        attempt()
    hvd.shutdown()
    hvd.init()
    assert hvd.allreduce(torch.ones(500), op=hvd.Sum)[0] == SIZE
    return str(caught.value)


def test_a_set_with_a_rank_that_has_joined_is_refused_in_all_of_it(peers: Peers) -> None:
    first, _, third = peers.all(check_join_in_a_set)
    assert first == third
    assert first.startswith(
        "ranks [0] have joined (hvd.join), which is of all ranks, while others are at allreduce"
    )
    assert "of the process set [0, 2]" in first


def check_begin_again() -> None:
    """What one beginning leaves is nothing to the next."""
    me = hvd.rank()
    old = hvd.add_process_set([0, 1])
    for turn in range(3):
        assert hvd.allreduce(torch.full((500,), float(me)), op=hvd.Sum)[0] == 3
        hvd.shutdown()
        assert not hvd.is_initialized()
        assert old.process_set_id is None
        hvd.init()
        assert hvd.get_process_set_ids_and_ranks() == {0: [0, 1, 2]}
        other = hvd.add_process_set([turn % 2, 2])
        assert other.process_set_id == 1
        with pytest.raises(ConfigError, match="is not known"):
            hvd.allreduce(torch.ones(1), process_set=old)
        assert hvd.add_process_set(old).process_set_id == 2
        if me != 2:
            assert hvd.allreduce(torch.full((500,), float(me)), op=hvd.Sum, process_set=old)[0] == 1
        if me in (turn % 2, 2):
            assert hvd.broadcast(torch.full((500,), float(me)), 2, process_set=other)[0] == 2


def test_init_after_shutdown_finds_nothing_of_what_was(peers: Peers) -> None:
    peers.all(check_begin_again)


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
