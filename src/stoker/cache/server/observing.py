"""What a server tells those who watch it: whether it lives, whether it is ready, and its figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stoker.base.exposition import CONTENT_TYPE
from stoker.cache.auth.principals import UNPROVEN, Principal
from stoker.cache.server.logs import DEFAULT_LEVEL, TEXT
from stoker.cache.server.metrics import Metrics
from stoker.cache.server.port import Answer, Request
from stoker.errors import NotAuthenticated
from stoker.wire.cache_api import JSON
from stoker.wire.cache_watch import Balance, Health, Readiness

HEALTH, READY, METRICS = "/-/health", "/-/ready", "/-/metrics"
FOR_ALL = (HEALTH.encode(), READY.encode())
"""Those that need no token, nor anybody else to say whose it is."""
DRAINING = "draining"
STARTING = "starting"
NOT_IN_FLEET = "not in its fleet"
_HEALTHY = msgspec.json.encode(Health())


@dataclass(frozen=True)
class ObserveSettings:
    """How a server may be watched. `open_metrics`: its figures need no token. `otlp_url`: where traces go; empty: there
    are none. `trusted_proxies`: who is believed when it says for whom it asks, see `ClientAddresses`."""

    open_metrics: bool = False
    access_log: bool = False
    otlp_url: str = ""
    audit_path: Path | None = None
    log_format: str = TEXT
    log_level: str = DEFAULT_LEVEL
    trusted_proxies: Sequence[str] = ()

    @property
    def tells_of_reads(self) -> bool:
        """Whether anything is told of each request that is no hit."""
        return self.access_log or bool(self.otlp_url)

    @property
    def open_targets(self) -> list[str]:
        """Which routes need no token."""
        return [HEALTH, READY, *([METRICS] if self.open_metrics else [])]


class Observed:
    """Answers for one server. `unready`: why it is not ready, in words that tell strangers nothing; `details`: the same
    for who may know all."""

    def __init__(
        self,
        metrics: Metrics,
        settings: ObserveSettings,
        unready: Callable[[], list[str]],
        details: Callable[[], list[str]],
    ) -> None:
        self.metrics = metrics
        self._settings = settings
        self._unready = unready
        self._details = details

    def health(self, request: Request, answer: Answer) -> None:
        """The process lives, and its loop turns."""
        _send(answer, 200, JSON, _HEALTHY)

    def ready(self, request: Request, answer: Answer) -> None:
        """Whether to send it requests."""
        why = self._unready()
        details = self._details() if request.principal.is_unrestricted and why else []
        body = msgspec.json.encode(Readiness(not why, why, details))
        _send(answer, 503 if why else 200, JSON, body)

    def balance(self) -> Balance:
        """How it stands beside the others."""
        owned, fair = self.metrics.balance()
        shortest_s = self.metrics.shortest_unused_s()
        return Balance(round(owned, 6), round(fair, 6), shortest_s, self._unready())

    def figures(self, request: Request, answer: Answer) -> None:
        """Raises NotAuthenticated."""
        principal: Principal | None = request.principal
        if self._settings.open_metrics:
            principal = None
        elif principal is UNPROVEN:
            raise NotAuthenticated("figures need a token here")
        _send(answer, 200, CONTENT_TYPE, self.metrics.text(principal).encode())


def _send(answer: Answer, status: int, kind: str, body: bytes) -> None:
    answer.start(status, [("Content-Type", kind)], len(body))
    answer.data(body)
    answer.finish()
