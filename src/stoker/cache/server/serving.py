"""Run a server until it is told to stop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

import uvloop

from stoker.cache.server.listening import raise_file_limit
from stoker.cache.server.server import CacheServer
from stoker.cache.server.settings import Listening, ServerSettings


def serve(
    settings: ServerSettings, announce: Callable[[Listening], None], until: Callable[[asyncio.Event], None]
) -> None:
    """Serve until SIGTERM, SIGINT, or until whatever `until` arranged sets the event, which may be while it starts.

    Raises ConfigError and EnvironmentProblem.
    """
    raise_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings, announce, until))


async def _serve(
    settings: ServerSettings, announce: Callable[[Listening], None], until: Callable[[asyncio.Event], None]
) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    until(stopping)
    server = CacheServer(settings)
    stop = loop.create_task(stopping.wait())
    start = loop.create_task(server.start())
    failure = loop.create_task(server.failure())
    try:
        await asyncio.wait((start, stop), return_when=asyncio.FIRST_COMPLETED)
        if start.done():
            announce(start.result())
            await asyncio.wait((stop, failure), return_when=asyncio.FIRST_COMPLETED)
            if failure.done():
                raise failure.result()
    finally:
        for task in (start, stop, failure):
            task.cancel()
        await asyncio.gather(start, stop, failure, return_exceptions=True)
        await server.stop()
