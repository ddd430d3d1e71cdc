"""When origins say that an object was written. Pure."""

from __future__ import annotations

from datetime import datetime
from email.utils import parsedate_to_datetime


def seconds_of(date: str) -> float:
    """A date as HTTP or as ISO 8601 says it, as seconds since 1970; 0 if it is none."""
    for read in (parsedate_to_datetime, datetime.fromisoformat):
        try:
            return read(date).timestamp()
        except (ValueError, OverflowError):
            continue
    return 0.0
