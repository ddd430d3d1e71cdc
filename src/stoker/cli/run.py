"""`stoker run`: torchrun's everyday flags, elastically."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
from typing import Any

from stoker.agent.output import StreamChoice
from stoker.base.units import parse_duration_s, parse_size_bytes
from stoker.cli.endpoint import Nodes, endpoint_of, nodes_of
from stoker.cli.launch import Launch, run_job
from stoker.errors import ConfigError
from stoker.settings import DEFAULT_TIMEOUT_S, Timeouts

EPILOG = """\
examples:
  stoker run --nproc-per-node 4 train.py --lr 0.1
  stoker run --nproc-per-node 2 --bucket fashion=s3://datasets/fashion -m my.train
  # two machines, two to four nodes (the same token on each):
  export STOKER_JOB_TOKEN=...
  stoker run --nnodes 2:4 --nproc-per-node 8 --rdzv-endpoint host1:29400 train.py

A script that uses `stoker.State` and `@stoker.elastic` survives deaths and joins in the same processes. Any other
script is run as torchrun runs it: a failure or a change of nodes restarts all its workers (--max-restarts).

The exit code is that of the first worker that failed (128 + N for signal N), else:
  0 done   2 wrong usage   3 too few nodes or a timeout   5 the machine refuses (port, disk)   130 interrupted
"""


def add_run_parser(subparsers: Any) -> None:
    """Add `run`."""
    parser = subparsers.add_parser(
        "run",
        help="run a training script on this node, elastically",
        description="Run a training script with one process per slot, as torchrun does, and keep it alive.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_torchrun_flags(parser)
    _add_stoker_flags(parser)
    parser.add_argument("script", metavar="SCRIPT", help="script, or module with -m")
    parser.add_argument(
        "script_args", metavar="ARGS", nargs=argparse.REMAINDER, help="the script's own arguments"
    )
    parser.set_defaults(handler=handle_run)


def _add_torchrun_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("torchrun's flags, with torchrun's meaning")

    def flag(name: str, *short: str, **options: Any) -> None:
        spelled = [f"--{name}"] + ([f"--{name.replace('-', '_')}"] if "-" in name else [])
        group.add_argument(*short, *spelled, **options)

    flag(
        "nproc-per-node",
        default="1",
        metavar="N",
        help="workers on this node: a number, auto, cpu or gpu (1)",
    )
    flag("nnodes", default="1", metavar="MIN:MAX", help="nodes: a number, or a range for elastic jobs (1)")
    flag("node-rank", type=int, default=None, metavar="R", help="0 starts the master; others wait for it")
    flag("rdzv-endpoint", default=None, metavar="HOST:PORT", help="where the job's master listens")
    flag(
        "rdzv-backend", default="c10d", choices=["c10d", "static"], help="accepted; Stoker has its own master"
    )
    flag("rdzv-id", default="none", metavar="ID", help="name of the job; nodes of another job are refused")
    flag("master-addr", default=None, metavar="HOST", help="the same as the host of --rdzv-endpoint")
    flag("master-port", type=int, default=None, metavar="PORT", help="the same as its port")
    flag("local-addr", default=None, metavar="HOST", help="address of this node for the others")
    flag("standalone", action="store_true", help="one node, on a free port")
    flag(
        "max-restarts",
        type=int,
        default=None,
        metavar="N",
        help="how often failed workers are started again (3 for elastic scripts, else 0)",
    )
    flag(
        "monitor-interval",
        type=float,
        default=None,
        help="accepted and not needed: ends are pushed, not polled",
    )
    flag(
        "tee", "-t", default="0", metavar="WHICH", help="0-3 or 0:3,1:2: show and keep (the default for all)"
    )
    flag("redirects", "-r", default="0", metavar="WHICH", help="0-3 or 0:3,1:2: keep in files only")
    flag(
        "log-dir",
        default="stoker-logs",
        metavar="DIR",
        help="folder for worker output and events (stoker-logs)",
    )
    group.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as in python -m")
    flag("no-python", action="store_true", help="SCRIPT is an executable of any kind")


def _add_stoker_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Stoker's flags")
    group.add_argument(
        "--timeout",
        default=f"{DEFAULT_TIMEOUT_S:.0f}s",
        metavar="TIME",
        help=f"how long anything may stand still before the run gives up and says why ({DEFAULT_TIMEOUT_S:.0f}s)",
    )
    group.add_argument(
        "--job-token-file", metavar="FILE", help="file with the job's secret (else STOKER_JOB_TOKEN)"
    )
    group.add_argument(
        "--bucket",
        action="append",
        default=[],
        metavar="NAME=URL",
        help="serve an origin as stoker://NAME/ through the embedded cache; may be repeated",
    )
    group.add_argument("--cache-dir", metavar="DIR", help="folder of the embedded cache (~/.cache/stoker)")
    group.add_argument("--cache-capacity", metavar="SIZE", help="its hard limit (20GB)")
    group.add_argument(
        "--cache-endpoint", metavar="URL", help="use this cache server instead of an embedded one"
    )
    group.add_argument("--no-cache", action="store_true", help="start no cache")
    group.add_argument("--checkpoint-dir", metavar="DIR", help="folder for checkpoints of stoker.State")
    group.add_argument(
        "--checkpoint-every", type=int, default=100, metavar="N", help="commits between two (100)"
    )
    group.add_argument("--audit", action="store_true", help="note who read what, and check it at the end")


def launch_of(arguments: argparse.Namespace) -> Launch:
    """What the flags say. Raises ConfigError."""
    try:
        timeouts = Timeouts.from_user_timeout(parse_duration_s(arguments.timeout))
        capacity = parse_size_bytes(arguments.cache_capacity) if arguments.cache_capacity else None
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if arguments.checkpoint_every < 1:
        raise ConfigError(f"--checkpoint-every {arguments.checkpoint_every} must be at least 1")
    if arguments.max_restarts is not None and arguments.max_restarts < 0:
        raise ConfigError(f"--max-restarts {arguments.max_restarts} must not be negative")
    nodes = Nodes(1, 1) if arguments.standalone else nodes_of(arguments.nnodes)
    return Launch(
        command=command_of(arguments),
        nodes=nodes,
        slots=slots_of(arguments.nproc_per_node),
        endpoint=endpoint_of(
            nodes,
            rdzv_endpoint=None if arguments.standalone else arguments.rdzv_endpoint,
            master_addr=arguments.master_addr,
            master_port=arguments.master_port,
        ),
        node_rank=arguments.node_rank,
        local_address=arguments.local_addr,
        job=arguments.rdzv_id,
        max_restarts=arguments.max_restarts,
        timeouts=timeouts,
        log_dir=arguments.log_dir,
        tee=StreamChoice("--tee", arguments.tee),
        redirects=StreamChoice("--redirects", arguments.redirects),
        token_file=arguments.job_token_file,
        buckets=buckets_of(arguments.bucket),
        cache_dir=arguments.cache_dir,
        cache_capacity_bytes=capacity,
        cache_endpoint=arguments.cache_endpoint,
        no_cache=arguments.no_cache,
        checkpoint_dir=arguments.checkpoint_dir,
        checkpoint_every=arguments.checkpoint_every,
        audit=arguments.audit,
    )


def handle_run(arguments: argparse.Namespace) -> int:
    """Run the job; returns its exit code."""
    launch = launch_of(arguments)
    with contextlib.suppress(ValueError):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return asyncio.run(run_job(launch))


def command_of(arguments: argparse.Namespace) -> list[str]:
    """argv of a worker. Raises ConfigError for a script that is not there."""
    rest = [arguments.script, *arguments.script_args]
    if arguments.no_python:
        return rest
    if arguments.module:
        return [sys.executable, "-u", "-m", *rest]
    if not os.path.isfile(arguments.script):
        raise ConfigError(
            f"there is no script {arguments.script!r} here ({os.getcwd()}); for a module use -m"
        )
    return [sys.executable, "-u", *rest]


def slots_of(text: str) -> int:
    """Workers on this node. Raises ConfigError."""
    if text in ("auto", "gpu", "cpu"):
        gpus = 0 if text == "cpu" else _count_gpus()
        if text == "gpu" and gpus == 0:
            raise ConfigError("--nproc-per-node gpu: this node has no GPU that its driver shows")
        return gpus or os.cpu_count() or 1
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"--nproc-per-node {text!r}: give a number of at least 1, or auto, cpu, gpu")
    return int(text)


def _count_gpus() -> int:
    """NVIDIA devices by their nodes in /dev: the agent does without PyTorch."""
    with contextlib.suppress(OSError):
        return sum(
            name.removeprefix("nvidia").isdigit() for name in os.listdir("/dev") if name.startswith("nvidia")
        )
    return 0


def buckets_of(texts: list[str]) -> dict[str, str]:
    """`NAME=URL` flags. Raises ConfigError."""
    buckets = {}
    for text in texts:
        name, equals, url = text.partition("=")
        if not equals or not name or not url:
            raise ConfigError(f"--bucket {text!r}: write NAME=ORIGIN_URL, like fashion=s3://datasets/fashion")
        buckets[name] = url
    return buckets
