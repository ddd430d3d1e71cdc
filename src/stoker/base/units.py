"""Parse and print sizes, rates and durations as people write them."""

from __future__ import annotations

import re

_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgtp]?)(i?)b?\s*$", re.IGNORECASE)
_DURATION = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|min|h|d)?\s*$", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_size_bytes(text: str) -> int:
    """`20GB` → 20·10⁹, `20GiB` → 20·2³⁰, `512` → 512. Raises ValueError, naming the text."""
    match = _SIZE.match(text)
    if match is None:
        raise ValueError(
            f"{text!r} is not a size: write a number with B, KB, MB, GB, TB or KiB, MiB, GiB, TiB"
        )
    number, power, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** _POWERS[power.lower()])


def parse_duration_s(text: str) -> float:
    """`90` and `90s` → 90.0, `2m` → 120.0, `1h`, `250ms`. Raises ValueError, naming the text."""
    match = _DURATION.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not a duration: write seconds, or a number with ms, s, m, h or d")
    number, unit = match.groups()
    return float(number) * _SECONDS[(unit or "s").lower()]


def format_bytes(size_bytes: float) -> str:
    """Three significant figures with a decimal unit: `1.50 MB`."""
    value = float(size_bytes)
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if abs(value) < 1000 or unit == "TB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    raise AssertionError("unreachable")


def format_duration(seconds: float) -> str:
    """`85 ms`, `4.2 s`, `3 min 20 s`, `2 h 5 min`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
