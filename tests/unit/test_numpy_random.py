"""The copy of NumPy's global generator is what `get_state` gives, whatever happened in between."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from stoker.train.numpy_random import NumpyRandomCopy

STEPS: list[Callable[[], object]] = [
    lambda: None,
    lambda: None,
    np.random.normal,  # two deviates at a time, of which one is kept
    np.random.normal,
    lambda: np.random.random(700),
    lambda: np.random.seed(5),
    lambda: np.random.permutation(10),
    lambda: np.random.set_bit_generator(np.random.MT19937(3)),
    lambda: np.random.set_bit_generator(np.random.PCG64(3)),
]


@pytest.fixture
def generator() -> Iterator[None]:
    """Whatever the test sets goes with it."""
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.MT19937(1))
    yield
    np.random.set_bit_generator(before)


def draws() -> list[float]:
    return [*np.random.normal(size=3), *np.random.random(5)]


@pytest.mark.usefixtures("generator")
def test_the_copy_is_the_state_whatever_was_drawn() -> None:
    rng = random.Random(1)
    copy = NumpyRandomCopy()
    kinds = set()
    for _ in range(2000):
        rng.choice(STEPS)()
        kept = copy.renew()
        kinds.add(type(kept))
        now = np.random.get_state(legacy=isinstance(kept, tuple))
        np.testing.assert_equal(kept, now)
        if rng.random() < 0.1:
            ahead = draws()
            np.random.set_state(kept)
            assert draws() == ahead
            np.random.set_state(kept)
    assert kinds == {tuple, dict}


@pytest.mark.usefixtures("generator")
def test_what_has_not_changed_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = NumpyRandomCopy()
    first = copy.renew()
    monkeypatch.setattr(np.random, "get_state", lambda: pytest.fail("it was copied"))
    assert copy.renew() is first
