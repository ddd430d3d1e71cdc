"""Whoever answers: a server, or another of its fleet where it does not."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from stoker.base.backoff import backoff_s
from stoker.base.rng import Rng
from stoker.cache.client.client import CacheClient
from stoker.errors import CacheUnavailable, ConfigError, ObjectNotFound, StokerError
from stoker.settings import ClientTlsFiles
from stoker.wire.cache_api import FleetMember, FleetStatus

T = TypeVar("T")
PATIENCE_S = 60.0
_BACKOFF_MIN_S, _BACKOFF_MAX_S = 0.05, 5.0


class SlowAnswer(CacheUnavailable):
    """The server is there, but has not answered this in time: it may still be at work on it."""


class Servers:
    """Asks one server of a fleet after the other until one answers; for many threads at once. `endpoint` names one or
    more of them, with commas in between.

    `timeout_s` is the longest silence of a server. When none answers, all are asked again, after longer and longer
    waits, for `patience_s`. What is asked must do no harm when it is done twice. Raises ConfigError where nobody is
    named.
    """

    def __init__(
        self,
        endpoint: str,
        token: str | None,
        *,
        timeout_s: float,
        patience_s: float = PATIENCE_S,
        tls: ClientTlsFiles | None = None,
    ) -> None:
        self._tls = tls
        self._token = token
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._urls = [part.strip() for part in endpoint.split(",") if part.strip()]
        if not self._urls:
            raise ConfigError(
                f"{endpoint!r} names no cache server: write http://HOST:PORT, or several with commas"
            )
        self._clients: dict[tuple[str, float], CacheClient] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._rng = Rng(int.from_bytes(os.urandom(8), "big"))

    def call(self, question: Callable[[CacheClient], T], timeout_s: float | None = None) -> T:
        """The answer of the first that gives one. `timeout_s`: a longer silence than usual, for this question.

        Raises SlowAnswer where a server is alive but silent for `timeout_s`, CacheUnavailable when none answered for
        the whole patience, and what servers say.
        """
        deadline: float | None = None
        attempt = 0
        while True:
            for url in list(self._urls):
                try:
                    answer = question(self.client(url, timeout_s))
                except CacheUnavailable as error:
                    last = error
                    was_silent = timeout_s is not None and isinstance(error.__cause__, TimeoutError)
                    if was_silent and self._is_alive(url):
                        raise SlowAnswer(str(error)) from error
                    self._put_last(url)
                else:
                    return answer
            now = time.monotonic()
            deadline = now + self._patience_s if deadline is None else deadline
            attempt += 1
            wait_s = min(
                backoff_s(attempt, self._rng, limit_s=_BACKOFF_MAX_S) + _BACKOFF_MIN_S, deadline - now
            )
            if wait_s <= 0 or self._closed.wait(wait_s):
                raise last

    def fleet(self) -> FleetStatus | None:
        """The fleet, whose members are asked from now on as well; None: the server is in none.

        Asks the first server alone, and once. Raises CacheUnavailable, and what it says.
        """
        try:
            fleet = self.client(self._urls[0]).fleet()
        except ObjectNotFound:  # a server that knows no fleets
            return None
        if len(fleet.members) < 2:
            return None
        with self._lock:
            known = set(self._urls)
            self._urls += [url for url in urls_of(fleet.members) if url not in known]
        return fleet

    def client(self, url: str, timeout_s: float | None = None) -> CacheClient:
        """The client of one server, closed with all others."""
        where = url, self._timeout_s if timeout_s is None else timeout_s
        with self._lock:
            if where not in self._clients:
                self._clients[where] = CacheClient(url, self._token, timeout_s=where[1], tls=self._tls)
            return self._clients[where]

    def close(self) -> None:
        """Close all connections; who waits for a server to come back gives up."""
        self._closed.set()
        with self._lock:
            clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            client.close()

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _put_last(self, url: str) -> None:
        """It did not answer: the others are asked before it from now on."""
        with self._lock:
            if self._urls[0] == url:
                self._urls = [*self._urls[1:], url]

    def _is_alive(self, url: str) -> bool:
        try:
            self.client(url).fleet()
        except CacheUnavailable:
            return False
        except StokerError:
            return True
        return True


def urls_of(members: list[FleetMember]) -> list[str]:
    """Where the members are that are not about to leave."""
    return [member.url for member in members if member.weight > 0]
