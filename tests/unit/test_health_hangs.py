"""Who keeps a world from stepping: by stacks and counters."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.job.health_hangs import (
    INTERVAL_S,
    REPLY_S,
    SAMPLES,
    BreakWorld,
    GiveUp,
    HangEffect,
    HangWatch,
    Hung,
    Slow,
    TakeStacks,
)
from stoker.job.health_stacks import Standing, standing
from stoker.wire.health import Stacks
from tests.unit.health_dumps import (
    BACKWARD,
    EVALUATING,
    MOVING,
    QUEUEING,
    REDUCING,
    SPINNING,
    STUCK,
    WAITING_FOR_ORDERS,
    stacks,
    still,
)


class World:
    """A world that has stepped once and then stands still."""

    def __init__(self, size: int, *, stepped: bool = True, user_timeout_s: float = 300.0) -> None:
        self.watch = HangWatch(user_timeout_s=user_timeout_s)
        self.now = 0.0
        self.ranks = {f"w{rank}": rank for rank in range(size)}
        self.progress = dict.fromkeys(self.ranks, (5, 3))
        self.form(4)
        if stepped:
            self.report()

    def form(self, commits: int) -> None:
        self.watch.begin_world(self.ranks, commits, self.now)

    def report(self) -> None:
        for worker, (commits, progress) in self.progress.items():
            self.watch.observe(worker, commits, progress, self.now)

    def look(self) -> TakeStacks:
        """Let time pass until stacks are asked for."""
        for _ in range(10_000):
            self.now += 1.0
            self.report()
            for effect in self.watch.tick(self.now, 0.2):
                assert isinstance(effect, TakeStacks)
                return effect
        raise AssertionError("nobody looks")

    def answer(self, asked: TakeStacks, *dumps: list[Stacks]) -> list[HangEffect]:
        self.now += 2.0
        effects: list[HangEffect] = []
        for worker, samples in zip(asked.request.workers, dumps, strict=True):
            assert effects == [], "judged before everybody had answered"
            effects = self.watch.on_stacks(asked.request.look, worker, samples, self.now)
        return effects

    def judge(self, *dumps: list[Stacks]) -> list[HangEffect]:
        return self.answer(self.look(), *dumps)


def test_the_one_that_does_not_wait_is_the_culprit() -> None:
    world = World(4)
    asked = world.look()
    assert world.now == 60
    assert asked.request.workers == ("w0", "w1", "w2", "w3")
    assert "no progress of any of 4 workers for 60 s" in asked.why
    (hung,) = world.answer(
        asked, still(*REDUCING), still(*BACKWARD), still(*STUCK), still(*WAITING_FOR_ORDERS)
    )
    assert isinstance(hung, Hung)
    assert hung.worker == "w2"
    assert hung.why == (
        "rank 2 (w2) has not stepped for 62 s and stands in load (train.py:11) while ranks 0-1, 3 wait"
    )
    assert 'File "/home/me/train.py", line 11, in load' in hung.stacks


def test_a_rank_that_hangs_where_it_has_read_more_than_the_others_is_still_the_culprit() -> None:
    """Rank 0 evaluates alone, so it has the most progress, and the others wait for it in a collective."""
    world = World(2)
    world.progress["w0"] = (5, 40)
    (hung,) = world.judge(still(*QUEUEING), still(*REDUCING))
    assert isinstance(hung, Hung)
    assert hung.worker == "w0"


def test_of_several_that_do_not_wait_the_one_behind_goes() -> None:
    """On an accelerator the victims stand anywhere, for instance at `loss.item()`."""
    world = World(3)
    world.progress["w1"] = (5, 2)
    (hung,) = world.judge(still(*EVALUATING), still(*STUCK), still(*EVALUATING))
    assert isinstance(hung, Hung)
    assert hung.worker == "w1"
    assert "is behind the others (commit 5 and 2 batches and collectives)" in hung.why


def test_if_all_wait_the_one_behind_goes() -> None:
    world = World(3)
    world.progress["w2"] = (4, 9)
    (hung,) = world.judge(*[still(*REDUCING)] * 3)
    assert isinstance(hung, Hung)
    assert hung.worker == "w2"


def test_the_one_that_stands_elsewhere_than_all_others_goes() -> None:
    world = World(4)
    (hung,) = world.judge(still(*EVALUATING), still(*EVALUATING), still(*STUCK), still(*EVALUATING))
    assert isinstance(hung, Hung)
    assert hung.worker == "w2"
    assert hung.why.endswith("while all others stand elsewhere")


def test_if_nobody_stands_out_the_world_is_formed_again_once() -> None:
    world = World(3)
    (broken,) = world.judge(*[still(*REDUCING)] * 3)
    assert isinstance(broken, BreakWorld)
    assert (
        "3 of 3 stand in all_reduce (distributed_c10d.py:3252), called by train (train.py:20)" in broken.why
    )
    world.watch.end_world()
    world.form(5)
    formed_at = world.now
    for _ in range(2):  # the network may be away for longer than for one look
        (slow,) = world.judge(*[still(*REDUCING)] * 3)
        assert isinstance(slow, Slow)
        assert slow.why.endswith("nobody is to blame, and forming the world again has not helped")
    (over,) = world.judge(*[still(*REDUCING)] * 3)
    assert isinstance(over, GiveUp)
    assert over.why.endswith("and the timeout of 300 s is over")
    assert over.stacks.startswith("ranks 0-2:\n")
    assert 300 <= world.now - formed_at < 310


def test_a_culprit_in_the_world_that_was_formed_again_does_not_get_the_timeout() -> None:
    world = World(3)
    (broken,) = world.judge(*[still(*REDUCING)] * 3)
    assert isinstance(broken, BreakWorld)
    world.watch.end_world()
    world.form(5)
    formed_at = world.now
    (hung,) = world.judge(still(*REDUCING), still(*STUCK), still(*REDUCING))
    assert isinstance(hung, Hung)
    assert world.now - formed_at < 70


def test_a_commit_in_between_forgives() -> None:
    world = World(2)
    (broken,) = world.judge(*[still(*REDUCING)] * 2)
    assert isinstance(broken, BreakWorld)
    world.form(5)
    world.progress = dict.fromkeys(world.ranks, (6, 0))
    (again,) = world.judge(*[still(*REDUCING)] * 2)
    assert isinstance(again, BreakWorld)


def test_a_world_that_waits_for_its_storage_is_left_alone_until_the_timeout() -> None:
    world = World(3)
    (slow,) = world.judge(*[still(*QUEUEING)] * 3)
    assert isinstance(slow, Slow)
    assert slow.why.endswith("3 of 3 stand in load (train.py:11), none waits for another")
    (slow,) = world.judge(*[still(*QUEUEING)] * 3)
    assert isinstance(slow, Slow)
    (over,) = world.judge(*[still(*QUEUEING)] * 3)
    assert isinstance(over, GiveUp)
    assert world.now == 302


def test_of_two_that_stand_in_different_places_nobody_is_to_blame() -> None:
    world = World(2)
    (broken,) = world.judge(still(*STUCK), still(*EVALUATING))
    assert isinstance(broken, BreakWorld)


def test_most_of_a_world_is_not_dismissed_for_where_it_stands() -> None:
    world = World(4)
    (effect,) = world.judge(still(*REDUCING), still(*STUCK), still(*STUCK), still(*STUCK))
    assert isinstance(effect, BreakWorld)


def test_one_that_moves_is_slow_and_is_looked_at_again_ever_later() -> None:
    world = World(2)
    looks = []
    for _ in range(3):
        (slow,) = world.judge(MOVING, still(*REDUCING))
        looks.append(world.now - 2)
        assert isinstance(slow, Slow)
        assert "but is busy in evaluate (train.py:40)" in slow.why
    assert looks == [60, 60 + 2 * 60, 60 + 2 * 60 + 4 * 60]


def test_one_that_computes_in_one_call_is_given_another_look_and_then_goes() -> None:
    for awake in (SPINNING, [stacks(*STUCK, wakeups=7 + i) for i in range(3)]):
        world = World(2)
        (slow,) = world.judge(still(*REDUCING), awake)
        assert isinstance(slow, Slow)
        assert "may be busy in load (train.py:11)" in slow.why
        (hung,) = world.judge(still(*REDUCING), awake)
        assert isinstance(hung, Hung)
        assert world.now == 60 + 30 + 2


def test_one_that_moved_between_two_looks_is_slow() -> None:
    world = World(2)
    (first,) = world.judge(still(*REDUCING), SPINNING)
    (second,) = world.judge(still(*REDUCING), still(*EVALUATING, active=True))
    assert isinstance(first, Slow)
    assert isinstance(second, Slow)


def test_all_ranks_evaluating_for_long_is_no_hang() -> None:
    world = World(3)
    effects = world.judge(MOVING, MOVING, MOVING)
    assert [type(effect) for effect in effects] == [Slow] * 3


def test_without_any_stacks_the_one_behind_goes_at_the_second_look() -> None:
    world = World(2)
    world.progress["w1"] = (5, 1)
    nothing = [stacks(unavailable="py-spy is not installed")]
    (slow,) = world.judge(nothing, nothing)
    assert isinstance(slow, Slow)
    (hung,) = world.judge(nothing, nothing)
    assert isinstance(hung, Hung)
    assert hung.worker == "w1"
    assert "shows no stacks (py-spy is not installed)" in hung.why


def test_a_stopped_process_is_the_culprit() -> None:
    world = World(2)
    (hung,) = world.judge(still(*REDUCING), still(*REDUCING, state="T"))
    assert isinstance(hung, Hung)
    assert hung.why == "rank 1 (w1) has not stepped for 62 s and is stopped by a signal (state T)"


def test_a_lone_worker_that_hangs_goes() -> None:
    world = World(1)
    (hung,) = world.judge(still(*STUCK))
    assert isinstance(hung, Hung)


def test_stacks_that_do_not_come_are_not_waited_for() -> None:
    world = World(3)
    asked = world.look()
    world.watch.on_stacks(asked.request.look, "w0", still(*REDUCING), world.now)
    world.watch.on_stacks(asked.request.look, "w1", still(*STUCK), world.now)
    deadline = world.now + (SAMPLES - 1) * INTERVAL_S + REPLY_S
    assert world.watch.tick(deadline - 0.5, 0.2) == []
    (hung,) = world.watch.tick(deadline, 0.2)
    assert isinstance(hung, Hung)
    assert hung.worker == "w1"


def test_progress_ends_a_look() -> None:
    world = World(2)
    asked = world.look()
    world.progress["w0"] = (5, 4)
    world.report()
    assert world.watch.on_stacks(asked.request.look, "w0", still(*STUCK), world.now) == []
    assert world.watch.on_stacks(asked.request.look, "w1", still(*STUCK), world.now) == []
    began = world.now
    world.look()
    assert world.now - began == 60


def test_the_limit_follows_the_steps_and_the_first_ones_have_the_users_timeout() -> None:
    world = World(2, stepped=False)
    assert world.watch.limit_s(0.0) == 300
    world.watch.observe("w0", 5, 0, 1.0)
    assert world.watch.limit_s(0.0) == 300
    world.watch.observe("w1", 5, 0, 1.0)
    assert world.watch.limit_s(0.0) == 60
    assert world.watch.limit_s(20.0) == 200
    world.watch.begin_world({"w0": 0, "w1": 1, "new": 2}, 9, 2.0)
    assert world.watch.limit_s(0.0) == 300, "the newcomer compiles"
    world.watch.gone("new", 3.0)
    assert world.watch.limit_s(0.0) == 60


def test_those_who_have_finished_are_not_waited_for() -> None:
    world = World(3)
    world.watch.finished("w0", world.now)
    assert world.look().request.workers == ("w1", "w2")
    world.watch.end_world()
    assert world.watch.tick(world.now + 1e6, 0.2) == []


def test_a_worker_that_does_not_become_ready() -> None:
    watch = HangWatch(user_timeout_s=100.0)
    watch.started("w0", 0.0)
    watch.started("w1", 0.0)
    watch.ready("w1")
    assert watch.tick(99.0, 0.0) == []
    (asked,) = watch.tick(100.0, 0.0)
    assert isinstance(asked, TakeStacks)
    assert asked.request.workers == ("w0",)
    (slow,) = watch.on_stacks(asked.request.look, "w0", MOVING, 102.0)
    assert isinstance(slow, Slow)
    assert watch.tick(299.0, 0.0) == []
    (asked,) = watch.tick(300.0, 0.0)
    assert isinstance(asked, TakeStacks)
    watch.on_stacks(asked.request.look, "w0", still(*STUCK), 302.0)
    (asked,) = watch.tick(700.0, 0.0)
    assert isinstance(asked, TakeStacks)
    (hung,) = watch.on_stacks(asked.request.look, "w0", still(*STUCK), 702.0)
    assert isinstance(hung, Hung)
    assert hung.why == "w0 is not ready after 702 s and stands in load (train.py:11)"


@settings(deadline=None)
@given(
    size=st.integers(1, 6),
    data=st.data(),
)
def test_whatever_comes_somebody_is_told_and_waiting_ranks_are_not_accused_beside_working_ones(
    size: int, data: st.DataObject
) -> None:
    world = World(size)
    kinds = [still(*REDUCING), still(*BACKWARD), still(*STUCK), still(*EVALUATING), MOVING, SPINNING, []]
    kinds.append(still(*STUCK, state="T"))
    for worker in world.ranks:
        world.progress[worker] = (5, data.draw(st.integers(0, 2)))
    dumps = [data.draw(st.sampled_from(kinds)) for _ in range(size)]
    for _ in range(3):
        effects = world.judge(*dumps)
        assert effects
        hung = [effect.worker for effect in effects if isinstance(effect, Hung)]
        stuck = {w for w, d in zip(world.ranks, dumps, strict=True) if d and standing(d) is Standing.WORKS}
        if hung and any(d == kinds[2] for d in dumps) and not any(d and d[0].state == "T" for d in dumps):
            assert stuck & set(hung) or len(stuck) > size / 2
        moving = {w for w, d in zip(world.ranks, dumps, strict=True) if d is MOVING}
        assert not moving & set(hung)
        if not all(isinstance(effect, Slow) for effect in effects):
            break
