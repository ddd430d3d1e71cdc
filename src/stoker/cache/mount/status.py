"""What `.stoker-status` says."""

from __future__ import annotations

from collections.abc import Mapping

from stoker.base.units import format_bytes
from stoker.cache.mount.source_port import Source


def status_text(source: Source, path: str, facts: Mapping[str, object]) -> bytes:
    """Of a folder, for people and for scripts: one `name: value` a line. `facts`: what the daemon says of itself."""
    capacity_bytes, held_bytes = source.room()
    lines = [
        f"folder: /{path}",
        f"cache_capacity_bytes: {capacity_bytes}",
        f"cache_held_bytes: {held_bytes}",
        f"cache_held: {format_bytes(held_bytes)} of {format_bytes(capacity_bytes)}",
    ]
    lines += [f"{name}: {value}" for name, value in facts.items()]
    return "\n".join(lines).encode() + b"\n"
