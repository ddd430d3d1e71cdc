"""A TCP cable between a client and etcd that can be cut, be deaf in one direction, or hold back what is sent."""

from __future__ import annotations

import asyncio
import contextlib


class Cable:
    """Forwards connections to a port on this host.

    - `cut`: nothing passes in either direction, and no connection is refused.
    - `deaf`: requests arrive, answers do not.
    - `hold`: requests are kept back until `release`, then they arrive, whatever became of the client.
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint = ""
        self.mode = ""
        self._target = int(endpoint.rpartition(":")[2])
        self._held: list[tuple[asyncio.StreamWriter, bytes]] = []
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Cable:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.endpoint = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()

    async def release(self) -> None:
        """Let pass what was held back."""
        held, self._held, self.mode = self._held, [], ""
        for writer, data in held:
            writer.write(data)
            await writer.drain()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers += [writer, to_writer]
        for source, sink, is_request in ((reader, to_writer, True), (to_reader, writer, False)):
            task = asyncio.create_task(self._pump(source, sink, is_request=is_request))
            self._tasks.add(task)

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, is_request: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                if self.mode == "hold" and is_request:
                    self._held.append((sink, data))
                elif self.mode == "" or (self.mode == "deaf" and is_request):
                    sink.write(data)
                    await sink.drain()
            if self.mode == "" and all(sink is not held for held, _ in self._held):
                sink.close()
