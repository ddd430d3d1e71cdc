"""torchrun's flags and PET_* variables: what has a meaning here, what is not needed here, and what cannot be."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from stoker.agent.output import StreamChoice
from stoker.base.units import parse_duration_s
from stoker.cli.endpoint import DEFAULT_JOB
from stoker.cli.policy import parsed
from stoker.errors import ConfigError

log = logging.getLogger("stoker")
OWN_BACKENDS = ("c10d", "static")
NOT_NEEDED = {
    "rdzv-conf": "--timeout is the only timeout",
    "role": "all workers of a job have one",
    "start-method": "workers are processes of their own",
    "event-log-handler": "`stoker job events` shows them",
    "logs-specs": "see --log-dir, --tee and --redirects",
    "duplicate-stdout-filters": "every line is kept in --log-dir",
    "duplicate-stderr-filters": "every line is kept in --log-dir",
    "signals-to-handle": "SIGTERM and Ctrl-C are understood, others reach `stoker run` alone",
    "numa-binding": "bind with numactl and --no-python",
}
"""torchrun's flags that are taken and do nothing, and what to know instead."""


class Streams(NamedTuple):
    """Which streams of which local ranks are shown, and which are kept in files only."""

    tee: StreamChoice
    redirects: StreamChoice


def add_torchrun_flags(parser: argparse.ArgumentParser, environment: Mapping[str, str]) -> None:
    """Add them. A variable PET_NNODES in the environment is the default of --nnodes, and so on, as for torchrun."""
    group = parser.add_argument_group(
        "torchrun's flags, with torchrun's meaning (PET_NNODES=… is --nnodes …)"
    )

    def flag(name: str, *short: str, **options: Any) -> None:
        spelled = [f"--{name}"] + ([f"--{name.replace('-', '_')}"] if "-" in name else [])
        variable = f"PET_{name.replace('-', '_').upper()}"
        text = environment.get(variable, "")
        if text:
            _from_environment(variable, text, options)
        group.add_argument(*short, *spelled, **options)

    _add_world_flags(flag)
    _add_worker_flags(flag)
    for name in NOT_NEEDED:
        flag(name, default=None, metavar="…", help=argparse.SUPPRESS)
    flag("virtual-local-rank", action="store_true", help=argparse.SUPPRESS)
    flag("run-path", action="store_true", help=argparse.SUPPRESS)


def _add_world_flags(flag: Callable[..., None]) -> None:
    flag(
        "nproc-per-node",
        default="1",
        metavar="N",
        help="workers on this node: a number; gpu: one for each device; cpu: one for each core; auto (1)",
    )
    flag("nnodes", default="1", metavar="MIN:MAX", help="nodes: a number, or a range for elastic jobs (1)")
    flag("node-rank", type=int, default=None, metavar="R", help="0 starts the master; others wait for it")
    flag("rdzv-endpoint", default=None, metavar="HOST:PORT", help="where the job's master listens")
    flag("rdzv-backend", default="c10d", metavar="NAME", help="c10d or static; Stoker has its own master")
    flag(
        "rdzv-id", default=DEFAULT_JOB, metavar="ID", help="name of the job; nodes of another job are refused"
    )
    flag("master-addr", default=None, metavar="HOST", help="the same as the host of --rdzv-endpoint")
    flag("master-port", type=int, default=None, metavar="PORT", help="the same as its port")
    flag("local-addr", default=None, metavar="HOST", help="address of this node for the others")
    flag("standalone", action="store_true", help="one node, on a free port")


def _add_worker_flags(flag: Callable[..., None]) -> None:
    flag(
        "max-restarts",
        type=int,
        default=None,
        metavar="N",
        help="how often failed workers are started again (3 for elastic scripts, else 0)",
    )
    flag("monitor-interval", type=float, default=None, help="accepted: ends are pushed, not polled")
    flag(
        "shutdown-timeout",
        default=None,
        metavar="TIME",
        help="between SIGTERM and SIGKILL when workers are stopped (30s, or --timeout if that is less)",
    )
    flag(
        "tee", "-t", default="0", metavar="WHICH", help="0-3 or 0:3,1:2: show and keep (the default for all)"
    )
    flag("redirects", "-r", default="0", metavar="WHICH", help="0-3 or 0:3,1:2: keep in files only")
    flag("local-ranks-filter", default="", metavar="RANKS", help="show only these: 0,2; the files keep all")
    flag(
        "log-dir",
        default="stoker-logs",
        metavar="DIR",
        help="folder for worker output and events (stoker-logs)",
    )
    flag("module", "-m", action="store_true", help="SCRIPT is a module, as in python -m")
    flag("no-python", action="store_true", help="SCRIPT is an executable of any kind")


def _from_environment(variable: str, text: str, options: dict[str, Any]) -> None:
    """Have a flag take its default from a variable that is set."""
    if options.get("action") == "store_true":
        options["default"] = text != "0"
        return
    parse = options.get("type", str)

    def named(value: str) -> Any:
        try:
            return parse(value)
        except ValueError:
            where = f" (from {variable})" if value == text else ""
            raise argparse.ArgumentTypeError(f"{value!r} is not a number{where}") from None

    options |= {"default": text, "type": named}  # a default that is text is parsed as well


def check_torchrun_flags(arguments: argparse.Namespace) -> None:
    """Raises ConfigError for what torchrun can and Stoker cannot."""
    backend = arguments.rdzv_backend.lower()
    if backend.startswith("etcd"):
        raise ConfigError(
            f"--rdzv-backend {arguments.rdzv_backend}: Stoker has its own master; to keep its memory in etcd and have "
            "any node host it, give --journal etcd://HOST:2379 and leave out --rdzv-backend and --rdzv-endpoint"
        )
    if backend not in OWN_BACKENDS:
        raise ConfigError(
            f"--rdzv-backend {arguments.rdzv_backend!r}: Stoker has its own master; leave this flag out"
        )
    if arguments.virtual_local_rank:
        raise ConfigError(
            "--virtual-local-rank: LOCAL_RANK counts the devices of a node here; leave the flag out and have the "
            "script take device LOCAL_RANK, as torch.accelerator.set_device_index(int(os.environ['LOCAL_RANK'])) does"
        )


def notice_of(arguments: argparse.Namespace) -> str:
    """One line about the flags that do nothing here; empty where there are none."""
    given = [name for name in NOT_NEEDED if getattr(arguments, name.replace("-", "_"), None)]
    told = "; ".join(f"--{name} ({NOT_NEEDED[name]})" for name in given)
    return f"not needed here and left aside: {told}" if told else ""


def shutdown_timeout_of(arguments: argparse.Namespace, environment: Mapping[str, str]) -> float | None:
    """`--shutdown-timeout` in seconds, or torchrun's variable for it; None: as --timeout has it. Raises ConfigError."""
    for name, text in (
        ("--shutdown-timeout", arguments.shutdown_timeout),
        ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", environment.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")),
    ):
        if text:
            return parsed(name, parse_duration_s, text)
    return None


def streams_of(arguments: argparse.Namespace, slots: int) -> Streams:
    """`--tee` and `--redirects`, after `--local-ranks-filter`. Raises ConfigError."""
    tee, redirects = (
        StreamChoice("--tee", arguments.tee),
        StreamChoice("--redirects", arguments.redirects),
    )
    text = arguments.local_ranks_filter
    if not text:
        return Streams(tee, redirects)
    try:
        shown = {int(rank) for rank in text.split(",")}
    except ValueError:
        raise ConfigError(f"--local-ranks-filter {text!r}: give local ranks like 0,2") from None
    if not any(slot in shown for slot in range(slots)):
        raise ConfigError(f"--local-ranks-filter {text!r}: this node's local ranks are 0 to {slots - 1}")

    def only_shown(flag: str, choice: StreamChoice, hidden: int) -> StreamChoice:
        values = (
            1 * choice.has(slot, "stdout") + 2 * choice.has(slot, "stderr") if slot in shown else hidden
            for slot in range(slots)
        )
        return StreamChoice(flag, ",".join(f"{slot}:{value}" for slot, value in enumerate(values)))

    return Streams(only_shown("--tee", tee, 0), only_shown("--redirects", redirects, 3))
