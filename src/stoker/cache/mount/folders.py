"""Reading folders, page by page: one of a million names takes no more room than one page. Pure.

Entries have numbers from 0 on: `.` and `..` first. Who reads on from a number that is not on the page that is here, or
after a restart, goes on with the page that it is on.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Iterator

from stoker.cache.mount import answers
from stoker.cache.mount.answers import DirEntry, Open
from stoker.cache.mount.handles import OpenFolder
from stoker.cache.mount.nodes import Node
from stoker.cache.mount.questions import Effect, List, Remember
from stoker.cache.mount.records import FolderRead, packed
from stoker.cache.mount.requests import RESENT, Header, Reading
from stoker.cache.mount.source_port import Found, Page
from stoker.cache.mount.state import MountState, child, done, refused
from stoker.cache.mount.waiting import Failed

_FOLDER, _FILE = stat.S_IFDIR >> 12, stat.S_IFREG >> 12
_DOTS = 2
_Entry = tuple[int, str, Found]
"""Its number, of those that are no dots, its path, and what it is."""


class Folders:
    """Answers OPENDIR, READDIR and READDIRPLUS."""

    def __init__(self, state: MountState) -> None:
        self._state = state

    def open(self, header: Header, now: float) -> list[Effect]:
        """Somebody wants to read a folder. The kernel keeps what it was told of it for as long as names."""
        folder = self._state.nodes.get(header.node)
        if folder is None or not folder.is_folder:
            return [refused(header.unique, errno.ESTALE if folder is None else errno.ENOTDIR)]
        effects: list[Effect] = []
        handle = self._state.handles.folder_opened_by(header.unique)
        if not handle:
            request = header.unique & ~RESENT
            handle = self._state.handles.open_folder(header.node, request)
            effects.append(Remember(packed(FolderRead(handle, header.node, 0, None, request))))
        flags, ttl_s = Open(0), self._state.settings.kernel_ttl_s
        # What is written through it the kernel does not see come into a folder.
        if ttl_s and not self._state.settings.is_writable:
            is_kept = now - folder.listed_at < ttl_s
            flags = Open.CACHE_DIR | (Open.KEEP_CACHE if is_kept else Open(0))
            folder.listed_at = folder.listed_at if is_kept else now
        return [*effects, done(header.unique, answers.opened(handle, flags))]

    def read(self, header: Header, asked: Reading, now: float, *, is_plus: bool) -> list[Effect]:
        """As many entries from number `asked.offset` on as have room and are on one page. From 0 on: as it is now."""
        opened, folder = self._state.handles.folder(asked.handle), self._state.nodes.get(header.node)
        if opened is None or folder is None:
            return [refused(header.unique, errno.EBADF)]
        if opened.written is None or not asked.offset:
            new = self._state.staged.new_in(folder.path)
            opened.written = {staged.path.rpartition("/")[2]: staged.node for staged in new}
        reading = _Reading(header.unique, folder, opened, asked, now, is_plus=is_plus)
        if opened.page is not None and asked.offset and _has(opened.page, reading.first):
            return self._answer(reading, now)
        start, after = opened.page_start(reading.first)
        return self._ask(reading, start, after, now)

    def _ask(self, reading: _Reading, start: int, after: str | None, now: float) -> list[Effect]:
        """Go on from a page to the one that has the entry."""

        def then(answer: object, at: float) -> list[Effect]:
            if isinstance(answer, Failed):
                return [refused(reading.unique, answer.code)]
            assert isinstance(answer, Page)
            handle, number = reading.asked.handle, reading.folder.number
            news = reading.opened.turn_to(start, answer, now)
            told = b"".join(packed(FolderRead(handle, number, *one)) for one in news)
            effects: list[Effect] = [Remember(told)] if told else []
            behind = start + len(answer.entries)
            if answer.after is not None and reading.first >= behind:
                return [*effects, *self._ask(reading, behind, answer.after, at)]
            return [*effects, *self._answer(reading, at)]

        question = List(reading.folder.path, after, self._state.settings.page_entries)
        return self._state.waiting.ask(reading.unique, question, then, now, since=reading.since)

    def _answer(self, reading: _Reading, now: float) -> list[Effect]:
        state, folder, asked, is_plus = self._state, reading.folder, reading.asked, reading.is_plus
        assert reading.opened.page is not None
        start, page = reading.opened.page
        behind = start + len(page.entries)
        entries: list[DirEntry] = []
        for number, name in enumerate((b".", b"..")[asked.offset :], asked.offset + 1):
            parent = folder.path.rpartition("/")[0] if name == b".." else folder.path
            inode = state.nodes.number_of(parent, is_folder=True)
            entries.append(DirEntry(name, inode, number, _FOLDER))
        left_bytes = asked.size_bytes - sum(answers.entry_bytes(one.name, is_plus=is_plus) for one in entries)
        fitting, is_all = _fitting(reading.some_of(start, page), left_bytes, is_plus=is_plus)
        if not fitting and is_all and page.after is not None:
            # To answer with none would say that there are no more.
            reading.first = behind
            return self._ask(reading, behind, page.after, now)
        effects: list[Effect] = []
        node_at: dict[str, Node] = {}
        valid_s = state.name_valid_s(reading.opened.page_at)
        if is_plus:
            # What is being written is looked up: it is another node than what the origin has. So is what has changed
            # since the page was asked for.
            settled = [
                (path, found)
                for _, path, found in fitting
                if state.staged.at(path) is None and not state.known.contradicts(path, found)
            ]
            nodes, effects = state.told(settled)
            node_at = {path: node for (path, _), node in zip(settled, nodes, strict=True)}
        for number, path, found in fitting:
            entry = DirEntry(_name(path), self._inode(path, found), number + _DOTS + 1, _kind(found))
            if (node := node_at.get(path)) is not None:
                entry = entry._replace(node=node.number, attr=state.attr(node), valid_s=valid_s)
            entries.append(entry)
        if is_all and page.after is None:
            entries += reading.written_from(behind)
        body, _ = answers.directory(entries, asked.size_bytes, is_plus=is_plus)
        return [*effects, done(reading.unique, body), *state.let_go(now)]

    def _inode(self, path: str, found: Found) -> int:
        if (staged := self._state.staged.at(path)) is not None:
            return staged.node
        return self._state.nodes.number_of(path, is_folder=found.is_folder, version=found.version)


class _Reading:
    """One request, which came at `since`. `first`: the entry that it begins with, of those that are no dots."""

    __slots__ = ("asked", "first", "folder", "is_plus", "opened", "since", "unique")

    def __init__(
        self, unique: int, folder: Node, opened: OpenFolder, asked: Reading, since: float, *, is_plus: bool
    ) -> None:
        self.unique = unique
        self.folder = folder
        self.opened = opened
        self.asked = asked
        self.since = since
        self.is_plus = is_plus
        self.first = max(asked.offset - _DOTS, 0)

    def some_of(self, start: int, page: Page) -> Iterator[_Entry]:
        """Entries on a page, but for those that come behind all others."""
        written, folder = self.opened.written or {}, self.folder.path
        for number, (name, found) in enumerate(page.entries[self.first - start :], self.first):
            if name not in written:
                yield number, child(folder, name), found

    def written_from(self, behind: int) -> list[DirEntry]:
        """Those, which have the numbers from there on."""
        numbered = enumerate((self.opened.written or {}).items(), behind)
        return [
            DirEntry(name.encode(), node, number + _DOTS + 1, _FILE)
            for number, (name, node) in numbered
            if number >= self.first
        ]


def _has(page: tuple[int, Page], number: int) -> bool:
    """Whether an entry is on a page, or there is none of that number."""
    start, entries = page
    return start <= number and (number < start + len(entries.entries) or entries.after is None)


def _fitting(some: Iterator[_Entry], left_bytes: int, *, is_plus: bool) -> tuple[list[_Entry], bool]:
    """Those that have room, and whether that is all."""
    fitting: list[_Entry] = []
    for one in some:
        left_bytes -= answers.entry_bytes(_name(one[1]), is_plus=is_plus)
        if left_bytes < 0:
            return fitting, False
        fitting.append(one)
    return fitting, True


def _name(path: str) -> bytes:
    return path.rpartition("/")[2].encode()


def _kind(found: Found) -> int:
    return _FOLDER if found.is_folder else _FILE
