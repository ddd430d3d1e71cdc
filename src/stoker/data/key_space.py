"""Cut a range of keys in two, where its middle may be. PURE.

Where it is cut decides how soon all is listed, never what is found: the parts join.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

LAST = "\U0010ffff"
"""After all that a key goes on with."""
_DIGITS = "0123456789"
_LOWER = "abcdefghijklmnopqrstuvwxyz"
_ALPHABETS = (_DIGITS, _DIGITS + _LOWER[:6], _DIGITS + _LOWER, _DIGITS + _LOWER.upper() + _LOWER)
_PLACES = 4
"""So many letters behind what both ends begin with are told apart."""


class Part(NamedTuple):
    """The keys after `after`, up to `stop`, which is one of them if it is there."""

    after: str
    stop: str


def shared(first: str, last: str) -> str:
    """What these begin with, and all that sort between them."""
    same = (place for place, (one, other) in enumerate(zip(first, last, strict=False)) if one != other)
    return first[: next(same, min(len(first), len(last)))]


def halves(part: Part, seen: Sequence[str]) -> list[Part]:
    """A part in two, or as it is where no key can be seen to be between. `seen`: keys with letters like its own."""
    begins = shared(part.after, part.stop)
    place = len(begins)
    letters = {key[place : place + 1] for key in (part.after, *seen)} | {part.stop[place : place + 1]}
    alphabet = _alphabet(letters - {LAST})
    # Behind what goes on as the first key does, if all else is between two signs.
    middles = [part.after[: place + 1] + LAST]
    if alphabet:
        numbers = [_number(key[place:], alphabet) for key in part]
        middles.insert(0, begins + _text(sum(numbers) // 2, alphabet))
    for middle in middles:
        if part.after < middle < part.stop:
            return [Part(part.after, middle), Part(middle, part.stop)]
    return [part]


def _alphabet(letters: set[str]) -> str:
    """The smallest that has all of them, but for punctuation."""
    said = {letter for letter in letters if letter.isalnum()}
    if not said:
        return ""
    return next((known for known in _ALPHABETS if said <= set(known)), "".join(sorted(said)))


def _number(text: str, alphabet: str) -> int:
    """A text's place among all of its first letters, as far as the alphabet tells them apart."""
    number = 0
    for place in range(_PLACES):
        letter = text[place : place + 1]
        digit = sum(known < letter for known in alphabet) if letter else 0
        number = number * len(alphabet) + digit
        if digit == len(alphabet):  # what is beyond the alphabet is as far as it goes
            for _ in range(place + 1, _PLACES):
                number *= len(alphabet)
            break
    return number


def _text(number: int, alphabet: str) -> str:
    letters = []
    for _ in range(_PLACES):
        number, digit = divmod(number, len(alphabet))
        letters.append(alphabet[digit])
    return "".join(reversed(letters)).rstrip(alphabet[0]) or alphabet[0]
