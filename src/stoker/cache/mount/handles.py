"""What the kernel has open: files, and how each is read; folders, and how far they were read. Pure.

The kernel reads a file either by requests, whose answers it keeps, or from another file in the daemon's place: all who
have a node open at one time the same way, and from the same file. It fails an OPEN that is answered otherwise. It tells
of a file's end after it has counted it itself, so that what is open here may be closed there, and never the other way.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

from stoker.cache.mount.records import Closed, FileOpened, FolderRead
from stoker.cache.mount.requests import RESENT
from stoker.cache.mount.source_port import Page

_EPOCH_BITS = 32
_STARTS_MAX = 4096


@dataclass(slots=True)
class OpenFile:
    """`backing_id` 0: read by requests. `request`: the OPEN that was answered with it. `next_offset`, `in_a_row`: how
    it is read."""

    node: int
    backing_id: int = 0
    request: int = 0
    next_offset: int = 0
    in_a_row: int = 0
    is_fetched: bool = False
    text: bytes | None = None


@dataclass(slots=True)
class OpenFolder:
    """`starts`: the numbers of entries with which pages begin, ascending, and after which name. `page_at`: when the one
    that is here was asked for. `request`: the OPENDIR that was answered with it. `written`: names and nodes of files
    that were being written when it was begun to be read: they come behind the last page, whether they are on one by
    then or not; None: that has to be found out."""

    node: int
    request: int = 0
    starts: list[tuple[int, str | None]] = field(default_factory=lambda: [(0, None)])
    page: tuple[int, Page] | None = None
    page_at: float = 0.0
    written: dict[str, int] | None = None

    def page_start(self, cookie: int) -> tuple[int, str | None]:
        """With which page to begin to come to this entry."""
        at = bisect_right(self.starts, cookie, key=_number)
        return self.starts[max(at - 1, 0)]

    def turn_to(self, start: int, page: Page, asked_at: float) -> list[tuple[int, str | None]]:
        """This page is here now. What is to be remembered of it: where it does not end as it did, the pages that began
        behind it were those of another folder."""
        self.page, self.page_at = (start, page), asked_at
        at = bisect_right(self.starts, start, key=_number)
        next_start = None if page.after is None else (start + len(page.entries), page.after)
        was = self.starts[at] if at < len(self.starts) else None
        if was == next_start:
            return []
        news = [] if was is None else [self.starts[at - 1]]
        if next_start is not None:
            news.append(next_start)
        for one in news:
            self.add_start(*one)
        return news

    def add_start(self, cookie: int, after: str | None) -> None:
        """A page begins there, and none is known behind it. Of very many every other one is forgotten: they are come to
        from those before."""
        del self.starts[bisect_left(self.starts, cookie, key=_number) :]
        self.starts.append((cookie, after))
        if len(self.starts) > _STARTS_MAX:
            self.starts = self.starts[::2]


@dataclass(slots=True)
class _Use:
    """Of a node: how many have it open, by which way."""

    by_requests: int = 0
    backed: int = 0
    backing_id: int = 0


class Handles:
    """Numbers of what is open. `epoch`: which daemon this is, so that no two of them use one number."""

    def __init__(self, epoch: int = 1) -> None:
        self._next = epoch << _EPOCH_BITS
        self._files: dict[int, OpenFile] = {}
        self._folders: dict[int, OpenFolder] = {}
        self._uses: dict[int, _Use] = {}
        self._before: dict[int, int] = {}
        """Of what was opened by way of a daemon before: by OPEN or OPENDIR the handle."""

    def __len__(self) -> int:
        return len(self._files) + len(self._folders)

    def begin(self, epoch: int) -> None:
        """Another daemon goes on."""
        self._next = epoch << _EPOCH_BITS

    def file(self, handle: int) -> OpenFile | None:
        """What is open under a number."""
        return self._files.get(handle)

    def folder(self, handle: int) -> OpenFolder | None:
        """What is open under a number."""
        return self._folders.get(handle)

    def backing_of(self, node: int) -> int | None:
        """How this node has to be opened now: by this number, by requests (0), or as one likes (None)."""
        use = self._uses.get(node)
        if use is None:
            return None
        return 0 if use.by_requests else use.backing_id

    def backings(self) -> frozenset[int]:
        """The numbers of backing files that are in use."""
        return frozenset(use.backing_id for use in self._uses.values() if use.backed)

    def opened_by(self, request: int) -> tuple[int, OpenFile] | None:
        """What a daemon before meant to answer this OPEN with, and did not live to, if it was sent again."""
        handle = self._opened_before(request)
        opened = self._files.get(handle)
        return None if opened is None else (handle, opened)

    def folder_opened_by(self, request: int) -> int:
        """So for OPENDIR: the handle; 0: none did."""
        handle = self._opened_before(request)
        return handle if handle in self._folders else 0

    def _opened_before(self, request: int) -> int:
        return self._before.get(request & ~RESENT, 0) if request & RESENT else 0

    def open_file(self, node: int, backing_id: int, text: bytes | None = None, request: int = 0) -> int:
        """The number of a file that is opened."""
        handle = self._take_number()
        self._add(handle, OpenFile(node, backing_id, request, text=text))
        return handle

    def open_folder(self, node: int, request: int = 0) -> int:
        """The number of a folder that is opened."""
        handle = self._take_number()
        self._folders[handle] = OpenFolder(node, request)
        return handle

    def close(self, handle: int) -> int:
        """It is closed. The number of a backing file that nobody needs any more, or 0."""
        folder = self._folders.pop(handle, None)
        if folder is not None:
            self._before.pop(folder.request, None)
        opened = self._files.pop(handle, None)
        if opened is None:
            return 0
        self._before.pop(opened.request, None)
        use = self._uses[opened.node]
        if opened.backing_id:
            use.backed -= 1
        else:
            use.by_requests -= 1
        if not use.backed and not use.by_requests:
            del self._uses[opened.node]
        return opened.backing_id if opened.backing_id and not use.backed else 0

    def records(self) -> Iterator[FileOpened | FolderRead]:
        """All that is open, for the next daemon, which tells the text of files that are none anew."""
        for handle, file in self._files.items():
            if file.text is None:
                yield FileOpened(handle, file.node, file.backing_id, file.request)
        for handle, folder in self._folders.items():
            for cookie, after in folder.starts:
                yield FolderRead(handle, folder.node, cookie, after, folder.request)

    def restore(self, record: FileOpened | FolderRead | Closed) -> None:
        """What a daemon before wrote down."""
        if isinstance(record, FileOpened):
            self._add(record.handle, OpenFile(record.node, record.backing_id, record.request))
            if record.request:
                self._before[record.request] = record.handle
        elif isinstance(record, FolderRead):
            folder = self._folders.setdefault(record.handle, OpenFolder(record.node, record.request))
            folder.add_start(record.cookie, record.after)
            if record.request:
                self._before[record.request] = record.handle
        else:
            self.close(record.handle)

    def _add(self, handle: int, opened: OpenFile) -> None:
        self._files[handle] = opened
        use = self._uses.setdefault(opened.node, _Use())
        if opened.backing_id:
            use.backed += 1
            use.backing_id = opened.backing_id
        else:
            use.by_requests += 1

    def _take_number(self) -> int:
        self._next += 1
        return self._next


def _number(start: tuple[int, str | None]) -> int:
    return start[0]
