"""Headers of S3's requests and answers: entity tags, dates and conditions. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from stoker.wire.http_dates import parse_http_date

_TAG = re.compile(r'(?:W/)?"([^"]*)"|([^\s,"]+)')
"""One of a list: in quotes it may have commas."""


class Outcome(Enum):
    """What becomes of a conditional request; the values are statuses."""

    GO_ON = 200
    NOT_MODIFIED = 304
    PRECONDITION_FAILED = 412


class Conditions(NamedTuple):
    """As they were sent; times in whole seconds since 1970. A date that cannot be read says nothing."""

    if_match: str | None = None
    if_none_match: str | None = None
    if_modified_since: int | None = None
    if_unmodified_since: int | None = None

    @property
    def are_none(self) -> bool:
        return self == Conditions()


def quoted_etag(etag: str) -> str:
    """As it stands in a header, or in XML before escaping; quotes that are there are not doubled."""
    return f'"{etag.strip().strip(chr(34))}"'


def conditions_of(headers: Mapping[bytes, bytes], prefix: str = "") -> Conditions:
    """Those of a request; of the source of a copy, with the prefix `x-amz-copy-source-`."""

    def text(name: str) -> str | None:
        value = headers.get(f"{prefix}{name}".encode())
        return None if value is None else value.decode("latin-1").strip()

    def date(name: str) -> int | None:
        value = text(name)
        return None if value is None else parse_http_date(value)

    return Conditions(
        text("if-match"), text("if-none-match"), date("if-modified-since"), date("if-unmodified-since")
    )


def evaluate(conditions: Conditions, etag: str, modified_s: float | None) -> tuple[Outcome, str]:
    """What becomes of a request for an object that is there, and the header that decided it.

    A tag says more than a time: If-Match counts and not If-Unmodified-Since, If-None-Match and not If-Modified-Since
    (RFC 9110, section 13.2.2; S3's GetObject). `modified_s` None: it is not known, and conditions on it hold.
    """
    if conditions.if_match is not None:
        if not _names(conditions.if_match, etag):
            return Outcome.PRECONDITION_FAILED, "If-Match"
    elif _is_later(modified_s, conditions.if_unmodified_since):
        return Outcome.PRECONDITION_FAILED, "If-Unmodified-Since"
    if conditions.if_none_match is not None:
        if _names(conditions.if_none_match, etag):
            return Outcome.NOT_MODIFIED, "If-None-Match"
    elif conditions.if_modified_since is not None and _is_not_later(modified_s, conditions.if_modified_since):
        return Outcome.NOT_MODIFIED, "If-Modified-Since"
    return Outcome.GO_ON, ""


def evaluate_write(conditions: Conditions, etag: str | None, modified_s: float | None) -> tuple[Outcome, str]:
    """What becomes of a write, or of a copy's source: nothing is "not modified" there, it has failed.

    `etag` None: there is no such object; then If-Match fails.
    """
    if etag is None:
        failed = conditions.if_match is not None
        return (Outcome.PRECONDITION_FAILED, "If-Match") if failed else (Outcome.GO_ON, "")
    outcome, why = evaluate(conditions, etag, modified_s)
    return (Outcome.PRECONDITION_FAILED if outcome is Outcome.NOT_MODIFIED else outcome), why


def _is_later(modified_s: float | None, than_s: int | None) -> bool:
    return modified_s is not None and than_s is not None and int(modified_s) > than_s


def _is_not_later(modified_s: float | None, than_s: int) -> bool:
    return modified_s is not None and int(modified_s) <= than_s


def _names(said: str, etag: str) -> bool:
    """Whether a list of tags names this one; a tag may come without its quotes, as S3 takes it."""
    if said == "*":
        return True
    tag = etag.strip().strip('"')
    return any((quoted or plain) == tag for quoted, plain in _TAG.findall(said))
