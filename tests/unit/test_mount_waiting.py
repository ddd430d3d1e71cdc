"""Who waits for what, and for how long."""

from __future__ import annotations

import errno

import pytest

from stoker.cache.mount import answers
from stoker.cache.mount.questions import (
    Ask,
    Effect,
    Fetch,
    Find,
    Held,
    MakeFolder,
    Question,
    Refresh,
    Remove,
    Reply,
    Status,
)
from stoker.cache.mount.waiting import Answered, Waiting


def told(unique: int) -> Answered:
    """What it does with an answer: say it to that request."""
    return lambda answer, _: [Reply((f"{unique}: {answer}".encode(),))]


def ask(waiting: Waiting, unique: int, question: Question, now: float = 0.0) -> list[Effect]:
    return waiting.ask(unique, question, told(unique), now)


def heard(waiting: Waiting, number: int, answer: object, now: float = 0.0) -> list[bytes]:
    _, _, thens = waiting.answered(number)
    effects = [effect for then in thens for effect in then(answer, now)]
    return [bytes(effect.parts[0]) for effect in effects if isinstance(effect, Reply)]


def refusals(*uniques: int, code: int) -> list[Reply]:
    return [Reply((answers.refusal(unique, code),)) for unique in uniques]


def test_who_asks_the_same_waits_for_one_answer() -> None:
    waiting = Waiting(10.0)
    assert ask(waiting, 2, Find("a")) == [Ask(1, Find("a"))]
    assert ask(waiting, 4, Find("a"), 1.0) == []
    assert ask(waiting, 6, Find("b"), 1.0) == [Ask(2, Find("b"))]
    assert len(waiting) == 3
    assert heard(waiting, 1, "x") == [b"2: x", b"4: x"]
    assert heard(waiting, 2, "y") == [b"6: y"]
    assert not waiting
    assert ask(waiting, 8, Find("a"), 1.0) == [Ask(3, Find("a"))]


@pytest.mark.parametrize(
    "others",
    [(Find("a"), Refresh("a"), Status("a"), Remove("a"), MakeFolder("a")), (Held("a", "1"), Fetch("a", "1"))],
)
def test_questions_of_different_kinds_are_never_one(others: tuple[Question, ...]) -> None:
    waiting = Waiting(10.0)
    for number, question in enumerate(others, 1):
        (asked,) = ask(waiting, 2 * number, question)
        assert asked == Ask(number, question)
    for number in range(1, len(others) + 1):
        assert heard(waiting, number, number) == [f"{2 * number}: {number}".encode()]


def fails(_: object, __: float) -> list[Effect]:
    """A defect."""
    raise AssertionError


def test_a_defect_of_one_who_waits_costs_the_others_nothing() -> None:
    waiting = Waiting(10.0)
    ask(waiting, 2, Find("a"))
    waiting.ask(4, Find("a"), fails, 0.0)
    ask(waiting, 6, Find("a"))
    waiting.ask_alone(Find("a"), 0.0, fails)
    waiting.ask_alone(Find("a"), 0.0, told(8))
    (refused,) = refusals(4, code=errno.EIO)
    assert heard(waiting, 1, "x") == [b"2: x", bytes(refused.parts[0]), b"6: x", b"8: x"]


def test_a_defect_of_one_who_has_waited_too_long_costs_the_others_nothing() -> None:
    waiting = Waiting(10.0)
    waiting.ask(2, Find("a"), fails, 0.0)
    waiting.ask(4, Find("b"), lambda _, __: refusals_of(4), 0.0)
    assert waiting.tick(10.0) == [*refusals(2, code=errno.EIO), *refusals_of(4)]
    assert not waiting


def refusals_of(unique: int) -> list[Effect]:
    return [*refusals(unique, code=errno.ETIMEDOUT)]


def test_what_nobody_waits_for_is_given_up_when_its_turn_comes() -> None:
    waiting = Waiting(10.0)
    ask(waiting, 2, Find("a"))
    assert not waiting.gives_up(1)
    ask(waiting, 4, Find("a"), 5.0)
    waiting.tick(10.0)
    assert not waiting.gives_up(1), "one is left"
    waiting.tick(15.0)
    assert waiting.gives_up(1)
    assert ask(waiting, 6, Find("a"), 15.0) == [Ask(2, Find("a"))]
    waiting.interrupt(6)
    assert waiting.gives_up(2)
    assert ask(waiting, 8, Find("a"), 15.0) == [Ask(3, Find("a"))]
    assert heard(waiting, 3, "x") == [b"8: x"]


def test_what_does_something_is_never_given_up() -> None:
    waiting = Waiting(10.0)
    waiting.ask_alone(Fetch("a", "1"), 0.0)
    ask(waiting, 2, Remove("a"))
    ask(waiting, 4, MakeFolder("a"))
    ask(waiting, 6, Refresh("a"))
    ask(waiting, 8, Find("a"))
    waiting.ask_alone(Find("a"), 0.0, told(1))  # not a request, and waits all the same
    waiting.tick(100.0)
    assert not waiting
    assert not any(waiting.gives_up(number) for number in range(1, 6))
