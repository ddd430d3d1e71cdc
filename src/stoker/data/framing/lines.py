"""Text: each line is a record, without its end (LF or CR LF). A byte order mark is no part of the first one."""

from __future__ import annotations

import numpy as np

from stoker.data.framing.scan import Malformed, Scan, Spans, Want

LINE_BYTES_MAX = 1 << 30
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LF, _CR = 10, 13


def scan(size_bytes: int, spans: Spans, *, keeps_empty: bool) -> Scan:
    """Find the lines of an object."""
    at, wanted = 0, 3
    while at < size_bytes:
        data = yield Want(at, wanted)
        if at == 0 and data.startswith(BYTE_ORDER_MARK):
            at, data = 3, data[3:]
        is_end = at + len(data) >= size_bytes
        seen = np.frombuffer(data, np.uint8)
        ends = np.flatnonzero(seen == _LF)
        if is_end and len(data) and data[-1] != _LF:
            ends = np.append(ends, len(data))
        if not len(ends):
            if is_end:
                break
            wanted = too_long(at, len(data))
            continue
        starts = np.concatenate(([0], ends[:-1] + 1))
        before = seen[np.maximum(ends - 1, 0)]
        stops = np.where((ends > starts) & (before == _CR), ends - 1, ends)
        if not keeps_empty:
            starts, stops = starts[stops > starts], stops[stops > starts]
        spans.extend(starts + at, stops + at)
        at += int(ends[-1]) + 1
        wanted = 1
    return ""


def too_long(at: int, seen_bytes: int) -> int:
    """How much to read where a record has not ended yet. Raises Malformed."""
    if seen_bytes >= LINE_BYTES_MAX:
        raise Malformed(f"a record is longer than {LINE_BYTES_MAX} bytes", at)
    return min(LINE_BYTES_MAX, 2 * seen_bytes + 1)
