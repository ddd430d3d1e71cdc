"""What the parts of a mount's core share. Pure."""

from __future__ import annotations

import stat
from collections.abc import Iterable
from dataclasses import dataclass

from msgspec import structs

from stoker.cache.mount import answers
from stoker.cache.mount.answers import Attr
from stoker.cache.mount.handles import Handles
from stoker.cache.mount.known import Known
from stoker.cache.mount.nodes import Node, NodeTable, PlainFiles
from stoker.cache.mount.questions import Effect, Find, Remember, Reply, Tell
from stoker.cache.mount.records import LookedUp, NodeNamed, Record, packed
from stoker.cache.mount.requests import Init
from stoker.cache.mount.source_port import Found
from stoker.cache.mount.staged import Busy, Staged, StagedFiles
from stoker.cache.mount.waiting import Waiting

_SETTLED_S = 10 * 365 * 86400.0
"""A node's content and attributes never change."""


@dataclass(frozen=True, slots=True)
class MountSettings:
    """`kernel_ttl_s`, `ttl_s`: for how long kernel and daemon take a name to be what it was; `absent_ttl_s`: and the
    daemon that there is none, which the kernel always asks again. `timeout_s`: nobody waits longer for anything.
    `nodes_max`: the kernel is asked to forget names beyond; of `known_max` names the daemon knows something.
    `packed_bytes_max`: files up to that are never one of their own in the cache. `has_xattrs`: if not, the kernel asks
    for none again."""

    uid: int = 0
    gid: int = 0
    file_mode: int = 0o444
    folder_mode: int = 0o555
    kernel_ttl_s: float = 60.0
    ttl_s: float = 60.0
    absent_ttl_s: float = 5.0
    timeout_s: float = 30.0
    nodes_max: int = 200_000
    known_max: int = 100_000
    packed_bytes_max: int = 1024 * 1024
    read_bytes_max: int = 1024 * 1024
    page_entries: int = 1000
    is_writable: bool = False
    wants_passthrough: bool = True
    has_xattrs: bool = True


class MountState:
    """Settings, tables, and what they say to the kernel. `started_ns`: when the mount was made."""

    def __init__(self, settings: MountSettings, plain: PlainFiles | None = None) -> None:
        self.settings = settings
        self.nodes = NodeTable(settings.nodes_max, settings.packed_bytes_max, plain)
        self.handles = Handles()
        self.known = Known(settings.ttl_s, settings.absent_ttl_s, settings.known_max)
        self.waiting = Waiting(settings.timeout_s)
        self.staged = StagedFiles()
        self.busy = Busy()
        self._is_letting_go = False
        self.started_ns = 0
        self.wall_offset_ns = 0
        self.flags = 0

    def agree(self, flags: int) -> None:
        """The kernel has had its answer to INIT."""
        self.flags = flags
        self.nodes.has_plain = not self.is_without_opens

    @property
    def is_without_opens(self) -> bool:
        """Whether the kernel is told to open files without asking: what they are their nodes say. Not where it is
        decided of each file how it is read, or where one is written."""
        return bool(self.flags & Init.NO_OPEN_SUPPORT)

    def is_written(self, staged: Staged) -> None:
        """Its node looks as it is written, until it is settled."""
        node = self.nodes.get(staged.node)
        if node is None:
            return
        if staged.before is None:
            staged.before = node.size_bytes, node.modified_ns
        node.is_settled, node.size_bytes = False, staged.size_bytes
        self.nodes.mark(node)

    def named(self, node: Node) -> NodeNamed:
        """For the next daemon: as it is if what is being written comes to nothing."""
        staged = self.staged.of_node(node.number)
        if staged is None or staged.before is None:
            return node.named()
        size_bytes, modified_ns = staged.before
        return structs.replace(node.named(), size_bytes=size_bytes, modified_ns=modified_ns)

    def settle(self, staged: Staged) -> None:
        """Nobody writes it any more. What the origin has not got its node does not look like."""
        node = self.nodes.get(staged.node)
        if node is None:
            return
        node.is_settled = True
        if not staged.is_put and staged.before is not None:
            node.size_bytes, node.modified_ns = staged.before
        self.nodes.mark(node)

    def attr(self, node: Node) -> Attr:
        """What `stat` tells of a node."""
        settings = self.settings
        if node.is_folder:
            mode, links = stat.S_IFDIR | settings.folder_mode, 1
        else:
            mode, links = stat.S_IFREG | settings.file_mode, 1
        modified_ns = node.modified_ns or self.started_ns
        return Attr(node.number, node.size_bytes, modified_ns, mode, settings.uid, settings.gid, links)

    def wall_ns(self, now: float) -> int:
        """What the clock on the wall says then, nanoseconds since 1970."""
        return self.wall_offset_ns + int(now * 1e9)

    def told(self, named: Iterable[tuple[str, Found]]) -> tuple[list[Node], list[Effect]]:
        """The nodes of paths, which the kernel is about to be told of; and what is to be done before."""
        nodes: list[Node] = []
        news: list[Record] = []
        again: list[int] = []
        for path, found in named:
            node, is_new = self.nodes.look_up(
                path, is_folder=found.is_folder, size_bytes=found.size_bytes, version=found.version,
                modified_ns=round(found.modified_s * 1e9),
            )  # fmt: skip
            nodes.append(node)
            if is_new:
                if (staged := self.staged.of_node(node.number)) is not None:
                    # The kernel had forgotten it, while the origin is still being told.
                    staged.before = None
                    self.is_written(staged)
                news.append(self.named(node))
            else:
                again.append(node.number)
        if again:
            news.append(LookedUp(again))
        return nodes, [remembered(news)] if news else []

    def entry(self, node: Node, asked_at: float) -> bytes:
        """The answer to LOOKUP. A special file is looked at anew each time."""
        valid_s = 0.0 if node.kind or not node.is_settled else self.name_valid_s(asked_at)
        return answers.entry(node.number, self.attr(node), valid_s, self.attr_valid_s(node))

    def name_valid_s(self, asked_at: float) -> float:
        """For how long the kernel need not look a name up again, of which was asked then. Who answers late, after what
        was known was dropped, tells the kernel what it is not to keep."""
        return 0.0 if self.known.is_old(asked_at) else self.settings.kernel_ttl_s

    def attr_valid_s(self, node: Node) -> float:
        """For how long the kernel need not ask for a node's attributes again."""
        return _SETTLED_S if node.is_settled and not node.kind else 0.0

    def let_go(self, now: float) -> list[Effect]:
        """Have the kernel forget what has been known longest, where it is too much. Once at a time: where it has to
        wait for who looks something up, those who look up others do not queue more and more of it behind that."""
        some = [] if self._is_letting_go else self.nodes.superfluous()
        if not some:
            return []
        self._is_letting_go = True
        return self.waiting.ask_alone(Tell(tuple(map(self.stale_name, some))), now, self._has_let_go)

    def _has_let_go(self, _: object, __: float) -> list[Effect]:
        self._is_letting_go = False
        return []

    def stale_name(self, node: Node) -> bytes:
        """The notice that a node's name is to be looked up again."""
        return self.stale_path(child(node.path, node.kind) if node.kind else node.path)

    def is_now(self, path: str, found: Found | None, now: float) -> None:
        """It was changed through this mount: who looks from now on sees that, also in lists."""
        self.known.put(path, found, now)
        self.waiting.part_from_lists(path)

    def may_be_changed(self, path: str, now: float) -> None:
        """So if nobody knows to what."""
        self.known.drop(path, now)
        self.waiting.part_from_lists(path)

    def changed(self, path: str, now: float) -> list[Effect]:
        """There is something else by now: who looks next is to see it."""
        self.may_be_changed(path, now)
        self.waiting.part_from(Find(path))
        return self.waiting.ask_alone(Tell((self.stale_path(path),)), now)

    def stale_path(self, path: str) -> bytes:
        """The notice that a name is to be looked up again."""
        parent, _, name = path.rpartition("/")
        return answers.stale_name(self.nodes.number_of(parent, is_folder=True), name.encode())


def remembered(records: Iterable[Record]) -> Remember:
    """All of them, at once."""
    return Remember(b"".join([packed(record) for record in records]))


def done(unique: int, *parts: bytes | memoryview) -> Reply:
    """To a request that could be done."""
    return Reply((answers.head(unique, sum(map(len, parts))), *parts))


def refused(unique: int, code: int) -> Reply:
    """To one that could not, for a reason out of `errno`."""
    return Reply((answers.refusal(unique, code),))


def child(folder: str, name: str) -> str:
    """The path of what is called so in a folder."""
    return f"{folder}/{name}" if folder else name
