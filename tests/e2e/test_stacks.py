"""Stacks of real processes that hang, spin, are stopped, or may not be looked at."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from stoker.agent.resources import process_state
from stoker.agent.stacks import StackDumper, Target, find_py_spy, parse_faulthandler
from stoker.job.health_hangs import HangEffect, HangWatch, Hung, Slow, TakeStacks
from stoker.job.health_stacks import Standing, describe, format_stacks, is_awake, moved, standing
from stoker.wire.health import MAX_FRAMES, StackRequest, Stacks
from tests.e2e.run_helpers import free_port, wait_for

pytestmark = pytest.mark.real

PREPARE = """
import sys, threading, time
from pathlib import Path
from stoker.train.stack_signal import prepare_to_be_looked_at
prepare_to_be_looked_at(Path(sys.argv[1]))
"""
DEADLOCK = """
import threading, time
def loader():
    time.sleep(1000)
def take_again(lock):
    lock.acquire()
threading.Thread(target=loader, name="data-loader", daemon=True).start()
lock = threading.Lock()
lock.acquire()
print("ready", flush=True)
take_again(lock)
"""
HOLDS_GIL = """
def count_for_ever():
    sum(iter(int, 1))  # in C, without ever giving up the GIL
print("ready", flush=True)
count_for_ever()
"""
MOVES = """
import time
def look_at_batch(left):
    time.sleep(0.02)
    if left: look_at_batch(left - 1)
def evaluate():
    while True: look_at_batch(40)
print("ready", flush=True)
evaluate()
"""
DEEP = """
import time
def dive(depth):
    dive(depth - 1) if depth else time.sleep(1000)
print("ready", flush=True)
dive(300)
"""
LOOPS = """
import time
def wait_in_vain():
    while True:
        time.sleep(0.02)
print("ready", flush=True)
wait_in_vain()
"""


@contextmanager
def process(script: str, *arguments: str, wait: bool = True) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert child.stdout is not None
    try:
        if wait:
            wait_until_ready(child)
        yield child
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()


def wait_until_ready(child: subprocess.Popen[str]) -> None:
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    process = psutil.Process(child.pid)
    used_s = process.cpu_times().user

    def stays() -> bool:
        """Whether it has come from the print to where it stays: nothing in it runs, or one thing does all the time."""
        states = [process_state(thread.id) for thread in process.threads()]
        return set(states) == {"S"} or process.cpu_times().user > used_s + 0.3

    wait_for(stays, why="place where it stays")
    time.sleep(0.3)


def dump(child: subprocess.Popen[str], py_spy: str | None, file: Path | None = None) -> Stacks:
    async def take() -> Stacks:
        return await StackDumper(py_spy).dump(Target(child.pid, file), timeout_s=10)

    return asyncio.run(take())


def sample(child: subprocess.Popen[str], py_spy: str | None, file: Path | None = None) -> tuple[Stacks, ...]:
    async def take() -> tuple[Stacks, ...]:
        return await StackDumper(py_spy).sample(Target(child.pid, file), samples=3, interval_s=0.1)

    return asyncio.run(take())


def main_functions(stacks: Stacks) -> list[str]:
    assert stacks.unavailable == ""
    assert stacks.main is not None
    return [frame.function for frame in stacks.main.frames]


@pytest.mark.parametrize("way", ["py-spy", "faulthandler"])
def test_a_deadlock_is_shown_with_all_threads(way: str, tmp_path: Path) -> None:
    file = tmp_path / "stacks"
    with process(PREPARE + DEADLOCK, str(file)) as child:
        py_spy = find_py_spy() if way == "py-spy" else None
        stacks = dump(child, py_spy, file)
        assert stacks.source == way
        assert stacks.state == "S"
        assert main_functions(stacks) == ["take_again", "<module>"]
        assert stacks.main is not None
        assert (stacks.main.frames[0].file, stacks.main.frames[0].line) == ("<string>", 11)
        (other,) = [thread for thread in stacks.threads if not thread.is_main]
        assert [frame.function.rpartition(".")[2] for frame in other.frames][:2] == ["loader", "run"]
        if way == "py-spy":
            assert other.name == "data-loader"
            assert stacks.main.active is False
        samples = sample(child, py_spy, file)
        assert not moved(samples)
        assert not is_awake(samples)
        assert [len(s.threads) for s in samples] == [1, 1, 2], "only the last one shows all threads"
        assert "in take_again" in format_stacks(samples[-1])


@pytest.mark.parametrize("way", ["py-spy", "faulthandler"])
def test_a_process_that_never_gives_up_the_gil_is_shown(way: str, tmp_path: Path) -> None:
    file = tmp_path / "stacks"
    with process(PREPARE + HOLDS_GIL, str(file)) as child:
        samples = sample(child, find_py_spy() if way == "py-spy" else None, file)
        assert main_functions(samples[0])[0] == "count_for_ever"
        assert not moved(samples)
        if way == "py-spy":
            assert is_awake(samples)


def test_a_stopped_process_is_shown_and_stays_as_it_was() -> None:
    with process(DEADLOCK) as child:
        os.kill(child.pid, signal.SIGSTOP)
        while process_state(child.pid) != "T":
            time.sleep(0.01)
        stacks = dump(child, find_py_spy())
        assert main_functions(stacks)[0] == "take_again"
        assert stacks.state == "T"
        assert process_state(child.pid) == "T"
        os.kill(child.pid, signal.SIGCONT)
        while process_state(child.pid) == "T":
            time.sleep(0.01)
        dump(child, find_py_spy())
        wait_for(lambda: process_state(child.pid) == "S", why="sleep: looking at it has not stopped it")


def test_a_process_that_moves_is_told_from_one_that_loops() -> None:
    with process(MOVES) as child:
        samples = sample(child, find_py_spy())
        assert moved(samples)
    with process(LOOPS) as child:
        samples = sample(child, find_py_spy())
        assert not moved(samples)
        assert is_awake(samples), "its main thread is put on a processor now and then"
        assert standing(samples) is Standing.WORKS
        assert describe(samples).startswith("wait_in_vain (")


def test_deep_stacks_are_cut_in_the_middle() -> None:
    with process(DEEP) as child:
        functions = main_functions(dump(child, find_py_spy()))
        assert len(functions) == MAX_FRAMES
        assert (functions[0], functions[-1]) == ("dive", "<module>")
        assert "calls left out" in "".join(functions)


def test_one_that_has_not_prepared_is_not_killed_by_the_signal(tmp_path: Path) -> None:
    with process(DEADLOCK) as child:
        stacks = dump(child, None, tmp_path / "none")
        assert stacks.unavailable == (
            "py-spy is not installed (pip install py-spy); the worker has not prepared for showing its stacks by signal"
        )
        assert child.poll() is None


def test_a_stopped_one_cannot_answer_a_signal(tmp_path: Path) -> None:
    file = tmp_path / "stacks"
    with process(PREPARE + DEADLOCK, str(file)) as child:
        os.kill(child.pid, signal.SIGSTOP)
        while process_state(child.pid) != "T":
            time.sleep(0.01)
        assert "a stopped process does not show" in dump(child, None, file).unavailable
        os.kill(child.pid, signal.SIGCONT)
        assert main_functions(dump(child, None, file))[0] == "take_again"


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("setpriv"), reason="needs root, to be somebody else")
def test_where_py_spy_may_not_look_the_signal_is_used(tmp_path: Path) -> None:
    py_spy, file = tmp_path / "py-spy", tmp_path / "stacks"
    py_spy.write_text(
        f'#!/bin/sh\nexec setpriv --reuid 65534 --regid 65534 --clear-groups {find_py_spy()} "$@"\n'
    )
    py_spy.chmod(0o755)
    with process(PREPARE + DEADLOCK, str(file)) as child:
        assert dump(child, str(py_spy), file).source == "faulthandler"
        refused = dump(child, str(py_spy)).unavailable
        assert refused.startswith("py-spy: ")
        assert "Permission Denied" in refused


def test_what_cannot_be_looked_at_is_said(tmp_path: Path) -> None:
    async def take(pid: int, py_spy: str | None, timeout_s: float = 30.0) -> str:
        return (await StackDumper(py_spy).dump(Target(pid), timeout_s=timeout_s)).unavailable

    never_ends = tmp_path / "never-ends"
    never_ends.write_text("#!/bin/sh\nexec sleep 100\n")
    never_ends.chmod(0o755)
    child = subprocess.Popen(["sleep", "100"])
    try:
        assert "python version" in asyncio.run(take(child.pid, find_py_spy()))
        assert "does not start" in asyncio.run(take(child.pid, "/nowhere/py-spy"))
        assert asyncio.run(take(child.pid, str(never_ends), 1.0)) == "py-spy took longer than 1 s"
    finally:
        child.kill()
        child.wait()
    assert asyncio.run(take(child.pid, find_py_spy())) == "the process has ended"


def test_a_request_is_answered_for_each_worker() -> None:
    async def ask(child: subprocess.Popen[str]) -> None:
        request = StackRequest(7, ("w0", "gone"), samples=2, interval_s=0.05)
        replies = await StackDumper(find_py_spy()).answer(request, {"w0": Target(child.pid)})
        assert [(reply.look, reply.worker, len(reply.samples)) for reply in replies] == [
            (7, "w0", 2),
            (7, "gone", 1),
        ]
        assert replies[1].samples[0].unavailable == "no such worker here"

    with process(DEADLOCK) as child:
        asyncio.run(ask(child))


def test_newer_interpreters_name_the_threads() -> None:
    text = (
        'Thread 0x00007f01 [data-loader] (most recent call first):\n  File "/a b.py", line 3 in load\n\n'
        'Current thread 0x00007f02 [python] (most recent call first):\n  File "/t.py", line ??? in train\n'
    )
    other, main = parse_faulthandler(text)
    assert (other.name, other.is_main, other.frames[0].file, other.frames[0].line) == (
        "data-loader",
        False,
        "/a b.py",
        3,
    )
    assert (main.name, main.is_main, main.frames[0].function, main.frames[0].line) == (
        "MainThread",
        True,
        "train",
        0,
    )
    assert parse_faulthandler("nonsense") == []


RANK = """
import sys, time
from datetime import timedelta
import torch, torch.distributed as dist
rank, size, port, how = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=100))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(10, 10))
def load_batch():
    time.sleep(1000)
def look_at_batch(left):
    time.sleep(0.02)
    if left: look_at_batch(left - 1)
def evaluate():
    while True: look_at_batch(40)
def train(step):
    if step == 2:
        print("ready", flush=True)
        if rank == 1:
            evaluate() if how == "slow" else load_batch()
    if how == "slow":
        dist.all_reduce(torch.ones(4))
    else:
        model(torch.ones(2, 10)).sum().backward()
for step in range(5):
    train(step)
"""


@pytest.mark.parametrize("how", ["hangs", "slow"])
def test_the_rank_that_keeps_the_others_waiting_is_found(how: str) -> None:
    port = str(free_port())
    with ExitStack() as ended:
        ranks = [
            ended.enter_context(process(RANK, str(rank), "3", port, how, wait=False)) for rank in range(3)
        ]
        for child in ranks:
            wait_until_ready(child)
        effects = asyncio.run(judge(ranks))
    (effect,) = effects
    assert isinstance(effect, Slow if how == "slow" else Hung), effect
    assert effect.worker == "w1"
    expected = "is busy in " if how == "slow" else "stands in load_batch (<string>:10) while ranks 0, 2 wait"
    assert expected in effect.why


async def judge(children: list[subprocess.Popen[str]]) -> list[HangEffect]:
    """Feed the stacks of real ranks to the hang watch, all with equal counters."""
    watch = HangWatch(user_timeout_s=300, interval_s=0.1)
    ranks = {f"w{rank}": rank for rank in range(len(children))}
    watch.begin_world(ranks, 0, 0.0)
    for worker in ranks:
        watch.observe(worker, 2, 1, 1.0)
    (asked,) = watch.tick(61.0, 0.1)
    assert isinstance(asked, TakeStacks)
    targets = {worker: Target(children[rank].pid) for worker, rank in ranks.items()}
    effects: list[HangEffect] = []
    for reply in await StackDumper(find_py_spy()).answer(asked.request, targets):
        effects += watch.on_stacks(reply.look, reply.worker, reply.samples, 62.0)
    return effects
