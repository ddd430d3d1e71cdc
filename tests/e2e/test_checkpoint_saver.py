"""The saver as a process: it outlives signals to the run, and not its agent."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.train.checkpoints.image import image_of
from stoker.train.checkpoints.storage import CheckpointStorage
from stoker.wire.saving import Command, Result, decode_result, encode_line
from tests.s3_server import KEYS

pytestmark = pytest.mark.real
ROOT = Path(__file__).parents[2]


class SaverProcess:
    def __init__(
        self, folder: Path, out: str, hangs_after_s: float = 60.0, *, is_survivor: bool = False
    ) -> None:
        self.folder = folder
        self.out = out
        folder.mkdir(exist_ok=True)
        self.child = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.saver_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if is_survivor else None,
            cwd=ROOT,
            start_new_session=True,
        )
        watch = Command(
            watch=str(folder), run_id="r", url=out, hangs_after_s=hangs_after_s, beside_others=is_survivor
        )
        self.tell(watch)
        assert self.hear().ready

    def tell(self, command: Command) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(encode_line(command))
        self.child.stdin.flush()

    def hear(self) -> Result:
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        assert line, "the saver has ended"
        return decode_result(line)

    def result(self) -> Result:
        """The next one but for progress."""
        while (heard := self.hear()).done_bytes:
            pass
        return heard

    def end(self) -> None:
        self.child.kill()
        self.child.wait()
        for pipe in filter(None, (self.child.stdin, self.child.stdout, self.child.stderr)):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def snapshot(self, commits: int, megabytes: int = 1) -> None:
        tensors: dict[str, Any] = {f"w{i}": torch.full((250_000,), float(commits)) for i in range(megabytes)}
        torch.save({"modules": {"m": tensors}, "values": {}}, self.folder / "part")
        (self.folder / "part").rename(self.folder / f"snapshot-{commits}.pt")


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[SaverProcess]:
    made = SaverProcess(tmp_path / "shm", str(tmp_path / "out"))
    yield made
    made.end()


def test_snapshots_that_appear_are_written(saver: SaverProcess) -> None:
    saver.snapshot(3)
    assert saver.result().saved == 3
    saver.snapshot(7)
    saver.tell(Command(save={}))
    assert saver.result().saved == 7
    image = CheckpointStorage(saver.out).read_newest()
    assert image is not None
    assert image.commits == 7
    assert os.getpriority(os.PRIO_PROCESS, saver.child.pid) >= 10


def test_at_the_end_the_newest_is_written(saver: SaverProcess) -> None:
    saver.snapshot(3)
    saver.tell(Command(finish=True))
    assert saver.result().saved == 3
    assert saver.child.wait(30) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_to_the_run_do_not_end_it(saver: SaverProcess, number: int) -> None:
    saver.child.send_signal(number)
    saver.snapshot(3)
    saver.tell(Command(finish=True))
    assert saver.result().saved == 3
    assert saver.child.wait(30) == 0


def test_it_ends_when_its_agent_hangs_up(saver: SaverProcess) -> None:
    assert saver.child.stdin is not None
    saver.snapshot(3, megabytes=200)
    saver.child.stdin.close()
    assert saver.child.wait(60) == 0


def test_a_saver_that_is_killed_leaves_the_checkpoint_before(saver: SaverProcess, tmp_path: Path) -> None:
    saver.snapshot(3)
    assert saver.result().saved == 3
    saver.snapshot(5, megabytes=100)
    out = Path(saver.out)
    deadline = time.monotonic() + 60
    while not list(out.glob(".step-*5.*")) and time.monotonic() < deadline:
        time.sleep(0.001)
    saver.child.kill()
    saver.child.wait()
    found = CheckpointStorage(saver.out).read_newest()
    assert found is not None
    assert found.commits in (3, 5)  # 5 where the kill came after the last byte
    again = SaverProcess(saver.folder, saver.out)
    try:
        again.tell(Command(finish=True))
        assert again.child.wait(60) == 0
    finally:
        again.end()
    assert sorted(entry.name for entry in out.iterdir()) == ["step-000000000003", "step-000000000005"]


def test_a_storage_that_does_not_answer_is_told_and_ends_with_its_saver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"s3://bucket/run?endpoint=http://127.0.0.1:{silent.getsockname()[1]}"
        saver = SaverProcess(tmp_path / "shm", url, hangs_after_s=0.5)
        try:
            saver.snapshot(3)
            heard = saver.result()
            assert "the storage hangs: looking for checkpoints in s3://bucket/run: nothing" in heard.failed
            assert heard.commits == 3
            again = saver.result()
            assert "the storage hangs" in again.failed
            assert again.failed != heard.failed
            assert saver.child.stdin is not None
            saver.child.stdin.close()
            assert saver.child.wait(30) == 0, "its agent hangs up"
        finally:
            saver.end()


def test_a_survivor_gives_way_to_another_that_writes(tmp_path: Path) -> None:
    """Two nodes have lost their master, and hold the same state; the first is in the middle of it."""
    other = CheckpointStorage(str(tmp_path / "out"))
    saver = SaverProcess(tmp_path / "shm", str(tmp_path / "out"), is_survivor=True)
    saver.snapshot(7)
    tensors = {f"w{i}": torch.full((250_000,), 7.0) for i in range(4)}
    words = 0

    def wrote(size_bytes: int) -> None:
        nonlocal words
        words += 1
        if words == 2:
            saver.tell(Command(finish=True, beside_others=True))
            assert saver.child.stderr is not None
            for line in saver.child.stderr:
                if b"waiting for another node, which writes .step-000000000007." in line:
                    break

    try:
        other.write(image_of(7, {"modules": {"m": tensors}, "values": {}}), wrote, beside_others=True)
        assert saver.child.wait(60) == 0
        assert saver.child.stdout is not None
        assert saver.child.stdout.read() == b""
    finally:
        saver.end()
    assert [(held.commits, held.problem) for held in other.held()] == [(7, "")]
