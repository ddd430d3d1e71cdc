"""How an agent keeps its node's saver: a process of a few lines stands for it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import msgspec
import pytest

from stoker.agent import saving
from stoker.agent.saving import NodeSaver
from stoker.wire.remarks import Remark
from stoker.wire.saving import STORAGE_FILE, StorageWanted

WELL = """
import json, sys
for line in sys.stdin:
    print(line, end="", file=open("told", "a"), flush=True)
    command = json.loads(line)
    if "save" in command or command.get("finish"):
        print(json.dumps({"saved": 7, "took_s": 0.1, "size_bytes": 10}), flush=True)
    if command.get("finish"):
        break
"""
FAILS_TWICE = """
import json
input()
for word in ({"failed": "no room"}, {"failed": "no room"}, {"saved": 7}):
    print(json.dumps(word), flush=True)
input()
"""
HANGS_A_WHILE = """
import json
input()
for word in ({"failed": "hangs for 60 s"}, {"failed": "hangs for 120 s"}, {"saved": 7}):
    print(json.dumps(word), flush=True)
input()
"""
HANGS = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('{"commits": 7, "done_bytes": 5, "size_bytes": 10}', flush=True)
time.sleep(600)
"""
DIES_AT_THE_END = "input(); input(); import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
LEAVES_A_CHILD = """
import json, os, time
if child := os.fork():
    print(json.dumps({"failed": str(child)}), flush=True)
time.sleep(600)
"""
ENDS = "input(); import sys; sys.exit(3)"


class Node:
    def __init__(self, folder: Path, script: str) -> None:
        self.folder = folder
        self.remarks: list[Remark] = []
        self._remarked = asyncio.Event()
        self.saver = NodeSaver(
            folder, "run-1", os.environ, remark=self._take, command=(sys.executable, "-c", script)
        )

    def wants_storage(self) -> None:
        wanted = StorageWanted("s3://bucket/run", keep=3)
        (self.folder / STORAGE_FILE).write_bytes(msgspec.json.encode(wanted))
        (self.folder / "0-0.snapshot").write_bytes(b"")

    async def finish(self, limit_s: float = 60.0, *, killed: bool = False) -> None:
        event = asyncio.Event()
        if killed:
            event.set()
        await self.saver.finish(limit_s, event)

    def told(self) -> list[dict[str, object]]:
        path = self.folder / "told"
        return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()] if path.exists() else []

    async def until(self, words: int) -> None:
        while len(self.remarks) < words:
            self._remarked.clear()
            await self._remarked.wait()

    def _take(self, remark: Remark) -> None:
        self.remarks.append(remark)
        self._remarked.set()


@pytest.fixture(autouse=True)
def _there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_it_begins_when_there_is_something_to_write(tmp_path: Path) -> None:
    async def story() -> None:
        node = Node(tmp_path, WELL)
        node.saver.look(writes=True)
        await asyncio.sleep(0)
        assert node.saver._starting is None
        node.wants_storage()
        node.saver.look(writes=False)  # another node has rank 0
        assert node.saver._starting is None
        node.saver.look(writes=True)
        assert node.saver._starting is not None
        await node.saver._starting
        node.saver.save_soon()
        await node.finish()
        watch, save, finish = node.told()
        assert (watch["watch"], watch["run_id"], watch["url"]) == (str(tmp_path), "run-1", "s3://bucket/run")
        assert watch["keep"] == 3
        assert ("save" in save, finish) == (True, {"finish": True})

    asyncio.run(story())
    assert Path("told").exists()


def test_at_the_end_it_is_started_where_it_had_not_begun(tmp_path: Path) -> None:
    async def story() -> None:
        node = Node(tmp_path, WELL)
        node.saver.look(writes=True)
        node.wants_storage()
        await node.finish()
        assert [next(iter(command)) for command in node.told()] == ["watch", "finish"]

    asyncio.run(story())


@pytest.mark.parametrize("turn", [0, 2])
def test_without_a_master_it_writes_beside_others_in_its_turn(
    tmp_path: Path, turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    sleep = asyncio.sleep

    async def at_once(delay_s: float) -> None:
        waited.append(delay_s)
        await sleep(0)

    async def story() -> None:
        node = Node(tmp_path, WELL)
        node.saver.look(writes=False)
        node.wants_storage()
        monkeypatch.setattr(asyncio, "sleep", at_once)
        await node.saver.finish(60.0, asyncio.Event(), turn=turn)
        watch, finish = node.told()
        assert watch["beside_others"] is True
        assert finish == {"finish": True, "beside_others": True}

    asyncio.run(story())
    assert waited == ([turn * saving.TURN_S] if turn else [])


def test_a_saver_that_dies_before_the_end_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        node = Node(tmp_path, DIES_AT_THE_END)
        node.wants_storage()
        node.saver.look(writes=True)
        await node.finish()
        assert [(r.kind, "has ended with -9" in r.text) for r in node.remarks] == [
            ("checkpoint-failed", True)
        ]

    asyncio.run(story())


def test_a_node_without_snapshots_ends_at_once(tmp_path: Path) -> None:
    async def story() -> None:
        node = Node(tmp_path, WELL)
        node.saver.look(writes=True)
        await node.finish()
        none = NodeSaver(None, "r", {}, remark=node.remarks.append)
        none.look(writes=True)
        await none.finish(1.0, asyncio.Event())
        assert node.told() == []

    asyncio.run(story())


def test_a_failure_is_remarked_once_and_its_end_too(tmp_path: Path) -> None:
    async def story() -> None:
        node = Node(tmp_path, FAILS_TWICE)
        node.wants_storage()
        node.saver.look(writes=True)
        await node.until(2)
        await node.finish()
        assert [(r.kind, r.text) for r in node.remarks] == [
            ("checkpoint-failed", "no room"),
            ("checkpoint-written-again", "at commit 7"),
        ]

    asyncio.run(story())


def test_a_storage_that_hangs_holds_nobody_longer_than_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(saving, "SAY_EVERY_S", 0.1)
    caplog.set_level("INFO")

    async def story() -> None:
        node = Node(tmp_path, HANGS)
        node.wants_storage()
        node.saver.look(writes=True)
        assert node.saver._starting is not None
        await node.saver._starting
        child = node.saver._child
        assert child is not None
        await node.finish(1.0)
        assert child.returncode == -9

    asyncio.run(story())
    assert "1 s did not suffice" in caplog.text.replace("1.0 s", "1 s")
    assert "writing the newest snapshot to the storage" in caplog.text


def test_a_saver_that_is_not_seen_to_end_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one is that a file system holds in the kernel; here a child of it holds its pipe."""
    monkeypatch.setattr(saving, "KILLED_S", 0.1)

    async def story() -> None:
        node = Node(tmp_path, LEAVES_A_CHILD)
        node.wants_storage()
        node.saver.look(writes=True)
        assert node.saver._starting is not None
        await node.saver._starting
        await node.until(1)
        try:
            await node.finish(0.1)
        finally:
            os.kill(int(node.remarks[0].text), signal.SIGKILL)

    asyncio.run(story())
    assert "was killed and does not end" in caplog.text


def test_a_storage_that_hangs_is_told_and_so_is_its_end(tmp_path: Path) -> None:
    async def story() -> None:
        node = Node(tmp_path, HANGS_A_WHILE)
        node.wants_storage()
        node.saver.look(writes=True)
        await node.until(3)
        await node.finish()
        assert [(r.kind, r.text) for r in node.remarks] == [
            ("checkpoint-failed", "hangs for 60 s"),
            ("checkpoint-failed", "hangs for 120 s"),
            ("checkpoint-written-again", "at commit 7"),
        ]

    asyncio.run(story())


def test_who_is_in_a_hurry_does_not_wait(tmp_path: Path) -> None:
    async def story() -> None:
        node = Node(tmp_path, HANGS)
        node.wants_storage()
        node.saver.look(writes=True)
        assert node.saver._starting is not None
        await node.saver._starting
        await node.finish(600.0, killed=True)

    asyncio.run(story())


def test_one_that_ends_on_its_own_is_remarked_and_another_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "START_AGAIN_S", 0.0)

    async def story() -> None:
        node = Node(tmp_path, ENDS)
        node.wants_storage()
        node.saver.look(writes=True)
        await node.until(1)
        assert "has ended with 3" in node.remarks[0].text
        node.saver.look(writes=True)
        assert node.saver._starting is not None
        await node.finish(killed=True)

    asyncio.run(story())


def test_it_ends_when_rank_0_is_elsewhere(tmp_path: Path) -> None:
    async def story() -> None:
        node = Node(tmp_path, HANGS)
        node.wants_storage()
        node.saver.look(writes=True)
        assert node.saver._starting is not None
        await node.saver._starting
        child = node.saver._child
        assert child is not None
        node.saver.look(writes=False)
        assert await child.wait() == -9
        await node.finish()
        assert node.remarks == []

    asyncio.run(story())
