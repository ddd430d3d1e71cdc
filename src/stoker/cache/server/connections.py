"""What the native front hands over: each request becomes a task of the back, which answers on the same connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

from stoker._native import Front, Piece
from stoker.cache.auth.access import Access
from stoker.cache.auth.principals import Principal
from stoker.cache.server.body import BodyParts
from stoker.cache.server.landing import Landing
from stoker.cache.server.port import Answer, BatchHit, Request
from stoker.cache.server.watch import Watch
from stoker.cache.store.containers import ContainerFiles
from stoker.wire.cache_batch import DESCRIPTOR, FRAME, INSTANCE_BYTES, DescriptorsWanted, ReadRequest
from stoker.wire.http import response_head

WHOLE_BYTES = 256 * 1024
"""An answer of the back's own that is shorter goes out as one, with its head: each part would wake the front."""
LOW_WATER_BYTES = 1024 * 1024
"""Who has more unsent waits until it is half of that: else each block that follows would wait anew."""
_TAKEN_AT_ONCE = 256
_WITHOUT_LENGTH = (204, 304)
"""There is no body; a length would be that of the object that a 304 does not send."""
_DESCRIPTOR_FRAME_BYTES = FRAME.size + INSTANCE_BYTES + DESCRIPTOR.size


class FrontAnswer:
    """Writes one response of the back to its connection. What is said to one that is gone is lost, and the task is
    cancelled."""

    def __init__(
        self,
        connections: Connections,
        connection: int,
        is_head: bool,
        begin: Callable[[int], Iterable[tuple[str, str]]],
        body: BodyParts | None = None,
    ) -> None:
        self._connections = connections
        self._front = connections.front
        self._connection = connection
        self._is_head = is_head
        self._body = body
        self._begin = begin
        self._is_chunked = False
        self._unsent_bytes = 0
        self._held = b""
        """Of the beginning of a short answer, until it is whole."""
        self.has_started = False
        self.is_finished = False

    def charge(self, principal: Principal) -> None:
        self._front.charge(self._connection, principal.name)

    def start(self, status: int, headers: Iterable[tuple[str, str]], length_bytes: int | None) -> None:
        self.has_started = True
        self._is_chunked = length_bytes is None
        framing: list[tuple[str, str]] = []
        if length_bytes is None:
            framing.append(("Transfer-Encoding", "chunked"))
        elif status not in _WITHOUT_LENGTH:
            framing.append(("Content-Length", str(length_bytes)))
        if self._body is not None and not self._body.is_over:
            # The next request could not be told from the rest of the body: the front ends the connection.
            framing.append(("Connection", "close"))
        self._held = response_head(status, (*framing, *headers, *self._begin(status)))
        if length_bytes is None or length_bytes > WHOLE_BYTES:
            self._say_held()

    def _say_held(self) -> None:
        held, self._held = self._held, b""
        if held:
            self._front.say(self._connection, held)

    def data(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_head or not data:
            return
        if self._held:
            self._held = b"".join((self._held, data))
            return
        self._unsent_bytes += len(data)
        before, after = self._around(len(data))
        self._front.say(self._connection, b"".join((before, data, after)) if self._is_chunked else data)

    def piece(self, piece: Piece, start: int, stop: int, before: bytes = b"") -> bool:
        if self._is_head or start == stop:
            return True
        self._say_held()
        size_bytes = stop - start
        before, after = self._around(size_bytes, before)
        files = self._connections.files.sending
        offset = piece.offset + start
        if not self._front.send_file(files, self._connection, piece.container, offset, size_bytes, before):
            return False
        if after:
            self._front.say(self._connection, after)
        self._unsent_bytes += size_bytes
        return True

    def landing(self, landing: Landing, start: int, stop: int, before: bytes = b"") -> None:
        if self._is_head or start == stop:
            return
        self._say_held()
        size_bytes = stop - start
        before, after = self._around(size_bytes, before)
        if before:
            self._front.say(self._connection, before)
        self._front.send_inflow(self._connection, landing.inflow, start, size_bytes)
        if after:
            self._front.say(self._connection, after)
        self._unsent_bytes += size_bytes

    def batch(
        self, request: ReadRequest, rule: tuple[int, float, int], wanted: DescriptorsWanted | None
    ) -> BatchHit | None:
        asked = None if wanted is None else (wanted.from_bytes, wanted.count_max, wanted.held)
        said = self._front.answer_batch(
            self._connection, request.keys, rule, asked, request.ranges, request.versions
        )
        if said is None:
            return None
        self.has_started = self.is_finished = True
        self._begin(200)
        return BatchHit(*said)

    def pass_descriptor(self, piece: Piece) -> bool:
        self._say_held()
        before, after = self._around(_DESCRIPTOR_FRAME_BYTES)
        return self._front.pass_descriptor(self._connection, piece.bucket, piece.container, before, after)

    @property
    def instance(self) -> bytes:
        return self._front.instance

    async def drain(self) -> None:
        self._say_held()
        if self._unsent_bytes > LOW_WATER_BYTES:
            await self._connections.drained(self._connection, LOW_WATER_BYTES // 2)
            self._unsent_bytes = LOW_WATER_BYTES // 2

    def finish(self) -> None:
        if self.is_finished:
            return
        self.is_finished = True
        last = b"0\r\n\r\n" if self._is_chunked and not self._is_head else self._held
        self._held = b""
        if last:
            self._front.say(self._connection, last, is_last=True)
        else:
            self._front.finish(self._connection)

    def _around(self, size_bytes: int, before: bytes = b"") -> tuple[bytes, bytes]:
        """What goes out before and after so many bytes that follow `before`: they are one chunk with it."""
        if not self._is_chunked:
            return before, b""
        return b"%x\r\n%b" % (size_bytes + len(before), before), b"\r\n"


class Connections:
    """Lives on one event loop. `on_broken` is told of a container whose file cannot be read."""

    def __init__(
        self,
        front: Front,
        files: ContainerFiles,
        access: Access,
        answer: Callable[[Request, Answer], Awaitable[None]],
        on_broken: Callable[[int], Awaitable[None]],
        watch: Watch,
    ) -> None:
        self.front = front
        self.files = files
        self._access = access
        self._answer = answer
        self._on_broken = on_broken
        self._watch = watch
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._bodies: dict[int, BodyParts] = {}
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._doubted: dict[int, asyncio.Future[None]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self) -> None:
        """Listen to the front from now on."""
        asyncio.get_running_loop().add_reader(self.front.fileno(), self._take)

    async def stop(self) -> None:
        """Cancel what is still being answered."""
        asyncio.get_running_loop().remove_reader(self.front.fileno())
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def drained(self, connection: int, unsent_bytes_max: int) -> None:
        """Wait until at most so many bytes are unsent. Raises ConnectionError if the peer is gone."""
        waiting = self._waiting[connection] = asyncio.get_running_loop().create_future()
        self.front.notify(connection, unsent_bytes_max)
        try:
            await waiting
        finally:
            self._waiting.pop(connection, None)

    def _take(self) -> None:
        for kind, connection, asked, part in self.front.take(_TAKEN_AT_ONCE):
            if asked is not None:
                method, target, headers, body, token, is_near, body_bytes, certificate, peer = asked
                parts = None
                if body_bytes:
                    size_bytes = None if body_bytes < 0 else body_bytes
                    parts = BodyParts(size_bytes, partial(self.front.more, connection))
                    self._bodies[connection] = parts
                principal = self._access.principal(token)
                request = Request(method, target, headers, body, principal, is_near, parts, certificate, peer)
                task = asyncio.get_running_loop().create_task(self._run(connection, request))
                self._tasks[connection] = task
            elif part is not None:
                if (coming := self._bodies.get(connection)) is not None:
                    coming.take(*part)
            elif kind == "broken":
                self._doubt(connection)
            elif kind == "drained":
                waiting = self._waiting.get(connection)
                if waiting is not None and not waiting.done():
                    waiting.set_result(None)
            elif (task_or_none := self._tasks.get(connection)) is not None:
                task_or_none.cancel()

    def _doubt(self, container: int) -> None:
        """Many connections may have found the same file to be broken."""
        if container in self._doubted:
            return
        task = asyncio.ensure_future(self._on_broken(container))
        self._doubted[container] = task
        task.add_done_callback(lambda _: self._doubted.pop(container, None))

    async def _run(self, connection: int, request: Request) -> None:
        try:
            with self._watch.watching(request) as inquiry:
                begin = partial(self._watch.begin_answer, inquiry)
                await self._answer(
                    request, FrontAnswer(self, connection, request.method == "HEAD", begin, request.parts)
                )
        except ConnectionError:
            # Half an answer is out and the rest cannot be had: the reader must see a broken connection.
            self.front.drop(connection)
        except BaseException:
            self.front.drop(connection)
            raise
        finally:
            if self._tasks.get(connection) is asyncio.current_task():
                del self._tasks[connection]
                self._bodies.pop(connection, None)
