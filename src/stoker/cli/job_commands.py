"""What the commands of `stoker job` do: ask a master, and print the answer for people or as JSON."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.live import Live

from stoker.cli import registry
from stoker.cli.job_target import (
    PATIENCE_S,
    JobIsOver,
    MovingClient,
    Target,
    master_of,
    patiently,
    target_of,
    without_secret,
)
from stoker.cli.job_view import advice_view, clean, console, jobs_table, shards_view, stacks_view, status_view
from stoker.cli.registry import JobRecord
from stoker.errors import ConfigError, JobError, JobTimeout, MasterUnreachable, StokerError
from stoker.wire.control import STACKS_TIMEOUT_S_MAX, Accepted, JobStatus, WorkerStatus
from stoker.wire.control_client import JobClient

_LOOK_S = 0.5
_AT_ONCE_MAX = 32


def ls(arguments: argparse.Namespace) -> int:
    """`stoker job ls`."""
    records = registry.records()
    with ThreadPoolExecutor(_AT_ONCE_MAX) as pool:
        answers = list(pool.map(lambda record: _ask(record, min(3.0, arguments.timeout)), records))
    if arguments.json:
        jobs = [
            {**without_secret(record), "endpoint": endpoint, "status": status, "problem": problem}
            for record, (endpoint, status, problem) in zip(records, answers, strict=True)
        ]
        _print_json({"jobs": jobs})
    elif not records:
        console().print("no job runs on this machine")
    else:
        rows = [(record.job, *answer) for record, answer in zip(records, answers, strict=True)]
        console().print(jobs_table(rows, time.time()))
    return 0


def status(arguments: argparse.Namespace) -> int:
    """`stoker job status`."""
    target = _target(arguments)
    with target.client(arguments.timeout) as client:
        if arguments.watch:
            return _watch(target, client, arguments)
        said = client.status()
        _show(arguments, said, lambda: status_view(said, target.endpoint, time.time()))
    return 0


def scale(arguments: argparse.Namespace) -> int:
    """`stoker job scale`."""
    nodes = arguments.nodes
    if nodes < 1:
        raise ConfigError("a job has at least 1 node; `stoker job stop` ends it")

    def missing(said: JobStatus) -> str:
        here = sum(any(_trains(worker) for worker in node.workers) for node in said.nodes)
        return (
            "" if said.phase == "running" and here == nodes else f"{here} of {nodes} nodes train: {said.why}"
        )

    target = _target(arguments)
    with target.client(arguments.timeout) as client:
        accepted = client.scale(nodes)
        return _change_while_it_runs(arguments, target, client, accepted, missing)


def stop(arguments: argparse.Namespace) -> int:
    """`stoker job stop`."""
    target = _target(arguments)
    with target.client(arguments.timeout) as client:
        accepted = client.stop(arguments.why)
        try:
            return _change(
                arguments, target, client, accepted, lambda said: "" if said.phase == "ended" else said.why
            )
        except (JobIsOver, MasterUnreachable):
            return 0  # it was there to accept, and has gone now: that is the end


def drain(arguments: argparse.Namespace) -> int:
    """`stoker job drain`."""
    target = _target(arguments)
    with target.client(arguments.timeout) as client:
        node = _node(client.status(), arguments.node)

        def missing(said: JobStatus) -> str:
            left = next((known for known in said.nodes if known.node == node), None)
            return "" if left is None else f"{node} is {left.state}: {left.why or said.why}"

        accepted = client.leave_node(node, arguments.why)
        return _change_while_it_runs(arguments, target, client, accepted, missing)


def stacks(arguments: argparse.Namespace) -> int:
    """`stoker job stacks`."""
    if not 0 < arguments.within <= STACKS_TIMEOUT_S_MAX:
        raise ConfigError(f"--within {arguments.within:g}: at most {STACKS_TIMEOUT_S_MAX:g} seconds")
    with _target(arguments).client(arguments.timeout) as client:
        said = client.stacks(arguments.within)
    _show(arguments, {"workers": said}, lambda: stacks_view(said, all_threads=arguments.all_threads))
    return 0


def shards(arguments: argparse.Namespace) -> int:
    """`stoker job shards`."""
    with _target(arguments).client(arguments.timeout) as client:
        said = client.shards()
    _show(arguments, {"shards": said}, lambda: shards_view(said))
    return 0


def advice(arguments: argparse.Namespace) -> int:
    """`stoker job advice`."""
    with _target(arguments).client(arguments.timeout) as client:
        said = client.advice()
    _show(arguments, {"advice": said}, lambda: advice_view(said))
    return 0


def metrics(arguments: argparse.Namespace) -> int:
    """`stoker job metrics`."""
    with _target(arguments).client(arguments.timeout) as client:
        text = client.metrics()
    if arguments.json:
        _print_json({"metrics": text})
    else:
        print(text, end="")
    return 0


def _target(arguments: argparse.Namespace) -> Target:
    return target_of(arguments.job, arguments.job_token_file)


def _ask(record: JobRecord, timeout_s: float) -> tuple[str, JobStatus | None, str]:
    """Where the job's master is, what it says, and if it does not, why."""
    endpoint = record.endpoint
    try:
        endpoint = master_of(record, timeout_s)
        with JobClient(endpoint, record.secret(), timeout_s=timeout_s) as client:
            return endpoint, client.status(), ""
    except StokerError as error:
        return endpoint, None, str(error)


def _watch(target: Target, client: MovingClient, arguments: argparse.Namespace) -> int:
    """The status again and again, until the job has ended."""
    out = console(redraws=True)
    with contextlib.ExitStack() as stack:
        live = None
        if out.is_terminal and not arguments.json:
            live = stack.enter_context(Live(console=out, auto_refresh=False))
        while True:
            try:
                said = patiently(target, client, client.status)
            except JobIsOver:
                return 0
            view = status_view(said, target.endpoint, time.time())
            if live is not None:
                live.update(view, refresh=True)
            else:
                _show(arguments, said, lambda: Group(view, ""))  # noqa: B023 (called at once)
            if said.phase == "ended":
                return 0
            time.sleep(arguments.every)


def _change(
    arguments: argparse.Namespace,
    target: Target,
    client: MovingClient,
    accepted: Accepted,
    missing: Callable[[JobStatus], str],
) -> int:
    """Say what was accepted, and wait until nothing is missing if that was asked for. Raises JobIsOver, JobTimeout."""
    _show(arguments, accepted, lambda: clean(accepted.why))
    if arguments.wait is None:
        return 0
    deadline = time.monotonic() + arguments.wait
    while True:
        said = patiently(target, client, client.status, patience_s=min(PATIENCE_S, arguments.wait))
        lacks = missing(said)
        if not lacks:
            return 0
        if said.phase == "ended":
            raise JobIsOver(said.why)
        if time.monotonic() >= deadline:
            raise JobTimeout(f"not done after {arguments.wait:g} s: {lacks}")
        time.sleep(_LOOK_S)


def _change_while_it_runs(
    arguments: argparse.Namespace,
    target: Target,
    client: MovingClient,
    accepted: Accepted,
    missing: Callable[[JobStatus], str],
) -> int:
    try:
        return _change(arguments, target, client, accepted, missing)
    except JobIsOver as over:
        raise JobError(
            f"the job has ended meanwhile: {over}" if str(over) else "the job has ended meanwhile"
        ) from None


def _trains(worker: WorkerStatus) -> bool:
    """Whether it is in the world, or works without one."""
    return worker.rank is not None or worker.phase == "working"


def _node(said: JobStatus, name: str) -> str:
    """A node's id, or that of the only node on a host. Raises ConfigError."""
    if any(node.node == name for node in said.nodes):
        return name
    found = [node.node for node in said.nodes if node.host == name]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"several nodes are on host {name}: say which of {', '.join(found)}")
    here = ", ".join(f"{node.node} on {node.host}" for node in said.nodes) or "none"
    raise ConfigError(f"the job has no node {name!r}: it has {here}")


def _show(arguments: argparse.Namespace, said: Any, view: Callable[[], RenderableType]) -> None:
    if arguments.json:
        _print_json(said)
    else:
        console().print(view(), soft_wrap=False)


def _print_json(said: Any) -> None:
    print(msgspec.json.encode(said).decode(), flush=True)
