"""In which order the parts of a global batch are summed: a fixed binary tree over the virtual ranks. PURE.

Floating-point sums depend on their order. Here it is that of the tree, whoever computed the parts: a rank adds up what
it has of its own subtrees, and what is left is added in the same order after the exchange. Parts without records are
left out, on all ranks alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

from stoker.data.order import parts_of

T = TypeVar("T")


class Node(NamedTuple):
    """The sum of the virtual ranks `[low, high)`."""

    low: int
    high: int


def parent_of(node: Node, count: int) -> Node:
    """The node above, in the tree over `count` virtual ranks. Raises ValueError for one that is not in it."""
    at = Node(0, count)
    while at != node:
        middle = (at.low + at.high) // 2
        below = Node(at.low, middle) if node.high <= middle else Node(middle, at.high)
        if below == node:
            return at
        if not below.low <= node.low < node.high <= below.high or below.high - below.low < 2:
            break
        at = below
    if node == Node(0, count):
        return node
    raise ValueError(f"{node} is no node of the tree over {count}")


def covering(low: int, high: int, count: int) -> list[Node]:
    """The fewest nodes that are the virtual ranks `[low, high)` together, in their order."""
    return _covering(Node(0, count), low, high)


def _covering(at: Node, low: int, high: int) -> list[Node]:
    if high <= at.low or at.high <= low:
        return []
    if low <= at.low and at.high <= high:
        return [at]
    middle = (at.low + at.high) // 2
    return _covering(Node(at.low, middle), low, high) + _covering(Node(middle, at.high), low, high)


def nodes_of(rank: int, world_size: int, count: int, is_empty: Callable[[int], bool]) -> list[Node]:
    """The sums that a rank brings to the exchange; `is_empty` says which virtual ranks have no records."""
    own = parts_of(rank, world_size, count)
    return [node for node in covering(own.start, own.stop, count) if not all(map(is_empty, range(*node)))]


def fold(sums: Mapping[Node, T], count: int, add: Callable[[T, T], T]) -> T | None:
    """All of them in the order of the tree; None where there is none."""
    return _fold(Node(0, count), sums, add)


def _fold(at: Node, sums: Mapping[Node, T], add: Callable[[T, T], T]) -> T | None:
    found = sums.get(at)
    if found is not None or at.high - at.low < 2:
        return found
    middle = (at.low + at.high) // 2
    left = _fold(Node(at.low, middle), sums, add)
    right = _fold(Node(middle, at.high), sums, add)
    if left is None or right is None:
        return left if right is None else right
    return add(left, right)


class Stack:
    """What one rank has summed of its parts, which come in their order. Holds one sum for each level of the tree."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._nodes: list[tuple[Node, object]] = []

    def push(self, number: int, part: T | None, add: Callable[[T, T], T]) -> None:
        """The part of a virtual rank; None: it has no records."""
        node, held = Node(number, number + 1), part
        while node != Node(0, self._count):
            above = parent_of(node, self._count)
            if not self._nodes or node.high != above.high:
                break
            before, sum_before = self._nodes[-1]
            if before != Node(above.low, node.low):
                break
            del self._nodes[-1]
            left: T | None = sum_before  # type: ignore[assignment]
            held = left if held is None else held if left is None else add(left, held)
            node = above
        self._nodes.append((node, held))

    def take(self) -> dict[Node, object]:
        """The sums; the stack is empty again."""
        nodes, self._nodes = self._nodes, []
        return {node: held for node, held in nodes if held is not None}

    @property
    def is_empty(self) -> bool:
        return not self._nodes
