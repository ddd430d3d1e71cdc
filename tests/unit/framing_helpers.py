"""Finding records in bytes that are here, fed piece by piece."""

from __future__ import annotations

from collections.abc import Callable

from stoker.data.framing.scan import Malformed, Scan, Spans

Scanner = Callable[[int, Spans], Scan]


def look_through(scanner: Scanner, data: bytes, ahead: int = 0) -> tuple[list[bytes], str, Malformed | None]:
    """The records, what they have in common, and what was wrong; `ahead`: so much more than is asked for is given."""
    spans, common, wrong = Spans(), "", None
    scan = scanner(len(data), spans)
    turns = 0
    try:
        want = next(scan)
        while True:
            turns += 1
            assert turns <= 4 * len(data) + 10, "it makes no headway"
            assert 0 <= want.start < len(data)
            want = scan.send(data[want.start : want.start + want.size_bytes + ahead])
    except StopIteration as done:
        common = done.value
    except Malformed as error:
        wrong = error
    assert wrong is None or 0 <= wrong.offset <= len(data)
    starts, stops = spans.starts.tolist(), spans.stops.tolist()
    assert all(0 <= start <= stop <= len(data) for start, stop in zip(starts, stops, strict=True))
    return [data[start:stop] for start, stop in zip(starts, stops, strict=True)], common, wrong
