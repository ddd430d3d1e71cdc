"""Who waits for what, and for how long."""

from __future__ import annotations

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
