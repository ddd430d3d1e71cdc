"""What the benchmarks share: flags, the machine and commit to print, and medians of interleaved runs."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

os.environ.setdefault(
    "STOKER_REPORT", "0"
)  # a loader's account of its waiting would stand between the figures


def parser(question: str) -> argparse.ArgumentParser:
    """A parser with the flags that every benchmark has."""
    made = argparse.ArgumentParser(description=question)
    made.add_argument("--quick", action="store_true", help="fewer and shorter runs; rougher figures")
    made.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    return made


def machine() -> str:
    """CPU, number of CPUs and kernel, for people."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            model = next(
                (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model
            )
    except OSError:
        pass
    system = f"{platform.system()} {platform.release()}"
    return f"{os.cpu_count()} x {model}, {system}, Python {platform.python_version()}"


def commit() -> str:
    """The commit that is checked out; `+` marks local changes."""
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=12"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def interleaved(sides: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run all sides in turn, `rounds` times, so that a slow minute of the machine hits them alike."""
    figures: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            figures[name].append(sides[name]())
    return figures


def median_ratio(ours: list[float], theirs: list[float]) -> float:
    """The median of ours over the median of theirs."""
    return statistics.median(ours) / statistics.median(theirs)


def report(name: str, figures: Mapping[str, Any], as_json: bool) -> None:
    """Print figures with machine and commit; ratios are rounded to three digits."""
    rounded = {key: round(value, 3) if isinstance(value, float) else value for key, value in figures.items()}
    print(f"{name}  [{machine()}; commit {commit()}]")
    for key, value in rounded.items():
        print(f"  {key:<34} {value}")
    if as_json:
        print(json.dumps({"benchmark": name, "machine": machine(), "commit": commit(), **rounded}))
