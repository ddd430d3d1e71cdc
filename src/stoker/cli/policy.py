"""Flags about failures and health, which `stoker run` and `stoker master` share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, TypeVar

from stoker.base.units import parse_duration_s, parse_size_bytes
from stoker.errors import ConfigError
from stoker.job.relaunch import RelaunchConfig
from stoker.job.scaling_advice import DEFAULT_TARGET_EFFICIENCY
from stoker.platform.memory import node_memory_bytes

T = TypeVar("T")


def add_policy_flags(group: Any) -> None:
    """Add them to a parser or group."""
    flag = group.add_argument
    flag("--relaunch-errors", action="store_true", help="restart workers after an error of the script, too")
    flag(
        "--forgive-after",
        default="1h",
        metavar="TIME",
        help="progress after which a restart is forgiven (1h)",
    )
    flag("--worker-memory", metavar="SIZE", help="memory limit of each worker, by a control group")
    flag("--worker-memory-max", metavar="SIZE", help="what it may grow to after kills for want of memory")
    flag("--cordon", default=None, metavar="TIME", help="how long a faulty node runs no workers (for ever)")
    flag("--node-check", action="store_true", help="check nodes before they join: matmul, allreduce in pairs")
    flag("--exclude-stragglers", action="store_true", help="do without nodes that are found slow")
    flag(
        "--hang-after",
        default="60s",
        metavar="TIME",
        help="least time without any progress after which the stacks of all ranks are taken (60s)",
    )


def add_scale_flags(group: Any) -> None:
    """Add the flags of the auto-scaler."""
    flag = group.add_argument
    flag(
        "--auto-scale",
        choices=["off", "recommend", "apply"],
        default="off",
        help="find out how many nodes pay, from the run's own speed: say so, or change to it (off)",
    )
    flag(
        "--target-efficiency",
        type=float,
        default=DEFAULT_TARGET_EFFICIENCY,
        metavar="SHARE",
        help=f"work of a node that the last ones must still add, of their usual ({DEFAULT_TARGET_EFFICIENCY:g})",
    )


def parsed(flag: str, parse: Callable[[str], T], text: str) -> T:
    """What a flag's text says. Raises ConfigError, naming the flag."""
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None


def relaunch_of(arguments: argparse.Namespace, *, slots: int | None) -> RelaunchConfig:
    """The relaunch policy that the flags ask for. Raises ConfigError.

    `slots`: workers of this node; None: workers run on other machines, whose memory is not known here.
    """
    if arguments.max_restarts is not None and arguments.max_restarts < 0:
        raise ConfigError(f"--max-restarts {arguments.max_restarts} must not be negative")
    forgive_after_s = parsed("--forgive-after", parse_duration_s, arguments.forgive_after)
    cordon_s = parsed("--cordon", parse_duration_s, arguments.cordon) if arguments.cordon else None
    least, most = arguments.worker_memory, arguments.worker_memory_max
    memory_bytes = parsed("--worker-memory", parse_size_bytes, least) if least else 0
    memory_max_bytes = parsed("--worker-memory-max", parse_size_bytes, most) if most else 0
    if memory_max_bytes and not memory_bytes:
        raise ConfigError("--worker-memory-max is what --worker-memory may grow to: give that, too")
    if 0 < memory_max_bytes < memory_bytes:
        raise ConfigError(f"--worker-memory-max {most} is below --worker-memory {arguments.worker_memory}")
    if memory_bytes and not memory_max_bytes:
        if slots is None:
            raise ConfigError(
                f"--worker-memory {least} needs --worker-memory-max here, what it may grow to (the same: not at all): "
                "workers run on other machines, whose memory is not known"
            )
        memory_max_bytes = max(memory_bytes, node_memory_bytes() // slots)
    return RelaunchConfig(
        max_restarts=arguments.max_restarts,
        forgive_after_s=forgive_after_s,
        relaunch_errors=arguments.relaunch_errors,
        memory_bytes=memory_bytes,
        memory_max_bytes=memory_max_bytes,
        cordon_s=cordon_s,
    )


def hang_after_of(arguments: argparse.Namespace) -> float:
    """Seconds without progress after which a world is looked at. Raises ConfigError."""
    seconds = parsed("--hang-after", parse_duration_s, arguments.hang_after)
    if seconds < 1:
        raise ConfigError(f"--hang-after {arguments.hang_after} is too short: give at least 1 second")
    return seconds


def target_efficiency_of(arguments: argparse.Namespace) -> float:
    """`--target-efficiency`. Raises ConfigError."""
    share = float(arguments.target_efficiency)
    if not 0 < share <= 1:
        raise ConfigError(f"--target-efficiency {share:g}: give a share above 0 and at most 1, like 0.8")
    return share
