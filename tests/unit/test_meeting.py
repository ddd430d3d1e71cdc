"""Barriers and sync points as the master keeps them."""

from __future__ import annotations

import msgspec
import pytest

from stoker.errors import ConfigError, WireError
from stoker.job.meeting import NAMES_MAX, Meetings
from stoker.wire.job import Member, World
from stoker.wire.meeting import Arrive, decode_met


def world(generation: int, *workers: str) -> World:
    members = tuple(Member(w, "n", i, i, len(workers), 0, False) for i, w in enumerate(workers))
    return World(generation, members, 0, 0, "127.0.0.1:1")


class Story:
    """Calls in, answers out."""

    def __init__(self, meetings: Meetings | None = None) -> None:
        self.meetings = meetings or Meetings()
        self.records: dict[str, bytes] = {}
        self.number = 0

    def enter(self, generation: int, *workers: str) -> None:
        self.meetings.on_world(world(generation, *workers), workers, 0.0)

    def barrier(self, worker: str, name: str = "b", generation: int = 1, turn: int = 0) -> list[str]:
        return self.arrive(worker, Arrive("barrier", name, generation, turn))

    def arrive(self, worker: str, arrive: Arrive) -> list[str]:
        """Who is answered."""
        self.number += 1
        self.meetings.call(worker, self.number, msgspec.msgpack.encode(arrive), 0.0)
        served = self.meetings.take()
        self.records.update({k: v for k, v in served.records.items() if v is not None})
        self.last = [decode_met(a.answer.body) for a in served.answers]
        return [a.worker for a in served.answers]

    def restart(self, *workers: str) -> Story:
        """The master dies; the next one has the records."""
        after = Story(Meetings(self.records))
        after.meetings.on_world(world(1, *workers), workers, 0.0)
        return after


def test_all_are_answered_when_the_last_has_come() -> None:
    story = Story()
    story.enter(1, "w0", "w1", "w2")
    assert story.barrier("w0") == []
    assert story.barrier("w2") == []
    assert sorted(story.barrier("w1")) == ["w0", "w1", "w2"]


def test_a_barrier_may_be_used_again() -> None:
    story = Story()
    story.enter(1, "w0", "w1")
    story.barrier("w0")
    story.barrier("w1")
    assert story.barrier("w0", turn=1) == [], "the first turn's callers do not count for the second"
    assert sorted(story.barrier("w1", turn=1)) == ["w0", "w1"]


def test_who_waits_for_one_that_has_left_the_world_is_told() -> None:
    story = Story()
    story.enter(1, "w0", "w1", "w2")
    story.barrier("w0", "before")
    story.barrier("w1", "after")
    story.meetings.on_left("w0")
    served = story.meetings.take()
    assert [(a.worker, decode_met(a.answer.body).all_there) for a in served.answers] == [("w1", False)]
    assert story.barrier("w2", "after") == ["w2"]
    assert not story.last[0].all_there
    assert story.barrier("w1", "before") == []
    assert sorted(story.barrier("w2", "before")) == ["w0", "w1", "w2"], "w0 had come there before it left"
    story.enter(2, "w0", "w1", "w2")
    assert story.barrier("w1", "after", generation=2) == [], "all are back"


def test_who_waits_for_one_that_has_returned_is_told_of_the_mistake() -> None:
    story = Story()
    story.enter(1, "w0", "w1", "w2")
    story.barrier("w0", "b")
    story.meetings.on_finished("w1")
    (refused,) = story.meetings.take().answers
    assert refused.worker == "w0"
    assert refused.answer.error.startswith(
        "w1 has returned from the @stoker.elastic function without having come"
    )
    story.meetings.call("w2", 9, msgspec.msgpack.encode(Arrive("barrier", "b", 1, 0)), 0.0)
    assert "equally often" in story.meetings.take().answers[0].answer.error
    story.enter(2, "w0", "w1", "w2")
    assert story.barrier("w0", generation=2) == [], "it has been called again"


def test_names_are_apart() -> None:
    story = Story()
    story.enter(1, "w0", "w1")
    assert story.barrier("w0", "save") == []
    assert story.barrier("w1", "load") == []


def test_a_new_world_begins_anew() -> None:
    story = Story()
    story.enter(1, "w0", "w1", "w2")
    story.barrier("w0")
    story.barrier("w1")
    story.enter(2, "w0", "w1")
    assert story.barrier("w0", generation=1) == [], "a late call of the old world"
    assert story.barrier("w0", generation=2) == []
    assert sorted(story.barrier("w1", generation=2)) == ["w0", "w1"]


def test_an_answer_that_was_lost_with_the_master_is_given_by_the_next_one() -> None:
    story = Story()
    story.enter(1, "w0", "w1")
    story.barrier("w0")
    story.barrier("w1")
    after = story.restart("w0", "w1")
    assert after.barrier("w1") == ["w1"], "the others are long past it"
    assert after.barrier("w0", turn=1) == []


def test_a_sync_point_tells_at_once_and_survives_the_master() -> None:
    story = Story()
    story.enter(1, "w0", "w1")
    assert story.arrive("w0", Arrive("sync", "ready")) == ["w0"]
    assert (story.last[0].all_there, story.last[0].missing) == (False, 1)
    after = story.restart("w0", "w1")
    after.arrive("w1", Arrive("sync", "ready"))
    assert after.last[0].all_there
    after.enter(2, "w0", "w1", "w2")
    after.arrive("w0", Arrive("sync", "ready"))
    assert after.last[0].missing == 1, "a newcomer has to come there, too"


def test_before_there_is_a_world_all_workers_are_meant() -> None:
    story = Story()
    story.meetings.on_world(None, ["w0", "w1"], 0.0)
    story.arrive("w0", Arrive("sync", "ready"))
    assert story.last[0].missing == 1
    story.arrive("w1", Arrive("sync", "ready"))
    assert story.last[0].all_there
    story.meetings.on_world(None, ["w1", "w2"], 0.0)
    story.arrive("w1", Arrive("sync", "ready"))
    assert story.last[0].missing == 1, "w2 has taken the place of w0"


def test_nothing_is_kept_of_workers_that_are_gone() -> None:
    story = Story()
    story.enter(1, "w0", "w1")
    story.arrive("w0", Arrive("sync", "ready"))
    story.arrive("w1", Arrive("sync", "ready"))
    story.enter(2, "w1")
    removed = {key for key, value in story.meetings.take().records.items() if value is None}
    assert removed == {"meeting/sync/w0"}


def test_only_members_of_the_world_are_waited_for() -> None:
    story = Story()
    assert story.barrier("w0", generation=0) == [], "there is no world"
    story.enter(1, "w0", "w1")
    assert story.barrier("w2") == [], "it is in no world"
    assert story.barrier("w0") == []
    assert sorted(story.barrier("w1")) == ["w0", "w1"]


def test_what_is_kept_stays_small() -> None:
    story = Story()
    story.enter(1, "w0")
    for n in range(NAMES_MAX):
        story.barrier("w0", f"b{n}")
        story.arrive("w0", Arrive("sync", f"s{n}"))
    with pytest.raises(ConfigError, match="1000 barriers"):
        story.barrier("w0", "one more")
    with pytest.raises(ConfigError, match="1000 sync points"):
        story.arrive("w0", Arrive("sync", "one more"))
    assert story.barrier("w0", "b0", turn=1) == ["w0"], "one name serves any number of times"


@pytest.mark.parametrize("key", ["meeting/turns", "meeting/sync/w0"])
def test_a_record_that_cannot_be_read_is_named(key: str) -> None:
    with pytest.raises(WireError, match=f"record '{key}' cannot be read"):
        Meetings({key: b"\xc1"})


def test_nonsense_is_refused() -> None:
    for body in (
        b"",
        b"\xff",
        msgspec.msgpack.encode(Arrive("barrier", "", 1)),
        msgspec.msgpack.encode({"a": 1}),
    ):
        with pytest.raises(WireError):
            Meetings().call("w0", 1, body, 0.0)
