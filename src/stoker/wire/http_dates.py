"""Points in time as HTTP, S3 and its signatures write them. Seconds are whole ones since 1970, UTC."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from email.utils import format_datetime, parsedate_to_datetime
from functools import lru_cache

_AMZ = re.compile("([0-9]{4})" + "([0-9]{2})" * 2 + "T" + "([0-9]{2})" * 3 + "Z")
_ISO_SECONDS = [f"{second:02}.000Z" for second in range(60)]
_SECONDS_MAX = 253_402_300_799
"""The last second of the year 9999, the last that these forms can say."""


def parse_http_date(text: str) -> int | None:
    """Any of the three forms of RFC 9110, section 5.6.7; None: it is no date, and the header says nothing."""
    try:
        found = parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    if found.tzinfo is None:
        found = found.replace(tzinfo=UTC)
    try:
        return int(found.timestamp())
    except (ValueError, OverflowError):
        return None


def format_http_date(seconds: float) -> str:
    """As `Fri, 02 Jan 2026 03:04:05 GMT`."""
    return format_datetime(_datetime(seconds), usegmt=True)


def parse_amz_date(text: str) -> int | None:
    """What `x-amz-date` says, as `20260102T030405Z`; None: it is no such date."""
    found = _AMZ.fullmatch(text)
    if found is None:
        return None
    try:
        return int(datetime(*map(int, found.groups()), tzinfo=UTC).timestamp())  # type: ignore[arg-type,misc]
    except ValueError:
        return None


def format_amz_date(seconds: float) -> str:
    """As `20260102T030405Z`."""
    return _datetime(seconds).strftime("%Y%m%dT%H%M%SZ")


def format_iso_date(seconds: float) -> str:
    """As S3's XML says it: `2026-01-02T03:04:05.000Z`."""
    minute, second = divmod(_whole(seconds), 60)
    return _iso_minute(minute) + _ISO_SECONDS[second]


@lru_cache(maxsize=4096)
def _iso_minute(minute: int) -> str:
    """Lists say it of each object, and many are of the same."""
    return _datetime(minute * 60).strftime("%Y-%m-%dT%H:%M:")


def _whole(seconds: float) -> int:
    return min(max(0, int(seconds)), _SECONDS_MAX)


def _datetime(seconds: float) -> datetime:
    return datetime.fromtimestamp(_whole(seconds), UTC)
