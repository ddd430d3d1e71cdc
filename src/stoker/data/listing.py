"""List all objects of a dataset: page after page, or many pages at once where each takes long to come.

An object store answers with 1,000 keys at a time, and each answer is some tenth of a second away: a million take
minutes one after the other. So their range is cut into parts that are listed side by side.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from stoker.cache.client.entries import Lister
from stoker.data.key_space import LAST, Part, halves, shared
from stoker.data.record_index import Listing, StringTable
from stoker.wire.cache_api import LIST_LIMIT_MAX, ObjectInfo

JOBS = 16
"""So many pages are asked for at once."""
PAGE = 1000
"""What object stores answer at once."""


def list_all(ask: Lister, prefix: str, is_far: Callable[[], bool]) -> Listing:
    """All objects whose keys start with `prefix`. `is_far` says, of more than one page, whether to list many at once.
    Raises what `ask` does."""
    page = ask(prefix, None, LIST_LIMIT_MAX)
    pages = [_packed(page.objects)]
    after = page.after
    # Parts end before the last of all characters: behind it, of which no sane key has one, nothing would be found.
    if after is not None and is_far() and not ask(prefix, prefix + LAST, 1).objects:
        return _joined(pages + _Work(ask, prefix).run([info.key for info in page.objects]))
    while after is not None:
        page = ask(prefix, after, LIST_LIMIT_MAX)
        pages.append(_packed(page.objects))
        after = page.after
    return _joined(pages)


class _Listed(NamedTuple):
    """A page of a part."""

    part: Part
    page: Listing
    keys: Sequence[str]
    """None are told where the part is at its end."""


class _Work:
    """Threads that list parts, in turns: whoever lists the same objects asks for the same pages, and a cache may have
    them. They are daemons: Ctrl-C must not wait for answers that can take long."""

    def __init__(self, ask: Lister, prefix: str) -> None:
        self._ask = ask
        self._prefix = prefix
        self._todo: queue.SimpleQueue[Part | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[_Listed | BaseException] = queue.SimpleQueue()

    def run(self, first: Sequence[str]) -> list[Listing]:
        """The pages after the first one, which was full, in their order. Raises the first error."""
        found: list[_Listed] = []
        parts = halves(Part(first[-1], self._end(first)), first)
        for _ in range(JOBS):
            threading.Thread(target=self._list, daemon=True).start()
        try:
            while parts:
                turn = self._turn(parts)
                found += turn
                parts = _cut([listed for listed in turn if listed.keys])
        finally:
            for _ in range(JOBS):
                self._todo.put(None)
        return [listed.page for listed in sorted(found, key=lambda listed: listed.part)]

    def _turn(self, parts: list[Part]) -> list[_Listed]:
        """The next page of each part, in their order."""
        for part in parts:
            self._todo.put(part)
        found = []
        for _ in parts:
            answer = self._done.get()
            if isinstance(answer, BaseException):
                raise answer
            found.append(answer)
        return sorted(found, key=lambda listed: listed.part)

    def _end(self, keys: Sequence[str]) -> str:
        """A text that no key is after, as near as the first page's keys tell."""
        low, high = len(self._prefix), len(shared(keys[0], keys[-1]))
        while low < high:
            middle = (low + high + 1) // 2
            if self._ask(self._prefix, keys[0][:middle] + LAST, 1).objects:
                high = middle - 1
            else:
                low = middle
        return keys[0][:low] + LAST

    def _list(self) -> None:
        while (part := self._todo.get()) is not None:
            try:
                page = self._ask(self._prefix, part.after, PAGE)
                inside = [info for info in page.objects if info.key <= part.stop]
                is_all = page.after is None or page.after >= part.stop
                keys = () if is_all else [info.key for info in inside]
                self._done.put(_Listed(part, _packed(inside), keys))
            except BaseException as error:  # noqa: BLE001 (raised again where the answer is awaited)
                self._done.put(error)
                return


def _cut(turn: Sequence[_Listed]) -> list[Part]:
    """What is left behind these full pages; in more parts, if more can be listed at once. No more are made than pages
    were full, so that at worst every other request is for nothing."""
    room = JOBS - len(turn)
    parts: list[Part] = []
    for listed in turn:
        left = Part(listed.keys[-1], listed.part.stop)
        some = halves(left, listed.keys) if room > 0 else [left]
        room -= len(some) - 1
        parts += some
    return parts


def _packed(objects: list[ObjectInfo]) -> Listing:
    """A page; what stands for a folder is left out."""
    files = [info for info in objects if not info.key.endswith("/")]
    return Listing(
        StringTable.of(info.key for info in files),
        StringTable.of(info.version.replace("\0", "") for info in files),
        np.array([info.size_bytes for info in files], np.int64),
    )


def _joined(pages: list[Listing]) -> Listing:
    return Listing(
        StringTable.joined([page.keys for page in pages]),
        StringTable.joined([page.versions for page in pages]),
        np.concatenate([page.sizes for page in pages]),
    )
