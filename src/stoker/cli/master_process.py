"""The master as a child of `stoker run`: started, started again when it dies, and heard to the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable

import msgspec

from stoker.base.backoff import backoff_s
from stoker.base.rng import Rng
from stoker.cli.master import EXIT_AGAIN, REFUSES, MasterStart
from stoker.errors import CacheError, ConfigError, EnvironmentProblem, StokerError
from stoker.wire.job import Outcome

log = logging.getLogger("stoker.master")
DEATHS_MAX = 20
"""Deaths in a row, each within SETTLED_S of the start, after which it is not started again."""
SETTLED_S = 30.0
REFUSALS = {kind.exit_code: kind for kind in (ConfigError, CacheError, EnvironmentProblem)}
"""What the exit code of a master means that did not even begin, within SETTLED_S: to start it again mends nothing."""
LINE_BYTES_MAX = 1 << 20
"""Of an outcome with its traceback, and of a line of the log."""


class MasterProcess:
    """Keeps a master running on a listening socket of this process's: who connects while it is away waits."""

    def __init__(self, start: MasterStart, listener: socket.socket, *, continues: bool = False) -> None:
        """`continues`: it takes the place of a master that has died."""
        self.start_with = start
        self.pid = 0
        self.on_spawn: Callable[[int], None] = lambda _: None
        """Called with the process id of each master that is started."""
        self.has_taken_part: Callable[[], bool] = lambda: True
        """Whether this command has been in the job that the master waited for. Who comes when it is just ending has
        not, and begins it anew."""
        self._listener = listener
        self._child: asyncio.subprocess.Process | None = None
        self._outcome: Outcome | None = None
        self._task: asyncio.Task[Outcome | None] | None = None
        self._follows = continues
        """A master was there before."""
        self._continues = continues
        self._is_retired = False
        self._is_given_up = False

    def start(self) -> None:
        """Begin to keep it running."""
        self._task = asyncio.create_task(self._keep_running(), name="master-process")

    async def wait(self) -> Outcome | None:
        """How the job ended; None: elsewhere, or it was given up. Raises EnvironmentProblem when none stays alive, and
        what the first one does when it refuses to begin: ConfigError, CacheError or EnvironmentProblem."""
        assert self._task is not None
        try:
            return await asyncio.shield(self._task)
        except asyncio.CancelledError:
            if self._is_given_up and self._task.cancelled():
                return None
            raise

    @property
    def ended(self) -> asyncio.Future[Outcome | None]:
        """Done when the master is: with the outcome, or why there will be no more master."""
        assert self._task is not None
        return self._task

    @property
    def is_alive(self) -> bool:
        """Whether a process of it runs, or is about to be started again."""
        return self._task is not None and not self._task.done()

    def retire(self, *, at_once: bool = False) -> None:
        """This node needs it no more: it goes if it only waits for its turn, or `at_once` for another to take over."""
        self._is_retired = True
        child = self._child
        if child is not None and child.returncode is None:
            if at_once:
                child.send_signal(signal.SIGTERM)
            elif child.stdin is not None:
                child.stdin.close()

    def give_up(self) -> None:
        """Whoever waits for the end waits no longer."""
        self._is_given_up = True
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """End it now, whatever the job does."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError, StokerError):
                await self._task
        if self._child is not None and self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._child.send_signal(signal.SIGKILL)
            await self._child.wait()
        self._listener.close()

    async def _keep_running(self) -> Outcome | None:
        deaths, rng, loop = 0, Rng(self._listener.fileno()), asyncio.get_running_loop()
        while not self._is_retired:
            began = loop.time()
            code, said = await self._run_once()
            if self._outcome is not None or self._is_retired:
                break
            has_settled = loop.time() - began >= SETTLED_S
            deaths = 1 if has_settled else deaths + 1
            if code in REFUSALS and not (self._follows or has_settled):
                raise REFUSALS[code](said or f"the job's master ended with code {code} before it began")
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            if code != EXIT_AGAIN and deaths > (1 if code > 0 else DEATHS_MAX):
                raise EnvironmentProblem(f"the job's master {how}{': ' + said if said else ''}")
            self._continues = self._continues or code < 0 or (code == EXIT_AGAIN and self.has_taken_part())
            self._follows = self._follows or code == EXIT_AGAIN or code < 0
            if code != EXIT_AGAIN:
                log.warning("the master (pid %d) %s: starting it again; the workers train on", self.pid, how)
            await asyncio.sleep(backoff_s(deaths - 1, rng, first_s=0.1, limit_s=2.0))
        return self._outcome

    async def _run_once(self) -> tuple[int, str]:
        """One life of the master: its exit code (negative: the signal), and the last line that it logged."""
        descriptor = self._listener.fileno()
        child = self._child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # a user's own queue.py or http.py is not Python's
            "-m",
            "stoker.cli.main",
            "master",
            "--from-stdin",
            "--listen-fd",
            str(descriptor),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            pass_fds=(descriptor,),
            start_new_session=True,  # Ctrl-C is for the run, which says what it means
            limit=LINE_BYTES_MAX,
        )
        self.pid = child.pid
        self.on_spawn(child.pid)
        assert child.stdin is not None
        with contextlib.suppress(ConnectionError):
            start = msgspec.structs.replace(self.start_with, follows=self._follows, continues=self._continues)
            child.stdin.write(msgspec.json.encode(start) + b"\n")
            await child.stdin.drain()  # it stays open: its end tells the master of this process's
        if self._is_retired:
            child.stdin.close()
        said, _ = await asyncio.gather(self._pass_on_log(child), self._read_outcome(child))
        return await child.wait(), said

    async def _pass_on_log(self, child: asyncio.subprocess.Process) -> str:
        assert child.stderr is not None
        last = ""
        while line := await _line_of(child.stderr):
            level, _, text = line.rstrip("\n").partition(" ")
            if level == REFUSES:
                last = text.replace("\v", "\n").strip()
                continue  # whoever starts it says so, once
            number = logging.getLevelNamesMapping().get(level)
            last = (text if number is not None else line).replace("\v", "\n").strip() or last
            log.log(number if number is not None else logging.ERROR, "%s", last)
        return last

    async def _read_outcome(self, child: asyncio.subprocess.Process) -> None:
        assert child.stdout is not None
        line = await _line_of(child.stdout)
        if line:
            with contextlib.suppress(msgspec.MsgspecError):
                self._outcome = msgspec.json.decode(line, type=Outcome)


async def _line_of(reader: asyncio.StreamReader) -> str:
    """The next line; a longer one than the buffer in pieces."""
    try:
        return (await reader.readline()).decode("utf-8", "replace")
    except ValueError:
        return (await reader.read(LINE_BYTES_MAX)).decode("utf-8", "replace") or "\n"
