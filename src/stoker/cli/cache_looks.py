"""Asks all servers of a fleet how they do, by way of one of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from stoker.cache.client.client import CacheClient
from stoker.cli.cache_ask import fleet_of
from stoker.cli.cache_options import Server
from stoker.cli.cache_rates import Look
from stoker.errors import CacheUnavailable, StokerError
from stoker.wire.cache_api import CacheStatus, FleetStatus

THREADS = 16
OTHERS_SILENCE_S = 2.0
"""For so long the others may be silent: one that hangs must not keep what the rest say from being shown."""


class FleetLooks:
    """Use as a context manager. Where the server that was named cannot be reached any more, another one is asked."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._clients: dict[str, CacheClient] = {}
        self._others: list[str] = []
        self._stack = contextlib.ExitStack()
        self._pool = self._stack.enter_context(ThreadPoolExecutor(THREADS, "stoker-top"))

    def __enter__(self) -> FleetLooks:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def look(self) -> Look:
        """Raises CacheUnavailable where no server that is known can be reached, and AccessDenied."""
        first: CacheUnavailable | None = None
        for url in (self._server.endpoint, *self._others):
            client = self._client(url, is_named=url == self._server.endpoint)
            try:
                status, fleet = client.status(), fleet_of(client)
            except CacheUnavailable as error:
                first = first or error
                continue
            return self._whole(status, fleet)
        assert first is not None
        raise first

    def _whole(self, status: CacheStatus, fleet: FleetStatus | None) -> Look:
        if fleet is None:
            return Look(status, None, {self._server.endpoint: status})
        urls = {member.name: member.url for member in fleet.members if member.name != fleet.name}
        self._others = list(urls.values())
        self._forget(urls)
        said = dict(zip(urls, self._pool.map(self._ask, urls.values()), strict=True))
        servers = {fleet.name: status} | {
            name: one for name, one in said.items() if isinstance(one, CacheStatus)
        }
        problems = {name: one for name, one in said.items() if isinstance(one, str)}
        return Look(status, fleet, servers, problems)

    def _ask(self, url: str) -> CacheStatus | str:
        try:
            return self._client(url).status()
        except StokerError as error:
            return str(error)

    def _client(self, url: str, *, is_named: bool = False) -> CacheClient:
        client = self._clients.get(url)
        if client is None:
            timeout_s = self._server.timeout_s if is_named else min(self._server.timeout_s, OTHERS_SILENCE_S)
            client = self._clients[url] = CacheClient(url, self._server.token, timeout_s=timeout_s)
            self._stack.callback(client.close)
        return client

    def _forget(self, urls: Mapping[str, str]) -> None:
        known: Iterable[str] = (*urls.values(), self._server.endpoint)
        for url in self._clients.keys() - set(known):
            self._clients.pop(url).close()
