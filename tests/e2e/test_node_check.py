"""The node check with real processes and real faults: missing, stopped, dead, slowed and unreachable peers."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from stoker.agent.agent import Agent
from stoker.agent.checks import NodeChecker, Place
from stoker.agent.duties import Duties
from stoker.agent.link import AgentConfig
from stoker.agent.resources import process_state
from stoker.base.clock import SystemClock
from stoker.job.health_check import CheckEffect, NodeCheck, Verdict
from stoker.job.journal.memory import MemoryJournal
from stoker.job.machine import JobConfig
from stoker.job.master import Master, MasterConfig, listen
from stoker.job.overview import Overview
from stoker.platform.local import LocalPlatform
from stoker.settings import Timeouts
from stoker.wire.health import CheckGroup, CheckReply, CheckResult, CheckTask
from tests.e2e.run_helpers import free_port

pytestmark = pytest.mark.real

PROGRAM = (sys.executable, "-m", "stoker.train.node_check")
SMALL = ("--device", "cpu", "--size", "128", "--payload", "1MiB")
Command = tuple[str, ...]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=ENVIRONMENT,
        start_new_session=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def checks(port: int, rank: int, size: int, timeout_s: float, *more: str) -> tuple[str, ...]:
    where = ("--rank", str(rank), "--world-size", str(size), "--store", f"127.0.0.1:{port}")
    return (*PROGRAM, *where, "--timeout", str(timeout_s), *SMALL, *more)


def result_of(child: subprocess.Popen[str]) -> CheckResult:
    output, _ = child.communicate(timeout=150)
    (line,) = output.splitlines()
    result = msgspec.json.decode(line, type=CheckResult)
    assert child.returncode == (0 if result.ok else 1)
    return result


def wait_for_store(port: int) -> None:
    """Rank 0 has done its product and waits for the others."""
    for _ in range(6000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.01)
    raise AssertionError("no store")


def test_three_healthy_processes_pass() -> None:
    port = free_port()
    with ExitStack() as ended:
        children = [ended.enter_context(started(*checks(port, rank, 3, 120))) for rank in range(3)]
        for child in children:
            result = result_of(child)
            assert (result.ok, result.stage, result.why) == (True, "done", "")
            assert 0 < result.matmul_s < result.elapsed_s
            assert 0 < result.allreduce_s < result.elapsed_s


def test_one_alone_needs_no_store_and_a_device_that_is_not_there_is_its_own_fault() -> None:
    with (
        started(*PROGRAM, "--rank", "0", "--world-size", "1", *SMALL) as alone,
        started(*PROGRAM, "--rank", "0", "--world-size", "1", "--device", "cuda:77") as no_device,
    ):
        result = result_of(alone)
        assert (result.ok, result.allreduce_s) == (True, 0.0)
        assert result.matmul_s > 0
        failed = result_of(no_device)
        assert (failed.ok, failed.stage) == (False, "start")
        assert failed.why.startswith("the device cannot be used: ")


def test_a_device_that_another_local_rank_tries_is_tried_once() -> None:
    with started(*PROGRAM, "--rank", "0", "--world-size", "1", "--local-rank", "2", *SMALL) as child:
        result = result_of(child)
        assert (result.ok, result.matmul_s, result.stage) == (True, 0.0, "done")


def test_a_peer_that_never_comes_is_not_waited_for_beyond_the_timeout() -> None:
    with ExitStack() as ended:
        for child in [ended.enter_context(started(*checks(free_port(), rank, 2, 30))) for rank in range(2)]:
            result = result_of(child)
            assert (result.ok, result.stage) == (False, "meet")
            assert result.matmul_s > 0, "its own device works"
            assert "did not meet at 127.0.0.1" in result.why or "at stage meet" in result.why


IN_THE_MIDST = """
import os, sys, torch.distributed
from stoker.train import node_check
torch.distributed.all_reduce = lambda *_: os.kill(os.getpid(), int(sys.argv[1]))
node_check.main(sys.argv[2:])
"""


def test_a_peer_that_is_stopped_or_dies_in_the_midst() -> None:
    with ExitStack() as ended:
        waiting = []
        for end in (signal.SIGSTOP, signal.SIGKILL):
            port = free_port()
            zero = ended.enter_context(started(*checks(port, 0, 2, 30)))
            options = checks(port, 1, 2, 30)[len(PROGRAM) :]
            one = ended.enter_context(started(sys.executable, "-c", IN_THE_MIDST, str(int(end)), *options))
            waiting.append((zero, one, "T" if end == signal.SIGSTOP else "Z"))
        for zero, one, state in waiting:
            result = result_of(zero)
            assert not result.ok
            assert result.stage == "allreduce"
            assert result.matmul_s > 0
            assert result.why
            assert process_state(one.pid) == state


def test_a_process_that_cannot_run_python_any_more_ends_all_the_same() -> None:
    """It takes the GIL once its clock runs, and keeps it; what ends it is a thread of faulthandler's own, in C."""
    code = (
        "from stoker.train import node_check\n"
        "node_check.NodeCheckProgram._open_device = lambda self: sum(iter(int, 1))\n"
        "node_check.main(['--rank', '0', '--world-size', '1', '--device', 'cpu', '--timeout', '3'])\n"
    )
    with started(sys.executable, "-c", code) as child:
        output, _ = child.communicate(timeout=100)
        assert output == ""
        assert child.returncode == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--rank", "2", "--world-size", "2"), "--rank 2 is not below --world-size 2"),
        (("--rank", "0", "--world-size", "2", "--store", "nowhere"), "--store nowhere is no HOST:PORT"),
        (("--rank", "0", "--world-size", "2"), "is no HOST:PORT"),
        (("--rank", "0", "--world-size", "1", "--timeout", "0"), "--timeout 0 is not"),
        (("--rank", "0", "--world-size", "1", "--payload", "much"), "'much' is not a size"),
    ],
)
def test_nonsense_is_refused(arguments: tuple[str, ...], words: str) -> None:
    said = subprocess.run([*PROGRAM, *arguments], check=False, capture_output=True, text=True, timeout=100)
    assert said.returncode == 2
    assert words in said.stderr
    assert said.stdout == ""


# -- the plan and the program together ---------------------------------------------------------------------


def carry_out(
    check: NodeCheck, nodes: Sequence[str], launch: Mapping[str, Command], *more: str
) -> dict[str, Verdict]:
    """The plan with real processes; `launch`: how a node starts the program, where it is not as all others do."""
    verdicts: dict[str, Verdict] = {}
    effects = check.begin(nodes, 0.0)
    while effects:
        groups = [effect for effect in effects if isinstance(effect, CheckGroup)]
        verdicts.update({effect.node: effect for effect in effects if isinstance(effect, Verdict)})
        effects = run_groups(check, groups, launch, *more)
    return verdicts


def run_groups(
    check: NodeCheck, groups: Sequence[CheckGroup], launch: Mapping[str, Command], *more: str
) -> list[CheckEffect]:
    effects: list[CheckEffect] = []
    with ExitStack() as ended:
        running = []
        for group in groups:
            port = free_port()
            for rank, node in enumerate(group.nodes):
                options = checks(port, rank, len(group.nodes), check.timeout_s, *more)[len(PROGRAM) :]
                child = ended.enter_context(started(*launch.get(node, PROGRAM), *options))
                running.append((group, node, child))
        for group, node, child in running:
            effects += check.result(node, group.group, result_of(child), 0.0)
    return effects


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to cut a process off the network")
def test_a_node_that_is_cut_off_is_found_among_four() -> None:
    cut_off = ("unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "sh", *PROGRAM)
    check = NodeCheck(timeout_s=45, straggler_ratio=1000)
    verdicts = carry_out(check, ["a", "b", "c", "d"], {"c": cut_off})
    assert {node: verdict.kind for node, verdict in verdicts.items()} == {
        "a": "good",
        "b": "good",
        "c": "faulty",
        "d": "good",
    }
    assert "did not meet" in verdicts["c"].why or "at stage meet" in verdicts["c"].why
    assert "which is known good" in verdicts["c"].why


@pytest.fixture
def sliver_of_a_core() -> Iterator[Path]:
    """A control group whose processes get 3 ms of processor time in each 100 ms."""
    one, two = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    folder = (one if one.is_dir() else two) / f"stoker-test-{os.getpid()}"
    try:
        folder.mkdir()
        if one.is_dir():
            (folder / "cpu.cfs_quota_us").write_text("3000")
        else:
            (folder / "cpu.max").write_text("3000 100000")
    except OSError as error:
        if folder.is_dir():
            folder.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    yield folder
    for _ in range(500):
        if not (folder / "cgroup.procs").read_text():
            break
        time.sleep(0.01)
    folder.rmdir()


def test_a_node_whose_processor_is_taken_away_is_a_straggler(sliver_of_a_core: Path) -> None:
    throttled = (
        "import os, sys, torch\n"
        f"open({str(sliver_of_a_core / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
        "from stoker.train.node_check import main\n"
        "main(sys.argv[1:])\n"
    )
    check = NodeCheck(timeout_s=100, straggler_ratio=2.5)
    verdicts = carry_out(
        check,
        ["a", "b", "c"],
        {"c": (sys.executable, "-c", throttled)},
        "--size",
        "1024",
        "--payload",
        "4KiB",
    )
    assert verdicts["c"].kind == "straggler"
    assert "a matrix product takes it" in verdicts["c"].why
    assert "in the best of 2 checks" in verdicts["c"].why
    assert "faulty" not in {verdict.kind for verdict in verdicts.values()}


# -- the agent's part --------------------------------------------------------------------------------------


@asynccontextmanager
async def duties(folder: Path) -> AsyncIterator[tuple[Duties, asyncio.Queue[msgspec.Struct]]]:
    said: asyncio.Queue[msgspec.Struct] = asyncio.Queue()
    checker = NodeChecker([Place(0, 0, ENVIRONMENT)], device="cpu")
    agents = Duties(folder, SystemClock(), workers=dict, send=said.put_nowait, checker=checker)
    try:
        yield agents, said
    finally:
        agents.close()


def test_a_check_that_is_asked_for_again_is_done_once_and_its_result_said_again(tmp_path: Path) -> None:
    async def story() -> None:
        async with duties(tmp_path) as (agents, said):
            task = CheckTask(group=7, rank=0, world_size=1, store="127.0.0.1:0", timeout_s=100.0)
            agents.take(task)
            agents.take(task)
            first = await said.get()
            assert isinstance(first, CheckReply)
            assert (first.group, first.result.ok) == (7, True)
            agents.take(task)
            assert said.get_nowait() == first, "its times tell one run from another"
            agents.take(msgspec.structs.replace(task, group=8))
            second = await said.get()
            assert isinstance(second, CheckReply)
            assert second.group == 8
            assert second.result.elapsed_s != first.result.elapsed_s
            assert said.empty()

    asyncio.run(story())


def test_a_new_check_ends_the_one_before(tmp_path: Path) -> None:
    async def story() -> None:
        async with duties(tmp_path) as (agents, said):
            port = free_port()
            agents.take(CheckTask(1, rank=0, world_size=2, store=f"127.0.0.1:{port}", timeout_s=100.0))
            await asyncio.to_thread(wait_for_store, port)
            agents.take(CheckTask(2, rank=0, world_size=1, store="127.0.0.1:0", timeout_s=100.0))
            reply = await said.get()
            assert isinstance(reply, CheckReply)
            assert (reply.group, reply.result.ok) == (2, True)
            with socket.socket() as probe:
                assert probe.connect_ex(("127.0.0.1", port)) != 0
            assert said.empty()

    asyncio.run(story())


class Relay:
    """Passes bytes on between agents and their master; the connection is reset, once, in place of certain ones."""

    def __init__(self, master_port: int, fatal: bytes) -> None:
        self.fatal = fatal
        self.resets = 0
        self._master_port = master_port
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._master_port)
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._pass_on(source, sink, writer, far_writer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *ends: asyncio.StreamWriter
    ) -> None:
        with suppress(OSError):
            while data := await source.read(65536):
                if self.fatal in data and not self.resets:
                    self.resets += 1
                    for end in ends:
                        linger = (1).to_bytes(4, sys.byteorder) + (0).to_bytes(4, sys.byteorder)
                        end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                        end.transport.abort()
                    return
                sink.write(data)
                await sink.drain()
            sink.close()


@pytest.mark.parametrize("lost", ["check_task", "check_reply"])
def test_a_stream_that_is_reset_under_a_check_makes_no_node_faulty(tmp_path: Path, lost: str) -> None:
    """Whether the task or the reply is lost with it."""

    async def story() -> None:
        listener = listen("127.0.0.1", 0)
        port = listener.getsockname()[1]
        journal = MemoryJournal()
        job = JobConfig(check_nodes=True, timeout_s=600.0, beat_timeout_s=60.0)
        master = Master(
            MasterConfig(job, "secret", f"127.0.0.1:{port}"),
            clock=SystemClock(),
            journal=journal,
            services=lambda _: {},
            control=Overview,
        )
        await master.start(listener)
        relay = Relay(port, lost.encode())
        server = await asyncio.start_server(relay.serve, "127.0.0.1", 0)

        async def locate() -> tuple[str, int]:
            return "127.0.0.1", server.sockets[0].getsockname()[1]

        config = AgentConfig(
            locate=locate,
            token="secret",
            command=(sys.executable, "-c", "pass"),
            slots=1,
            host="h",
            address="127.0.0.1",
            run_id="none",
            log_dir=tmp_path,
            runtime_dir=tmp_path,
            environment=ENVIRONMENT,
            device="cpu",
            timeouts=Timeouts(user_s=600.0, park_s=300.0, beat_timeout_s=60.0),
        )
        agent = Agent(config, LocalPlatform(), SystemClock())
        outcome = await agent.run()
        assert outcome is not None
        assert outcome.success
        assert await master.wait() == outcome
        assert relay.resets == 1
        await master.close()
        server.close()
        entries = await journal.read_entries()
        assert [entry["verdict"] for entry in entries if entry["kind"] == "node-checked"] == ["good"]

    asyncio.run(story())
