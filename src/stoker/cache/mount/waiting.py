"""Who waits for what to be found out, and for how long. Pure."""

from __future__ import annotations

import errno
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from stoker.cache.mount import answers
from stoker.cache.mount.questions import (
    Ask,
    Back,
    Effect,
    Find,
    Held,
    List,
    Question,
    Read,
    Reply,
    Room,
    StageRead,
    Status,
)

log = logging.getLogger("stoker.mount")
Answered = Callable[[object, float], list[Effect]]
"""What to do with an answer, at a time."""
_ONLY_ANSWERED = (Find, List, Read, Back, Held, Room, StageRead, Status)
"""What is asked for no more than its answer."""


class Failed:
    """An answer: it could not be found out, for this reason out of `errno`."""

    __slots__ = ("code",)

    def __init__(self, code: int) -> None:
        self.code = code


@dataclass(slots=True)
class _Asked:
    question: Question
    at: float
    until: float
    waiting: dict[int, tuple[Answered, float]] = field(default_factory=dict)
    """By the number of the request; until when it waits."""
    after: list[Answered] = field(default_factory=list)


class Waiting:
    """Questions that are asked. Who asks what is asked already waits with the others; nobody waits for longer than
    `timeout_s`, and what comes later is heard all the same."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._asked: dict[int, _Asked] = {}
        self._numbers: dict[tuple[type, Question], int] = {}
        """With the kind of the question: two of different kinds about one path are equal as tuples."""
        self._requests: dict[int, int] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, unique: object) -> bool:
        """Whether that request waits."""
        return unique in self._requests

    def ask(
        self,
        unique: int,
        question: Question,
        then: Answered,
        now: float,
        *,
        since: float | None = None,
        patience_s: float | None = None,
        is_patient: bool = False,
        is_alone: bool = False,
    ) -> list[Effect]:
        """A request waits for an answer. Not again for one that was given up: that may never come. `since`: when it
        came, if it has waited for another one. `patience_s`: so long; `is_patient`: for as long as it takes, as
        bytes do that go a long way. `is_alone`: an answer to who asked before is none to it."""
        number = None if is_alone else self._numbers.get((type(question), question))
        if patience_s is None:
            patience_s = math.inf if is_patient else self._timeout_s
        waits = then, (now if since is None else since) + patience_s
        if number is not None and self._asked[number].until > now:
            self._asked[number].waiting[unique] = waits
            self._requests[unique] = number
            return []
        return [self._new(question, now, patience_s, {unique: waits})]

    def ask_alone(self, question: Question, now: float, after: Answered | None = None) -> list[Effect]:
        """No request waits for it."""
        number = self._numbers.get((type(question), question))
        effects: list[Effect] = []
        if number is None:
            ask = self._new(question, now, self._timeout_s, {})
            number, effects = ask.number, [ask]
        if after is not None:
            self._asked[number].after.append(after)
        return effects

    def is_asked(self, *kinds: type) -> bool:
        """Whether a question of one of these kinds has no answer yet."""
        return any(isinstance(asked.question, kinds) for asked in self._asked.values())

    def part(self) -> None:
        """What is asked from now on is asked anew: what was asked before may be answered by what is no more so."""
        self._numbers.clear()

    def part_from(self, question: Question) -> None:
        """So is this one."""
        self._numbers.pop((type(question), question), None)

    def part_from_lists(self, path: str) -> None:
        """So are the lists of all folders that a path lies in: it has changed."""
        for kind, question in list(self._numbers):
            if isinstance(question, List) and (not question.path or path.startswith(f"{question.path}/")):
                del self._numbers[kind, question]

    def answered(self, number: int) -> tuple[Question, float, list[Answered]]:
        """It was found out: what was asked, and when, and what those who still wait do with it. A defect of one of
        them costs the others nothing."""
        asked = self._asked.pop(number)
        key = type(asked.question), asked.question
        if self._numbers.get(key) == number:
            del self._numbers[key]
        for unique in asked.waiting:
            self._requests.pop(unique, None)
        thens = [partial(_done, unique, then) for unique, (then, _) in asked.waiting.items()]
        return asked.question, asked.at, [*thens, *(partial(_done, 0, then) for then in asked.after)]

    def gives_up(self, number: int) -> bool:
        """Whether nobody waits any more for a question whose turn comes only now, and that is of no use to anybody
        else: it is as if it had never been asked."""
        asked = self._asked[number]
        if asked.waiting or asked.after or not isinstance(asked.question, _ONLY_ANSWERED):
            return False
        self.answered(number)
        return True

    def interrupt(self, unique: int) -> list[Effect]:
        """Whoever made that request is to end. What is waited for patiently is something that is done."""
        number = self._requests.get(unique)
        if number is None or self._asked[number].waiting[unique][1] == math.inf:
            return []
        del self._requests[unique], self._asked[number].waiting[unique]
        return [Reply((answers.refusal(unique, errno.EINTR),))]

    def tick(self, now: float) -> list[Effect]:
        """Time goes by: who has waited long enough is told so."""
        late: list[Answered] = []
        for asked in self._asked.values():
            for unique in [unique for unique, (_, until) in asked.waiting.items() if until <= now]:
                late.append(partial(_done, unique, asked.waiting.pop(unique)[0]))
                del self._requests[unique]
        return [effect for then in late for effect in then(Failed(errno.ETIMEDOUT), now)]

    def _new(
        self, question: Question, now: float, patience_s: float, waiting: dict[int, tuple[Answered, float]]
    ) -> Ask:
        self._next += 1
        self._asked[self._next] = _Asked(question, now, now + patience_s, waiting)
        self._numbers[type(question), question] = self._next
        for unique in waiting:
            self._requests[unique] = self._next
        return Ask(self._next, question)


def _done(unique: int, then: Answered, answer: object, now: float) -> list[Effect]:
    """What it does with an answer; a refusal where that fails. `unique` 0: of no request."""
    try:
        return then(answer, now)
    except Exception:
        log.exception("an answer could not be used")
        return [Reply((answers.refusal(unique, errno.EIO),))] if unique else []
