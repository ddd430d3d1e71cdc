"""Files that are written through a mount: whose close makes one whole, and what is whole where nobody closes it."""

from __future__ import annotations

import errno

import pytest

from stoker.cache.mount.waiting import Failed
from tests.unit.test_mount_putting import OTHER, TRUNCATE, WRITE_ONLY, WRITER, Writers, found
from tests.unit.test_mount_putting_races import opened_node

FIRST, SECOND = WRITER, OTHER


@pytest.mark.parametrize("is_taken_over", [False, True])
def test_who_closes_last_of_several_waits_for_what_it_wrote(is_taken_over: bool) -> None:
    mount = Writers()
    node, first = mount.create("a")
    mount.write(node, first, b"x")
    second = opened_node(mount, node, pid=SECOND)
    assert mount.code(mount.close(node, second, pid=SECOND)) == 0, "it is the first one's, who is not done"
    assert not mount.puts()
    close = mount.close(node, first)
    mount.answer_put(found(1))
    assert mount.code(close) == 0
    if is_taken_over:
        mount.restart()
    mount.release(node, first)
    mount.write(node, second, b"y", 1)
    close = mount.close(node, second, pid=SECOND)
    assert mount.code(close) is None
    mount.answer_put(Failed(errno.ENOSPC))
    assert mount.code(close) == errno.ENOSPC


@pytest.mark.parametrize("is_taken_over", [False, True])
def test_who_began_it_anew_decides_when_it_is_whole(is_taken_over: bool) -> None:
    """What the other one had written is gone, and what is there now is half of something."""
    mount = Writers()
    node, first = mount.create("a")
    mount.write(node, first, b"x")
    second = opened_node(mount, node, WRITE_ONLY | TRUNCATE, pid=SECOND)
    mount.write(node, second, b"half")
    if is_taken_over:
        mount.restart()
    assert mount.code(mount.close(node, first, pid=FIRST)) == 0
    assert not mount.puts()
    close = mount.close(node, second, pid=SECOND)
    mount.answer_put(found(4))
    assert mount.code(close) == 0


def test_a_copy_that_somebody_else_closes_makes_nothing_whole_whoever_is_left() -> None:
    mount = Writers()
    node, first = mount.create("a")
    mount.write(node, first, b"x")
    mount.close(node, first, pid=SECOND)
    assert not mount.puts()


@pytest.mark.parametrize("data", [b"x", b""])
@pytest.mark.parametrize("is_taken_over", [False, True])
def test_what_was_closed_is_put_at_the_end_though_nobody_hears_that_it_is_not_open(
    data: bytes, is_taken_over: bool
) -> None:
    mount = Writers()
    node, handle = mount.create("a")
    if data:
        mount.write(node, handle, data)
    close = mount.close(node, handle)
    if is_taken_over:
        mount.restart()
    mount.carry_out(mount.core.end(mount.now))
    mount.answer_put(found(len(data)))
    assert len(mount.core.state.staged) == 0
    if not is_taken_over:
        assert mount.code(close) == 0


@pytest.mark.parametrize("data", [b"x", b""])
@pytest.mark.parametrize("has_synced", [False, True])
def test_what_is_open_at_the_end_is_not_whole(data: bytes, has_synced: bool) -> None:
    """Who forces a mount away cuts off those who write: what was there before stays, and what they wrote is kept."""
    mount = Writers()
    node, handle = mount.create("a")
    if has_synced:
        mount.write(node, handle, b"synced")
        sync = mount.sync(node, handle)
        mount.answer_put(found(6))
        assert mount.code(sync) == 0
        handle = opened_node(mount, node, WRITE_ONLY | TRUNCATE)
    if data:
        mount.write(node, handle, data)
    mount.carry_out(mount.core.end(mount.now))
    assert not mount.puts()
    assert mount.kept() == ["a"]
    assert len(mount.core.state.staged) == 0


def test_what_is_synced_and_open_at_the_end_is_there() -> None:
    mount = Writers()
    node, handle = mount.create("a")
    mount.write(node, handle, b"x")
    mount.sync(node, handle)
    (put,) = mount.puts()
    mount.carry_out(mount.core.end(mount.now))
    mount.answer(put, found(1))
    assert not mount.puts()
    assert not mount.kept()
    assert len(mount.core.state.staged) == 0


def test_what_is_written_after_it_was_closed_is_not_whole_at_the_end() -> None:
    """By a copy of the descriptor, in another process."""
    mount = Writers()
    node, handle = mount.create("a")
    mount.write(node, handle, b"x")
    mount.close(node, handle)
    mount.answer_put(found(1))
    mount.write(node, handle, b"more", 1)
    mount.carry_out(mount.core.end(mount.now))
    assert not mount.puts()
    assert mount.kept() == ["a"]
