"""What workers print: kept and shown in order, and nobody but the worker waits for a slow or dead file or console."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.agent.console import Console
from stoker.agent.output import WorkerOutput
from stoker.agent.writers import QUEUE_BYTES, WriterThread
from stoker.platform.local import LocalPlatform, LocalProcess

pytestmark = pytest.mark.real

T = TypeVar("T")
LONG_S = 60.0
PRINTER = """
import sys
for number in range(int(sys.argv[1])):
    sys.stdout.write(f"line {number} " + "x" * 90 + "\\n")
"""


def play(story: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(story, 2 * LONG_S))


async def flushed(thread: WriterThread, within_s: float = LONG_S) -> bool:
    return await thread.flush(within_s, asyncio.Event())


class Worker:
    """A process whose output goes where an agent would put it."""

    def __init__(self, output: WorkerOutput, *command: str) -> None:
        self.output = output
        self.fed_bytes = 0
        self.ended: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self.process: LocalProcess = LocalPlatform().start(
            command, os.environ, on_output=self._feed, on_exit=self._end
        )
        output.reads_from(self.process)

    def _feed(self, stream: str, data: bytes) -> None:
        self.fed_bytes += len(data)
        self.output.feed(stream, data)

    def _end(self, code: int | None, _: int | None) -> None:
        self.output.close()
        self.ended.set_result(code)


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONG_S):
        while not what():  # noqa: ASYNC110 - it is a process that goes on meanwhile
            await asyncio.sleep(0.01)


async def steady(figure: Callable[[], int]) -> int:
    """The figure once it stands still."""
    known = -1
    async with asyncio.timeout(LONG_S):
        while figure() != known:
            known = figure()
            await asyncio.sleep(1.0)
    return known


@contextlib.asynccontextmanager
async def console_on(
    stream: str, monkeypatch: pytest.MonkeyPatch, patience_s: float
) -> AsyncIterator[tuple[Console, int]]:
    """A console with one of its streams on a pipe, and the end of that to read from."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as file:
        monkeypatch.setattr(sys, stream, file)
        try:
            yield Console(patience_s=patience_s), reading
        finally:
            with contextlib.suppress(OSError):
                os.close(reading)


def hang_up(reading: int) -> None:
    """Nobody reads any more; the number stays taken until it is closed, or it would be another file's by then."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, reading)
    os.close(nothing)


def read_all(descriptor: int) -> bytes:
    return b"".join(iter(lambda: os.read(descriptor, 1 << 20), b""))


# -- files -----------------------------------------------------------------------------------------------------


def test_output_is_cut_into_lines_and_kept(tmp_path: Path) -> None:
    shown: list[tuple[str, bytes]] = []

    async def story() -> str:
        files = WriterThread("files")
        output = WorkerOutput(
            tmp_path / "w", files, lambda stream, lines: shown.extend((stream, x) for x in lines)
        )
        output.feed("stdout", b"one\ntw")
        output.feed("stdout", b"o\n10%\r20%\r\nrest")
        output.feed("stderr", b"x\nE: no\n")
        output.close()
        assert await flushed(files)
        return output.tail()

    assert play(story()) == "x\nE: no\n"
    assert [line for stream, line in shown if stream == "stdout"] == [b"one", b"two", b"20%", b"rest"]
    assert (tmp_path / "w" / "stdout.log").read_bytes() == b"one\ntwo\n10%\r20%\r\nrest"
    assert (tmp_path / "w" / "stderr.log").read_bytes() == b"x\nE: no\n"


def test_a_progress_bar_is_shown_now_and_then_and_when_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("stoker.agent.output.time.monotonic", lambda: now)
    shown: list[bytes] = []

    async def story() -> None:
        nonlocal now
        files = WriterThread("files")
        output = WorkerOutput(tmp_path, files, lambda _, lines: shown.extend(lines))
        for percent in range(100):
            output.feed("stderr", b"\r%d%%" % percent)
            now += 0.4
        now -= 1
        output.feed("stderr", b"\r100%\ndone\r")
        output.feed("stderr", b"\nlast\r")
        output.close()
        files.close()

    play(story())
    assert shown == [b"0%", b"25%", b"50%", b"75%", b"100%", b"done", b"last"]


@given(
    st.lists(st.tuples(st.sampled_from(["stdout", "stderr"]), st.binary(max_size=200).map(lambda b: b * 700)))
)
def test_whatever_comes_is_kept_in_its_order(
    tmp_path_factory: pytest.TempPathFactory, fed: list[tuple[str, bytes]]
) -> None:
    folder = tmp_path_factory.mktemp("output")

    async def story() -> None:
        files = WriterThread("files")
        output = WorkerOutput(folder, files, None)
        for stream, data in fed:
            output.feed(stream, data)
            if len(data) % 3 == 0:
                await asyncio.sleep(0)
        output.close()
        assert await flushed(files)
        files.close()

    play(story())
    for stream in ("stdout", "stderr"):
        assert (folder / f"{stream}.log").read_bytes() == b"".join(
            data for name, data in fed if name == stream
        )


def test_a_full_disk_costs_the_file_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for stream in ("stdout", "stderr"):
        (tmp_path / f"{stream}.log").symlink_to("/dev/full")
    shown: list[bytes] = []

    async def story() -> int | None:
        files = WriterThread("files")
        output = WorkerOutput(tmp_path, files, lambda _, lines: shown.extend(lines))
        worker = Worker(output, sys.executable, "-c", PRINTER, "30000")
        code = await worker.ended
        assert await flushed(files)
        return code

    assert play(story()) == 0
    assert len(shown) == 30000
    assert [r.getMessage() for r in caplog.records] == [
        f"worker output is not kept while the disk is full: No space left on device in {tmp_path}"
    ], "it is said once"


def test_a_file_that_takes_nothing_holds_its_worker_and_nobody_else(tmp_path: Path) -> None:
    """As a dead network file system does: its writes hang."""
    os.mkfifo(tmp_path / "stdout.log")

    async def story() -> bytes:
        files = WriterThread("files")
        output = WorkerOutput(tmp_path, files, None)
        worker = Worker(output, sys.executable, "-c", PRINTER, "30000")
        await until(lambda: worker.fed_bytes > QUEUE_BYTES)
        at_most = await steady(lambda: worker.fed_bytes)
        assert at_most < 2 * QUEUE_BYTES < 30000 * 100, "what follows stays with the worker"
        assert not worker.ended.done()
        assert output.stuck_s() > 0.25
        assert not await flushed(files, 0.2), "nobody waits for longer than they say"
        reading = asyncio.create_task(asyncio.to_thread((tmp_path / "stdout.log").read_bytes))
        assert await worker.ended == 0
        assert await flushed(files)
        return await reading

    lines = play(story()).splitlines()
    assert [int(line.split()[1]) for line in lines] == list(range(30000))


def test_whoever_is_in_a_hurry_waits_for_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "stdout.log")

    async def story() -> bool:
        files = WriterThread("files")
        WorkerOutput(tmp_path, files, None)
        hurry = asyncio.Event()
        asyncio.get_running_loop().call_later(0.1, hurry.set)
        return await files.flush(100 * LONG_S, hurry)

    assert not play(story())


# -- console ---------------------------------------------------------------------------------------------------


def test_a_slow_reader_misses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> bytes:
        async with console_on("stdout", monkeypatch, patience_s=LONG_S) as (console, reading):
            files = WriterThread("files")
            output = WorkerOutput(
                tmp_path, files, lambda stream, lines: console.show(3, stream, lines), console.outlets
            )
            worker = Worker(output, sys.executable, "-c", PRINTER, "60000")
            await until(lambda: worker.fed_bytes > QUEUE_BYTES // 2)
            held_at = await steady(lambda: worker.fed_bytes)
            assert held_at < 60000 * 100, "it waits for its reader"
            read = asyncio.create_task(asyncio.to_thread(read_all, reading))
            assert await worker.ended == 0
            await console.close(LONG_S, asyncio.Event())
            sys.stdout.close()
            return await read

    lines = play(story()).splitlines()
    assert all(line.startswith(b"[rank 3] line ") for line in lines)
    assert [int(line.split()[3]) for line in lines] == list(range(60000))


def test_a_console_that_nobody_reads_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> bytes:
        async with console_on("stdout", monkeypatch, patience_s=0.3) as (console, reading):
            files = WriterThread("files")
            output = WorkerOutput(
                tmp_path, files, lambda stream, lines: console.show(0, stream, lines), console.outlets
            )
            worker = Worker(output, sys.executable, "-c", PRINTER, "100000")
            assert await worker.ended == 0, "though nobody has read a line"
            assert await flushed(files)
            read = asyncio.create_task(asyncio.to_thread(read_all, reading))
            await console.close(LONG_S, asyncio.Event())
            sys.stdout.close()
            return await read

    shown = [int(line.split()[3]) for line in play(story()).splitlines()]
    kept = (tmp_path / "stdout.log").read_bytes().splitlines()
    assert len(kept) == 100000, "the file has them all"
    assert 0 < len(shown) < 100000
    assert shown == list(range(len(shown)))
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith(f"{100000 - len(shown)} lines that workers wrote to stdout are not shown")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("mounting a small tmpfs needs root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_costs_what_does_not_fit(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever comes when there is room again is kept, and the file says how much is missing before it."""
    filler = small_disk / "filler"

    async def story() -> None:
        files = WriterThread("files")
        output = WorkerOutput(small_disk / "w0", files, None)
        output.feed("stdout", b"first\n")
        assert await flushed(files)
        filler.write_bytes(b"x" * 100_000)
        for _ in range(10):
            output.feed("stdout", b"y" * 50_000)
            output.feed("stderr", b"z" * 50_000)
            assert await flushed(files)
        filler.unlink()
        output.feed("stdout", b"again\n")
        output.close()
        assert await flushed(files)

    play(story())
    kept = (small_disk / "w0" / "stdout.log").read_bytes()
    told = re.fullmatch(
        rb"first\n(y*)\n\[stoker: (\d+) bytes are missing here, the disk was full\]\nagain\n", kept
    )
    assert told is not None, kept[:200] + b" ... " + kept[-200:]
    assert len(told[1]) + int(told[2]) == 500_000
    kept = (small_disk / "w0" / "stderr.log").read_bytes()
    told = re.fullmatch(rb"(z*)\n\[stoker: (\d+) bytes are missing here, the disk was full\]\n", kept)
    assert told is not None, "also where nothing comes afterwards"
    assert len(told[1]) + int(told[2]) == 500_000
    assert [record.getMessage() for record in caplog.records] == [
        f"worker output is not kept while the disk is full: No space left on device in {small_disk / 'w0'}"
    ]


def test_a_console_that_is_gone_is_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`stoker run … | head`."""

    async def story() -> int | None:
        async with console_on("stdout", monkeypatch, patience_s=LONG_S) as (console, reading):
            hang_up(reading)
            files = WriterThread("files")
            output = WorkerOutput(
                tmp_path, files, lambda stream, lines: console.show(0, stream, lines), console.outlets
            )
            code = await Worker(output, sys.executable, "-c", PRINTER, "50000").ended
            await console.close(LONG_S, asyncio.Event())
            return code

    assert play(story()) == 0
    assert [record.getMessage() for record in caplog.records] == [
        "what workers write to stdout is not shown any more: [Errno 32] Broken pipe"
    ]


def test_the_log_goes_the_same_way_and_no_thread_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> bytes:
        async with console_on("stderr", monkeypatch, patience_s=0.1) as (console, reading):
            handler = logging.StreamHandler()
            logging.getLogger().addHandler(handler)
            try:
                console.take_logs()
                for number in range(3000):
                    logging.getLogger("test").warning("%d %s", number, "x" * 100)
                await asyncio.to_thread(logging.getLogger("test").warning, "of another thread")
                await asyncio.sleep(0)
                read = asyncio.create_task(asyncio.to_thread(read_all, reading))
                await console.close(LONG_S, asyncio.Event())
                assert handler.stream is sys.stderr
                sys.stderr.close()
                return await read
            finally:
                logging.getLogger().removeHandler(handler)

    lines = play(story()).splitlines()
    assert [int(line.split()[0]) for line in lines[:-1]] == list(range(3000))
    assert lines[-1] == b"of another thread"
