"""Resources of this machine and of real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from stoker.agent.programs import Output, ProgramStuck, run_program
from stoker.agent.resources import (
    ASIDE_EVERY_S,
    ResourceMeter,
    available_cores,
    free_bytes,
    main_thread_wakeups,
    parent_of,
    parse_gpus,
    process_state,
    read_gpus,
    read_group_memory,
    read_process,
)
from stoker.agent.stacks import _catches
from stoker.base.clock import SystemClock
from stoker.platform.memory import _started_at
from stoker.wire.health import STACK_SIGNAL_OFFSET, GpuUse, NodeUse
from tests.clocks import HandClock
from tests.e2e.run_helpers import wait_for

pytestmark = pytest.mark.real

MIB = 1 << 20
STACK_SIGNAL = signal.SIGRTMIN + STACK_SIGNAL_OFFSET


def spawn(code: str) -> subprocess.Popen[str]:
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def end(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait()
    assert child.stdout is not None
    child.stdout.close()


def test_a_report_says_what_other_tools_say(tmp_path: Path) -> None:
    busy = spawn("print('ready', flush=True)\nwhile True: pass")
    idle = spawn("import time\nheld = b'x' * 200 * 1024**2\nprint('ready', flush=True)\ntime.sleep(100)")

    async def twice() -> NodeUse:
        meter = ResourceMeter(tmp_path, SystemClock())
        workers = {"busy": busy.pid, "idle": idle.pid, "gone": 2**22 + 1}
        first = await meter.measure(workers)
        assert [use.cpu_cores for use in first.workers] == [0.0, 0.0, 0.0]
        await asyncio.sleep(1.0)
        report = await meter.measure(workers)
        meter.close()
        return report

    try:
        wait_for(lambda: process_state(idle.pid) == "S", why="one that sleeps")
        node = asyncio.run(twice())
        uses = {use.worker: use for use in node.workers}
        assert uses["busy"].state == "R"
        assert 0.05 < uses["busy"].cpu_cores < 1.2
        assert (uses["idle"].state, uses["idle"].cpu_cores) == ("S", 0.0)
        assert uses["idle"].resident_bytes == pytest.approx(
            psutil.Process(idle.pid).memory_info().rss, rel=0.1
        )
        assert uses["idle"].resident_bytes > 200 * MIB
        assert uses["idle"].threads == psutil.Process(idle.pid).num_threads()
        assert (uses["gone"].state, uses["gone"].resident_bytes) == ("", 0)
        assert 0.0 < node.cpu_share <= 1.0
        assert node.memory_total_bytes == psutil.virtual_memory().total
        assert node.memory_available_bytes == pytest.approx(psutil.virtual_memory().available, rel=0.2)
        assert node.disk_free_bytes == pytest.approx(psutil.disk_usage(str(tmp_path)).free, rel=0.2)
        assert 0 < node.cores <= psutil.cpu_count()  # type: ignore[operator]
    finally:
        end(busy)
        end(idle)


def test_state_letters() -> None:
    child = spawn("import time\nprint('ready', flush=True)\ntime.sleep(100)")
    try:
        while process_state(child.pid) != "S":
            time.sleep(0.01)
        os.kill(child.pid, signal.SIGSTOP)
        while process_state(child.pid) != "T":
            time.sleep(0.01)
        before = main_thread_wakeups(child.pid)
        os.kill(child.pid, signal.SIGCONT)
        while main_thread_wakeups(child.pid) == before:
            time.sleep(0.01)
        os.kill(child.pid, signal.SIGKILL)
        while process_state(child.pid) != "Z":
            time.sleep(0.01)
    finally:
        end(child)
    assert process_state(child.pid) == ""
    assert main_thread_wakeups(child.pid) == -1


def test_a_name_with_brackets_and_blanks_is_no_trouble(tmp_path: Path) -> None:
    program = tmp_path / "a) R (b"
    program.symlink_to("/bin/sleep")
    child = subprocess.Popen([str(program), "100"])
    try:
        use = read_process(child.pid)
        assert use.threads == 1
        assert use.state in "RSD"
    finally:
        child.kill()
        child.wait()


def test_a_name_that_is_no_text_is_no_trouble() -> None:
    """The kernel cuts names off after 15 bytes, also in the middle of a character."""
    child = spawn(
        "import ctypes, signal, time\n"
        f"signal.signal({STACK_SIGNAL}, lambda *_: None)\n"
        "ctypes.CDLL(None).prctl(15, b'\\xd0' * 15, 0, 0, 0)\n"
        "print('ready', flush=True)\ntime.sleep(100)"
    )
    try:
        assert Path(f"/proc/{child.pid}/comm").read_bytes().strip() == b"\xd0" * 15
        assert read_process(child.pid).threads == 1
        assert process_state(child.pid) in "RS"
        assert parent_of(child.pid) == os.getpid()
        wait_for(lambda: main_thread_wakeups(child.pid) > 0, why="one that was asleep")
        assert _catches(child.pid, STACK_SIGNAL)
        assert _started_at(child.pid) > 0
    finally:
        end(child)


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory control group of our own, in either version."""
    one, two = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    folder = (one if one.is_dir() else two) / f"stoker-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if one.is_dir() else "memory.max")).write_text(str(300 * MIB))
    except OSError as error:
        if folder.is_dir():
            folder.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    yield folder
    folder.rmdir()


def test_the_limit_of_a_control_group_is_seen(group: Path) -> None:
    code = (
        "from stoker.agent.resources import read_group_memory\n"
        f"import os; open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
        "held = b'x' * 50 * 1024**2\n"
        "memory = read_group_memory()\n"
        "print(memory.limit_bytes, memory.used_bytes, memory.oom_kills)\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    limit_bytes, used_bytes, oom_kills = (int(number) for number in said.stdout.split())
    assert limit_bytes == 300 * MIB
    assert 50 * MIB < used_bytes < 300 * MIB
    assert oom_kills == 0


def test_where_there_is_no_limit() -> None:
    assert read_group_memory().limit_bytes < 1 << 60
    assert available_cores() > 0
    assert free_bytes(Path("/nowhere/at/all")) == -1


def test_accelerators_are_asked_for_and_a_program_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    text = "0, NVIDIA H100 80GB HBM3, 97, 71234, 81559\n1, NVIDIA H100 80GB HBM3, [N/A], 4, 81559\nno such line\n"
    assert parse_gpus(text) == (
        GpuUse(0, "NVIDIA H100 80GB HBM3", 0.97, 71234 * MIB, 81559 * MIB),
        GpuUse(1, "NVIDIA H100 80GB HBM3", 0.0, 4 * MIB, 81559 * MIB),
    )
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}END\n")
    program.chmod(0o755)
    assert asyncio.run(read_gpus(str(program))) == parse_gpus(text)
    program.write_text("#!/bin/sh\nexec sleep 100\n")
    assert asyncio.run(read_gpus(str(program), timeout_s=0.3)) == ()
    program.write_text("#!/bin/sh\nexit 9\n")
    assert asyncio.run(read_gpus(str(program))) == ()
    assert asyncio.run(read_gpus(str(tmp_path / "none"))) == ()


def test_a_report_does_not_wait_for_what_hangs(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec sleep 100\n")
    program.chmod(0o755)

    async def measure() -> NodeUse:
        meter = ResourceMeter(tmp_path, SystemClock(), gpu_command=str(program))
        reports = [await meter.measure({}) for _ in range(3)]
        meter.close()
        await asyncio.sleep(0.1)
        return reports[-1]

    report = asyncio.run(asyncio.wait_for(measure(), 60))
    assert report.gpus == ()
    assert report.disk_free_bytes > 0, "one question that hangs holds up no other"


def test_a_driver_that_hangs_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What it holds in the kernel cannot be killed: each question would leave one more process behind."""
    asked: list[str] = []

    async def stuck(*command: str, timeout_s: float) -> Output:
        asked.append(command[0])
        raise ProgramStuck(f"{command[0]} (process 7) cannot be killed")

    monkeypatch.setattr("stoker.agent.resources.run_program", stuck)

    async def measure() -> None:
        clock = HandClock()
        meter = ResourceMeter(tmp_path, clock, gpu_command="nvidia-smi")
        for _ in range(10):
            assert (await meter.measure({})).disk_free_bytes > 0
            clock.at += 2 * ASIDE_EVERY_S
        meter.close()

    asyncio.run(measure())
    assert asked == ["nvidia-smi"]
    assert [record.getMessage() for record in caplog.records] == [
        "nvidia-smi (process 7) cannot be killed: accelerators are not looked at any more, their driver may hang"
    ]


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_program_that_cannot_be_killed_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    """One that heeds the signal is a matter of time alone."""
    monkeypatch.setattr("stoker.agent.programs.KILLED_WITHIN_S", 0.2)

    async def ask(is_deaf: bool) -> None:
        started: list[asyncio.subprocess.Process] = []
        is_started = asyncio.Event()
        start = asyncio.create_subprocess_exec

        async def start_deaf(*command: str, **more: Any) -> asyncio.subprocess.Process:
            process = await start(*command, **more)
            started.append(process)
            is_started.set()
            if is_deaf:
                monkeypatch.setattr(process, "kill", lambda: None)
            return process

        monkeypatch.setattr(asyncio, "create_subprocess_exec", start_deaf)
        try:
            running = asyncio.ensure_future(
                run_program("sleep", "100", timeout_s=100 if is_cancelled else 0.2)
            )
            if is_cancelled:
                await is_started.wait()
                running.cancel()
            await running
        finally:
            monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
            if is_deaf:
                started[0].send_signal(signal.SIGKILL)
            await started[0].wait()

    for is_deaf, error in ((False, TimeoutError), (True, ProgramStuck)):
        with pytest.raises(asyncio.CancelledError if is_cancelled else error) as raised:
            asyncio.run(ask(is_deaf))
        assert is_cancelled or type(raised.value) is error
