"""A small blocking client of a job's control API, for the command line, dashboards and scripts."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from stoker.errors import AccessDenied, ConfigError, MasterUnreachable, WireError
from stoker.wire.control import (
    JSON,
    WAIT_S_MAX,
    Accepted,
    Advice,
    EventPage,
    Health,
    JobEvent,
    JobStatus,
    LeaveRequest,
    ScaleAdvice,
    ScaleRequest,
    ShardList,
    ShardStatus,
    StackDump,
    StopRequest,
    WorkerStacks,
)
from stoker.wire.control_errors import ErrorBody, error_of

ANSWER_BYTES_MAX = 256 * 1024 * 1024
_GONE = (ConnectionResetError, BrokenPipeError, http.client.RemoteDisconnected)

T = TypeVar("T")


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """`HOST:PORT` or `[V6]:PORT` as host and port. Raises ConfigError."""
    host, colon, port = endpoint.removeprefix("http://").rstrip("/").rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    is_port = port.isascii() and port.isdigit() and 0 < int(port) <= 65535
    if not colon or not host or not is_port or any(c.isspace() or c in "/@" for c in host):
        raise ConfigError(f"{endpoint!r} is not a master's endpoint: write HOST:PORT, like host1:29400")
    return host, int(port)


class JobClient:
    """One job's master. Keeps one connection open; not for two threads at once.

    `timeout_s` bounds each wait for the master: to connect, and for any part of an answer.

    Every method raises MasterUnreachable (nobody answers), AccessDenied (the token),
    ConfigError (an argument that cannot be), JobError (the job has ended) or WireError (it is not a master).
    """

    def __init__(self, endpoint: str, token: str, *, timeout_s: float = 10.0) -> None:
        self.endpoint = endpoint
        self.timeout_s = timeout_s
        host, port = split_endpoint(endpoint)
        if not (token.isascii() and token.isprintable()):
            raise ConfigError("a job's token has only printable ASCII characters: is that the right file?")
        self._token = token
        self._connection = http.client.HTTPConnection(host, port, timeout=timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hang up; the next call connects again."""
        self._connection.close()

    def status(self) -> JobStatus:
        """The job at a glance."""
        return self._get("/v1/status", JobStatus)

    def events(self, after: int = 0, limit: int = 1000, wait_s: float = 0.0) -> EventPage:
        """Events whose `seq` is above `after`; where there are none, wait for one up to `wait_s`."""
        query = urlencode({"after": after, "limit": limit, "wait_s": f"{wait_s:g}"})
        return self._get(f"/v1/events?{query}", EventPage, extra_s=wait_s)

    def follow(self, after: int = 0, *, wait_s: float = WAIT_S_MAX / 2) -> Iterator[JobEvent]:
        """Events as they come, until the job has ended. Raises MasterUnreachable when the master goes away: what came
        before is not lost, and one may go on from the last `seq`."""
        while True:
            page = self.events(after, wait_s=wait_s)
            yield from page.events
            after = page.after
            if page.ended:
                return

    def scale(self, nodes: int) -> Accepted:
        """Have this many nodes."""
        return self._post("/v1/scale", ScaleRequest(nodes))

    def stop(self, why: str, exit_code: int | None = None) -> Accepted:
        """End the job now. `exit_code`: what its commands exit with; None: the master's default."""
        request = StopRequest(why) if exit_code is None else StopRequest(why, exit_code)
        return self._post("/v1/stop", request)

    def leave_node(self, node: str, why: str) -> Accepted:
        """Have a node leave at an agreed commit."""
        return self._post(f"/v1/nodes/{quote(node, safe='')}/leave", LeaveRequest(why))

    def stacks(self, timeout_s: float = 10.0) -> tuple[WorkerStacks, ...]:
        """What every rank does now; those that do not answer within `timeout_s` have a problem instead."""
        path = f"/v1/stacks?{urlencode({'timeout_s': f'{timeout_s:g}'})}"
        return self._get(path, StackDump, extra_s=timeout_s).workers

    def shards(self) -> tuple[ShardStatus, ...]:
        """How far the dynamic shards have come."""
        return self._get("/v1/shards", ShardList).shards

    def advice(self) -> ScaleAdvice | None:
        """How many nodes the job should have; None until enough was measured."""
        return self._get("/v1/advice", Advice).advice

    def metrics(self) -> str:
        """Figures as Prometheus text."""
        return self._request("GET", "/v1/metrics").decode("utf-8", "replace")

    def health(self) -> Health:
        """Whether the master's process serves."""
        return self._get("/v1/healthz", Health)

    def openapi(self) -> dict[str, Any]:
        """The API as an OpenAPI document."""
        return self._get("/v1/openapi.json", dict[str, Any])

    def _get(self, path: str, kind: type[T], extra_s: float = 0.0) -> T:
        return self._decode(self._request("GET", path, extra_s=extra_s), kind)

    def _post(self, path: str, request: msgspec.Struct) -> Accepted:
        return self._decode(self._request("POST", path, msgspec.json.encode(request)), Accepted)

    def _request(self, method: str, path: str, body: bytes | None = None, extra_s: float = 0.0) -> bytes:
        try:
            status, answer = self._exchange(method, path, body, self.timeout_s + extra_s)
        except (OSError, http.client.IncompleteRead) as error:
            self.close()
            raise MasterUnreachable(
                f"no master answers at {self.endpoint}: {_said(error)}; `stoker job ls` shows this machine's jobs"
            ) from None
        except http.client.HTTPException as error:
            self.close()
            raise WireError(
                f"{self.endpoint} does not speak HTTP: is that port a Stoker master's? ({error!r})"
            ) from None
        if status >= 400:
            self._raise(status, answer)
        return answer

    def _exchange(self, method: str, path: str, body: bytes | None, timeout_s: float) -> tuple[int, bytes]:
        """One request and its answer. A kept connection that turns out to be closed is opened anew, once."""
        connection = self._connection
        is_kept = connection.sock is not None
        try:
            return self._send(method, path, body, timeout_s)
        except _GONE:
            connection.close()
            if not is_kept:
                raise  # and asking twice does no harm: a request says what should be, not what to add
        return self._send(method, path, body, timeout_s)

    def _send(self, method: str, path: str, body: bytes | None, timeout_s: float) -> tuple[int, bytes]:
        connection = self._connection
        if connection.sock is None:
            connection.connect()
        connection.sock.settimeout(timeout_s)
        headers = {"Authorization": f"Bearer {self._token}", "Accept": JSON}
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        if response.length is None:
            answer = response.read(ANSWER_BYTES_MAX + 1)
        else:  # read() tells a part from the whole, read(amount) does not
            answer = response.read() if response.length <= ANSWER_BYTES_MAX else b""
        if max(len(answer), response.length or 0) > ANSWER_BYTES_MAX:
            connection.close()
            raise WireError(f"{self.endpoint} answers with more than {ANSWER_BYTES_MAX} bytes")
        return response.status, answer

    def _raise(self, status: int, answer: bytes) -> None:
        try:
            body = msgspec.json.decode(answer, type=ErrorBody)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise WireError(f"{self.endpoint} answers {status}: is that port a Stoker master's?") from None
        if body.error == "unauthorized":
            raise AccessDenied(
                f"the master at {self.endpoint} refuses the job token: give the one of its nodes with "
                "--job-token-file FILE or STOKER_JOB_TOKEN"
            )
        raise error_of(body)

    def _decode(self, answer: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(answer, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise WireError(
                f"{self.endpoint} answers what this version cannot read: {error}; upgrade one of them"
            ) from None


def _said(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it does not answer in time"
    if isinstance(error, http.client.IncompleteRead):
        return "it went away in the middle of an answer"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
