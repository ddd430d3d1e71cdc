"""What `.stoker-status` says."""

from __future__ import annotations

from collections.abc import Mapping

from stoker.base.units import format_bytes
from stoker.cache.mount.source_port import Source
from stoker.errors import StokerError

_WAITING = "waiting"
"""The fact that counts requests which have no answer yet."""


def status_text(source: Source, path: str, facts: Mapping[str, object]) -> bytes:
    """Of a folder, for people and for scripts: one `name: value` a line. `facts`: what the daemon says of itself, while
    who reads this waits. It is looked at most when something is wrong: a cache that cannot be asked is said, and the
    rest is told."""
    lines = [f"folder: /{path}"]
    try:
        capacity_bytes, held_bytes = source.room()
    except StokerError as error:
        lines.append(f"cache: cannot be asked: {' '.join(str(error).split())}")
    else:
        lines += [
            f"cache_capacity_bytes: {capacity_bytes}",
            f"cache_held_bytes: {held_bytes}",
            f"cache_held: {format_bytes(held_bytes)} of {format_bytes(capacity_bytes)}",
        ]
    lines += [f"{name}: {_without_reader(name, value)}" for name, value in facts.items()]
    return "\n".join(lines).encode() + b"\n"


def _without_reader(name: str, value: object) -> object:
    """Who waits for this very text is no news, unless it has been given up already."""
    return max(value - 1, 0) if name == _WAITING and isinstance(value, int) else value
