"""`stoker cache top`: what is read right now, and from where."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import sys
import termios
import threading
import tty
from typing import Any, NamedTuple, TextIO

import msgspec
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from stoker.base.units import format_bytes, format_duration
from stoker.cache.client.client import CacheClient
from stoker.cli.cache_ask import describe_fleet, describe_troubles, fleet_of
from stoker.cli.cache_options import leaf, print_json, seconds, server_of
from stoker.cli.job_view import clean, console
from stoker.errors import EXIT_OK, CacheUnavailable
from stoker.wire.cache_api import BucketStatus, CacheStatus, FleetStatus


class BucketRates(msgspec.Struct, frozen=True):
    """Of one bucket between two looks. `hit_ratio` is None where nothing was asked for."""

    name: str
    hits_per_s: float
    hit_ratio: float | None
    cache_bytes_per_s: float
    origin_bytes_per_s: float
    origin_requests_per_s: float
    held_bytes: int
    origin_state: str


class Look(NamedTuple):
    """What a server says at one moment."""

    status: CacheStatus
    fleet: FleetStatus | None


def add_top_parser(commands: Any) -> None:
    """Add `top` to the commands of `stoker cache`."""
    top = leaf(
        commands, "top", "show again and again how much of each bucket is read, and from where", _top,
        "  stoker cache top\n  stoker cache top --interval 5s --json >> top.jsonl\n  stoker cache top --once\n\n"
        "q ends it. Rates are those of the server that is asked, over the interval; bytes from the cache are those of\n"
        "hits, bytes from the origin those that it was asked for.",
    )  # fmt: skip
    top.add_argument("--interval", metavar="TIME", type=seconds, default=1.0, help="between two looks (1s)")
    top.add_argument("--once", action="store_true", help="one interval, and no more")


def _top(arguments: argparse.Namespace) -> int:
    server = server_of(arguments)
    out = console(redraws=True)
    is_live = out.is_terminal and not arguments.json and not arguments.once
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(server.client())
        before = _look(client)
        keys = stack.enter_context(Keys(sys.stdin if is_live else None))
        live = stack.enter_context(Live(console=out, auto_refresh=False)) if is_live else None
        if live is not None:
            live.update(top_view(server.endpoint, before, []), refresh=True)
        while not keys.wait(arguments.interval):
            try:
                after = _look(client)
            except CacheUnavailable as error:
                if arguments.once:
                    raise
                lost = Text(clean(str(error)), "red")
                _show(arguments, live, lost, {"endpoint": server.endpoint, "problem": str(error)})
                continue
            rates = rates_between(before.status, after.status)
            view = top_view(server.endpoint, after, rates)
            _show(arguments, live, view, _as_json(server.endpoint, after, rates))
            before = after
            if arguments.once:
                break
    return EXIT_OK


def _look(client: CacheClient) -> Look:
    return Look(client.status(), fleet_of(client))


def _show(
    arguments: argparse.Namespace, live: Live | None, view: RenderableType, said: dict[str, Any]
) -> None:
    if arguments.json:
        print_json(said)
    elif live is not None:
        live.update(view, refresh=True)
    else:
        out = console()
        out.print(view)
        if not arguments.once:
            out.print()
        sys.stdout.flush()


def rates_between(before: CacheStatus, after: CacheStatus) -> list[BucketRates]:
    """Of each bucket, by the server's own clock. A server that has started anew meanwhile began with nothing."""
    passed_s = after.uptime_s - before.uptime_s
    known = {row.name: row for row in before.buckets}
    if passed_s <= 0:
        passed_s, known = after.uptime_s, {}
    return [_rates(known.get(row.name), row, max(passed_s, 1e-3)) for row in after.buckets]


def _rates(before: BucketStatus | None, after: BucketStatus, passed_s: float) -> BucketRates:
    def grown(name: str) -> int:
        return max(0, int(getattr(after, name)) - (0 if before is None else int(getattr(before, name))))

    hits, misses = grown("hits"), grown("misses")
    return BucketRates(
        name=after.name,
        hits_per_s=round(hits / passed_s, 3),
        hit_ratio=round(hits / (hits + misses), 4) if hits + misses else None,
        cache_bytes_per_s=round(grown("hit_bytes") / passed_s, 1),
        origin_bytes_per_s=round(grown("origin_bytes") / passed_s, 1),
        origin_requests_per_s=round(grown("origin_requests") / passed_s, 3),
        held_bytes=after.held_bytes,
        origin_state=after.origin_state,
    )


def _as_json(endpoint: str, look: Look, rates: list[BucketRates]) -> dict[str, Any]:
    status, fleet = look
    return {
        "endpoint": endpoint,
        "state": status.state,
        "uptime_s": status.uptime_s,
        "held_bytes": status.held_bytes,
        "capacity_bytes": status.capacity_bytes,
        "fleet": fleet,
        "notes": status.notes,
        "buckets": rates,
    }


def top_view(endpoint: str, look: Look, rates: list[BucketRates]) -> RenderableType:
    """A server and its buckets for people; without rates, before the first interval is over."""
    status, fleet = look
    style = "green" if status.state == "ok" else "red"
    head = Text.assemble(
        (clean(endpoint), "bold"), "  ", (clean(status.state), style), f"  up {format_duration(status.uptime_s)}  ",
        f"held {format_bytes(status.held_bytes)} of {format_bytes(status.capacity_bytes)}",
    )  # fmt: skip
    parts: list[RenderableType] = [head]
    if fleet is not None:
        parts.append(Text(f"  {describe_fleet(fleet)}", "red" if fleet.down else ""))
        parts += [Text(f"  {line}", "red") for line in describe_troubles(fleet)]
    parts += [Text(f"  note: {clean(note)}", "yellow") for note in status.notes]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("BUCKET", no_wrap=True)
    for name in ("HITS/S", "HIT RATIO", "FROM CACHE/S", "FROM ORIGIN/S", "ORIGIN REQ/S", "HELD"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("ORIGIN")
    for row in rates:
        table.add_row(
            clean(row.name),
            f"{row.hits_per_s:.4g}",
            "-" if row.hit_ratio is None else f"{row.hit_ratio:.1%}",
            format_bytes(row.cache_bytes_per_s),
            format_bytes(row.origin_bytes_per_s),
            f"{row.origin_requests_per_s:.4g}",
            format_bytes(row.held_bytes),
            Text("ok") if row.origin_state == "closed" else Text("fails, is left alone", "red"),
        )
    return Group(*parts, table)


class Keys:
    """Waits, and hears `q` meanwhile if there is a keyboard. The terminal is left as it was found."""

    def __init__(self, keyboard: TextIO | None) -> None:
        self._keyboard = keyboard if keyboard is not None and keyboard.isatty() else None
        self._before: list[Any] | None = None

    def __enter__(self) -> Keys:
        if self._keyboard is not None:
            self._before = termios.tcgetattr(self._keyboard)
            tty.setcbreak(self._keyboard, termios.TCSANOW)
        return self

    def __exit__(self, *_: object) -> None:
        if self._keyboard is not None and self._before is not None:
            termios.tcsetattr(self._keyboard, termios.TCSADRAIN, self._before)

    def wait(self, seconds_: float) -> bool:
        """Wait so long; True at once when `q` is hit."""
        if self._keyboard is None:
            return threading.Event().wait(seconds_)
        file = self._keyboard
        while select.select([file], [], [], seconds_)[0]:
            typed = os.read(file.fileno(), 64)
            if b"q" in typed or b"Q" in typed:
                return True
            if not typed:  # nobody is there any more
                self._keyboard = None
                return threading.Event().wait(seconds_)
        return False
