"""What the flags about hosts mean, and what the driver makes of its master's answers."""

from __future__ import annotations

import argparse
import socket
from typing import Any

import msgspec
import pytest

from stoker.cli.endpoint import Endpoint, Nodes, outward_address
from stoker.cli.hosts_job import changes, new_worlds
from stoker.cli.hosts_options import (
    ANY_NUMBER,
    HostOptions,
    add_host_flags,
    agent_command,
    agent_options,
    forwarded,
    host_options_of,
    is_local,
    meeting_point,
)
from stoker.errors import ConfigError
from stoker.job.hosts_events import JobEnded, NodeCordoned, NodeJoined, NodeLost, WorldFormed
from stoker.settings import Timeouts
from stoker.wire.control import JobEvent, JobOutcome, JobStatus, MasterStatus, NodeStatus, WorkerStatus


def parsed(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_host_flags(parser)
    parser.add_argument("--lr")
    return parser.parse_args(flags)


def options_of(*flags: str, environment: dict[str, str] | None = None) -> HostOptions:
    options = host_options_of(parsed("--remote-shell", "env X={host}", *flags), 2, environment or {})
    assert options is not None
    return options


def test_without_hosts_there_is_no_driver() -> None:
    assert host_options_of(parsed(), 1, {}) is None


def test_numbers_of_nodes() -> None:
    assert options_of("--hosts", "h1,h2:4").nodes(None) == (2, 2)
    assert options_of("--host-discovery-script", "./h.sh").nodes(None) == (1, ANY_NUMBER)
    assert options_of("--hosts", "h1,h2:4").nodes(Nodes(1, 3)) == (1, 3)


def test_a_script_may_have_arguments() -> None:
    assert options_of("--host-discovery-script", "./h.sh --cluster 'a b'").script == (
        "./h.sh",
        "--cluster",
        "a b",
    )


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--hosts", "h1", "--host-discovery-script", "x"), "give one of them"),
        (("--hosts", ""), "names no host"),
        (("--host-discovery-script", " "), "is empty"),
        (("--host-discovery-script", "'"), "quotation"),
        (("--hosts", "h1", "--discovery-interval", "0s"), "above 0"),
        (("--hosts", "h1", "--discovery-interval", "soon"), "duration"),
        (("--hosts", "h1", "--blacklist-cooldown-range", "5s", "1s"), "--blacklist-cooldown-range 5 1"),
        (("--hosts", "h1", "--blacklist-limit", "0"), "--blacklist-limit"),
        (("--hosts", "h1", "--reset-limit", "-1"), "--reset-limit"),
        (("--hosts", "h1", "--forward-env", "NOT_HERE"), "NOT_HERE"),
        (("--hosts", "h1", "--forward-env", "=x"), "=x"),
        (("--hosts", "h1", "--remote-shell", "ssh somewhere"), "{host}"),
    ],
)
def test_flags_that_cannot_be(flags: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint.replace("{", r"\{")):
        options_of(*flags)


@pytest.mark.parametrize("timeout_s", [1.0, 8.0, 300.0, 86_400.0])
def test_all_waiting_times_fit_into_the_one_timeout(timeout_s: float) -> None:
    policy = options_of("--hosts", "h1").policy(Nodes(1, 2), Timeouts.from_user_timeout(timeout_s))
    assert policy.timeout_s == timeout_s
    assert 0 < policy.rejoin_s <= policy.start_s < policy.timeout_s, (
        "another host has its chance before the end"
    )


def test_variables_that_are_forwarded() -> None:
    here = {"STOKER_X": "1", "STOKER_JOB_TOKEN": "secret", "NCCL_DEBUG": "INFO", "HOME": "/root", "PATH": "/bin",
            "PYTHONPATH": "/a:b:", "AWS_SECRET": "s"}  # fmt: skip
    given = forwarded(here, {"MORE": "x"})
    assert given.keys() == {"STOKER_X", "NCCL_DEBUG", "PATH", "PYTHONPATH", "MORE"}
    first, second, third = given["PYTHONPATH"].split(":")
    assert first == "/a"
    assert second.endswith("/b")
    assert second.removesuffix("/b") == third, "what was relative means the same on the other side"


def test_only_what_python_needs_is_on_the_command_line() -> None:
    command = agent_command(
        "/py", {"PYTHONPATH": "/x y", "LD_LIBRARY_PATH": "/l", "AWS_SECRET": "s", "PATH": "/bin"}
    )
    assert command[:3] == ["env", "LD_LIBRARY_PATH=/l", "PYTHONPATH=/x y"]
    assert command[3:] == ["/py", "-P", "-m", "stoker.cli.agent", "--from-stdin"]
    assert agent_command("/py", {})[0] == "/py"


def test_agents_get_the_flags_that_are_not_the_drivers_own() -> None:
    assert agent_options(parsed("--hosts", "h1", "--lr", "0.1")) == {"lr": "0.1"}


def test_this_machine() -> None:
    for name in ("localhost", socket.gethostname(), "127.0.0.1", "127.0.0.3", "::1"):
        assert is_local(name), name
    for name in ("h1", "0.0.0.0", "::", "203.0.113.5", "root@localhost", "10.77.250.250"):
        assert not is_local(name), name


def test_where_the_master_listens() -> None:
    here = options_of("--hosts", "localhost,127.0.0.2")
    endpoint, address_for = meeting_point(None, here)
    assert (endpoint, address_for("localhost")) == (Endpoint("127.0.0.1", 0), "127.0.0.1")
    given = Endpoint("10.0.0.9", 4000)
    endpoint, address_for = meeting_point(given, here)
    assert (endpoint, address_for("h7")) == (given, "10.0.0.9")
    endpoint, address_for = meeting_point(None, options_of("--hosts", "localhost,203.0.113.5"))
    assert endpoint == Endpoint("0.0.0.0", 0)
    assert not address_for("203.0.113.5").startswith("127.")
    assert not outward_address("localhost").startswith("127."), (
        "workers elsewhere have to reach those here, too"
    )


def status(*nodes: NodeStatus) -> JobStatus:
    return JobStatus(
        job="none", phase="running", why="", generation=1, world_size=1, nodes_min=1, nodes_max=4, nodes_target=4,
        nodes=nodes, master=MasterStatus(pid=1, started_wall_s=0.0),
    )  # fmt: skip


def node(name: str, rank: int | None = None, **more: Any) -> NodeStatus:
    workers = (WorkerStatus(worker=f"w-{name}", rank=rank),)
    return NodeStatus(node=name, host=f"host-{name}", address="", slots=1, workers=workers, **more)


def test_what_is_new_since_the_last_look() -> None:
    first = status(node("a", rank=0), node("b"))
    assert changes(None, first, 1) == [
        NodeJoined("a", "host-a"),
        NodeJoined("b", "host-b"),
        WorldFormed(frozenset({"a"})),
    ]
    assert changes(first, first, 0) == []
    second = status(node("b", rank=0, state="cordoned", why="its disk fails"), node("c", rank=1))
    assert changes(first, second, 2) == [
        NodeJoined("c", "host-c"),
        NodeLost("a", "the master counts it as gone"),
        WorldFormed(frozenset({"b", "c"})),
        WorldFormed(frozenset({"b", "c"})),
        NodeCordoned("b", "its disk fails"),
    ]
    assert changes(second, second, 0) == [], "a cordon is told once"


@pytest.mark.parametrize("success", [True, False])
def test_the_end_of_the_job(success: bool) -> None:
    ended = msgspec.structs.replace(status(), phase="ended", outcome=JobOutcome(success, 0, "so it is"))
    assert changes(status(node("a")), ended, 0) == [
        NodeLost("a", "the master counts it as gone"),
        JobEnded(success),
    ]


def test_worlds_of_earlier_jobs_in_the_same_journal_are_not_counted() -> None:
    now = msgspec.structs.replace(status(), started_wall_s=100.0)
    told = [(90.0, "world"), (99.9, "world"), (100.0, "world"), (101.0, "node-lost"), (102.0, "world")]
    events = [JobEvent(seq, wall_s, kind, "because", {}) for seq, (wall_s, kind) in enumerate(told, 1)]
    assert new_worlds(events, now) == 2
