"""The order in which parts of a global batch are summed does not depend on who computed them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker.data.order import parts_of
from stoker.train.exact.flat import ALIGNED, Flat
from stoker.train.exact.tree import Node, Stack, covering, fold, nodes_of, parent_of

counts = st.integers(1, 40)


@given(counts, st.data())
def test_every_world_sums_in_the_same_order(count: int, data: st.DataObject) -> None:
    world_size = data.draw(st.integers(1, count))
    empty = data.draw(st.sets(st.integers(0, count - 1)))
    rng = np.random.default_rng(count)
    parts = (rng.standard_normal(count) * 10.0 ** rng.integers(-8, 8, count)).astype(np.float32)
    expected = tree_sum(parts, empty, 0, count)

    sums: dict[Node, np.float32] = {}
    for rank in range(world_size):
        stack = Stack(count)
        for number in parts_of(rank, world_size, count):
            stack.push(number, None if number in empty else parts[number], np.add)
        own = stack.take()
        assert stack.is_empty
        assert list(own) == nodes_of(rank, world_size, count, empty.__contains__)
        assert len(own) <= 2 * count.bit_length(), "a few for each level of the tree"
        sums |= own  # type: ignore[arg-type]
    found = fold(sums, count, np.add)
    assert (found is None) == (len(empty) == count)
    assert expected == found


def tree_sum(parts: np.ndarray, empty: set[int], low: int, high: int) -> np.float32 | None:
    """As it is written in the text books."""
    if high - low == 1:
        return None if low in empty else parts[low]
    middle = (low + high) // 2
    left, right = tree_sum(parts, empty, low, middle), tree_sum(parts, empty, middle, high)
    if left is None or right is None:
        return left if right is None else right
    return np.add(left, right)


def test_the_order_matters_and_is_not_that_of_a_loop() -> None:
    parts = np.array([1e8, 1.0, -1e8, 1.0], dtype=np.float32)
    stack = Stack(4)
    for number, part in enumerate(parts):
        stack.push(number, part, np.add)
    ((_, found),) = stack.take().items()
    assert found == tree_sum(parts, set(), 0, 4)
    assert found != np.float32(((parts[0] + parts[1]) + parts[2]) + parts[3])


@given(counts, st.data())
def test_nodes_cover_a_range_once(count: int, data: st.DataObject) -> None:
    low = data.draw(st.integers(0, count - 1))
    high = data.draw(st.integers(low, count))
    nodes = covering(low, high, count)
    assert [number for node in nodes for number in range(*node)] == list(range(low, high))
    for node in nodes:
        above = parent_of(node, count)
        assert above == node or not (low <= above.low and above.high <= high), "the fewest"


@pytest.mark.parametrize("node", [Node(1, 3), Node(0, 5), Node(0, 3)])
def test_a_range_that_is_no_node_is_refused(node: Node) -> None:
    with pytest.raises(ValueError, match="no node of the tree over 4"):
        parent_of(node, 4)


def test_flat_tensors_keep_types_apart_and_begin_at_cache_lines() -> None:
    parameters = [torch.ones(3), torch.ones(2, 5, dtype=torch.bfloat16), torch.ones(7)]
    buffers = [torch.tensor(5), torch.tensor([True, False]), torch.ones(4)]
    one, other = Flat(parameters, buffers, 3), Flat(parameters, buffers, 3)
    views = [*one.gradients, *one.buffers, one.marks]
    assert all(view.storage_offset() % ALIGNED == 0 for view in views)
    assert set(one.tensors) == {torch.float32, torch.bfloat16, torch.int64, torch.uint8}
    for flat, value in ((one, 1), (other, 2)):
        for view in [*flat.gradients, *flat.buffers, flat.marks]:
            view.fill_(value)
    one.scale(2.0)
    assert one.add(other) is one
    assert all(bool((view == 4).all()) for view in [*one.gradients, one.buffers[2], one.marks])
    assert one.buffers[0].item() == 3, "whole numbers are not weighted"
    assert one.gradients[1].shape == (2, 5)
