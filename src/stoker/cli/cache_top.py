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
from typing import Any, TextIO

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from stoker.base.units import format_bytes, format_duration
from stoker.cli.cache_ask import describe_fleet, describe_troubles
from stoker.cli.cache_looks import FleetLooks
from stoker.cli.cache_options import leaf, print_json, seconds, server_of
from stoker.cli.cache_rates import AWAY, BucketRates, Look, ServerRates, fleet_rates, shortest_s
from stoker.cli.job_view import clean, console
from stoker.errors import EXIT_OK, CacheUnavailable


def add_top_parser(commands: Any) -> None:
    """Add `top` to the commands of `stoker cache`."""
    top = leaf(
        commands, "top", "show again and again what all servers of the fleet read, and from where", _top,
        "  stoker cache top\n  stoker cache top --interval 5s --json >> top.jsonl\n  stoker cache top --once\n\n"
        "q ends it. The server that is asked says who else is in its fleet, and each of them is asked with the same\n"
        "token. Rates are over the interval; bytes from the cache are those of hits, from peers and from the origin\n"
        "those that were fetched. What one server gets from another counts at both: there as a hit, here from peers.",
    )  # fmt: skip
    top.add_argument("--interval", metavar="TIME", type=seconds, default=1.0, help="between two looks (1s)")
    top.add_argument("--once", action="store_true", help="one interval, and no more")


def _top(arguments: argparse.Namespace) -> int:
    server = server_of(arguments)
    out = console(redraws=True)
    is_live = out.is_terminal and not arguments.json and not arguments.once
    with contextlib.ExitStack() as stack:
        looks = stack.enter_context(FleetLooks(server))
        before = looks.look()
        keys = stack.enter_context(Keys(sys.stdin if is_live else None))
        live = stack.enter_context(Live(console=out, auto_refresh=False)) if is_live else None
        if live is not None:
            live.update(top_view(server.endpoint, before, [], []), refresh=True)
        while not keys.wait(arguments.interval):
            try:
                after = looks.look()
            except CacheUnavailable as error:
                if arguments.once:
                    raise
                lost = Text(clean(str(error)), "red")
                _show(arguments, live, lost, {"endpoint": server.endpoint, "problem": str(error)})
                continue
            servers, buckets = fleet_rates(before, after)
            view = top_view(server.endpoint, after, servers, buckets)
            _show(arguments, live, view, _as_json(server.endpoint, after, servers, buckets))
            before = after
            if arguments.once:
                break
    return EXIT_OK


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


def _as_json(
    endpoint: str, look: Look, servers: list[ServerRates], buckets: list[BucketRates]
) -> dict[str, Any]:
    status = look.status
    return {
        "endpoint": endpoint,
        "state": status.state,
        "uptime_s": status.uptime_s,
        "held_bytes": sum(one.held_bytes for one in servers),
        "capacity_bytes": sum(one.capacity_bytes for one in servers),
        "shortest_unused_s": shortest_s(servers),
        "fleet": look.fleet,
        "notes": status.notes,
        "servers": servers,
        "buckets": buckets,
    }


def top_view(
    endpoint: str, look: Look, servers: list[ServerRates], buckets: list[BucketRates]
) -> RenderableType:
    """Servers and their buckets for people; without rates, before the first interval is over."""
    status, fleet = look.status, look.fleet
    said = look.servers.values()
    held, capacity = sum(one.held_bytes for one in said), sum(one.capacity_bytes for one in said)
    head = Text.assemble(
        (clean(endpoint), "bold"), "  ", (clean(status.state), "green" if status.state == "ok" else "red"),
        f"  up {format_duration(status.uptime_s)}  held {format_bytes(held)} of {format_bytes(capacity)}",
    )  # fmt: skip
    shortest = shortest_s(servers)
    if shortest is not None:
        head.append(f"  shortest age at eviction {format_duration(shortest)}")
    parts: list[RenderableType] = [head]
    if fleet is not None:
        parts.append(Text(f"  {describe_fleet(fleet)}", "red" if fleet.down else ""))
        parts += [Text(f"  {line}", "red") for line in describe_troubles(fleet)]
    parts += [Text(f"  note: {clean(note)}", "yellow") for note in status.notes]
    if fleet is not None and servers:
        parts.append(_servers_table(servers))
    return Group(*parts, _buckets_table(buckets, in_fleet=fleet is not None))


def _table(first: str, *names: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(first, no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _servers_table(servers: list[ServerRates]) -> Table:
    table = _table(
        "SERVER", "HITS/S", "HIT RATIO", "FROM CACHE/S", "FROM PEERS/S", "FROM ORIGIN/S", "HELD", "OWNED/FAIR",
        "SHORTEST AGE",
    )  # fmt: skip
    table.add_column("STATE")
    for one in servers:
        if one.state == AWAY:
            table.add_row(clean(one.name), *["-"] * 8, Text(f"{AWAY}: {clean(one.problem)}", "red"))
            continue
        table.add_row(
            clean(one.name),
            f"{one.hits_per_s:.4g}",
            _percent(one.hit_ratio),
            format_bytes(one.cache_bytes_per_s),
            format_bytes(one.peer_bytes_per_s),
            format_bytes(one.origin_bytes_per_s),
            _percent(one.held_bytes / one.capacity_bytes if one.capacity_bytes else None),
            f"{one.owned_ratio / one.fair_ratio:.2f}" if one.owned_ratio and one.fair_ratio else "-",
            "-" if one.shortest_unused_s is None else format_duration(one.shortest_unused_s),
            Text(clean(one.state), "" if one.state == "ok" else "red"),
        )
    return table


def _buckets_table(buckets: list[BucketRates], *, in_fleet: bool) -> Table:
    peers = ("FROM PEERS/S",) if in_fleet else ()
    table = _table(
        "BUCKET", "HITS/S", "HIT RATIO", "FROM CACHE/S", *peers, "FROM ORIGIN/S", "ORIGIN REQ/S", "HELD"
    )
    table.add_column("ORIGIN")
    for row in buckets:
        table.add_row(
            clean(row.name),
            f"{row.hits_per_s:.4g}",
            _percent(row.hit_ratio),
            format_bytes(row.cache_bytes_per_s),
            *((format_bytes(row.peer_bytes_per_s),) if in_fleet else ()),
            format_bytes(row.origin_bytes_per_s),
            f"{row.origin_requests_per_s:.4g}",
            format_bytes(row.held_bytes),
            _origin(row),
        )
    return table


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.1%}"


def _origin(row: BucketRates) -> Text:
    if row.kind == "blobs":
        return Text("none: blobs")
    return Text("ok") if row.origin_state == "closed" else Text("fails, is left alone", "red")


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
