"""Points in time as HTTP, S3 and its signatures write them. Seconds are whole ones since 1970, UTC."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from email.utils import format_datetime, parsedate_to_datetime

_AMZ = re.compile(r"[0-9]{8}T[0-9]{6}Z")
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
    if _AMZ.fullmatch(text) is None:
        return None
    try:
        return int(datetime.strptime(text, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp())
    except ValueError:
        return None


def format_amz_date(seconds: float) -> str:
    """As `20260102T030405Z`."""
    return _datetime(seconds).strftime("%Y%m%dT%H%M%SZ")


def format_iso_date(seconds: float) -> str:
    """As S3's XML says it: `2026-01-02T03:04:05.000Z`."""
    return _datetime(seconds).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def _datetime(seconds: float) -> datetime:
    return datetime.fromtimestamp(min(max(0, int(seconds)), _SECONDS_MAX), UTC)
