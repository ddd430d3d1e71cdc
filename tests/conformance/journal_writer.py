"""A master in a process of its own, to be killed or stopped: it writes batches and says which were kept.

    python journal_writer.py URL JOB WIDTH SIZE TTL_S

Each batch sets WIDTH records of SIZE bytes to one number, the one after that of the last run, deletes what other
records that run left, and appends one entry that names it. Lines: `leads EPOCH`, then each number, then `lost` or
`unavailable` if that is how it ends.
"""

from __future__ import annotations

import asyncio
import sys

from stoker.errors import JournalUnavailable, LeadershipLost
from stoker.job.journal.durable import Entry
from stoker.job.journal.open import open_journal


def batch(number: int, width: int, size_bytes: int) -> dict[str, bytes]:
    """The records of one batch."""
    return {f"r{i}": b"%d " % number + b"." * size_bytes for i in range(width)}


def number_of(records: dict[str, bytes]) -> int:
    """The number that all records agree on, 0 if there are none."""
    numbers = {int(value.split(b" ")[0]) for value in records.values()}
    assert len(numbers) <= 1, f"a torn batch: {numbers}"
    return numbers.pop() if numbers else 0


async def main(url: str, job: str, width: int, size_bytes: int, ttl_s: float) -> None:
    journal = open_journal(url, job)
    leadership = await journal.lead("127.0.0.1:1", ttl_s=ttl_s)
    print("leads", leadership.epoch, flush=True)
    records = await journal.load()
    number = number_of(records)
    others: dict[str, bytes | None] = dict.fromkeys(records)
    while True:
        number += 1
        changes = {**others, **batch(number, width, size_bytes)}
        try:
            await journal.write(changes, [Entry(0.0, "batch", str(number), {})])
        except LeadershipLost:
            print("lost", flush=True)
            break
        except JournalUnavailable as error:
            print("unavailable", error, flush=True)
            break
        print(number, flush=True)
    await journal.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])))
