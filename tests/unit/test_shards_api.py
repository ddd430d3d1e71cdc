"""`stoker.shards()` in a script that runs alone."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from stoker.errors import ConfigError, JobError
from stoker.train.attempts import Attempt, attempts, is_broken_world
from stoker.train.shards import DynamicShards, LeasedShard, shards
from stoker.train.shards_session import ShardSession
from stoker.wire.shards import ShardStatus


def alone(records: int = 30, shard_size: int = 10, max_failures: int = 3) -> DynamicShards:
    return shards(
        "train", records=records, shard_size=shard_size, max_failures=max_failures, session=ShardSession()
    )


def failures(source: DynamicShards) -> tuple[int, int]:
    status = source.status()
    assert status.doing == 0
    return status.failures, status.todo


def test_a_loop_does_all_shards_of_all_epochs() -> None:
    source = shards("train", records=25, shard_size=10, epochs=2, shuffle=True, session=ShardSession())
    assert len(source) == 6
    read = Counter((shard.epoch, record) for shard in source for record in shard.records)
    assert read == Counter((epoch, record) for epoch in range(2) for record in range(25))
    assert source.status().is_finished
    assert list(source) == []
    assert source, "an empty loop is no empty dataset"


def test_a_loop_that_is_left_early_hands_its_shard_back() -> None:
    source = alone()
    for shard in source:
        if shard.number == 1:
            break
    assert failures(source) == (0, 2)
    assert [shard.number for shard in source] == [1, 2]


def leave_by_return(source: DynamicShards) -> LeasedShard | None:
    for shard in source:
        return shard
    return None


def leave_after_a_caught_error(source: DynamicShards) -> None:
    kept = []
    for _ in source:
        try:
            int("x")
        except ValueError as error:
            kept.append(error)
            break


def leave_inside_finally(source: DynamicShards) -> None:
    for _ in source:
        try:
            break
        finally:
            str(source)


def leave_an_enumeration(source: DynamicShards) -> None:
    for _, _ in enumerate(source):
        break


@pytest.mark.parametrize(
    "leave", [leave_by_return, leave_after_a_caught_error, leave_inside_finally, leave_an_enumeration]
)
def test_leaving_a_loop_is_no_failure(leave: Callable[[DynamicShards], object]) -> None:
    source = alone()
    leave(source)
    assert failures(source) == (0, 3)


def raise_plainly(source: DynamicShards) -> None:
    for _ in source:
        raise ValueError("bad record")


def raise_deeper(source: DynamicShards) -> None:
    for _ in source:
        int("x")


def raise_through_finally(source: DynamicShards) -> None:
    for _ in source:
        try:
            int("x")
        finally:
            str(source)


def raise_again(source: DynamicShards) -> None:
    for _ in source:
        try:
            int("x")
        except ValueError:
            raise


def raise_in_an_enumeration(source: DynamicShards) -> None:
    for _, shard in enumerate(source):
        with memoryview(b"x"):
            shard.records[100]


@pytest.mark.parametrize(
    "leave", [raise_plainly, raise_deeper, raise_through_finally, raise_again, raise_in_an_enumeration]
)
def test_an_exception_that_leaves_a_loop_is_a_failure(leave: Callable[[DynamicShards], None]) -> None:
    source = alone(max_failures=2)
    with pytest.raises((ValueError, IndexError)):
        leave(source)
    assert failures(source) == (1, 3)
    with pytest.raises(JobError, match=r"shard 0 of dataset 'train' .* failed 2 times, last with: once more"):
        _ = [shard.fail("once more") for shard in source if shard.number == 0]


def test_a_failed_job_names_where_the_exception_left_the_loop() -> None:
    source = alone(max_failures=1)
    with pytest.raises(ValueError, match="bad record"):
        raise_plainly(source)
    with pytest.raises(JobError, match=rf"left the loop at {__file__}:\d+$"):
        list(source)


def test_nothing_is_said_of_a_loop_in_a_generator() -> None:
    """Whether its own loop was left by `break` or by an exception cannot be told there."""

    def doubled(source: DynamicShards) -> Iterator[int]:
        for shard in source:
            yield shard.number * 2

    source = alone()
    for _ in doubled(source):
        break
    assert failures(source) == (0, 3)


def test_a_generator_that_hands_an_exception_through_is_understood() -> None:
    def passed_on(source: DynamicShards) -> Iterator[LeasedShard]:
        yield from source

    source = alone()
    loop = passed_on(source)
    next(loop)
    with pytest.raises(OSError, match="disk"):
        loop.throw(OSError("disk"))  # type: ignore[attr-defined]
    assert failures(source) == (1, 3)


def work_in_blocks(source: DynamicShards, work: Callable[[LeasedShard], object]) -> None:
    for shard in source:
        with shard:
            work(shard)


def interrupt(_: LeasedShard) -> None:
    raise KeyboardInterrupt


def test_a_block_tells_the_whole_reason() -> None:
    source = alone(max_failures=1)
    with pytest.raises(ZeroDivisionError):
        work_in_blocks(source, lambda shard: 1 / (shard.number - 1))
    assert source.status().done == 1
    why = r"shard 1 of dataset 'train' \(records \[10, 20\) of epoch 0\) failed 1 times(.|\n)*ZeroDivisionError: div"
    with pytest.raises(JobError, match=why):
        list(source)


def test_an_interrupted_block_is_no_failure() -> None:
    session = ShardSession()
    source = shards("train", records=30, shard_size=10, session=session)
    with pytest.raises(KeyboardInterrupt):
        work_in_blocks(source, interrupt)
    assert failures(source) == (0, 3)
    session.is_interrupted = lambda: True
    with pytest.raises(ZeroDivisionError):
        work_in_blocks(source, lambda shard: 1 / shard.number)
    with pytest.raises(ValueError, match="bad record"):
        raise_plainly(source)
    assert failures(source) == (0, 3)


def test_a_caught_exception_goes_on_until_the_shard_has_failed_too_often() -> None:
    source = alone()
    seen: list[int] = []

    def attempt() -> None:
        for shard in source:
            seen.append(shard.number)
            if shard.number == 1:
                raise ValueError("bad record")

    def run() -> None:
        while not source.status().is_finished:
            with contextlib.suppress(ValueError):
                attempt()

    with pytest.raises(JobError, match="shard 1 of dataset 'train'"):
        run()
    assert Counter(seen) == {0: 1, 1: 3, 2: 1}


PEER_GONE = "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:38011"


def lose_a_peer(_: LeasedShard) -> None:
    raise RuntimeError(PEER_GONE)


def lose_a_peer_and_wrap_it(shard: LeasedShard) -> None:
    try:
        lose_a_peer(shard)
    except RuntimeError as error:
        raise LookupError("step 20 failed") from error


@pytest.mark.parametrize("work", [lose_a_peer, lose_a_peer_and_wrap_it])
def test_a_block_that_a_peers_death_ended_is_no_failure(work: Callable[[LeasedShard], object]) -> None:
    source = alone()
    with pytest.raises((RuntimeError, LookupError)):
        work_in_blocks(source, work)
    assert failures(source) == (0, 3)


@pytest.fixture
def attempt() -> Iterator[Attempt]:
    """A call of the elastic function that is under way."""
    attempt = attempts().begin()
    yield attempt
    attempt.end(world_broke=False)


def settled(source: DynamicShards) -> ShardStatus:
    """The status once nobody is at work."""
    for _ in range(6000):
        status = source.status()
        if status.doing == 0:
            return status
        time.sleep(0.01)
    raise AssertionError("a shard is still out")


@pytest.mark.parametrize(("world_broke", "count"), [(True, 0), (False, 1)])
def test_what_left_a_loop_is_the_scripts_failure_unless_the_world_broke(
    attempt: Attempt, world_broke: bool, count: int
) -> None:
    """1. a peer dies; 2. the collective raises, out of the loop; 3. the order to leave the world comes."""
    source = alone()
    with pytest.raises(ValueError, match="bad record"):
        raise_plainly(source)
    assert source.status().doing == 1, "nobody knows yet"
    attempt.end(world_broke=world_broke)
    assert settled(source).failures == count


def test_what_a_script_catches_inside_its_function_is_its_own_failure(attempt: Attempt) -> None:
    source = alone()
    with pytest.raises(ValueError, match="bad record"):
        raise_plainly(source)
    for shard in source:
        assert shard.number == 1
        shard.give_back()
        assert settled(source).failures == 1
        break
    assert not attempt.has_ended


def test_a_verdict_is_not_waited_for_for_ever(attempt: Attempt) -> None:
    verdict = attempt.verdict()
    assert not is_broken_world(verdict, wait_s=0.01)
    attempt.end(world_broke=True)
    assert is_broken_world(verdict)
    assert not is_broken_world(attempt.verdict()), "it is over"
    assert attempts().under_way is None


def test_done_may_be_said_early_and_counts_once() -> None:
    source = alone()
    for shard in source:
        assert shard.done()
        assert not shard.done()
        assert not shard.fail("too late")
        assert not shard.is_open
        break
    assert failures(source) == (0, 2)
    assert source.status().done == 1


def test_a_tables_shards_are_ranges_of_keys() -> None:
    source = shards("rows", table=("id", 5, np.int64(12)), shard_size=np.int64(4), session=ShardSession())  # type: ignore[arg-type]
    ranges = []
    for shard in source:
        ranges.append((shard.column, shard.start, shard.stop, len(shard)))
        with pytest.raises(ConfigError, match=r"rows whose id is at least shard\.start"):
            _ = shard.records
    assert ranges == [("id", 5, 9, 4), ("id", 9, 12, 3)]


def test_progress_goes_into_a_checkpoint_and_back() -> None:
    source = alone(records=100)
    for shard in source:
        if shard.number == 4:
            saved = json.loads(json.dumps(source.state_dict()))
        if shard.number == 7:
            break
    source.load_state_dict(saved)
    assert [shard.number for shard in source] == [4, 5, 6, 7, 8, 9]
    other = alone(records=100)
    other.load_state_dict(saved)
    assert [shard.start for shard in other] == [40, 50, 60, 70, 80, 90]
    with pytest.raises(ConfigError, match="was cut as"):
        alone(records=200).load_state_dict(saved)
    with pytest.raises(ConfigError, match=r"no state of stoker\.shards: .*handed_out"):
        source.load_state_dict({**saved, "handed_out": "x"})
    with pytest.raises(ConfigError, match="state of dataset 'test'"):
        source.load_state_dict({**saved, "dataset": "test"})


def test_one_name_is_one_dataset() -> None:
    session = ShardSession()
    one = shards("train", records=10, shard_size=5, session=session)
    other = shards("train", records=10, shard_size=5, session=session)
    assert [next(iter(one)).number, next(iter(other)).number] == [0, 0], "each loop hands back what it leaves"
    with pytest.raises(
        ConfigError, match=r"'train' was registered by alone as .*every worker must describe it alike"
    ):
        shards("train", records=11, shard_size=5, session=session)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({}, "exactly one of records=..., table="),
        ({"records": 5, "stream": True}, "exactly one of"),
        ({"records": 5.0}, "records=5.0 is no whole number"),
        ({"records": 0}, "records=0 cannot be: it is at least 1"),
        ({"records": 2**70}, "is too large"),
        ({"records": 5, "epochs": 0}, "epochs=0 cannot be"),
        ({"records": 5, "shuffle": 1}, "Expected `bool`"),
        ({"records": 5, "lease_timeout_s": 0}, "lease_timeout_s=0.0 cannot be"),
        ({"records": 5, "max_failures": 0}, "max_failures=0 cannot be"),
        ({"table": ("id", 1, 5), "shuffle_records": True}, "shuffle_records is for records"),
        ({"stream": True, "epochs": 2}, "a stream is read once"),
        ({"table": (7, 1, 5)}, "Expected `str`"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        shards("train", shard_size=2, session=ShardSession(), **arguments)  # type: ignore[arg-type]
