"""What a mount's daemon knows of paths."""

from __future__ import annotations

import errno

from stoker.cache.mount.known import Known
from stoker.cache.mount.source_port import Found

FILE = Found(False, 5, "v", 1.0)


def test_what_is_old_is_not_known_and_still_there() -> None:
    known = Known(ttl_s=10.0, absent_ttl_s=1.0, count_max=10)
    known.put("a", FILE, 100.0)
    known.put("none", None, 100.0)
    assert known.get("a", 110.0) == (True, FILE)
    assert known.get("none", 101.0) == (True, None)
    assert known.get("a", 110.5) == known.get("none", 102.0) == (False, None)
    assert (known.last("a"), known.last("none"), known.last("other")) == (FILE, None, None)
    known.drop("a", 112.0)
    assert known.last("a") is None


def test_what_could_not_be_found_out_is_not_asked_again_at_once() -> None:
    known = Known(ttl_s=10.0, absent_ttl_s=1.0, count_max=10)
    assert known.failing("a", 0.0) == 0
    known.failed("a", errno.ETIMEDOUT, 100.0)
    assert known.failing("a", 105.0) == errno.ETIMEDOUT
    assert known.failing("b", 105.0) == 0
    assert known.failing("a", 111.0) == 0
    assert known.failing("a", 105.0) == 0, "what is over is forgotten"


def test_what_is_heard_or_dropped_does_not_fail() -> None:
    known = Known(ttl_s=10.0, absent_ttl_s=1.0, count_max=10)
    for path in ("a", "b", "c/d"):
        known.failed(path, errno.EIO, 100.0)
    known.put("a", FILE, 101.0)
    known.drop("b", 101.0)
    assert (known.failing("a", 102.0), known.failing("b", 102.0)) == (0, 0)
    assert known.failing("c/d", 102.0) == errno.EIO
    known.drop_below("c", 103.0)
    assert known.failing("c/d", 104.0) == 0


def test_it_does_not_grow_for_ever() -> None:
    known = Known(ttl_s=10.0, absent_ttl_s=1.0, count_max=3)
    for number in range(10):
        known.put(f"{number}", FILE, 100.0)
        known.failed(f"{number}", errno.EIO, 100.0)
    assert len(known) == 3
    assert [known.failing(f"{number}", 100.0) for number in range(6, 10)] == [
        0,
        errno.EIO,
        errno.EIO,
        errno.EIO,
    ]
