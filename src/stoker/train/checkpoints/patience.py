"""How long a storage has kept a saver waiting, and when to say so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from stoker.base.units import format_bytes, format_duration


class _Asked(NamedTuple):
    what: str
    commits: int | None
    done_bytes: int
    size_bytes: int


class Hanging(NamedTuple):
    """What to say."""

    commits: int | None
    text: str


class Patience:
    """For the thread that asks things of a storage, and for another that looks whether it is still at it.

    It is said when a storage has done nothing for `hangs_after_s`, and again after twice as long each time. `now` are
    seconds of a clock that only goes forward.
    """

    def __init__(self, now: Callable[[], float], hangs_after_s: float = 60.0) -> None:
        self._now = now
        self._hangs_after_s = hangs_after_s
        self._lock = threading.Lock()
        self._asked: _Asked | None = None
        self._since = 0.0
        self._say_after_s = 0.0

    @contextmanager
    def asking(self, what: str, commits: int | None = None, size_bytes: int = 0) -> Iterator[None]:
        """`what` would follow "… hangs: ". One thing after the other; each begins anew."""
        self._note(_Asked(what, commits, 0, size_bytes))
        try:
            yield
        finally:
            self._note(None)

    def went_on(self, done_bytes: int) -> None:
        """The storage has taken something."""
        with self._lock:
            asked = self._asked
        if asked is not None:
            self._note(asked._replace(done_bytes=done_bytes))

    def overdue(self) -> Hanging | None:
        """What is to be said now of what hangs; None: nothing new."""
        with self._lock:
            waited_s = self._now() - self._since
            if self._asked is None or waited_s < self._say_after_s:
                return None
            self._say_after_s *= 2
            asked = self._asked
        how_far = (
            f", after {format_bytes(asked.done_bytes)} of {format_bytes(asked.size_bytes)}"
            if asked.size_bytes
            else ""
        )
        text = f"the storage hangs: {asked.what}{how_far}: nothing has come of it for {format_duration(waited_s)}"
        return Hanging(asked.commits, text)

    def _note(self, asked: _Asked | None) -> None:
        with self._lock:
            self._asked, self._since, self._say_after_s = asked, self._now(), self._hangs_after_s
