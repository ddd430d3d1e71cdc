"""Are 64 tenants held to what each may be sent, and does one with many connections take from the others?

One server, one object of 8 MiB in its cache, read again and again by every tenant. First each has a limit of its own:
what it was sent over what it may be sent. Then there is one limit for all, and one tenant floods with 32 connections
where each other has one: the least that another was sent over an equal share, and what the flooding one got; and how
long small reads of a tenant that reads nothing else take beside the flood, over how long they take without it.
"""

from __future__ import annotations

import os
import selectors
import socket
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from _common import parser, report
from _serving import serve

TENANTS = 64
LIMIT_BYTES_PER_S = 1_500_000
ALL_BYTES_PER_S = 96_000_000
FLOOD = 32
OBJECT_BYTES = 8 * 1024 * 1024
PART_BYTES = 256 * 1024
SMALL_BYTES = 1000
WARM_S = 1.0
SHARED = (
    "sent / limit of all",
    "least of the others / equal share",
    "the flooding one / equal share",
    "p50 of small reads beside the flood / without",
)


class Reading(NamedTuple):
    """One connection that asks for the object without an end."""

    tenant: int
    link: socket.socket


def token(tenant: int) -> str:
    """A tenant's."""
    return f"token-of-tenant-{tenant}"


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    seconds = 4.0 if options.quick else 10.0
    rounds = 3 if options.quick else 5
    with tempfile.TemporaryDirectory(prefix="tenants-") as name:
        folder = Path(name)
        (folder / "origin").mkdir()
        (folder / "origin/large").write_bytes(os.urandom(OBJECT_BYTES))
        (folder / "origin/small").write_bytes(os.urandom(SMALL_BYTES))
        own = [held_to_limits(folder, seconds) for _ in range(rounds)]
        shared = [flooded(folder, seconds) for _ in range(rounds)]
    figures: dict[str, object] = {"tenants": TENANTS}
    figures["sent / own limit, all tenants"] = statistics.median(statistics.mean(one) for one in own)
    figures["sent / own limit, least"] = statistics.median(min(one) for one in own)
    figures["sent / own limit, most"] = statistics.median(max(one) for one in own)
    for place, what in enumerate(SHARED):
        figures[what] = statistics.median(one[place] for one in shared)
    report("tenants", figures, options.json)


def access(folder: Path, egress_bytes_per_s: int) -> Path:
    """The file of access, with each tenant's own limit (0: none)."""
    path = folder / f"access-{egress_bytes_per_s}.toml"
    path.write_text(
        "".join(
            f'[principals.tenant-{number}]\nrules = ["b: read"]\ntokens = ["{token(number)}"]\n'
            f"egress = {egress_bytes_per_s}\n"
            for number in range(TENANTS + 1)
        )
    )
    return path


def held_to_limits(folder: Path, seconds: float) -> list[float]:
    """What each was sent over its own limit."""
    flags = "--access", str(access(folder, LIMIT_BYTES_PER_S))
    with serve(folder / "cache", folder / "origin", *flags) as server:
        warm(server.address)
        sent, took_s = read(server.address, list(range(TENANTS)), seconds)
    return [one / (LIMIT_BYTES_PER_S * took_s) for one in sent]


def flooded(folder: Path, seconds: float) -> tuple[float, float, float, float]:
    """With one limit for all: sent over that; least of the others, and the flooding one, over an equal share; small
    reads beside it over those without."""
    flags = "--access", str(access(folder, 0)), "--egress", str(ALL_BYTES_PER_S)
    with serve(folder / "cache", folder / "origin", *flags) as server:
        warm(server.address)
        alone: list[float] = []
        read(server.address, [], 0.5, alone)
        beside: list[float] = []
        sent, took_s = read(server.address, [0] * FLOOD + list(range(1, TENANTS)), seconds, beside)
    share = ALL_BYTES_PER_S * took_s / TENANTS
    return (
        sum(sent) / (ALL_BYTES_PER_S * took_s),
        min(sent[1:]) / share,
        sent[0] / share,
        statistics.median(beside) / statistics.median(alone),
    )


def warm(address: tuple[str, int]) -> None:
    """Have both objects in the cache."""
    for key in ("large", "small", "large"):
        with socket.create_connection(address, 60) as link:
            link.sendall(request(TENANTS, key, "Connection: close\r\n"))
            while link.recv(PART_BYTES):
                pass


def request(tenant: int, key: str, more: str = "") -> bytes:
    """Of that tenant."""
    lines = f"Host: b\r\nAuthorization: Bearer {token(tenant)}\r\n{more}"
    return f"GET /b/{key} HTTP/1.1\r\n{lines}\r\n".encode()


def read(
    address: tuple[str, int], tenants: Sequence[int], seconds: float, small_s: list[float] | None = None
) -> tuple[list[int], float]:
    """Bytes that each tenant was sent, and in how long; a connection for each mention of one. `small_s`: how long small
    reads took, which are made meanwhile."""
    sent = [0] * TENANTS
    links = [Reading(tenant, socket.create_connection(address, 60)) for tenant in tenants]
    small = socket.create_connection(address, 60)
    with selectors.DefaultSelector() as selector:
        for reading in links:
            reading.link.sendall(request(reading.tenant, "large") * 64)
            reading.link.setblocking(False)
            selector.register(reading.link, selectors.EVENT_READ, reading.tenant)
        small.setblocking(False)
        asked_at = 0.0
        if small_s is not None:
            selector.register(small, selectors.EVENT_READ, -1)
            asked_at = ask(small)
        began = time.perf_counter()
        counts_from = began + (WARM_S if tenants else 0.0)
        until = counts_from + seconds
        while (now := time.perf_counter()) < until:
            for key, _ in selector.select(0.05):
                assert isinstance(key.fileobj, socket.socket)
                part = len(key.fileobj.recv(PART_BYTES))
                if key.data >= 0:
                    sent[key.data] += part if now >= counts_from else 0
                elif small_s is not None:
                    small_s.append(time.perf_counter() - asked_at)
                    asked_at = ask(small)
    for reading in links:
        reading.link.close()
    small.close()
    return sent, time.perf_counter() - counts_from


def ask(small: socket.socket) -> float:
    """For the small object; when."""
    small.send(request(TENANTS, "small"))
    return time.perf_counter()


if __name__ == "__main__":
    main()
