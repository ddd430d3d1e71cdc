"""What `.stoker-status` says."""

from __future__ import annotations

from collections.abc import Mapping

from stoker.base.units import format_bytes
from stoker.cache.mount.source_port import Source
from stoker.errors import StokerError


def status_text(source: Source, path: str, facts: Mapping[str, object]) -> bytes:
    """Of a folder, for people and for scripts: one `name: value` a line. `facts`: what the daemon says of itself. It is
    looked at most when something is wrong: a cache that cannot be asked is said, and the rest is told."""
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
    lines += [f"{name}: {value}" for name, value in facts.items()]
    return "\n".join(lines).encode() + b"\n"
