"""A fleet of simulated agents as a process: `_fleet_main.py HOST PORT TOKEN`, commands as JSON on standard input.

Each line is an object with `do` and its arguments; each is answered with one line, once it is done.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import random
import resource
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import uvloop
from _fleet import Fleet, until
from _fleet_shards import ShardWork

from stoker.wire.frames import FrameCodec
from stoker.wire.job import Beat

Answer = dict[str, Any]


class Commands:
    """What the benchmark may ask for. Times are seconds since the command came."""

    def __init__(self, host: str, port: int, token: str) -> None:
        self.host, self.port = host, port
        self.fleet = Fleet(host, port, token)

    async def launch(self, count: int, slots: int, timeout_s: float) -> Answer:
        """Agents join, all at once: until the master has spoken to all, and until all hold the first world."""
        fleet, began = self.fleet, time.monotonic()
        fleet.add(count, slots)
        await fleet.wait_until_told(count, timeout_s)
        told_s = time.monotonic() - began
        await fleet.wait_for_world(count, slots, timeout_s)
        return {"joined_s": told_s, "world_s": fleet.world_at - began, **self._seen()}

    async def add(self, count: int, slots: int, timeout_s: float) -> Answer:
        """More agents come: until all hold a world with them."""
        fleet, began = self.fleet, time.monotonic()
        fleet.add(count, slots)
        await fleet.wait_for_world(len(fleet.agents), slots, timeout_s)
        return {"world_s": fleet.world_at - began, **self._seen()}

    async def lose(self, count: int, slots: int, timeout_s: float) -> Answer:
        """Agents end: until all others hold a world without them."""
        fleet, began = self.fleet, time.monotonic()
        fleet.lose(count)
        closed_s = time.monotonic() - began
        await fleet.wait_for_world(len(fleet.agents), slots, timeout_s)
        return {"closed_s": closed_s, "world_s": fleet.world_at - began, **self._seen()}

    async def beat(self, per_s: float, seconds: float) -> Answer:
        """Signs of life at this rate (below 0: one of each agent per second) for a while, and for ever if 0."""
        fleet = self.fleet
        fleet.per_s, before, began = per_s, fleet.sent, time.monotonic()
        cpu = time.process_time()
        await asyncio.sleep(seconds)
        passed = time.monotonic() - began
        sent = fleet.sent - before
        return {
            "sent_per_s": sent / passed if seconds else 0.0,
            "cpu": (time.process_time() - cpu) / passed if seconds else 0.0,
            **self._seen(),
        }

    async def back(self, timeout_s: float) -> Answer:
        """The master has died: until all agents have lost their streams, and a new one has spoken to them all."""
        fleet, began = self.fleet, time.monotonic()
        await until(lambda: not fleet.told)
        lost_s = time.monotonic() - began
        await fleet.wait_until_told(len(fleet.agents), timeout_s)
        return {"lost_s": lost_s, "back_s": time.monotonic() - began, **self._seen()}

    async def shards(self, agents: int, slots: int, shards: int, vanish: int, timeout_s: float) -> Answer:
        """New agents work through a dataset; `vanish` of them end meanwhile, others come in their place."""
        fleet, rng = self.fleet, random.Random(2)
        work = ShardWork(fleet, shards)
        fleet.add(agents, slots)
        async with asyncio.timeout(timeout_s):
            for turn in range(vanish):
                share = (turn + 1) / (vanish + 1)
                await until(functools.partial(lambda share: work.leases >= shards * share, share))
                work.vanish(fleet, rng.choice([agent for agent in fleet.agents if agent.workers]))
                fleet.add(1, slots)
            await until(lambda: work.is_over)
        return {**work.verdict(), "first error": next(iter(work.errors), ""), **self._seen()}

    async def echo(self, connections: int, seconds: float) -> Answer:
        """Frames per second that the null server echoes: every connection sends the next beat when one comes back."""
        loop, frame = asyncio.get_running_loop(), FrameCodec[Beat](Beat).encode(Beat("node-12345", 100, 10))
        count = [0]

        class Ping(asyncio.Protocol):
            def connection_made(self, transport: Any) -> None:
                self.transport = transport
                transport.write(frame)

            def data_received(self, data: bytes) -> None:
                count[0] += 1
                self.transport.write(frame)

        transports = []
        for number in range(connections):
            sock = socket.socket()
            sock.setblocking(False)
            sock.bind((f"127.0.{number % 200}.2", 0))
            await loop.sock_connect(sock, (self.host, self.port))
            transports.append((await loop.create_connection(Ping, sock=sock))[0])
        before, began = count[0], time.monotonic()
        await asyncio.sleep(seconds)
        rate = (count[0] - before) / (time.monotonic() - began)
        for transport in transports:
            transport.abort()
        return {"frames_per_s": rate}

    def _seen(self) -> Answer:
        fleet = self.fleet
        return {
            "agents": len(fleet.agents),
            "generation": fleet.world,
            "size": fleet.world_size,
            "lost_streams": fleet.lost_streams,
            "refusals": dict(fleet.refusals),
        }


async def main() -> None:
    host, port, token = sys.argv[1:]
    commands = Commands(host, int(port), token)
    beating = asyncio.create_task(commands.fleet.beat_forever())
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        command = json.loads(line)
        run: Callable[..., Awaitable[Answer]] = getattr(commands, command.pop("do"))
        try:
            answer = await run(**command)
        except TimeoutError:
            seen = {"told": commands.fleet.told, "world_count": commands.fleet.world_count}
            answer = {"error": "it took too long", **seen, **commands._seen()}
        print(json.dumps(answer), flush=True)
    beating.cancel()


if __name__ == "__main__":
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gc.disable()  # its pauses would be taken for the master's
    uvloop.run(main())
