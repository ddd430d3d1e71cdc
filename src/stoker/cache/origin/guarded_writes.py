"""Any origin that can be written to, asked with restraint: see `guarded.py`.

What may have happened is asked for a second time only where that changes nothing: removing, looking and giving up are,
a body that is sent as it comes, a copy and the end of an upload are not.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Sequence
from typing import TypeVar

from stoker.base.clock import Clock
from stoker.base.rng import Rng
from stoker.cache.limits import OriginLimits
from stoker.cache.origin.guarded import GuardedOrigin
from stoker.cache.origin.port import Part
from stoker.cache.origin.users import OriginUser, writes_as
from stoker.cache.origin.writing_port import (
    NO_ATTRIBUTES,
    Attributes,
    Capabilities,
    Described,
    Upload,
    UploadPart,
    WritableOrigin,
    Writes,
)
from stoker.errors import ObjectChanged, ObjectNotFound, OriginBusy, OriginError, StokerError, WriteRefused
from stoker.wire.cache_api import ObjectInfo

T = TypeVar("T")


class GuardedWrites:
    """Writing to an origin, as one of its users or as the server itself. `guard`: the origin's, the same for all."""

    def __init__(self, guard: GuardedWritableOrigin, writable: Writes) -> None:
        self._guard = guard
        self._writable = writable

    @property
    def capabilities(self) -> Capabilities:
        return self._writable.capabilities

    async def describe(self, key: str) -> Described:
        return await self._guard.ask(lambda: self._writable.describe(key))

    async def put(
        self,
        key: str,
        parts: AsyncIterable[Part],
        size_bytes: int | None = None,
        *,
        attributes: Attributes = NO_ATTRIBUTES,
        if_match: str | None = None,
        if_none_match: bool = False,
        sha256: str = "",
    ) -> ObjectInfo:
        body = _Body(parts)
        return await self._guard.once(
            lambda: self._writable.put(
                key,
                body.parts(),
                size_bytes,
                attributes=attributes,
                if_match=if_match,
                if_none_match=if_none_match,
                sha256=sha256,
            ),
            body,
        )

    async def delete(self, key: str) -> None:
        await self._guard.ask(lambda: self._writable.delete(key))

    async def delete_many(self, keys: Sequence[str]) -> dict[str, StokerError]:
        return await self._guard.ask(lambda: self._writable.delete_many(keys))

    async def copy(
        self, source_key: str, key: str, version: str | None = None, *, attributes: Attributes | None = None
    ) -> ObjectInfo:
        return await self._guard.once(
            lambda: self._writable.copy(source_key, key, version, attributes=attributes)
        )

    async def begin_upload(self, key: str, attributes: Attributes = NO_ATTRIBUTES) -> str:
        return await self._guard.once(lambda: self._writable.begin_upload(key, attributes))

    async def put_part(
        self,
        key: str,
        upload_id: str,
        number: int,
        parts: AsyncIterable[Part],
        size_bytes: int,
        *,
        sha256: str = "",
    ) -> str:
        body = _Body(parts)
        return await self._guard.once(
            lambda: self._writable.put_part(key, upload_id, number, body.parts(), size_bytes, sha256=sha256),
            body,
        )

    async def complete_upload(
        self,
        key: str,
        upload_id: str,
        parts: Sequence[tuple[int, str]],
        *,
        if_match: str | None = None,
        if_none_match: bool = False,
    ) -> ObjectInfo:
        return await self._guard.once(
            lambda: self._writable.complete_upload(
                key, upload_id, parts, if_match=if_match, if_none_match=if_none_match
            )
        )

    async def abort_upload(self, key: str, upload_id: str) -> None:
        await self._guard.ask(lambda: self._writable.abort_upload(key, upload_id))

    async def list_parts(
        self, key: str, upload_id: str, after: int = 0, limit: int = 1000
    ) -> list[UploadPart]:
        return await self._guard.ask(lambda: self._writable.list_parts(key, upload_id, after, limit))

    async def list_uploads(
        self, prefix: str = "", after: tuple[str, str] | None = None, limit: int = 1000
    ) -> list[Upload]:
        return await self._guard.ask(lambda: self._writable.list_uploads(prefix, after, limit))

    async def clean_up(self, now: float, age_s: float) -> int:
        return await self._guard.ask(lambda: self._writable.clean_up(now, age_s))


class GuardedWritableOrigin(GuardedWrites, GuardedOrigin):
    """The limit on requests counts writes as well, that on bytes only reads. A refusal is an answer; what a body fails
    with says nothing about the origin."""

    _left_alone = OriginBusy  # who writes has waited for nothing yet

    def __init__(self, origin: WritableOrigin, limits: OriginLimits, clock: Clock, rng: Rng) -> None:
        GuardedOrigin.__init__(self, origin, limits, clock, rng)
        GuardedWrites.__init__(self, self, origin)
        self._of_server = origin

    def written_as(self, user: OriginUser | None) -> GuardedWrites:
        """What writes as that user; None: as the server itself. Raises WriteDenied where the origin has no such
        users."""
        return self if user is None else GuardedWrites(self, writes_as(self._of_server, user))

    async def ask(self, request: Callable[[], Awaitable[T]]) -> T:
        """What may be asked for twice. Raises what it raises."""
        return await self._ask(0, request)

    async def once(self, request: Callable[[], Awaitable[T]], body: _Body | None = None) -> T:
        """Raises what it raises."""
        await self._wait_for_turn(0)
        try:
            answer = await request()
        except OriginError as error:
            if body is not None and body.has_failed:
                self._breaker.gave_up()
            else:
                self._has_failed(error)
            raise
        except (ObjectNotFound, ObjectChanged, WriteRefused):
            self._breaker.gave_up() if body is not None and body.has_failed else self._breaker.succeeded()
            raise
        except BaseException:
            self._breaker.gave_up()
            raise
        self._breaker.succeeded()
        return answer


class _Body:
    """Tells whether it was the body that failed: it may come from another origin."""

    def __init__(self, parts: AsyncIterable[Part]) -> None:
        self._parts = parts
        self.has_failed = False

    async def parts(self) -> AsyncGenerator[Part, None]:
        try:
            async for part in self._parts:
                yield part
        except GeneratorExit:
            raise
        except BaseException:
            self.has_failed = True
            raise
