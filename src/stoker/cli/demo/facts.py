"""All that a finished demo knows of itself, and its short form for `--json`."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from stoker.cli.demo.layout import Layout
from stoker.cli.demo.story import Kill, Recovery, Schedule, Stay, epoch_spans, throughput
from stoker.cli.demo.watch import CacheSample, Event, Watch
from stoker.data.audit import Report, audit
from stoker.data.ledger import read_ledgers
from stoker.errors import EXIT_FAILED

BIN_S = 0.5
BINS_MAX = 120


@dataclass(frozen=True)
class Setting:
    """What was run."""

    title: str
    layout: Layout
    schedule: Schedule
    workers: int
    origin_mbps: float
    origin_latency_ms: float
    cold: bool
    """The cache was empty at the start."""


@dataclass(frozen=True)
class Facts:
    """One run, when it is over. Wall seconds are since 1970."""

    setting: Setting
    exit_code: int
    """Of the job itself."""
    folder: Path
    started_s: float
    ended_s: float
    accuracy: float | None
    audit: Report
    kill: Kill | None
    kill_wanted: bool
    recovery: Recovery | None
    join: Recovery | None
    newcomers: dict[str, int]
    """Workers that joined after the kill, with their process ids."""
    survivors_kept_pids: bool
    origin_bytes: int
    hits: int
    misses: int
    stays: tuple[Stay, ...]
    curve: tuple[tuple[float, float], ...]
    """(seconds since the start, samples per second)."""
    epochs: tuple[tuple[float, float], ...]
    """Wall seconds of each epoch."""
    cache: tuple[CacheSample, ...]
    events: tuple[Event, ...]

    @property
    def seconds(self) -> float:
        """From the start of the job to its end."""
        return self.ended_s - self.started_s

    @property
    def recovery_s(self) -> float | None:
        """From the kill to the next committed step; None without a kill or a step after it."""
        if self.kill is None or self.recovery is None:
            return None
        return self.recovery.committed_s - self.kill.wall_s

    @property
    def join_pause_s(self) -> float | None:
        """For how long no step was committed when the replacement came in."""
        return None if self.join is None else self.join.pause_s

    @property
    def origin_ratio(self) -> float:
        """Bytes read from the origin over the bytes of the dataset."""
        return self.origin_bytes / self.setting.layout.total_bytes

    @property
    def samples_per_s(self) -> float:
        """Over all epochs, pauses included."""
        if not self.epochs:
            return 0.0
        stretch_s = self.epochs[-1][1] - self.epochs[0][0]
        read = min(self.audit.steps, self.setting.schedule.steps) / self.setting.schedule.steps
        return self.setting.schedule.records * self.setting.schedule.epochs * read / max(stretch_s, 1e-9)

    @property
    def is_exact(self) -> bool:
        """No record was missed or read twice."""
        return self.audit.missed == self.audit.repeated == 0

    @property
    def demo_exit_code(self) -> int:
        """The job's own; 1 when it ended well but not as it should."""
        return 0 if self.succeeded else self.exit_code or EXIT_FAILED

    @property
    def succeeded(self) -> bool:
        return self.exit_code == 0 and self.is_exact and self.accuracy is not None


def facts_of(watch: Watch, setting: Setting, exit_code: int) -> Facts:
    """Put together what was seen and what the ledgers say."""
    assert watch.folder is not None
    story, kill, ended_s = watch.story, watch.kill, watch.ended_s
    times = story.step_times()
    newcomers = story.newcomers(kill) if kill is not None else set()
    last = watch.cache[-1] if watch.cache else CacheSample(ended_s, 0, 0, 0)
    bins = max(1, min(BINS_MAX, int((ended_s - watch.started_s) / BIN_S)))
    survivors = {w: pid for w, pid in watch.first_pids.items() if kill is None or w != kill.worker}
    return Facts(
        setting=setting,
        exit_code=exit_code,
        folder=watch.folder,
        started_s=watch.started_s,
        ended_s=ended_s,
        accuracy=watch.accuracy,
        audit=audit(
            read_ledgers(watch.folder / "audit"), {"train": setting.schedule.records}, setting.schedule.epochs
        ),
        kill=kill,
        kill_wanted=watch.kill_wanted,
        recovery=story.recovery(kill) if kill is not None else None,
        join=story.join(kill) if kill is not None else None,
        newcomers={worker: watch.all_pids.get(worker, 0) for worker in sorted(newcomers)},
        survivors_kept_pids=bool(survivors)
        and all(watch.last_pids.get(worker) == pid for worker, pid in survivors.items()),
        origin_bytes=last.origin_bytes,
        hits=last.hits,
        misses=last.misses,
        stays=tuple(sorted(story.stays.values(), key=lambda s: (s.generation, s.rank))),
        curve=tuple(throughput(times, setting.schedule, watch.started_s, ended_s, bins)),
        epochs=tuple(epoch_spans(times, setting.schedule)),
        cache=tuple(watch.cache),
        events=tuple(sorted(watch.events, key=lambda e: e.wall_s)),
    )


def as_json(facts: Facts) -> dict[str, Any]:
    """The keys of `--json`. Times in seconds; null where there was nothing to measure."""
    setting, kill = facts.setting, facts.kill
    return {
        "ok": facts.succeeded,
        "exit_code": facts.demo_exit_code,
        "accuracy": facts.accuracy,
        "generations": facts.audit.generations,
        "recovery_s": _rounded(facts.recovery_s),
        "join_pause_s": _rounded(facts.join_pause_s),
        "steps": facts.audit.steps,
        "steps_lost": facts.audit.steps_lost,
        "records_missed": facts.audit.missed,
        "records_repeated": facts.audit.repeated,
        "origin_bytes_ratio": round(facts.origin_ratio, 4),
        "origin_bytes": facts.origin_bytes,
        "dataset_bytes": setting.layout.total_bytes,
        "cache_hits": facts.hits,
        "cache_misses": facts.misses,
        "cache_cold": setting.cold,
        "dataset": setting.layout.dataset,
        "records": setting.schedule.records,
        "test_records": setting.layout.test_records,
        "workers": setting.workers,
        "epochs": setting.schedule.epochs,
        "global_batch_size": setting.schedule.global_batch_size,
        "origin_mbps": setting.origin_mbps,
        "origin_latency_ms": setting.origin_latency_ms,
        "killed_worker": None if kill is None else kill.worker,
        "killed_rank": None if kill is None else kill.rank,
        "killed_pid": None if kill is None else kill.pid,
        "joined": bool(facts.newcomers),
        "joined_pids": list(facts.newcomers.values()),
        "surviving_pids_unchanged": facts.survivors_kept_pids,
        "samples_per_s": round(facts.samples_per_s, 1),
        "seconds": round(facts.seconds, 2),
        "report": str(facts.folder / "report.html"),
        "logs": str(facts.folder),
    }


def environment_facts() -> dict[str, str]:
    """The machine and the versions, for the report."""
    return {
        "Machine": f"{platform.system()} {platform.release()}, {platform.machine()}, {os.cpu_count()} CPUs",
        "Processor": _processor(),
        "Python": sys.version.split()[0],
        "Stoker": _version("stoker"),
        "PyTorch": _version("torch"),
        "NumPy": _version("numpy"),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
