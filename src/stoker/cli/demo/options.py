"""The flags of `stoker demo`. Imports nothing heavy: the command line loads this at every start."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.base.units import parse_duration_s
from stoker.errors import ConfigError

DEFAULT_TIMEOUT = "120s"
DEFAULT_LATENCY_MS = 2.0
MAX_WORKERS = 4
EPILOG = """\
examples:
  stoker demo                                   three workers, one of them killed, about a minute
  stoker demo --workers 4 --epochs 3            more of both
  stoker demo --no-kill                         the same run undisturbed, to compare
  stoker demo --origin-mbps 5                   a slower origin: see what the cache is for
  stoker demo --records 6000 --json             a short run; the last line of stdout is one JSON object

What it does: it takes Fashion-MNIST (from Debian's package dataset-fashion-mnist, which it installs where it may;
else the digits that scikit-learn ships), lays it out as one object per record behind a bandwidth and latency limit,
and trains a small CNN on it through the cache. In the first epoch it kills a worker with SIGKILL. The others go on
in the same processes and a replacement joins. At the end it checks that every record was read exactly once.

exit codes:
  0 trained, and no record missed or read twice   1 it failed, or a record was   2 wrong usage   130 interrupted
"""


@dataclass(frozen=True)
class DemoOptions:
    """What the flags say."""

    workers: int = 3
    epochs: int | None = None
    """None: as many as suit the dataset."""
    kill: bool = True
    origin_mbps: float | None = None
    """Megabits a second; None: what suits the dataset."""
    origin_latency_ms: float = DEFAULT_LATENCY_MS
    records: int | None = None
    """Training records; None: all."""
    global_batch_size: int | None = None
    """None: what suits the dataset."""
    dataset: str = "auto"
    folder: Path = Path("stoker-demo")
    keep_cache: bool = False
    json: bool = False
    timeout_s: float = 120.0


def add_demo_parser(subparsers: Any) -> None:
    """Add `demo`."""
    parser = subparsers.add_parser(
        "demo",
        help="train a small model, kill a worker, watch the run go on",
        description="Train a small model through the cache from a slow origin, kill a worker, watch the run go on.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--workers", type=int, default=3, metavar="N", help=f"worker processes, 2 to {MAX_WORKERS} (3)")
    add("--epochs", type=int, default=None, metavar="N", help="times through the data (2; 20 for the digits)")
    add("--no-kill", action="store_true", help="kill nobody")
    add("--origin-mbps", type=float, default=None, metavar="MBPS",
        help="bandwidth of the origin, megabits a second (20; less for less data)")  # fmt: skip
    add("--origin-latency-ms", type=float, default=DEFAULT_LATENCY_MS, metavar="MS",
        help=f"what each request to the origin takes besides ({DEFAULT_LATENCY_MS:g})")  # fmt: skip
    add("--records", type=int, default=None, metavar="N", help="use only this many training records (all)")
    add("--global-batch-size", type=int, default=None, metavar="N",
        help="records per step over all workers (256; 32 for the digits)")  # fmt: skip
    add("--dataset", choices=["auto", "fashion-mnist", "digits"], default="auto",
        help="auto: Fashion-MNIST where it is or can be installed, else the digits")  # fmt: skip
    add("--dir", default="stoker-demo", metavar="DIR",
        help="folder for the origin, the cache, logs and reports (stoker-demo)")  # fmt: skip
    add(
        "--keep-cache",
        action="store_true",
        help="use the cache of an earlier run and keep it (else it starts empty)",
    )
    add("--json", action="store_true", help="progress to stderr; the last line of stdout is one JSON object")
    add("--timeout", default=DEFAULT_TIMEOUT, metavar="TIME",
        help=f"how long anything may stand still before the demo gives up ({DEFAULT_TIMEOUT})")  # fmt: skip
    parser.set_defaults(handler=handle_demo)


def options_of(arguments: argparse.Namespace) -> DemoOptions:
    """What the flags say. Raises ConfigError, naming the flag."""
    if not 2 <= arguments.workers <= MAX_WORKERS:
        raise ConfigError(f"--workers {arguments.workers}: the demo runs 2 to {MAX_WORKERS}")
    for flag, value, least in (
        ("--epochs", arguments.epochs, 1),
        ("--records", arguments.records, 100),
        ("--global-batch-size", arguments.global_batch_size, arguments.workers),
    ):
        if value is not None and value < least:
            raise ConfigError(f"{flag} {value} must be at least {least}")
    if arguments.origin_mbps is not None and not 0.001 <= arguments.origin_mbps <= 1e6:
        raise ConfigError(f"--origin-mbps {arguments.origin_mbps:g} must be from 0.001 to 1000000")
    if not 0 <= arguments.origin_latency_ms <= 10_000:
        raise ConfigError(f"--origin-latency-ms {arguments.origin_latency_ms:g} must be from 0 to 10000")
    try:
        timeout_s = parse_duration_s(arguments.timeout)
    except ValueError as error:
        raise ConfigError(f"--timeout: {error}") from None
    return DemoOptions(
        workers=arguments.workers,
        epochs=arguments.epochs,
        kill=not arguments.no_kill,
        origin_mbps=arguments.origin_mbps,
        origin_latency_ms=arguments.origin_latency_ms,
        records=arguments.records,
        global_batch_size=arguments.global_batch_size,
        dataset=arguments.dataset,
        folder=Path(arguments.dir),
        keep_cache=arguments.keep_cache,
        json=arguments.json,
        timeout_s=timeout_s,
    )


def handle_demo(arguments: argparse.Namespace) -> int:
    """Run the demo; returns its exit code."""
    from stoker.cli.demo.command import run_demo

    return run_demo(options_of(arguments))
