"""What fio reads of one large file: the file itself, a mount whose file the kernel reads in the daemon's place, and one
whose daemon reads (its answers stay in the kernel's page cache)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from _common import interleaved, median_ratio
from _mounted import await_whole, evict, in_time, stoker_mount

from stoker.platform.memory import MemoryLimits

GOAL = 0.95
PATTERNS = {
    "sequential 1 MiB": ("read", "1M"),
    "random 128 KiB": ("randread", "128k"),
    "random 4 KiB": ("randread", "4k"),
}
ENGINES = ("psync", "mmap")
JOBS = (1, 4)
NATIVE, PASSTHROUGH, BY_REQUESTS = "native", "passthrough", "by requests"
MIB = 2**20
LIMIT_BYTES = 512 * MIB
_PART_BYTES = 16 * MIB


def warm_reads(folder: Path, *, quick: bool) -> dict[str, object]:
    """Bytes per second of a file that the page cache holds, over those of the native file."""
    if shutil.which("fio") is None:
        return {"warm reads: skipped, fio is not there (Debian: fio)": 0}
    rounds, seconds, size_bytes = (2, 0.5, 256 * MIB) if quick else (5, 1.0, 512 * MIB)
    figures: dict[str, object] = {}
    with sides(folder, size_bytes) as files:
        for path in files.values():
            fio(path, "read", "1M", "psync", 1, None)
        for engine in ENGINES:
            for name, (pattern, block) in PATTERNS.items():
                for jobs in JOBS:
                    runs = {
                        side: partial(fio, path, pattern, block, engine, jobs, seconds)
                        for side, path in files.items()
                    }
                    figures |= _compared(f"warm, {name}, {engine}, {jobs} jobs", runs, rounds)
    return figures


def limited_reads(folder: Path, *, quick: bool) -> dict[str, object]:
    """The same of a file that is larger than the memory that readers, daemon and cache may use together."""
    if shutil.which("fio") is None:
        return {"reads under a memory limit: skipped, fio is not there (Debian: fio)": 0}
    rounds, seconds, size_bytes = (2, 1.0, 3 * LIMIT_BYTES // 2) if quick else (5, 3.0, 4 * LIMIT_BYTES)
    limits = MemoryLimits()
    memory = limits.prepare("benchmark", LIMIT_BYTES)
    if memory is None:
        return {f"reads under a memory limit: skipped, {limits.problem}": 0}
    figures: dict[str, object] = {}
    try:
        with sides(folder, size_bytes, memory.before_exec) as files:
            for name, (pattern, block) in PATTERNS.items():
                for jobs in JOBS:

                    def run(
                        path: Path, pattern: str = pattern, block: str = block, jobs: int = jobs
                    ) -> float:
                        evict(folder / "data", *folder.glob("cache-*"))
                        return fio(path, pattern, block, "psync", jobs, seconds, memory.before_exec)

                    runs = {side: partial(run, path) for side, path in files.items()}
                    figures |= _compared(
                        f"{size_bytes / LIMIT_BYTES:g} x memory, {name}, {jobs} jobs", runs, rounds
                    )
    finally:
        memory.close()
        limits.close()
    return figures


@contextlib.contextmanager
def sides(
    folder: Path, size_bytes: int, before_exec: Callable[[], None] | None = None
) -> Iterator[Mapping[str, Path]]:
    """The same file on each side; the caches lie on the disk of the native one, and hold all of it."""
    data = folder / "data"
    data.mkdir(parents=True)
    with open(data / "file", "wb") as file:
        for _ in range(size_bytes // _PART_BYTES):
            file.write(os.urandom(_PART_BYTES))
    with contextlib.ExitStack() as stack:
        files = {NATIVE: data / "file"}
        for side, flags in ((PASSTHROUGH, ()), (BY_REQUESTS, ("--no-passthrough",))):
            name = side.replace(" ", "-")
            mount = stoker_mount(
                str(data), folder / name, "--cache-dir", str(folder / f"cache-{name}"), *flags,
                before_exec=before_exec,
            )  # fmt: skip
            files[side] = stack.enter_context(mount).folder / "file"
            in_time(["cat", str(files[side])], 300, before_exec=before_exec, is_silent=True)
            await_whole(files[side])
        yield files
    shutil.rmtree(folder)


def fio(
    path: Path,
    pattern: str,
    block: str,
    engine: str,
    jobs: int,
    seconds: float | None,
    before_exec: Callable[[], None] | None = None,
) -> float:
    """Bytes per second of all jobs; without `seconds`: of one time through the file."""
    command = [
        "fio", "--name=read", f"--filename={path}", f"--rw={pattern}", f"--bs={block}", f"--ioengine={engine}",
        f"--numjobs={jobs}", "--group_reporting", "--readonly", "--fadvise_hint=0", "--randrepeat=0", "--norandommap",
        f"--invalidate={int(before_exec is not None)}", "--output-format=json", "--thread",
    ]  # fmt: skip
    if seconds is not None:
        command += ["--time_based", f"--runtime={round(seconds * 1000)}ms"]
    said = in_time(command, 120, before_exec=before_exec)
    return float(json.loads(said[said.index("{") :])["jobs"][0]["read"]["bw_bytes"])


def _compared(label: str, runs: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, object]:
    found = interleaved(runs, rounds)
    return {
        f"{label}: passthrough / native (goal {GOAL})": median_ratio(found[PASSTHROUGH], found[NATIVE]),
        f"{label}: by requests / native": median_ratio(found[BY_REQUESTS], found[NATIVE]),
        f"{label}: native MB/s": round(sorted(found[NATIVE])[len(found[NATIVE]) // 2] / 1e6),
    }
