"""Writing that may take long or hang (a console that nobody reads, a dead network file system), in threads of its own.

    thread = WriterThread("stoker-files")
    outlet = thread.outlet(file.write)
    outlet.put(b"...")                       # never waits
    if outlet.is_full:
        outlet.when_room(go_on)              # called in the event loop

What is put into one outlet is written in that order. Nobody is kept from putting: who is to wait looks at `is_full`
and stops reading where the bytes come from.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

QUEUE_BYTES = 1024 * 1024
"""An outlet with more than this on its way is full."""
PIECE_BYTES = 64 * 1024
"""What is written at once: more would hide how far a slow reader has come."""
LINGER_S = 0.01
"""How long a little is kept, for more to come: a worker that writes word by word would wake the thread for each."""
HURRY_S = 1.0
"""How long the rest may take to be written when somebody is in a hurry."""


class Outlet:
    """One place that is written to, made by `WriterThread.outlet`. For the event loop's thread."""

    def __init__(
        self,
        thread: WriterThread,
        write: Callable[[bytes], None],
        *,
        close: Callable[[], None],
        on_error: Callable[[OSError], None],
        patience_s: float,
    ) -> None:
        self.write = write
        self.close = close
        self.error: OSError | None = None
        """Why nothing is written any more."""
        self.done_bytes = 0
        """What the thread is through with."""
        self.moved_at = time.monotonic()
        """When something was last written, or nothing was left to be."""
        self._put_bytes = 0
        self._is_told = False
        self._thread = thread
        self._on_error = on_error
        self._patience_s = patience_s
        self._waiting: list[Callable[[], None]] = []
        self._timer: asyncio.TimerHandle | None = None

    def put(self, data: bytes) -> None:
        """Have this written after all that was put before. Never waits; after an error it is dropped."""
        if self.error is None:
            if self.waiting_bytes == 0:
                self.moved_at = time.monotonic()
            self._put_bytes += len(data)
            self._thread.put(self, data)

    def end(self) -> None:
        """Close the place once all is written that was put."""
        self._thread.put(self, None)

    @property
    def waiting_bytes(self) -> int:
        """What is on its way."""
        return self._put_bytes - self.done_bytes

    @property
    def is_stalled(self) -> bool:
        """Whether it is full, and nothing of it has been written for longer than `patience_s`."""
        is_over = self.waiting_bytes > QUEUE_BYTES
        return is_over and time.monotonic() - self.moved_at >= self._patience_s

    @property
    def is_full(self) -> bool:
        """Whether to wait before putting more: it moves, and has enough to do."""
        return self.waiting_bytes > QUEUE_BYTES and self.error is None and not self.is_stalled

    def when_room(self, call: Callable[[], None]) -> None:
        """Call back once, when it is full no longer, or may be."""
        self._waiting.append(call)
        if self._timer is None and self._patience_s < math.inf:
            left_s = self._patience_s - (time.monotonic() - self.moved_at)
            self._timer = self._thread.loop.call_later(max(left_s, 0.001), self.look)

    def look(self) -> None:
        """Something was written, or has not been for long."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()

    def fail(self) -> None:
        """It cannot be written to."""
        if self.error is not None and not self._is_told:
            self._is_told = True
            self._on_error(self.error)
        self.look()


class WriterThread:
    """One thread that writes for any number of outlets, in the order in which it was given things to write.

    Between it and the event loop there is a deque and no lock: only the loop appends, only the thread takes away.
    """

    def __init__(self, name: str) -> None:
        """Belongs to the running event loop. The thread starts with the first bytes, and keeps no process alive."""
        self.loop = asyncio.get_running_loop()
        self._name = name
        self._queue: deque[tuple[Outlet, bytes | None] | asyncio.Future[None]] = deque()
        """Bytes of an outlet; None: close it; a future: of somebody who waits until all before it is done."""
        self._news = threading.Event()
        self._is_idle = False
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def outlet(
        self,
        write: Callable[[bytes], None],
        *,
        close: Callable[[], None] = lambda: None,
        on_error: Callable[[OSError], None] = lambda _: None,
        patience_s: float = math.inf,
    ) -> Outlet:
        """A place to write to. `write`, called in the thread, writes all of it or raises OSError, which ends the outlet
        and reaches `on_error` in the event loop; `close` is called there at its end. `patience_s`: it is stalled after
        so many seconds without progress."""
        return Outlet(self, write, close=close, on_error=on_error, patience_s=patience_s)

    def put(self, outlet: Outlet, data: bytes | None) -> None:
        """See `Outlet.put` and `end`."""
        self._append((outlet, data))

    async def flush(self, within_s: float, hurry: asyncio.Event) -> bool:
        """Wait until all is written that was put, or cannot be; whether it is. Waits no longer than `within_s` seconds,
        or a little once `hurry` is set."""
        if self._thread is None:
            return True
        flushed: asyncio.Future[None] = self.loop.create_future()
        self._append(flushed)
        hurrying = asyncio.ensure_future(hurry.wait())
        waited: set[asyncio.Future[Any]] = {flushed, hurrying}
        await asyncio.wait(waited, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        if not flushed.done() and hurrying.done():
            await asyncio.wait({flushed}, timeout=min(within_s, HURRY_S))
        hurrying.cancel()
        return flushed.done()

    def close(self) -> None:
        """Take nothing more; what is on its way may still be written."""
        self._is_closed = True
        self._news.set()

    def _append(self, item: tuple[Outlet, bytes | None] | asyncio.Future[None]) -> None:
        if self._is_closed:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._queue.append(item)
        if self._is_idle:
            self._news.set()

    def tell(self, call: Callable[[], object]) -> None:
        """Have it called in the event loop; for the thread."""
        with contextlib.suppress(RuntimeError):  # it is closed by now
            self.loop.call_soon_threadsafe(call)

    # -- the thread ---------------------------------------------------------------------------------------

    def _work(self) -> None:
        while self._wait():
            while self._queue:
                item = self._queue.popleft()
                if isinstance(item, asyncio.Future):
                    self.tell(functools.partial(_set, item))
                    continue
                outlet, data = item
                try:
                    if data is None:
                        outlet.close()
                    else:
                        self._write(outlet, self._with_more(outlet, data))
                except OSError as error:
                    outlet.error = outlet.error or error
                    self.tell(outlet.fail)

    def _wait(self) -> bool:
        """Until there is something to do; False: there never will be."""
        self._is_idle = True
        while not self._queue:  # looked at after saying so: who appends before that is seen here
            if self._is_closed:
                return False
            self._news.wait()
            self._news.clear()
        self._is_idle = False
        if not self._is_closed:
            time.sleep(LINGER_S)
        return True

    def _with_more(self, outlet: Outlet, data: bytes) -> bytes:
        """With what follows for the same place, as far as it fits into one piece."""
        parts, size_bytes = [data], len(data)
        while self._queue:
            item = self._queue[0]
            if isinstance(item, asyncio.Future) or item[0] is not outlet or item[1] is None:
                break
            size_bytes += len(item[1])
            if size_bytes > PIECE_BYTES:
                break
            self._queue.popleft()
            parts.append(item[1])
        return b"".join(parts)

    def _write(self, outlet: Outlet, data: bytes) -> None:
        done_bytes = outlet.done_bytes
        try:
            for start in range(0, max(1, len(data)), PIECE_BYTES):
                if outlet.error is None:
                    outlet.write(data[start : start + PIECE_BYTES])
                self._note(outlet, done_bytes + min(start + PIECE_BYTES, len(data)))
        finally:
            self._note(outlet, done_bytes + len(data))

    def _note(self, outlet: Outlet, done_bytes: int) -> None:
        was_over = outlet.waiting_bytes > QUEUE_BYTES // 2
        outlet.done_bytes = done_bytes
        outlet.moved_at = time.monotonic()
        if was_over and outlet.waiting_bytes <= QUEUE_BYTES // 2:
            self.tell(outlet.look)


def _set(flushed: asyncio.Future[None]) -> None:
    if not flushed.done():
        flushed.set_result(None)
