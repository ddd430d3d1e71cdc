"""Short programs that an agent asks something, and that may hang."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import NamedTuple

KILLED_WITHIN_S = 1.0
"""A process that a dead disk or driver holds cannot be killed; it is not waited for longer than this."""


class ProgramStuck(TimeoutError):
    """A program whose time is over cannot be killed either: it and its pipes are left behind."""


class Output(NamedTuple):
    """What a program said, and its exit code."""

    stdout: bytes
    stderr: str
    code: int


async def run_program(
    *command: str, timeout_s: float, environment: Mapping[str, str] | None = None
) -> Output:
    """Run it without a shell and without input; it is killed when its time is over. `environment`: by default this
    process's own.

    Raises TimeoutError, ProgramStuck when that happened and killing it did not help, and OSError when it cannot be
    started.
    """
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe
    )
    try:
        async with asyncio.timeout(timeout_s):
            stdout, stderr = await process.communicate()
    except TimeoutError:
        if not await _kill(process):
            raise ProgramStuck(f"{command[0]} (process {process.pid}) cannot be killed") from None
        raise
    except asyncio.CancelledError:
        await _kill(process)
        raise
    return Output(stdout, stderr.decode(errors="replace"), process.returncode or 0)


async def _kill(process: asyncio.subprocess.Process) -> bool:
    """End it; whether that has worked."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(KILLED_WITHIN_S):
            await process.wait()
    return process.returncode is not None
