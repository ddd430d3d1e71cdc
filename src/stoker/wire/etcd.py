"""etcd's v3 API as JSON over HTTP (its gRPC gateway), over several endpoints of one cluster.

Every request made here may be repeated without harm, because whoever makes one guards it by a comparison or says the
same thing twice; so a request without an answer is simply put to the next endpoint.

Source: https://etcd.io/docs/v3.4/dev-guide/api_grpc_gateway/ and rpc.proto of etcd 3.4.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Sequence
from typing import Any, TypeVar

import aiohttp
import msgspec

from stoker.errors import AccessDenied, EnvironmentProblem, JournalUnavailable
from stoker.wire.lost_peers import give_up_when_unheard

log = logging.getLogger("stoker.journal")
T = TypeVar("T")
HEADERS = {
    "Content-Type": "application/json",
    "Grpc-Metadata-hasleader": "true",  # a member that has lost its cluster says so at once instead of waiting
}
TRY_S = 1.0
TRY_LIMIT_S = 4.0
PAUSE_S = 0.1
NO_SPACE = "database space exceeded"
CANCELLED, UNKNOWN, DEADLINE, EXHAUSTED, ABORTED, INTERNAL, UNAVAILABLE = 1, 2, 4, 8, 10, 13, 14
ELSEWHERE = frozenset((CANCELLED, UNKNOWN, DEADLINE, EXHAUSTED, ABORTED, INTERNAL, UNAVAILABLE))
DENIED = frozenset((7, 16))
NO_USER = "user name is empty"
"""What etcd says, with the code for a wrong argument, to who shows no credentials."""
NOT_FOUND, OUT_OF_RANGE = 5, 11


class EtcdRefused(EnvironmentProblem):
    """etcd understood and said no. `code` is gRPC's."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class EtcdFull(JournalUnavailable):
    """etcd has reached its quota: it takes no writes until somebody makes room."""


class Header(msgspec.Struct, frozen=True):
    """On every answer."""

    revision: int = 0


class KeyValue(msgspec.Struct, frozen=True):
    """A key as etcd keeps it."""

    key: bytes = b""
    value: bytes = b""
    create_revision: int = 0
    mod_revision: int = 0
    lease: int = 0


class Range(msgspec.Struct, frozen=True):
    """Answer to a range request. `more`: the limit cut it."""

    header: Header = Header()
    kvs: tuple[KeyValue, ...] = ()
    more: bool = False


class Response(msgspec.Struct, frozen=True):
    """Answer to one operation of a transaction."""

    response_range: Range | None = None


class Transaction(msgspec.Struct, frozen=True):
    """Answer to a transaction; `ranges` are those of the branch that was taken."""

    header: Header = Header()
    succeeded: bool = False
    responses: tuple[Response, ...] = ()

    @property
    def ranges(self) -> list[Range]:
        return [r.response_range for r in self.responses if r.response_range is not None]


class Lease(msgspec.Struct, frozen=True):
    """Answer to a grant or a keep-alive. `TTL` 0: there is no such lease any more."""

    ID: int = 0
    TTL: int = 0


class _Streamed(msgspec.Struct, frozen=True):
    result: Lease = Lease()


class _Happened(msgspec.Struct, frozen=True):
    events: tuple[Any, ...] = ()


class _Watched(msgspec.Struct, frozen=True):
    result: _Happened | None = None


class _Failure(msgspec.Struct, frozen=True):
    message: str = ""
    code: int = UNKNOWN


class _StreamFailure(msgspec.Struct, frozen=True):
    message: str = ""
    grpc_code: int = UNKNOWN


class _FailedStream(msgspec.Struct, frozen=True):
    error: _StreamFailure


class _EndpointFailed(Exception):
    """This endpoint has no answer; another may have."""


class EtcdClient:
    """Requests to whichever endpoint answers. Nothing is opened before the first request."""

    def __init__(
        self, endpoints: Sequence[str], *, tls: ssl.SSLContext | None = None, timeout_s: float = 5.0
    ) -> None:
        scheme = "https" if tls is not None else "http"
        self.urls = [f"{scheme}://{endpoint}/v3" for endpoint in endpoints]
        self._tls = tls
        self._timeout_s = timeout_s
        self._at = 0
        self._session: aiohttp.ClientSession | None = None
        self._permitted: set[str] = set()
        """Requests that etcd has answered. Where it denies one of these later, somebody is changing its roles, and it
        will be answered again: a job of weeks does not end over that."""

    def __str__(self) -> str:
        return ", ".join(url.removesuffix("/v3") for url in self.urls)

    async def get(self, key: bytes) -> tuple[KeyValue | None, int]:
        """One key, linearizable, and the store's revision."""
        found = await self.call("kv/range", {"key": key}, Range)
        return (found.kvs[0] if found.kvs else None), found.header.revision

    async def call(self, path: str, request: Any, answer: type[T], *, timeout_s: float | None = None) -> T:
        """Put the request to one endpoint after the other until one answers.

        Raises JournalUnavailable when none does within `timeout_s`, EtcdRefused, AccessDenied for a request of a kind
        that was never answered.
        """
        body = msgspec.json.encode(request)
        allowed_s = self._timeout_s if timeout_s is None else timeout_s
        loop = asyncio.get_running_loop()
        deadline, try_s, tries = loop.time() + allowed_s, TRY_S, 0
        why = "there was no time for it"
        while (left_s := deadline - loop.time()) > 0:
            try:
                answered = await self._once(self.urls[self._at], path, body, answer, min(try_s, left_s))
                self._permitted.add(path)
                return answered
            except _EndpointFailed as failure:
                if tries == 0 or left_s >= try_s:  # one that had no time left says nothing of why
                    why = str(failure)
            except AccessDenied as denied:
                if path not in self._permitted:
                    raise
                why = str(denied)
            tries += 1
            self._at = (self._at + 1) % len(self.urls)
            if tries % len(self.urls) == 0:
                try_s = min(try_s * 1.5, TRY_LIMIT_S)
                await asyncio.sleep(min(PAUSE_S, max(0.0, deadline - loop.time())))
        raise JournalUnavailable(
            f"no etcd endpoint answered within {allowed_s:.1f} s (last: {why}); check that a majority of"
            f" {self} runs and can be reached from here"
        )

    async def call_at(self, url: str, path: str, request: Any, answer: type[T], *, timeout_s: float) -> T:
        """Put the request once, to this one of `urls`. Raises JournalUnavailable, EtcdRefused, AccessDenied."""
        try:
            return await self._once(url, path, msgspec.json.encode(request), answer, timeout_s)
        except _EndpointFailed as failure:
            raise JournalUnavailable(str(failure)) from None

    async def keep_alive(self, lease: int, *, timeout_s: float) -> int:
        """Renew a lease; the seconds it now has, 0 if it is gone."""
        streamed = await self.call("lease/keepalive", {"ID": lease}, _Streamed, timeout_s=timeout_s)
        return streamed.result.TTL

    async def wait_for_change(
        self, key: bytes, after_revision: int, timeout_s: float, range_end: bytes = b""
    ) -> None:
        """Return once the key, or one of those up to `range_end`, changed after this revision, or it can no longer be
        told, or time is up."""
        request = {
            "create_request": {"key": key, "range_end": range_end, "start_revision": after_revision + 1}
        }
        url = self.urls[self._at]
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._opened().post(f"{url}/watch", data=msgspec.json.encode(request)) as response,
            ):
                rest = b""
                async for piece in response.content.iter_any():
                    *lines, rest = (rest + piece).split(b"\n")
                    for line in lines:
                        result = msgspec.json.decode(line, type=_Watched, strict=False).result
                        if result is not None and result.events:
                            return
        except TimeoutError:
            return
        except (aiohttp.ClientError, OSError, msgspec.MsgspecError) as error:
            log.debug("watching %s at %s ended: %s", key, url, error)
        self._at = (self._at + 1) % len(self.urls)
        await asyncio.sleep(PAUSE_S)

    async def close(self) -> None:
        """Close all connections; a later request opens new ones."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    ssl=self._tls if self._tls is not None else True, socket_factory=_watchful_socket
                ),
                headers=HEADERS,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=TRY_S),
            )
        return self._session

    async def _once(self, url: str, path: str, body: bytes, answer: type[T], timeout_s: float) -> T:
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._opened().post(f"{url}/{path}", data=body) as response,
            ):
                status, said = response.status, await response.read()
        except TimeoutError:
            raise _EndpointFailed(f"{url} did not answer for {timeout_s:.1f} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise _EndpointFailed(f"{url}: {error or type(error).__name__}") from None
        try:
            if said.startswith(b'{"error":{'):
                failed = msgspec.json.decode(said, type=_FailedStream, strict=False).error
                raise _refusal(url, status, _Failure(failed.message, failed.grpc_code))
            if status == 200:
                return msgspec.json.decode(said, type=answer, strict=False)
            raise _refusal(url, status, msgspec.json.decode(said, type=_Failure, strict=False))
        except msgspec.MsgspecError:
            raise _EndpointFailed(
                f"{url} answers {status} and no JSON: is it etcd 3.4 or newer, with its gRPC gateway enabled?"
            ) from None


def _refusal(url: str, status: int, failure: _Failure) -> Exception:
    said = f"{url} says: {failure.message or status}"
    if NO_SPACE in failure.message:
        return EtcdFull(
            f"{said}; compact and defragment etcd or raise its --quota-backend-bytes, then `etcdctl alarm disarm`"
        )
    if failure.code in DENIED or NO_USER in failure.message:
        return AccessDenied(f"{said}; give credentials that may read and write the job's keys")
    return (
        _EndpointFailed(said) if failure.code in ELSEWHERE else EtcdRefused(f"etcd at {said}", failure.code)
    )


def _watchful_socket(address: tuple[Any, ...]) -> socket.socket:
    """A socket that notices within about ten seconds that the other end is gone without a word."""
    family, kind, protocol = address[:3]
    made = socket.socket(family, kind, protocol)
    give_up_when_unheard(made, 10.0)
    return made
