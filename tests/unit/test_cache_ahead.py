"""What is fetched ahead of readers, in simulations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.cache.ahead import FILES_MAX, Limits, ReadAhead

LIMITS = Limits(4, 64)
COUNT = 1000


class World:
    """Files of which blocks come in the order in which they are fetched, each after a reader's step."""

    def __init__(self, limits: Limits = LIMITS, owns: Callable[[int], bool] = lambda block: True) -> None:
        self.core: ReadAhead[str] = ReadAhead()
        self.limits = limits
        self.owns = owns
        self.held: set[int] = set()
        self.coming: list[int] = []
        self.coming_max = 0
        self.fetched_ahead = 0
        self.waits = 0

    def wants(self, block: int) -> bool:
        return self.owns(block) and block not in self.held and block not in self.coming

    def take(self, blocks: tuple[int, ...]) -> None:
        assert all(self.wants(block) for block in blocks)
        assert len(set(blocks)) == len(blocks)
        self.coming += blocks
        self.fetched_ahead += len(blocks)
        self.coming_max = max(self.coming_max, len(self.coming))

    def read(self, block: int) -> None:
        """A reader's step: what is held needs nobody to be asked."""
        if block in self.held:
            return
        self.waits += 1
        self.take(self.core.asked("f", block, COUNT, self.limits, self.wants, 0.0).blocks)
        self.held.add(block)
        if block in self.coming:
            self.coming.remove(block)
            self.take(self.core.came("f", self.limits, self.wants).blocks)

    def come(self, count: int) -> None:
        """Some of what is coming has come."""
        for _ in range(min(count, len(self.coming))):
            self.held.add(self.coming.pop(0))
            self.take(self.core.came("f", self.limits, self.wants).blocks)


def test_one_block_is_no_sign_and_the_next_one_is() -> None:
    world = World()
    world.read(0)
    assert world.coming == []
    world.read(1)
    assert world.coming == [2, 3, 4, 5]


def test_who_reads_on_waits_seldom_and_the_line_is_full() -> None:
    world = World()
    for block in range(COUNT):
        world.read(block)
        world.come(2)
    assert world.held == set(range(COUNT))
    assert world.coming_max == 4
    assert world.waits <= 60


def test_nothing_is_fetched_beyond_the_distance_or_the_end() -> None:
    world = World(Limits(4, 10))
    for block in range(40):
        world.read(block)
    world.come(1000)
    assert max(world.held) <= 39 + 10
    end = World()
    for block in range(COUNT - 3, COUNT):
        end.read(block)
    end.come(10)
    assert max(end.held) == COUNT - 1


def test_who_reads_here_and_there_has_nothing_fetched() -> None:
    world = World()
    for block in range(0, COUNT, 37):
        world.read(block)
        world.come(10)
    assert world.fetched_ahead == 0


@pytest.mark.parametrize("readers", [2, 5, 8])
def test_several_who_read_on_in_one_file_each_have_a_run(readers: int) -> None:
    world = World()
    places = [reader * 100 for reader in range(readers)]
    for step in range(50):
        for place in places:
            world.read(place + step)
        world.come(4)
    assert world.fetched_ahead >= readers * 20


def test_a_server_fetches_only_what_is_its_own_of_a_striped_file() -> None:
    world = World(Limits(4, 64, 4), owns=lambda block: block % 4 == 1)
    world.read(1)
    world.read(5)
    assert world.coming == [9, 13, 17, 21]
    for block in range(9, COUNT, 4):
        world.read(block)
        world.come(4)
    assert world.fetched_ahead > 200
    assert all(block % 4 == 1 for block in world.held)


def test_while_there_is_no_room_nothing_is_begun_and_what_follows_is_not_lost() -> None:
    world = World()
    world.read(0)
    world.read(1)
    world.limits = Limits(0, 64)
    world.come(4)
    world.read(6)
    assert world.coming == []
    world.limits = LIMITS
    world.read(7)
    assert world.coming == [8, 9, 10, 11]


def test_what_cannot_be_kept_is_fetched_no_more() -> None:
    world = World()
    world.read(0)
    world.read(1)
    world.core.stop("f")
    world.come(4)
    assert world.coming == []


def test_files_that_are_not_read_any_more_are_forgotten() -> None:
    core: ReadAhead[int] = ReadAhead()
    for name in range(3 * FILES_MAX):
        core.asked(name, 0, COUNT, LIMITS, lambda block: True, 0.0)
    assert len(core) == FILES_MAX


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 5)), max_size=80), st.integers(0, 5))
def test_no_block_is_fetched_twice_and_never_too_many_at_once(
    steps: list[tuple[int, int]], streams: int
) -> None:
    world = World(Limits(streams, 20))
    for block, come in steps:
        world.read(block)
        world.come(come)
    assert world.coming_max <= streams


def test_what_may_be_fetched_ahead_is_shared_by_all_who_read_on() -> None:
    core: ReadAhead[int] = ReadAhead()
    limits = Limits(4, 64)
    fetched = 0
    for name in range(16):
        core.asked(name, 0, COUNT, limits, lambda block: True, 0.0)
    for block in range(1, 40):
        for name in range(16):
            step = core.asked(name, block, COUNT, limits, lambda block: True, 0.0)
            for came in step.blocks:
                fetched = max(fetched, came - block)
                core.came(name, limits, lambda block: False)
    assert fetched <= 64 // 16 + 64, "the first had it all to themselves for a while"
    late: ReadAhead[int] = ReadAhead()
    for name in range(16):
        for block in range(2):
            late.asked(name, block, COUNT, limits, lambda block: True, 0.0)
    assert late.asked(15, 2, COUNT, limits, lambda block: True, 0.0).blocks == ()
    assert late.asked(15, 3, COUNT, limits, lambda block: True, 1000.0).blocks == (), "four are coming"


def test_where_who_comes_later_has_to_wait_one_is_begun_at_a_time() -> None:
    world = World(Limits(4, 64, 1, 1))
    world.read(0)
    world.read(1)
    assert world.coming == [2]
    world.read(3)
    assert world.coming == [2, 4]


def test_a_file_that_is_not_kept_is_left_alone_for_a_while() -> None:
    world = World()
    world.read(0)
    world.read(1)
    world.core.stop("f")
    world.come(4)
    before = world.fetched_ahead
    for block in range(6, 40):
        world.read(block)
    assert world.fetched_ahead == before
    for block in range(40, 100):
        world.read(block)
    assert world.fetched_ahead > before
