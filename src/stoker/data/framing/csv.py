"""CSV as Python's `csv` reads it: fields may be quoted, then they may have delimiters, line ends and doubled quotes.

Delimiter and quote are ASCII, so all of this works on UTF-8 as it stands.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from stoker.data.framing.lines import BYTE_ORDER_MARK, too_long
from stoker.data.framing.scan import Malformed, Scan, Spans, Want

_LF, _CR = b"\n", b"\r"


class Dialect(NamedTuple):
    """One ASCII character each; an empty quote: nothing is quoted."""

    delimiter: bytes = b","
    quote: bytes = b'"'


def scan(size_bytes: int, spans: Spans, dialect: Dialect, *, has_header: bool) -> Scan:
    """Find the records of an object; empty lines are none. Returns its header, as it stands."""
    at, wanted = 0, 3
    header = ""
    while at < size_bytes:
        data = yield Want(at, wanted)
        base = at
        place = 3 if at == 0 and data.startswith(BYTE_ORDER_MARK) else 0
        is_end = at + len(data) >= size_bytes
        while place < len(data):
            stop = record_end(data, place, dialect)
            if stop is None and not is_end:
                break
            if stop is None:
                raise Malformed("a quote is opened here, or later in this record, and never closed", at)
            if stop == len(data) and not is_end:
                break
            text_stop = stop - 1 if data[place:stop].endswith(_CR) else stop
            if text_stop > place and has_header:
                header, has_header = _header(data[place:text_stop], base + place), False
            elif text_stop > place:
                spans.add(base + place, base + text_stop)
            place = stop + 1
            at = base + place
        if is_end:
            break
        wanted = too_long(at, len(data)) if at == base else 1
    return header


def record_end(data: bytes, at: int, dialect: Dialect) -> int | None:
    """Where the record that begins at `at` ends: at a line end, or the end of data; None: inside quotes there."""
    line_end = _or_end(data.find(_LF, at), data)
    if not dialect.quote or data.find(dialect.quote, at, line_end) < 0:
        return line_end
    while True:
        if data.startswith(dialect.quote, at):
            closed = _closing(data, at + 1, dialect.quote)
            if closed is None:
                return None
            at = closed + 1
        line_end = _or_end(data.find(_LF, at), data)
        delimiter = data.find(dialect.delimiter, at, line_end)
        if delimiter < 0:
            return line_end
        at = delimiter + 1


def split(record: bytes, dialect: Dialect) -> list[str]:
    """The fields of one record. Raises Malformed."""
    try:
        if not dialect.quote or dialect.quote not in record:
            return record.decode().split(dialect.delimiter.decode())
        fields: list[str] = []
        at, end = 0, len(record)
        while True:
            text = b""
            if record.startswith(dialect.quote, at):
                closed = _closing(record, at + 1, dialect.quote)
                if closed is None:
                    raise Malformed("a quote is never closed", at)
                text = record[at + 1 : closed].replace(dialect.quote * 2, dialect.quote)
                at = closed + 1
            delimiter = record.find(dialect.delimiter, at)
            fields.append((text + record[at : end if delimiter < 0 else delimiter]).decode())
            if delimiter < 0:
                return fields
            at = delimiter + 1
    except UnicodeDecodeError as error:
        raise Malformed(f"it is not UTF-8: {error.reason}", error.start) from None


def _closing(data: bytes, at: int, quote: bytes) -> int | None:
    """Where the quote that ends a field is, which begins at `at`: the first that is not doubled."""
    pattern = re.compile(b"(?:[^%b]++|%b%b)*+%b" % ((re.escape(quote),) * 4))
    found = pattern.match(data, at)
    return None if found is None else found.end() - 1


def _header(record: bytes, offset: int) -> str:
    try:
        return record.decode()
    except UnicodeDecodeError as error:
        raise Malformed(f"the header is not UTF-8: {error.reason}", offset) from None


def _or_end(place: int, data: bytes) -> int:
    return len(data) if place < 0 else place
