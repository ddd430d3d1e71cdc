"""A node that comes back when its job has ended."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from stoker.agent.agent import Agent
from stoker.agent.link import AgentConfig
from stoker.base.clock import SystemClock
from stoker.errors import WireError
from stoker.platform.local import LocalPlatform
from stoker.wire.frames import FrameCodec
from stoker.wire.job import Directive, Join, Outcome, Refused, ToAgent, ToMaster
from stoker.wire.stream import SWITCHING, read_head

ENDED = Outcome(False, 130, "it was stopped")
TOO_LATE = Refused("the job has ended", outcome=ENDED)


def run(folder: Path, answers: list[ToAgent]) -> tuple[Outcome | None, list[Join]]:
    """An agent whose master says these, one for each of its streams."""
    joins: list[Join] = []

    async def story() -> Outcome | None:
        async def master(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_head(reader)
            writer.write(SWITCHING)
            join = await FrameCodec[ToMaster](ToMaster).read(reader)
            assert isinstance(join, Join)
            joins.append(join)
            writer.write(FrameCodec[ToAgent](ToAgent).encode(answers[len(joins) - 1]))
            writer.write_eof()
            while await reader.read(1 << 16):
                pass
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

        server = await asyncio.start_server(master, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]

        async def locate() -> tuple[str, int]:
            return "127.0.0.1", port

        config = AgentConfig(
            locate=locate, token="t", command=(), slots=1, host="h", address="127.0.0.1", run_id="none",
            log_dir=folder, runtime_dir=folder, environment={},
        )  # fmt: skip
        try:
            return await asyncio.wait_for(Agent(config, LocalPlatform(), SystemClock()).run(), 60)
        finally:
            server.close()
            await server.wait_closed()

    return asyncio.run(story()), joins


def test_who_was_of_the_job_ends_as_it_did(tmp_path: Path) -> None:
    outcome, joins = run(tmp_path, [Directive(seq=1, generation=1), TOO_LATE])
    assert outcome == ENDED
    assert len({join.node for join in joins}) == 1, "nobody joins anew"


def test_who_comes_only_now_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WireError, match="the job has ended"):
        run(tmp_path, [TOO_LATE])
