"""How a dataset's objects are listed: one page after the other, or many at once."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.data import listing
from stoker.data.key_space import LAST, Part, halves
from stoker.data.listing import list_all
from stoker.errors import OriginError
from stoker.wire.cache_api import ObjectInfo, ObjectPage

KEYS = st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1, max_size=6)
NAMES = st.text("ab01/-.", min_size=1, max_size=8)
PLENTY = 5
"""Objects in a page of these tests."""


class Bucket:
    """What a cache answers with, and what it was asked."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.keys = sorted(set(keys))
        self.asked: Counter[tuple[str | None, int]] = Counter()
        self._lock = threading.Lock()

    def ask(self, prefix: str, after: str | None, limit: int) -> ObjectPage:
        with self._lock:
            self.asked[after, limit] += 1
        keys = [key for key in self.keys if key.startswith(prefix)]
        first = 0 if after is None else bisect_right(keys, after)
        some = keys[first : first + limit]
        infos = [ObjectInfo(key, len(key), f"v{key}\0") for key in some]
        return ObjectPage(infos, some[-1] if len(some) == limit else None)


@pytest.fixture
def _small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "PAGE", PLENTY)
    monkeypatch.setattr(listing, "LIST_LIMIT_MAX", PLENTY)


def folders() -> list[str]:
    return [f"train/{name}/{number:04}.jpg" for name in ("cat", "dog", "eel") for number in range(200)]


LAYOUTS = {
    "numbers": [f"{number:06}" for number in range(1000)],
    "numbers that are not padded": [f"img_{number}.bin" for number in range(1000)],
    "folders": folders(),
    "a few beside many": [*folders(), *(f"test/{number}" for number in range(20)), "LICENSE"],
    "one behind the other": ["a" * length for length in range(1, 200)],
    "no letters": [f"{'-' * (number // 20)}{'/' * (number % 20)}." for number in range(400)],
    "the last of all characters": [f"{chr(0x10FFFF) * (number % 3)}{number:04}" for number in range(300)],
    "other scripts": [f"{chr(0x3B1 + number % 20)}/{chr(0x4E00 + number)}" for number in range(300)],
}


@pytest.mark.usefixtures("_small_pages")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_is_listed_by_few_pages_whatever_keys_look_like(layout: str) -> None:
    bucket = Bucket(LAYOUTS[layout])
    found = list_all(bucket.ask, "", lambda: True)
    assert list(found.keys) == [key for key in bucket.keys if not key.endswith("/")]
    assert list(found.versions) == [f"v{key}" for key in found.keys]
    assert found.sizes.tolist() == [len(key) for key in found.keys]
    pages = len(bucket.keys) / PLENTY
    assert bucket.asked.total() <= 2 * pages + 20
    again = Bucket(LAYOUTS[layout])
    list_all(again.ask, "", lambda: True)
    assert again.asked == bucket.asked  # so that a cache can answer who lists next


@pytest.mark.usefixtures("_small_pages")
@given(st.lists(KEYS | NAMES, max_size=120), NAMES | st.just(""), st.booleans())
@settings(deadline=None, max_examples=60)
def test_a_listing_is_all_keys_below_the_prefix_in_order(keys: list[str], prefix: str, is_far: bool) -> None:
    bucket = Bucket([*keys, *(prefix + key for key in keys)])
    found = list_all(bucket.ask, prefix, lambda: is_far)
    assert list(found.keys) == [
        key for key in bucket.keys if key.startswith(prefix) and not key.endswith("/")
    ]


@pytest.mark.usefixtures("_small_pages")
def test_pages_are_listed_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    news = threading.Condition()
    inside, together, parts_of_turn = 0, 0, 0
    take_turn = listing._Work._turn

    def turn(work: listing._Work, parts: list[Part]) -> list[listing._Listed]:
        nonlocal parts_of_turn
        parts_of_turn = len(parts)
        return take_turn(work, parts)

    class Meeting(Bucket):
        def ask(self, prefix: str, after: str | None, limit: int) -> ObjectPage:
            nonlocal inside, together
            with news:
                inside += 1
                together = max(together, inside)
                news.notify_all()
                if parts_of_turn == listing.JOBS:
                    assert news.wait_for(lambda: together == listing.JOBS, 60)
            try:
                return super().ask(prefix, after, limit)
            finally:
                with news:
                    inside -= 1

    monkeypatch.setattr(listing._Work, "_turn", turn)
    list_all(Meeting(LAYOUTS["numbers"]).ask, "", lambda: True)
    assert together == listing.JOBS > 4


@pytest.mark.usefixtures("_small_pages")
def test_what_is_near_is_listed_page_after_page() -> None:
    bucket = Bucket(LAYOUTS["numbers"])
    list_all(bucket.ask, "", lambda: False)
    assert bucket.asked.total() == 1 + len(bucket.keys) / PLENTY


def test_one_page_is_asked_for_once() -> None:
    bucket = Bucket(["a", "b"])

    def is_far() -> bool:
        raise AssertionError("nobody has to know")

    assert list(list_all(bucket.ask, "", is_far).keys) == ["a", "b"]
    assert bucket.asked.total() == 1


@pytest.mark.usefixtures("_small_pages")
def test_a_page_that_fails_ends_it() -> None:
    class Broken(Bucket):
        def ask(self, prefix: str, after: str | None, limit: int) -> ObjectPage:
            if after is not None and after > "0005":
                raise OriginError("no")
            return super().ask(prefix, after, limit)

    with pytest.raises(OriginError):
        list_all(Broken(LAYOUTS["numbers"]).ask, "", lambda: True)


@given(KEYS | NAMES, KEYS | NAMES, st.lists(NAMES, max_size=3))
def test_halves_join(first: str, second: str, seen: list[str]) -> None:
    after, stop = sorted((first, second + LAST))
    parts = halves(Part(after, stop), seen)
    assert parts[0].after == after
    assert parts[-1].stop == stop
    if len(parts) == 2:
        assert after < parts[0].stop == parts[1].after < stop
    else:
        assert len(parts) == 1


@pytest.mark.parametrize(("after", "stop", "middle"), [
    ("shard-02/7", "shard-1", "shard-06"),
    ("img_100.jpg", f"img_{LAST}", "img_55"),
    ("train/009.jpg", "train0", f"train/{LAST}"),
    ("0a", "0c", "0b"),
])  # fmt: skip
def test_the_middle_is_where_keys_may_be(after: str, stop: str, middle: str) -> None:
    first, _ = halves(Part(after, stop), [])
    assert first.stop.startswith(middle[:-1])
