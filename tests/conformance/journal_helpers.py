"""Watch over masters in processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from stoker.base.rng import Rng
from stoker.job.journal.durable import Journal
from tests.conformance.journal_writer import number_of

WRITER = Path(__file__).with_name("journal_writer.py")


class Writer:
    """A running `journal_writer.py`."""

    def __init__(
        self, url: str, job: str, *, width: int = 3, size_bytes: int = 100, ttl_s: float = 5.0
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(WRITER), url, job, str(width), str(size_bytes), str(ttl_s)],
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        """The next thing that it says; empty at its end."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def wait_for_batches(self, count: int) -> None:
        """Wait until it has said that this many batches are kept."""
        first = self.line()
        assert first.startswith("leads"), first
        for _ in range(count):
            said = self.line()
            assert said.isdigit(), said

    def rest(self) -> list[str]:
        """All that it said until its end."""
        out, _ = self.process.communicate(timeout=60)
        return out.split("\n")[:-1]


@contextlib.contextmanager
def writing(
    url: str, job: str, *, width: int = 3, size_bytes: int = 100, ttl_s: float = 5.0
) -> Iterator[Writer]:
    """A writer that is gone at the end."""
    writer = Writer(url, job, width=width, size_bytes=size_bytes, ttl_s=ttl_s)
    try:
        yield writer
    finally:
        if writer.process.poll() is None:
            writer.process.kill()
        writer.process.wait()
        if writer.process.stdout is not None:
            writer.process.stdout.close()


def check_killed_writers(
    url: str, job: str, open_again: Callable[[], Journal], shapes: list[tuple[int, int, int]], rng: Rng
) -> None:
    """SIGKILL one writer after the other at some moment; each time all that was acknowledged must be there, whole.

    `shapes`: for each writer the records of a batch, their size in bytes, and after how many batches it is killed.
    """

    async def look() -> tuple[dict[str, bytes], list[str]]:
        journal = open_again()
        try:
            return await journal.load(), [e["why"] for e in await journal.read_entries()]
        finally:
            await journal.close()

    for width, size_bytes, count in shapes:
        with writing(url, job, width=width, size_bytes=size_bytes) as writer:
            writer.wait_for_batches(count)
            with contextlib.suppress(subprocess.TimeoutExpired):
                writer.process.wait(rng.uniform(0.0, 0.02))
            writer.process.send_signal(signal.SIGKILL)
            said = [int(line) for line in writer.rest() if line.isdigit()]
        records, whys = asyncio.run(look())
        number = number_of(records)
        assert whys == [str(n) for n in range(1, number + 1)]
        if said:
            assert said[-1] <= number <= said[-1] + 1, "an acknowledged batch is gone"
        assert number > 0
