"""`stoker run`: torchrun's everyday flags, elastically."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

from stoker.agent.accelerators import AUTO, CPU, Machine, Workers, plan_workers
from stoker.base.units import parse_duration_s, parse_size_bytes
from stoker.cli.endpoint import Nodes, endpoint_of, nodes_of
from stoker.cli.hosts_options import add_host_flags, host_options_of
from stoker.cli.hosts_run import run_over_hosts
from stoker.cli.launch import run_job
from stoker.cli.options import Launch
from stoker.cli.policy import (
    add_policy_flags,
    add_scale_flags,
    hang_after_of,
    parsed,
    relaunch_of,
    target_efficiency_of,
)
from stoker.cli.torchrun import (
    add_torchrun_flags,
    check_torchrun_flags,
    notice_of,
    shutdown_timeout_of,
    streams_of,
)
from stoker.compat.horovod.shim import IMPORTABLE
from stoker.errors import ConfigError
from stoker.job.journal.open import parse_journal_url
from stoker.platform.programs import require_program
from stoker.settings import DEFAULT_TIMEOUT_S, Timeouts, environment

log = logging.getLogger("stoker")
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
    add_torchrun_flags(parser, environment())
    _add_stoker_flags(parser)
    add_policy_flags(parser.add_argument_group("failures and health"))
    add_scale_flags(parser.add_argument_group("scaling"))
    add_host_flags(parser)
    parser.add_argument("script", metavar="SCRIPT", help="script, or module with -m")
    parser.add_argument(
        "script_args", metavar="ARGS", nargs=argparse.REMAINDER, help="the script's own arguments"
    )
    parser.set_defaults(handler=handle_run)


def _add_stoker_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Stoker's flags")
    group.add_argument(
        "--timeout",
        default=f"{DEFAULT_TIMEOUT_S:.0f}s",
        metavar="TIME",
        help=f"how long anything may stand still before the run gives up and says why ({DEFAULT_TIMEOUT_S:.0f}s)",
    )
    group.add_argument(
        "--node-unit",
        type=int,
        default=1,
        metavar="N",
        help="a world's nodes are a whole multiple of this (1)",
    )
    group.add_argument(
        "--journal",
        metavar="URL",
        help="where the master keeps what it must remember: a file (default: in the log folder), or "
        "etcd://host:2379,... with which any node may host it",
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
    group.add_argument(
        "--accelerator",
        default=AUTO,
        metavar="KIND",
        help="what workers train on: auto, cpu, or a kind of device such as cuda, xpu, mps, npu, hpu (auto)",
    )
    group.add_argument(
        "--auto-tune",
        action="store_true",
        help="find the number of loader workers and the micro-batch with the fastest step, by trying",
    )
    group.add_argument(
        "--horovod",
        action="store_true",
        help="have `import horovod.torch` give the script Stoker's own, also where Horovod is installed",
    )
    group.add_argument("--audit", action="store_true", help="note who read what, and check it at the end")


def launch_of(arguments: argparse.Namespace) -> Launch:
    """What the flags say. Raises ConfigError."""
    check_torchrun_flags(arguments)
    user_s = parsed("--timeout", parse_duration_s, arguments.timeout)
    timeouts = Timeouts.from_user_timeout(user_s, shutdown_timeout_of(arguments, environment()))
    capacity = None
    if arguments.cache_capacity is not None:
        capacity = parsed("--cache-capacity", parse_size_bytes, arguments.cache_capacity)
        if capacity < 1:
            raise ConfigError(f"--cache-capacity {arguments.cache_capacity}: for no cache give --no-cache")
    if arguments.checkpoint_every < 1:
        raise ConfigError(f"--checkpoint-every {arguments.checkpoint_every} must be at least 1")
    if arguments.journal is not None:
        parse_journal_url(arguments.journal)
    workers = workers_of(arguments)
    streams = streams_of(arguments, workers.slots)
    nodes = Nodes(1, 1) if arguments.standalone else nodes_of(arguments.nnodes)
    return Launch(
        command=command_of(arguments),
        nodes=nodes,
        slots=workers.slots,
        accelerator=workers.accelerator,
        slot_environments=workers.environments,
        auto_tune=arguments.auto_tune,
        endpoint=endpoint_of(
            nodes,
            rdzv_endpoint=None if arguments.standalone else arguments.rdzv_endpoint,
            master_addr=arguments.master_addr,
            master_port=arguments.master_port,
        ),
        node_rank=arguments.node_rank,
        local_address=arguments.local_addr,
        job=arguments.rdzv_id,
        relaunch=relaunch_of(arguments, slots=None if runs_over_hosts(arguments) else workers.slots),
        check_nodes=arguments.node_check,
        exclude_stragglers=arguments.exclude_stragglers,
        hang_after_s=hang_after_of(arguments),
        auto_scale=arguments.auto_scale,
        target_efficiency=target_efficiency_of(arguments),
        timeouts=timeouts,
        log_dir=arguments.log_dir,
        tee=streams.tee,
        redirects=streams.redirects,
        token_file=arguments.job_token_file,
        buckets=buckets_of(arguments.bucket),
        cache_dir=arguments.cache_dir,
        cache_capacity_bytes=capacity,
        cache_endpoint=arguments.cache_endpoint,
        no_cache=arguments.no_cache,
        checkpoint_dir=arguments.checkpoint_dir,
        checkpoint_every=arguments.checkpoint_every,
        audit=arguments.audit,
        environment=horovod_environment(environment()) if arguments.horovod else {},
        journal=arguments.journal,
        node_unit=arguments.node_unit,
        verbose=arguments.verbose,
    )


def handle_run(arguments: argparse.Namespace) -> int:
    """Run the job; returns its exit code."""
    launch = launch_of(arguments)
    if notice := notice_of(arguments):
        log.info("%s", notice)
    for idle in idle_flags_of(arguments):
        log.warning("%s", idle)
    hosts = host_options_of(arguments, launch.slots, environment())
    if hosts is not None:
        if hosts.script:
            require_program(hosts.script[0], environment())
        return asyncio.run(run_over_hosts(launch, hosts, arguments))
    with contextlib.suppress(ValueError):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return asyncio.run(run_job(launch))


def idle_flags_of(arguments: argparse.Namespace) -> list[str]:
    """What was asked for and has no effect, in words."""
    over_hosts = runs_over_hosts(arguments)
    given = {
        "--reset-limit": not over_hosts and arguments.reset_limit is not None,
        "--blacklist-limit": not over_hosts and arguments.blacklist_limit is not None,
        "--forward-env": not over_hosts and bool(arguments.forward_env),
        "--node-rank": over_hosts and arguments.node_rank is not None,
        "--cache-dir": arguments.no_cache and arguments.cache_dir is not None,
        "--cache-capacity": arguments.no_cache and arguments.cache_capacity is not None,
    }
    why = {
        "--node-rank": "with --hosts or --host-discovery-script: the driver has the master",
        "--cache-dir": "with --no-cache",
        "--cache-capacity": "with --no-cache",
    }
    alone = "without --hosts or --host-discovery-script"
    return [f"{flag} has no effect {why.get(flag, alone)}" for flag, is_idle in given.items() if is_idle]


def runs_over_hosts(arguments: argparse.Namespace) -> bool:
    """Whether this command drives agents on hosts. Those agents are not told of the hosts."""
    return any(getattr(arguments, flag, None) is not None for flag in ("hosts", "host_discovery_script"))


def command_of(arguments: argparse.Namespace) -> list[str]:
    """argv of a worker. Raises ConfigError for a script that is not there."""
    rest = [arguments.script, *arguments.script_args]
    if arguments.no_python and not arguments.run_path:
        return rest
    if arguments.module and not arguments.run_path:
        return [sys.executable, "-u", "-m", *rest]
    if not os.path.isfile(arguments.script):
        raise ConfigError(
            f"there is no script {arguments.script!r} here ({os.getcwd()}); for a module use -m"
        )
    return [sys.executable, "-u", *rest]


def horovod_environment(given: Mapping[str, str]) -> dict[str, str]:
    """With this a worker's `import horovod` finds Stoker's, and so does that of a process that it starts."""
    folders = [str(IMPORTABLE), *filter(None, [given.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(folders)}


def workers_of(arguments: argparse.Namespace) -> Workers:
    """What this node runs; where other hosts do, what those run that say no number. Raises ConfigError."""
    nproc, accelerator = arguments.nproc_per_node, arguments.accelerator
    machine = Machine(environment())
    if runs_over_hosts(arguments) and nproc.isdigit():  # each of them looks for its own devices
        return plan_workers(nproc, CPU, machine)._replace(accelerator=accelerator)
    workers = plan_workers(nproc, accelerator, machine)
    if not nproc.isdigit():
        log.info("%d workers on this node: %s", workers.slots, workers.why)
    return workers


def buckets_of(texts: list[str]) -> dict[str, str]:
    """`NAME=URL` flags. Raises ConfigError."""
    buckets = {}
    for text in texts:
        name, equals, url = text.partition("=")
        if not equals or not name or not url:
            raise ConfigError(f"--bucket {text!r}: write NAME=ORIGIN_URL, like fashion=s3://datasets/fashion")
        buckets[name] = url
    return buckets
