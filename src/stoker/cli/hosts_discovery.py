"""Where the list of hosts comes from: `--hosts`, or a script that is asked again and again."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping, Sequence
from typing import Protocol

from stoker.errors import EnvironmentProblem
from stoker.job.hosts_list import HostList, parse_script_output
from stoker.platform.local import LocalPlatform

OUTPUT_BYTES_MAX = 1024 * 1024
WORDS_MAX = 200


class HostSource(Protocol):
    """Knows the hosts of a job."""

    async def read(self) -> HostList:
        """The hosts as they are now. Raises ConfigError or EnvironmentProblem when that cannot be told."""
        ...


class StaticHosts:
    """A list that never changes."""

    def __init__(self, listed: HostList) -> None:
        self._listed = listed

    async def read(self) -> HostList:
        return self._listed


class HostScript:
    """A program that prints `host[:slots]` lines, as Horovod Elastic's `--host-discovery-script` does."""

    def __init__(
        self, argv: Sequence[str], *, environment: Mapping[str, str], default_slots: int, timeout_s: float
    ) -> None:
        self._argv = tuple(argv)
        self._environment = environment
        self._default_slots = default_slots
        self._timeout_s = timeout_s
        self._platform = LocalPlatform()

    async def read(self) -> HostList:
        """Run the script once and take its answer.

        Raises EnvironmentProblem when it cannot be started, fails, prints too much or takes too long (it and what it
        started are then killed), ConfigError for an answer that is no list of hosts.
        """
        ended: asyncio.Future[tuple[int | None, int | None]] = asyncio.get_running_loop().create_future()
        printed = {"stdout": bytearray(), "stderr": bytearray()}

        def take(stream: str, data: bytes) -> None:
            printed[stream] += data
            if stream == "stderr":
                del printed[stream][: -4 * WORDS_MAX]
            elif len(printed[stream]) > OUTPUT_BYTES_MAX:
                del printed[stream][OUTPUT_BYTES_MAX + 1 :]
                process.signal(signal.SIGKILL)

        def end(code: int | None, signal_number: int | None) -> None:
            if not ended.done():
                ended.set_result((code, signal_number))

        process = self._platform.start(self._argv, self._environment, on_output=take, on_exit=end)
        hangs = False
        try:
            await asyncio.wait({ended}, timeout=self._timeout_s)
            hangs = not ended.done()
        finally:
            if not ended.done():
                process.signal(signal.SIGKILL)
                await asyncio.wait({ended})
        code, signal_number = ended.result()
        if hangs:
            raise EnvironmentProblem(f"it gave no answer within {self._timeout_s:g} s and was killed")
        if len(printed["stdout"]) > OUTPUT_BYTES_MAX:
            raise EnvironmentProblem(f"it printed more than {OUTPUT_BYTES_MAX} bytes and was killed")
        if code != 0:
            how = f"exit code {code}" if code is not None else f"signal {signal_number}"
            said = printed["stderr"].decode("utf-8", "replace").strip()[-WORDS_MAX:]
            raise EnvironmentProblem(f"{how}: {said}" if said else how)
        text = printed["stdout"].decode("utf-8", "replace")
        return parse_script_output(text, self._default_slots)
