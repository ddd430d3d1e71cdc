"""What is looked at next of the announced reads, and how far ahead."""

from __future__ import annotations

import numpy as np

from stoker.cache.coming import Stream
from stoker.cache.prefetch import LOOKED_AT_ONCE, Look, Prefetch

MB = 1_000_000


def stream(reads: int, *, read_s: float = 1.0, plan: int = 0) -> Stream:
    made = Stream("job", plan, read_s=read_s, now=0.0)
    made.announce(0, reads, np.arange(reads, dtype=np.uint64), np.arange(reads))
    return made


def looks(core: Prefetch, streams: dict[str, Stream]) -> list[tuple[str, int, int]]:
    found: list[tuple[str, int, int]] = []
    while (look := core.next(streams)) is not None:
        found.append(look[:3])
    return found


def learnt(window_bytes: int, read_bytes: int) -> Prefetch:
    core = Prefetch(window_bytes)
    for _ in range(500):
        core.came(read_bytes)
    return core


def test_no_further_ahead_than_a_window_of_bytes() -> None:
    core, one = learnt(10 * MB, MB), stream(100)
    assert looks(core, {"a": one}) == [("a", 0, 10)]
    one.advance(3, 3.0)
    assert looks(core, {"a": one}) == [("a", 10, 13)]
    assert core.ahead("a", one) == 10
    one.advance(50, 50.0)
    assert looks(core, {"a": one}) == [("a", 50, 60)], "what was passed over is not looked at"


def test_what_is_due_first_comes_first_over_all_streams() -> None:
    core = learnt(4000 * MB, MB)
    quick, slow = stream(1000, read_s=0.1), stream(1000, read_s=1.0)
    order = [(look.stream, look.start) for look in iter(lambda: core.next({"q": quick, "s": slow}), None)]
    assert order[:2] in ([("q", 0), ("s", 0)], [("s", 0), ("q", 0)])
    assert order[2:4] == [("q", LOOKED_AT_ONCE), ("q", 2 * LOOKED_AT_ONCE)]
    assert [start for name, start in order if name == "s"] == [0, 256, 512, 768]


def test_streams_share_the_window() -> None:
    core = learnt(20 * MB, MB)
    assert looks(core, {"a": stream(100), "b": stream(100)}) == [("a", 0, 10), ("b", 0, 10)]


def test_of_a_part_of_a_stream_the_window_has_as_many_reads() -> None:
    core, part = learnt(10 * MB, MB), Stream("job", 0, read_s=1.0, now=0.0)
    part.announce(0, 1000, np.arange(100, dtype=np.uint64), np.arange(0, 1000, 10))
    assert looks(core, {"a": part}) == [("a", 0, 100)]
    part.announce(1000, 10**9, np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.int64))
    part.advance(1000, 1000.0)
    assert len(looks(core, {"a": part})) == 1, "where nothing is read there is nothing to look at"


def test_two_reads_are_ahead_however_large_they_are() -> None:
    assert looks(learnt(1000, MB), {"a": stream(5)}) == [("a", 0, 2)]


def test_a_new_plan_begins_anew_and_one_that_is_gone_is_forgotten() -> None:
    core = learnt(10 * MB, MB)
    looks(core, {"a": stream(100)})
    assert looks(core, {"a": stream(100, plan=1)}) == [("a", 0, 10)]
    assert looks(core, {}) == []
    assert looks(core, {"a": stream(100, plan=1)}) == [("a", 0, 10)]


def test_what_could_not_be_kept_is_fetched_once_there_is_room_again() -> None:
    core, one = learnt(10 * MB, MB), stream(100)
    looks(core, {"a": one})
    core.bar("a", {"a": one})
    assert core.next({"a": one}) is None
    one.advance(4, 4.0)
    assert core.next({"a": one}) is None
    one.advance(5, 5.0)
    assert looks(core, {"a": one}) == [("a", 5, 15)]
    core.bar("gone", {"a": one})


def test_what_is_announced_anew_is_looked_at_once_more() -> None:
    core, one = learnt(10 * MB, MB), stream(100)
    looks(core, {"a": one})
    one.announce(6, 50, np.arange(50, dtype=np.uint64), np.arange(6, 56))
    core.back("a", 6)
    assert core.next({"a": one}) == Look("a", 6, 10, "due in 6.0 s, before all others")


def test_large_reads_share_their_streams_part_of_the_window_by_bytes() -> None:
    core, streams = Prefetch(100 * MB), {"a": stream(100), "b": stream(100)}
    looks(core, streams)
    assert core.share_of("a", 0, 30 * MB, streams) == 30 * MB
    assert core.share_of("a", 1, 30 * MB, streams) == 20 * MB, "half of the window is the other stream's"
    assert core.share_of("a", 2, 30 * MB, streams) == 0
    assert core.share_of("b", 0, 80 * MB, streams) == 50 * MB
    assert core.share_of("a", 1, 30 * MB, streams) == 20 * MB, "looked at once more, it counts once"
    streams["a"].advance(0, 0.0, 1)
    assert core.share_of("a", 2, 30 * MB, streams) == 30 * MB, "the first is asked for"
    assert core.share_of("c", 0, MB, streams) == 0
