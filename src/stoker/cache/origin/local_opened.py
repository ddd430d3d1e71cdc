"""A file that is read part by part, in threads that cannot be called back."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


class OpenedOnce:
    """A descriptor that is opened when it is first taken, by one thread at a time.

    A thread cannot be called back. If its asker leaves while it reads, it closes the descriptor itself
    afterwards: closed under its hands, the number could be another file's by the time it reads.
    """

    def __init__(self, open_file: Callable[[], int]) -> None:
        self._open_file = open_file
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._is_taken = False
        self._is_left = False

    def take(self) -> int | None:
        """Until `put_back`; None after `leave`. Raises what opening it raises."""
        with self._lock:
            if self._is_left:
                return None
            self._is_taken = True
        try:
            if self._fd is None:
                self._fd = self._open_file()
        except BaseException:
            self.put_back()
            raise
        return self._fd

    def put_back(self) -> None:
        with self._lock:
            self._is_taken = False
            self._close_if_over()

    def leave(self) -> None:
        """Nobody will take it again. Does not wait for who has it."""
        with self._lock:
            self._is_left = True
            self._close_if_over()

    def _close_if_over(self) -> None:
        if self._is_left and not self._is_taken and self._fd is not None:
            os.close(self._fd)
            self._fd = None
