"""Remarks of workers in the event log."""

from __future__ import annotations

import msgspec
import pytest

from stoker.errors import WireError
from stoker.job.remarks import Remarks
from stoker.wire.remarks import TEXT_CHARS_MAX, Remark


def body(text: str) -> bytes:
    return msgspec.msgpack.encode(Remark("checkpoint-failed", text))


def test_a_remark_is_written_once_and_answered_each_time() -> None:
    service = Remarks()
    service.call("w0", 3, body("No space left on device"), 0.0)
    service.call("w0", 3, body("No space left on device"), 1.0)
    service.call("w1", 3, body("it is full here, too"), 1.0)
    served = service.take()
    assert [(e.kind, e.why, e.details["worker"]) for e in served.events] == [
        ("checkpoint-failed", "No space left on device", "w0"),
        ("checkpoint-failed", "it is full here, too", "w1"),
    ]
    assert [(a.worker, a.answer.number) for a in served.answers] == [("w0", 3), ("w0", 3), ("w1", 3)]
    assert service.take() == ((), {}, ())


def test_long_and_wrong_ones() -> None:
    service = Remarks()
    service.call("w0", 1, body("x" * 10_000), 0.0)
    assert len(service.take().events[0].why) == TEXT_CHARS_MAX
    with pytest.raises(WireError):
        service.call(
            "w0", 2, msgspec.msgpack.encode({"type": "remark", "kind": "ended", "text": "all well"}), 0.0
        )


def test_figures_come_along_and_are_bounded() -> None:
    service = Remarks()
    service.call("w0", 1, msgspec.msgpack.encode(Remark("time-spent", "so long", {"waited_s": 1.5})), 0.0)
    (event,) = service.take().events
    assert (event.kind, event.details) == ("time-spent", {"worker": "w0", "figures": {"waited_s": 1.5}})
    for figures in ({str(number): 0.0 for number in range(65)}, {"x" * 65: 0.0}, {"x": "text"}):
        said = {"type": "remark", "kind": "time-spent", "text": "", "figures": figures}
        with pytest.raises(WireError):
            service.call("w0", 2, msgspec.msgpack.encode(said), 0.0)
