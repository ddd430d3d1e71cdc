"""What Ctrl-C and SIGTERM mean to a node, by where its job's master is."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, cast

import pytest

from stoker.agent.agent import Agent
from stoker.cli.endpoint import Endpoint, JobToken, Nodes
from stoker.cli.hosting import Hosting, Steering
from stoker.cli.master_process import MasterProcess
from stoker.cli.options import Launch
from stoker.errors import MasterUnreachable
from stoker.settings import Timeouts
from tests.unit.control_fake import TOKEN, FakeJob, Served, served

WHY = "interrupted by SIGINT"


class SomeAgent:
    """Notes that it is asked to leave."""

    def __init__(self) -> None:
        self.left: list[str] = []
        self.pids: dict[str, int] = {}

    def leave(self, why: str) -> None:
        self.left.append(why)


@pytest.fixture
def master() -> Iterator[Served]:
    with served(FakeJob()) as server:
        yield server


def interrupted(
    locate: Callable[[], Awaitable[tuple[str, int]]],
    *,
    endpoint: str,
    by_journal: bool = True,
    hosts_master: bool = True,
    nodes: int = 2,
    number: signal.Signals = signal.SIGINT,
) -> list[str]:
    """Why the agent was asked to leave, if it was, after a signal and the end of what follows from it."""

    async def story() -> list[str]:
        timeouts = Timeouts.from_user_timeout(2.0)
        launch = Launch(["x"], Nodes(1, nodes), 1, Endpoint("127.0.0.1", 0), timeouts)
        process = cast(MasterProcess, object()) if hosts_master else None
        hosting = Hosting(locate, "127.0.0.1", endpoint, 1.0, process=process, may_be_left=by_journal)
        agent = SomeAgent()
        Steering(launch, cast(Agent, agent), hosting, JobToken(TOKEN)).on_signals()
        try:
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.1)
            rest = asyncio.all_tasks() - {cast(Any, asyncio.current_task())}
            await asyncio.wait_for(asyncio.gather(*rest), 30.0)
        finally:
            for known in (signal.SIGINT, signal.SIGTERM, signal.SIGTSTP):
                asyncio.get_running_loop().remove_signal_handler(known)
        return agent.left

    return asyncio.run(story())


def at(server: Served) -> Callable[[], Awaitable[tuple[str, int]]]:
    async def locate() -> tuple[str, int]:
        return "127.0.0.1", server.port

    return locate


def asked(server: Served) -> list[tuple[object, ...]]:
    assert server.job is not None
    return server.job.asked


def test_ctrl_c_ends_the_job_where_its_master_is(master: Served) -> None:
    assert interrupted(at(master), endpoint=master.endpoint) == []
    assert asked(master) == [("stop", WHY, 130)]


def test_a_candidate_leaves_where_the_master_is_elsewhere(master: Served) -> None:
    assert interrupted(at(master), endpoint="127.0.0.1:1") == [WHY]
    assert asked(master) == []


def test_the_only_node_ends_its_job_wherever_the_master_is(master: Served) -> None:
    assert interrupted(at(master), endpoint="127.0.0.1:1", nodes=1) == []
    assert asked(master) == [("stop", WHY, 130)]


def test_sigterm_and_a_node_without_a_master_leave(master: Served) -> None:
    here = master.endpoint
    assert interrupted(at(master), endpoint=here, number=signal.SIGTERM) == ["interrupted by SIGTERM"]
    assert interrupted(at(master), endpoint=here, hosts_master=False, by_journal=False) == [WHY]
    assert asked(master) == []


def test_a_master_that_is_being_started_again_is_told_then(master: Served) -> None:
    tries = []

    async def locate() -> tuple[str, int]:
        tries.append(1)
        if len(tries) < 3:
            raise MasterUnreachable("the journal names no master")
        return "127.0.0.1", master.port

    assert interrupted(locate, endpoint=master.endpoint) == []
    assert asked(master) == [("stop", WHY, 130)]


@pytest.mark.parametrize("by_journal", [True, False])
def test_while_no_master_can_be_told_the_node_leaves(by_journal: bool) -> None:
    async def locate() -> tuple[str, int]:
        raise MasterUnreachable("the journal names no master")

    assert interrupted(locate, endpoint="127.0.0.1:1", by_journal=by_journal) == [WHY]


def test_a_job_that_has_ended_meanwhile_needs_no_end(master: Served) -> None:
    assert master.job is not None
    master.do(master.job.end)
    assert interrupted(at(master), endpoint=master.endpoint) == []
    assert asked(master) == []
