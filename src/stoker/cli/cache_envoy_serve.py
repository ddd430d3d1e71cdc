"""Tells Envoys where the servers of a fleet are: over REST (xDS v3), or in files that Envoy watches."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from stoker.base.clock import SystemClock
from stoker.cache.auth.access import Access
from stoker.cache.fleet.discovery import Discovery
from stoker.cache.fleet.envoy import TYPE_URL, DiscoveryRequest, DiscoveryResponse, version_of
from stoker.cache.fleet.envoy_bootstrap import HOLD_S
from stoker.cache.fleet.envoy_tls import SECRET_TYPE_URL, secrets
from stoker.cache.fleet.port import Membership
from stoker.cache.server.listening import listen_tcp
from stoker.errors import ConfigError, WireError
from stoker.job.control.connection import Limits, serve_connection
from stoker.job.control.response import Refusal, Response, error_response, json_response

log = logging.getLogger("stoker.cache")
DISCOVERY_PATH = "/v3/discovery:endpoints"
SECRETS_PATH = "/v3/discovery:secrets"
HEALTH_PATH = "/health"
_BODY_BYTES_MAX = 1024 * 1024
"""An Envoy says with each request which extensions it has: 80 KB."""
_RETRY_S = 1.0


class DiscoveryHealth(msgspec.Struct, frozen=True):
    """What `GET /health` says. `problem`: why what is told may be old; empty: it is not."""

    servers: int
    problem: str = ""


class DiscoveryRouter:
    """Answers the requests of Envoys."""

    def __init__(self, discovery: Discovery, auth: Access) -> None:
        self._discovery = discovery
        self._auth = auth
        self._secrets = [secret.encode() for secret in auth.unrestricted_tokens()]

    def is_authorized(self, headers: Mapping[str, str]) -> bool:
        """Whether it carries one of the tokens, where there are any."""
        if self._auth.is_open:
            return True
        scheme, _, given = headers.get("authorization", "").partition(" ")
        given_bytes = given.strip().encode("utf-8", "surrogateescape")
        matches = [hmac.compare_digest(given_bytes, secret) for secret in self._secrets]
        return scheme.lower() == "bearer" and any(matches)

    def unauthorized(self) -> Refusal:
        """What an unknown Envoy is told."""
        mend = "send it as 'Authorization: Bearer TOKEN': --token-file of --print-bootstrap says where Envoy has it"
        return Refusal("unauthorized", "the discovery's token is missing or wrong", mend)

    async def handle(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Response:
        """Answer one request."""
        try:
            return await self._handle(method, target, headers, body)
        except Refusal as refusal:
            return refusal.response

    async def _handle(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Response:
        path = target.partition("?")[0]
        methods = {DISCOVERY_PATH: "POST", SECRETS_PATH: "POST", HEALTH_PATH: "GET"}
        if path not in methods:
            raise Refusal(
                "not_found", f"there is no route {path}", f"ask for {DISCOVERY_PATH} or {HEALTH_PATH}"
            )
        if method != methods[path]:
            allow = (("Allow", methods[path]),)
            raise Refusal(
                "method_not_allowed", f"{path} has no {method}", f"use {methods[path]}", headers=allow
            )
        if path == HEALTH_PATH:
            endpoints = self._discovery.endpoints
            said = DiscoveryHealth(len(endpoints or ()), self._discovery.problem or "")
            return json_response(said, 503 if endpoints is None else 200)
        if not self.is_authorized(headers):
            raise self.unauthorized()
        return await (self._discover(body) if path == DISCOVERY_PATH else self._tell_secrets(body))

    async def _tell_secrets(self, body: bytes) -> Response:
        """They are names of files, which are always the same: who knows that is kept until it asks again."""
        request = _request(body, SECRET_TYPE_URL)
        try:
            told = secrets(request.resource_names)
        except ConfigError as error:
            raise Refusal("bad_request", str(error)) from None
        said = DiscoveryResponse(version_of(told), told, SECRET_TYPE_URL)
        if request.version_info != said.version_info:
            return json_response(said)
        await asyncio.sleep(HOLD_S)
        return Response(304)

    async def _discover(self, body: bytes) -> Response:
        request = _request(body, TYPE_URL)
        try:
            told = await self._discovery.answer(request, HOLD_S)
        except ConfigError as error:
            raise Refusal("bad_request", str(error)) from None
        if told is not None:
            return json_response(told)
        if self._discovery.endpoints is None:
            why = self._discovery.problem or "nobody has said yet who is in the fleet"
            return error_response("environment", why, "start servers with the same --fleet")
        return Response(304)


def _request(body: bytes, type_url: str) -> DiscoveryRequest:
    """What an Envoy asks for. Raises Refusal."""
    try:
        request = msgspec.json.decode(body or b"{}", type=DiscoveryRequest)
    except ValueError as error:
        raise Refusal("bad_request", f"this is no DiscoveryRequest: {error}", "send JSON of xDS v3") from None
    if request.type_url not in ("", type_url):
        raise Refusal("bad_request", f"{request.type_url} is not served here", f"ask for {type_url}")
    return request


class EndpointFiles:
    """Writes resources to files that Envoys watch, whenever they change."""

    def __init__(self, discovery: Discovery, files: Mapping[str, Path]) -> None:
        self._discovery = discovery
        self._files = files

    async def keep(self) -> None:
        """Never ends by itself. A file that cannot be written is tried again; what it says stays until then."""
        async with asyncio.TaskGroup() as tasks:
            for resource, path in self._files.items():
                tasks.create_task(self._keep(resource, path))

    async def _keep(self, resource: str, path: Path) -> None:
        version, problem = "", ""
        while True:
            told = await self._discovery.answer(DiscoveryRequest(version, [resource]), HOLD_S)
            if told is None:
                continue
            try:
                write_endpoints(path, msgspec.json.encode(told))
            except OSError as error:
                if problem != (problem := f"cannot write {path}: {error.strerror}"):
                    log.warning("%s; it is tried again and again", problem)
                await asyncio.sleep(_RETRY_S)
                continue
            version, problem = told.version_info, ""


def write_endpoints(path: Path, said: bytes) -> None:
    """Put it there in one move, which is what Envoy watches for. Raises OSError."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(said)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class DiscoveryServer:
    """Listens for Envoys. Start it on a running event loop; raises ConfigError and EnvironmentProblem from `start`."""

    def __init__(self, router: DiscoveryRouter, host: str, port: int) -> None:
        self._router = router
        self._host = host
        self._port = port
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        """Its URL."""
        sock = listen_tcp(self._host, self._port)
        host, port = sock.getsockname()[:2]
        self._server = await asyncio.start_server(self._serve, sock=sock)
        return f"http://[{host}]:{port}" if sock.family == socket.AF_INET6 else f"http://{host}:{port}"

    async def stop(self) -> None:
        """Hang up: Envoys keep what they know, and ask again."""
        if self._server is None:
            return
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        limits = Limits(body_bytes_max=_BODY_BYTES_MAX)
        try:
            await serve_connection(reader, writer, self._router, limits=limits)
        except WireError as error:
            log.warning("closing a connection: %s", error)
            writer.close()
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            self._connections.discard(task)


async def run_discovery(
    membership: Membership,
    auth: Access,
    listen: tuple[str, int] | None,
    files: Mapping[str, Path],
    announce: Callable[[str, Sequence[Path]], None],
) -> None:
    """Serve until SIGTERM or SIGINT. `listen` None: only files are written. Raises ConfigError, EnvironmentProblem."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    discovery = Discovery(membership, SystemClock())
    server = None if listen is None else DiscoveryServer(DiscoveryRouter(discovery, auth), *listen)
    url = "" if server is None else await server.start()
    announce(url, list(files.values()))
    work = [asyncio.ensure_future(discovery.follow())]
    if files:
        work.append(asyncio.ensure_future(EndpointFiles(discovery, files).keep()))
    stop = asyncio.ensure_future(stopping.wait())
    try:
        done, _ = await asyncio.wait((*work, stop), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in (*work, stop):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*work, stop, return_exceptions=True)
        if server is not None:
            await server.stop()
        await membership.leave()
