"""Run seeded worlds: `python -m tests.sim.run --seed 1 --worlds 10000` (what `make sim` and `make soak` call)."""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait

from tests.sim import blob_world, cache_world, job_world, mount_world, mount_writing_world

KINDS: dict[str, Callable[[int], str]] = {
    "job": job_world.run_world,
    "cache": cache_world.run_world,
    "blob": blob_world.run_world,
    "mount": mount_world.run_world,
    "mount-writing": mount_writing_world.run_world,
}
CHUNK = 50


def label_of(verdict: str) -> str:
    """A verdict without its figures, so that alike ones are counted together."""
    return re.sub(r"\d+(\.\d+)?", "N", verdict.split(" after ")[0].split(":")[0])


def play(kind: str, first: int, count: int) -> tuple[Counter[str], list[str]]:
    """Worlds `first … first + count - 1`; returns their verdicts and the stories of those that failed."""
    verdicts: Counter[str] = Counter()
    failures: list[str] = []
    for seed in range(first, first + count):
        try:
            verdicts[label_of(KINDS[kind](seed))] += 1
        except Exception as error:  # noqa: BLE001 - any error of a world is a finding
            failures.append(
                f"{kind} world {seed}: {type(error).__name__}: {error}\n"
                f"replay: python -m tests.sim.run --kind {kind} --seed {seed} --worlds 1"
            )
    return verdicts, failures


def chunks(
    kinds: list[str], seed: int, worlds: int | None, seconds: float | None
) -> Iterator[tuple[str, int, int]]:
    deadline = None if seconds is None else time.monotonic() + seconds
    start = 0
    while worlds is None or start < worlds:
        if deadline is not None and time.monotonic() > deadline:
            return
        count = CHUNK if worlds is None else min(CHUNK, worlds - start)
        for kind in kinds:
            yield kind, seed + start, count
        start += count


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.run", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="first seed")
    parser.add_argument("--worlds", type=int, default=None, help="worlds of each kind (10000)")
    parser.add_argument("--seconds", type=float, default=None, help="go on for this long instead")
    parser.add_argument("--kind", choices=[*KINDS, "all"], default="all")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args(argv)
    worlds = arguments.worlds if arguments.seconds is not None or arguments.worlds is not None else 10_000
    kinds = list(KINDS) if arguments.kind == "all" else [arguments.kind]
    began = time.monotonic()
    verdicts: Counter[str] = Counter()
    failures: list[str] = []
    tasks = chunks(kinds, arguments.seed, worlds, arguments.seconds)
    with ProcessPoolExecutor(arguments.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        # Few tasks ahead: with --seconds the generator decides by the clock when it is enough.
        running = {pool.submit(play, *task) for task in itertools.islice(tasks, 2 * arguments.processes)}
        while running:
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                done, failed = future.result()
                verdicts += done
                failures += failed
                for story in failed:
                    print(story, file=sys.stderr)
            running |= {pool.submit(play, *task) for task in itertools.islice(tasks, len(finished))}
    total = sum(verdicts.values()) + len(failures)
    print(
        f"{total} worlds of {', '.join(kinds)} from seed {arguments.seed} in {time.monotonic() - began:.0f} s, "
        f"{len(failures)} violated an invariant"
    )
    for verdict, count in verdicts.most_common():
        print(f"{count:8d}  {verdict[:100]}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
