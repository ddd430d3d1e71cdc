"""An agent that trains nothing: it joins the tests' stand-in master, and leaves when it is asked to.

Everything between driver and agent is the real thing; only the job is not. `MOOD` says how it behaves on which host, as
in `h2:stubborn,h3:broken`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.cli.agent import enter, read_start, serve
from stoker.cli.agent_lock import only_agent
from stoker.wire.hosts import AgentStart


class StandInAgent:
    """What `DriverChannel` needs of an agent."""

    def __init__(self, stubborn: bool) -> None:
        self.stubborn = stubborn
        self.done = asyncio.Event()

    def leave(self, why: str) -> None:
        print(f"asked to leave: {why}", flush=True)
        if not self.stubborn:
            self.done.set()

    def kill(self) -> None:
        print("ended", flush=True)
        self.done.set()


@dataclass(frozen=True)
class StandInLaunch:
    start: AgentStart
    on_start: Callable[[Any], None] | None = None
    host: str = ""


async def run(launch: Any) -> int:
    start = launch.start
    moods = dict(pair.split(":") for pair in os.environ.get("MOOD", "").split(",") if pair)
    mood = moods.get(start.host, "")
    if mood == "broken":
        print("this host is broken", file=sys.stderr)
        return 7
    agent = StandInAgent(stubborn="stubborn" in mood)
    launch.on_start(agent)
    if "silent" in mood:
        print("waiting", flush=True)
        await agent.done.wait()
        return 0
    reader, writer = await asyncio.open_connection(start.master_host, start.master_port)
    about = {
        "host": launch.host,
        "slots": start.slots,
        "token": start.token,
        "pid": os.getpid(),
        "cwd": os.getcwd(),
        "environment": dict(os.environ),
        "options": start.options,
        "order": start.order,
    }
    writer.write(json.dumps(about).encode() + b"\n")
    print(f"hello from {launch.host}", flush=True)
    ended = asyncio.ensure_future(reader.read())
    left = asyncio.ensure_future(agent.done.wait())
    await asyncio.wait({ended, left}, return_when=asyncio.FIRST_COMPLETED)
    left.cancel()
    return 0


if __name__ == "__main__":
    first, rest = read_start(0)
    enter(first)
    launch: Any = StandInLaunch(first)
    with only_agent(Path(first.directory), first.host, first.token, grace_s=first.grace_s):
        code = asyncio.run(serve(first, rest, 0, lambda _: launch, run))
    sys.exit(code)
