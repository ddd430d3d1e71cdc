"""Prints the journal's figures: `python -m tests.conformance.journal_figures` (two minutes)."""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
from pathlib import Path

from stoker.job.journal.durable import Entry, Journal
from stoker.job.journal.open import open_journal, open_locator
from tests.conformance.journal_helpers import writing
from tests.e2e.etcd import Etcd, running_etcd

RECORDS, WRITES, ROUNDS = 50, 2000, 3


def shown(seconds: list[float]) -> str:
    """Median and worst cases."""
    ordered = sorted(seconds)
    points = [ordered[min(len(ordered) - 1, int(len(ordered) * q))] * 1e3 for q in (0.5, 0.99, 1.0)]
    return "p50 {:.3f} ms, p99 {:.3f} ms, longest {:.1f} ms".format(*points)


async def write_many(journal: Journal) -> str:
    """Batches of 3 records of 300 bytes and 1 entry."""
    await journal.lead("127.0.0.1:1")
    taken = []
    for number in range(WRITES):
        batch: dict[str, bytes | None] = {f"k{(3 * number + i) % RECORDS}": b"x" * 300 for i in range(3)}
        started = time.perf_counter()
        await journal.write(batch, [Entry(1.0, "world", "a node joined", {"generation": number})])
        taken.append(time.perf_counter() - started)
    await journal.close()
    return shown(taken)


async def takeover(url: str, job: str, ttl_s: float) -> tuple[float, float]:
    """Seconds from SIGKILL of the master until the next one leads, and until a locator has told of it."""
    with writing(url, job, ttl_s=ttl_s) as writer:
        await asyncio.to_thread(writer.wait_for_batches, 5)
        journal, locator = open_journal(url, job), open_locator(url, job)
        changes = locator.changes()
        await anext(changes)
        campaign = asyncio.create_task(journal.lead("127.0.0.1:2", ttl_s=ttl_s))
        await asyncio.sleep(0.5)
        writer.process.send_signal(signal.SIGKILL)
        started = time.perf_counter()
        await campaign
        led_s = time.perf_counter() - started
        while await anext(changes) is None:
            continue
        told_s = time.perf_counter() - started
        await changes.aclose()
        await locator.close()
        await journal.close()
    return led_s, told_s


async def resignation(url: str, job: str) -> float:
    """Seconds from the master's close until the next one leads."""
    first, second = open_journal(url, job), open_journal(url, job)
    await first.lead("127.0.0.1:1", ttl_s=60.0)
    campaign = asyncio.create_task(second.lead("127.0.0.1:2", ttl_s=60.0))
    await asyncio.sleep(0.3)
    started = time.perf_counter()
    closing = asyncio.create_task(first.close())
    await campaign
    taken_s = time.perf_counter() - started
    await closing
    await second.close()
    return taken_s


async def longest_write(etcd: Etcd, harm: signal.Signals, *, to_leader: bool) -> str:
    """The longest write while the member in use is harmed."""
    leader = await asyncio.to_thread(etcd.leader)
    victim = leader if to_leader else next(m for m in etcd.members if m is not leader)
    order = [victim, *(m for m in etcd.members if m is not victim)]
    journal = open_journal("etcd://" + ",".join(m.endpoint for m in order), "harmed")
    leadership = await journal.lead("127.0.0.1:1", ttl_s=5.0)
    asyncio.get_running_loop().call_later(1.0, victim.send, harm)
    started, longest_s, number = time.perf_counter(), 0.0, 0
    while time.perf_counter() - started < 8.0:
        before = time.perf_counter()
        await journal.write({"a": b"%d" % number})
        longest_s = max(longest_s, time.perf_counter() - before)
        number += 1
    lost = leadership.lost
    await journal.close()
    return f"longest write {longest_s:.2f} s, leadership lost: {lost}"


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        print("SQLite:", await write_many(open_journal(f"{folder}/journal.sqlite", "j")))
    for members in (1, 3):
        with tempfile.TemporaryDirectory() as folder, running_etcd(Path(folder), members) as etcd:
            print(f"etcd, {members} members:", await write_many(open_journal(etcd.url, "j")))
            if members == 1:
                for ttl_s in (2.0, 3.0, 5.0):
                    times = [await takeover(etcd.url, f"t{ttl_s:.0f}-{n}", ttl_s) for n in range(ROUNDS)]
                    print(
                        f"ttl {ttl_s:.0f} s, takeover (leads, told):",
                        [f"{a:.2f} {b:.2f}" for a, b in times],
                    )
                print(
                    "after a resignation:",
                    [f"{await resignation(etcd.url, f'r{n}'):.3f} s" for n in range(ROUNDS)],
                )
    for harm in (signal.SIGKILL, signal.SIGSTOP):
        for to_leader in (True, False):
            with tempfile.TemporaryDirectory() as folder, running_etcd(Path(folder), 3) as etcd:
                whom = "the leading member" if to_leader else "another member"
                print(f"{harm.name} of {whom}:", await longest_write(etcd, harm, to_leader=to_leader))


if __name__ == "__main__":
    asyncio.run(main())
