"""A node's saver, as its agent sees it: a child that writes the workers' snapshots to a storage.

It is started when there is a snapshot and a place to write it to, for it takes seconds to begin. What becomes of
checkpoints is in the event log. It ends with the agent, after the newest snapshot is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from stoker.base.units import format_bytes, format_duration
from stoker.errors import WireError
from stoker.wire.remarks import TEXT_CHARS_MAX, Remark
from stoker.wire.saving import (
    STORAGE_FILE,
    Command,
    Result,
    StorageWanted,
    decode_result,
    encode_line,
)

log = logging.getLogger("stoker.agent")
COMMAND = (sys.executable, "-P", "-m", "stoker.train.checkpoints.saver")
START_AGAIN_S = 30.0
"""Seconds after which another saver is started in the place of one that has ended on its own."""
SAY_EVERY_S = 10.0
KILLED_S = 10.0
"""After SIGKILL a saver ends in no time, unless a file system holds it in the kernel: then it is left behind."""
TURN_S = 5.0
"""Seconds that nodes which have lost their master leave to each other: who finds the state written writes nothing."""


class NodeSaver:
    """`remark` takes what belongs into the event log."""

    def __init__(
        self,
        folder: Path | None,
        run_id: str,
        environment: Mapping[str, str],
        *,
        remark: Callable[[Remark], None],
        command: tuple[str, ...] = COMMAND,
    ) -> None:
        """`folder`: of the snapshots; None: there are none."""
        self._folder = folder
        self._run_id = run_id
        self._environment = dict(environment)
        self._remark = remark
        self._command = command
        self._child: asyncio.subprocess.Process | None = None
        self._starting: asyncio.Task[None] | None = None
        self._hearing: asyncio.Task[None] | None = None
        self._start_at = 0.0
        self._is_ours = False
        self._problem = ""
        self._newest = Result()
        """The newest word about one that is being written."""
        self._is_ending = False
        self._is_beside = False
        """Others may be writing as well."""

    def look(self, *, writes: bool) -> None:
        """On each beat. `writes`: whether it is this node whose snapshots are written."""
        if writes != self._is_ours:
            self._is_ours = writes
            if not writes:
                self.kill()  # another node writes from now on
        idle = self._starting is None and self._child is None
        if idle and self._is_ours and time.monotonic() >= self._start_at and self._has_work():
            self._starting = asyncio.create_task(self._start())

    def save_soon(self) -> None:
        """A worker has failed: what there is in memory is to last."""
        self._tell(Command(save={}))

    async def finish(self, limit_s: float, killed: asyncio.Event, *, turn: int | None = None) -> None:
        """Have the newest snapshot written, and end. Gives up after `limit_s`, or when `killed` is set.

        `turn`: nobody says which node writes; each of them does in its turn, unless it finds the state written.
        """
        self._is_ending = True
        if turn is not None:
            self._is_ours = self._is_beside = True
        if self._child is None and self._starting is None and self._is_ours and self._has_work():
            self._starting = asyncio.create_task(self._start())
        ending = asyncio.create_task(self._finish(turn or 0))
        stop = asyncio.create_task(killed.wait())
        deadline = time.monotonic() + limit_s
        try:
            while not ending.done() and not killed.is_set():
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    log.warning(
                        "the newest snapshot is not written to the storage: %s did not suffice",
                        format_duration(limit_s),
                    )
                    break
                await asyncio.wait(
                    [ending, stop], timeout=min(left_s, SAY_EVERY_S), return_when=asyncio.FIRST_COMPLETED
                )
                if not ending.done() and not killed.is_set():
                    self._say_progress()
        finally:
            for task in (ending, stop):
                task.cancel()
            await asyncio.gather(ending, stop, return_exceptions=True)
            self._is_ours = False
            if self._starting is not None:
                await self._starting
            self.kill()
            await self._see_it_end()

    def kill(self) -> None:
        """At once. What it was writing is no checkpoint."""
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                self._child.kill()

    # -- the child ----------------------------------------------------------------------------------------

    def _has_work(self) -> bool:
        folder = self._folder
        if folder is None or not (folder / STORAGE_FILE).exists():
            return False
        return any(path.suffix == ".snapshot" for path in folder.iterdir())

    async def _start(self) -> None:
        assert self._folder is not None
        try:
            wanted = msgspec.json.decode((self._folder / STORAGE_FILE).read_bytes(), type=StorageWanted)
            self._child = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=self._environment,
                start_new_session=True,
            )
        except (OSError, msgspec.MsgspecError) as error:
            self._failed(f"snapshots are not written to the storage: {error}")
            self._start_at = time.monotonic() + START_AGAIN_S
            self._starting = None
            return
        watch = Command(
            watch=str(self._folder),
            run_id=self._run_id,
            url=wanted.url,
            keep=wanted.keep,
            every_s=wanted.every_s,
            beside_others=self._is_beside,
        )
        self._tell(watch)
        self._hearing = asyncio.create_task(self._hear(self._child))
        self._starting = None
        if not self._is_ours:
            self.kill()

    async def _hear(self, child: asyncio.subprocess.Process) -> None:
        assert child.stdout is not None
        async for line in child.stdout:
            try:
                self._take(decode_result(line))
            except WireError as error:
                log.warning("%s", error)
        code = await child.wait()
        self._child = None
        if self._is_ours and (code != 0 or not self._is_ending):
            self._start_at = time.monotonic() + START_AGAIN_S
            self._failed(f"the process that writes snapshots to the storage has ended with {code}")

    def _take(self, result: Result) -> None:
        self._newest = result
        if result.failed:
            self._failed(result.failed)
        elif result.saved is not None:
            size, took = format_bytes(result.size_bytes), format_duration(result.took_s)
            log.debug("checkpoint at commit %d is written: %s in %s", result.saved, size, took)
            if self._problem:
                self._problem = ""
                self._remark(Remark("checkpoint-written-again", f"at commit {result.saved}"))

    def _failed(self, problem: str) -> None:
        """Said once, until it is another or it is over."""
        if problem != self._problem:
            self._problem = problem
            log.warning("%s", problem)
            self._remark(Remark("checkpoint-failed", problem[:TEXT_CHARS_MAX]))

    def _tell(self, command: Command) -> None:
        if self._child is not None and self._child.stdin is not None:
            self._child.stdin.write(encode_line(command))

    async def _see_it_end(self) -> None:
        if self._hearing is None:
            return
        _, late = await asyncio.wait([self._hearing], timeout=KILLED_S)
        if late and self._child is not None:
            log.error(
                "the process that writes snapshots to the storage, %d, was killed and does not end: a file system "
                "holds it, or a process that it has started; it is left behind",
                self._child.pid,
            )
            self._hearing.cancel()
            await asyncio.wait([self._hearing])
            self._child._transport.close()  # type: ignore[attr-defined]  # its pipes, which somebody holds open

    async def _finish(self, turn: int) -> None:
        if self._starting is not None:
            await asyncio.shield(self._starting)
        if self._child is not None and turn:
            await asyncio.sleep(turn * TURN_S)
        if self._child is not None:
            self._tell(Command(finish=True, beside_others=self._is_beside))
            assert self._hearing is not None
            await asyncio.shield(self._hearing)

    def _say_progress(self) -> None:
        done, size = self._newest.done_bytes, self._newest.size_bytes
        how_far = f": {format_bytes(done)} of {format_bytes(size)}" if done else ""
        log.info("writing the newest snapshot to the storage%s", how_far)
