"""Which paths and versions the kernel's nodes are. Pure.

The number of a node comes of what it is: of a folder's path, of a file's path and version. So it is the same after a
restart, and the file that another version makes is another one: who has the old one open goes on reading it, and what
the kernel keeps of a node's content is right for ever. A folder that was removed and made again has another number
while the kernel knows the one before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple, Protocol

import xxhash

from stoker.cache.mount.records import Forgotten, LookedUp, NodeNamed
from stoker.cache.mount.requests import ROOT

_NUMBERS = (1 << 63) - 1
_LOOKED_THROUGH = 64
_REMOVED = "removed"
"""The version of a folder that is no more: Linux never makes anything in it again, whatever has its name by then."""


class PlainFiles(Protocol):
    """Numbers of files that can be opened to be read without a decision: whatever opens them may look here."""

    def add(self, number: int, /) -> None: ...
    def discard(self, number: int, /) -> None: ...
    def __contains__(self, number: object, /) -> bool: ...


class FailedRead(NamedTuple):
    """Why bytes could not be had, out of `errno`, when, and which."""

    code: int
    at: float
    start: int
    stop: int


class Node:
    """One that the kernel knows. `kind`: empty, or which of the special files it is. `is_settled`: nobody writes it.
    `was_plain`: it may be open without anybody having written that down. `listed_at`: since when the kernel keeps what
    is in a folder. `failed`: what of it could not be had."""

    __slots__ = (
        "failed",
        "is_folder",
        "is_settled",
        "kind",
        "listed_at",
        "lookups",
        "modified_ns",
        "number",
        "path",
        "size_bytes",
        "version",
        "was_plain",
    )

    def __init__(
        self,
        number: int,
        path: str,
        *,
        is_folder: bool = False,
        size_bytes: int = 0,
        version: str = "",
        modified_ns: int = 0,
        kind: str = "",
    ) -> None:
        self.number = number
        self.path = path
        self.is_folder = is_folder
        self.size_bytes = size_bytes
        self.version = version
        self.modified_ns = modified_ns
        self.kind = kind
        self.lookups = 0
        self.is_settled = True
        self.was_plain = False
        self.listed_at = float("-inf")
        self.failed: FailedRead | None = None

    def named(self) -> NodeNamed:
        """For the next daemon."""
        return NodeNamed(
            self.number, self.path, self.is_folder, self.size_bytes, self.version, self.modified_ns,
            self.lookups, self.kind, self.was_plain,
        )  # fmt: skip


class NodeTable:
    """The nodes that the kernel has not forgotten, those first that are known longest; and the root. `plain`: those of
    them that are files of at most `plain_bytes_max`, which are always read by requests, and that nobody writes; none
    if not `has_plain`."""

    def __init__(self, count_max: int, plain_bytes_max: int = 0, plain: PlainFiles | None = None) -> None:
        self._count_max = count_max
        self._plain_bytes_max = plain_bytes_max
        self.plain: PlainFiles = set() if plain is None else plain
        self.has_plain = True
        self._added = 0
        self._nodes = OrderedDict({ROOT: Node(ROOT, "", is_folder=True)})
        self._made_again: dict[str, int] = {}
        """Folders beside which the kernel knows the one that was removed before them."""

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def get(self, number: int) -> Node | None:
        """None: the kernel was never told of it, or has forgotten it."""
        return self._nodes.get(number)

    def number_of(self, path: str, *, is_folder: bool = False, version: str = "", kind: str = "") -> int:
        """Of a path's node; the root's is given."""
        if is_folder:
            if not path:
                return ROOT
            if path in self._made_again:
                return self._made_again[path]
        name = f"{path}/" if is_folder else f"{path}\0{version}\0{kind}"
        attempt = 0
        while True:
            number = _number(name, attempt)
            there = self._nodes.get(number)
            if number > ROOT and (
                there is None
                or (there.path, there.is_folder, there.version, there.kind)
                == (path, is_folder, version, kind)
            ):
                return number
            attempt += 1

    def look_up(
        self,
        path: str,
        *,
        is_folder: bool = False,
        size_bytes: int = 0,
        version: str = "",
        modified_ns: int = 0,
        kind: str = "",
    ) -> tuple[Node, bool]:
        """The node of a path, which the kernel is told of once more; whether it is news."""
        number = self.number_of(path, is_folder=is_folder, version=version, kind=kind)
        node = self._nodes.get(number)
        is_new = node is None
        if node is None:
            self._added += 1
            node = self._nodes[number] = Node(
                number, path, is_folder=is_folder, size_bytes=size_bytes, version=version,
                modified_ns=modified_ns, kind=kind,
            )  # fmt: skip
            self.mark(node)
            self._note_folder(node)
        node.lookups += 1
        return node, is_new

    def removed(self, path: str) -> Node | None:
        """A folder is no more. If it is made again that is another node, though the kernel may know this one yet."""
        node = self._nodes.get(self.number_of(path, is_folder=True))
        if node is not None:
            node.version = _REMOVED
            self._made_again.pop(path, None)
        return node

    def _note_folder(self, node: Node) -> None:
        """Whether it has another number than its path gives it first."""
        if node.is_folder and not node.version and node.number != _number(f"{node.path}/", 0):
            self._made_again[node.path] = node.number

    def forget(self, number: int, lookups: int) -> None:
        """The kernel has let go of so many; of a node that it was never told of, nothing happens."""
        node = self._nodes.get(number)
        if node is None or number == ROOT:
            return
        node.lookups -= lookups
        if node.lookups <= 0:
            self.plain.discard(number)
            del self._nodes[number]
            if self._made_again.get(node.path) == number:
                del self._made_again[node.path]

    def mark(self, node: Node) -> None:
        """It is new, or otherwise than it was: whether it can be opened without a decision. Once it could, somebody may
        have it open of whom nobody knows."""
        is_large = node.size_bytes > self._plain_bytes_max
        if node.is_folder or node.kind or not node.is_settled or is_large or not self.has_plain:
            self.plain.discard(node.number)
        else:
            node.was_plain = True
            self.plain.add(node.number)

    def superfluous(self) -> list[Node]:
        """Some of those that have been known longest, where there are too many: the kernel is to be asked to forget
        them; more than came too many since it was asked last. Who is named is not named again before all others
        were."""
        some: list[Node] = []
        excess = len(self._nodes) - self._count_max
        if excess <= 0:
            return some
        count, self._added = max(_LOOKED_THROUGH, 2 * min(self._added, excess)), 0
        for number, node in list(islice(self._nodes.items(), count)):
            self._nodes.move_to_end(number)
            if number != ROOT:
                some.append(node)
        return some

    def below(self, path: str) -> list[Node]:
        """All in a folder, and in its folders."""
        prefix = f"{path}/" if path else ""
        return [node for node in self._nodes.values() if node.path.startswith(prefix) and node.number != ROOT]

    def restore(self, record: NodeNamed | LookedUp | Forgotten) -> None:
        """What a daemon before wrote down."""
        if isinstance(record, NodeNamed):
            node = Node(
                record.node, record.path, is_folder=record.is_folder, size_bytes=record.size_bytes,
                version=record.version, modified_ns=record.modified_ns, kind=record.kind,
            )  # fmt: skip
            node.lookups, node.was_plain = record.lookups, record.was_plain
            self._nodes[record.node] = node
            if node.version and self._made_again.get(node.path) == node.number:
                del self._made_again[node.path]
            self._note_folder(node)
        elif isinstance(record, LookedUp):
            for number in record.nodes:
                if (known := self._nodes.get(number)) is not None:
                    known.lookups += 1
        else:
            for number, lookups in record.lookups:
                self.forget(number, lookups)


def _number(name: str, attempt: int) -> int:
    return xxhash.xxh3_64_intdigest(name, seed=attempt) & _NUMBERS
