"""One check of a node: a program for each device, with the environment of the worker that will use it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from stoker.agent.accelerators import Machine
from stoker.agent.checks import NodeChecker, Place, combine, places_of
from stoker.agent.link import AgentConfig
from stoker.wire.health import CheckResult, CheckTask

TASK = CheckTask(group=1, rank=1, world_size=2, store="127.0.0.1:1", timeout_s=20)
ECHO = """
import json, os, sys
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
device = os.environ.get("CUDA_VISIBLE_DEVICES", "?")
bad = device == "MIG-b"
print("something else")
print(json.dumps({
    "type": "check_result", "ok": not bad, "matmul_s": 2.0 if arguments["--world-size"] == "1" else 1.0,
    "allreduce_s": 0.5 if arguments["--world-size"] == "2" else 0.0,
    "why": f"{device} as {arguments['--local-rank']} of rank {arguments['--rank']} is broken" if bad else "",
    "stage": "matmul" if bad else "done",
}))
"""


def config(folder: Path, **more: object) -> AgentConfig:
    async def locate() -> tuple[str, int]:
        return "127.0.0.1", 1

    fixed = {
        "locate": locate,
        "token": "t",
        "command": (),
        "host": "h",
        "address": "127.0.0.1",
        "run_id": "none",
        "log_dir": folder,
        "runtime_dir": folder,
        "environment": {"PATH": "/usr/bin"},
        "extra": {"STOKER_NODE_ADDRESS": "127.0.0.1"},
    }
    return AgentConfig(**{**fixed, **more})  # type: ignore[arg-type]


def machine(root: Path, *devices: str) -> Machine:
    (root / "dev").mkdir(exist_ok=True)
    for name in devices:
        (root / "dev" / name).touch()
    return Machine({}, root)


def test_a_check_reaches_its_peers_as_a_worker_does(tmp_path: Path) -> None:
    """Without the interface's name Gloo announces the address of the host's name, which may be a loopback one."""
    (place,) = places_of(config(tmp_path, slots=4), machine(tmp_path))
    assert (place.slot, place.local_rank) == (0, 0)
    assert place.environment["GLOO_SOCKET_IFNAME"] == "lo"
    assert place.environment["STOKER_NODE_ADDRESS"] == "127.0.0.1"
    assert place.environment["PATH"] == "/usr/bin"
    chosen = config(tmp_path, slots=1, environment={"GLOO_SOCKET_IFNAME": "ib0"})
    assert places_of(chosen, machine(tmp_path))[0].environment["GLOO_SOCKET_IFNAME"] == "ib0", (
        "the user's own"
    )


def test_every_device_is_tried_and_the_processor_once(tmp_path: Path) -> None:
    def tried(here: AgentConfig, *devices: str) -> list[tuple[int, int]]:
        return [(place.slot, place.local_rank) for place in places_of(here, machine(tmp_path, *devices))]

    assert tried(config(tmp_path, slots=3)) == [(0, 0)]
    assert tried(config(tmp_path, slots=3, device="xpu")) == [(0, 0), (1, 1), (2, 2)]
    assert tried(config(tmp_path, slots=3, device="cpu"), "nvidia0") == [(0, 0)]
    assert tried(config(tmp_path, slots=3), "nvidia0") == [(0, 0), (1, 1), (2, 2)]
    migs = tuple({"CUDA_VISIBLE_DEVICES": name} for name in ("MIG-a", "MIG-b", "MIG-a"))
    places = places_of(config(tmp_path, slots=3, slot_environments=migs), machine(tmp_path))
    assert [(p.slot, p.local_rank, p.environment["CUDA_VISIBLE_DEVICES"]) for p in places] == [
        (0, 0, "MIG-a"),
        (1, 0, "MIG-b"),
    ], "each sees one device alone; one that two share is tried once"


@pytest.mark.real
def test_one_device_that_fails_fails_its_node_and_is_named(tmp_path: Path) -> None:
    def check(*names: str) -> CheckResult:
        places = [Place(slot, 0, {"CUDA_VISIBLE_DEVICES": name}) for slot, name in enumerate(names)]
        return asyncio.run(NodeChecker(places, program=(sys.executable, "-c", ECHO)).check(TASK))

    assert check("MIG-a", "MIG-c") == CheckResult(ok=True, matmul_s=2.0, allreduce_s=0.5), "of the slowest"
    failed = check("MIG-a", "MIG-b")
    assert (failed.ok, failed.stage) == (False, "matmul")
    assert failed.why == "slot 1: MIG-b as 0 of rank 0 is broken"


@pytest.mark.real
@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise SystemExit('no PyTorch')", "gave no result (exit code 1): no PyTorch"),
        ("print('{}')", "gave no result (exit code 0)"),
    ],
)
def test_a_program_that_gives_no_result_says_why(code: str, words: str) -> None:
    checker = NodeChecker([Place(0, 0, {})], program=(sys.executable, "-c", code))
    result = asyncio.run(checker.check(TASK))
    assert (result.ok, result.stage) == (False, "start")
    assert words in result.why
    missing = asyncio.run(NodeChecker([Place(0, 0, {})], program=("/no/such",)).check(TASK))
    assert "the check program failed: " in missing.why


def test_the_earliest_failure_is_the_nodes() -> None:
    meeting = CheckResult(ok=False, matmul_s=1.0, why="nobody came", stage="meet")
    broken = CheckResult(ok=False, why="no device", stage="start")
    good = CheckResult(ok=True, matmul_s=3.0)
    assert combine([(0, meeting), (1, broken), (2, good)]).why == "slot 1: no device"
    assert combine([(0, meeting), (1, good)]).stage == "meet"
    assert combine([(0, meeting)]) == meeting
