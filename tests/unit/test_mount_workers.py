"""Threads that find things out for a mount, also where the machine has none to spare."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from stoker.cache.mount.workers import Workers
from tests.unit.no_threads import no_thread_can_start

WAIT_S = 30.0


def test_without_any_thread_nothing_can_be_done_until_there_is_one_again() -> None:
    workers = Workers("test", 1)
    with no_thread_can_start():
        for _ in range(3):
            with pytest.raises(RuntimeError):
                workers.do(lambda: None)
    done = threading.Event()
    workers.do(done.set)
    assert done.wait(WAIT_S)


def test_what_gets_no_thread_of_its_own_waits_for_another() -> None:
    workers = Workers("test", 3)
    begun, go_on = threading.Event(), threading.Event()
    order: list[int] = []
    all_done = threading.Event()

    def first() -> None:
        begun.set()
        assert go_on.wait(WAIT_S)

    def note(number: int) -> None:
        order.append(number)
        if number == 2:
            all_done.set()

    workers.do(first)
    assert begun.wait(WAIT_S)
    with no_thread_can_start():
        for number in range(3):
            workers.do(partial(note, number))
    assert not order
    go_on.set()
    assert all_done.wait(WAIT_S)
    assert order == [0, 1, 2]


def test_work_that_waits_does_not_keep_threads_from_being_started() -> None:
    """As many things go on at a time as may, once the machine has room again."""
    workers = Workers("test", 3)
    together, begun = threading.Barrier(4), threading.Event()  # all three, and this test

    def meet() -> None:
        begun.set()
        together.wait(WAIT_S)

    workers.do(meet)
    assert begun.wait(WAIT_S)
    with no_thread_can_start():
        workers.do(meet)
    workers.do(meet)
    workers.do(lambda: None)
    together.wait(WAIT_S)
