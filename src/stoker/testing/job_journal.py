"""What every journal must do. Subclass JournalConformance in a test module and say how to open one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import pytest

from stoker.job.journal.durable import Entry, Journal

T = TypeVar("T")
KIB, MIB = 1024, 1024 * 1024

ODD_NAMES = (
    "",
    "a",
    "a/b",
    "/",
    "..",
    "a b",
    "ü",
    "\u4e2d\U0001f600",
    "\0",
    "x\ny",
    "%2F",
    "'; --",
    "n" * 400,
)
ODD_VALUES = (b"", b"\0", b"=", b"#", b'#{"id":"x","pieces":1,"size_bytes":1}', bytes(range(256)))


def entry(number: int, why: str = "") -> Entry:
    """An entry that can be told from others."""
    return Entry(1000.0 + number, "test", why or f"number {number}", {"number": number})


class JournalConformance:
    """The suite for every journal; DurableJournalConformance is for those that outlive their process."""

    def open_journal(self) -> Journal:
        """The journal of this test; called again after `close`, it is the same journal."""
        raise NotImplementedError

    def run(self, test: Callable[[Journal], Awaitable[T]]) -> T:
        """Run an async test with the journal, as its master."""

        async def whole() -> T:
            journal = self.open_journal()
            try:
                await journal.lead("127.0.0.1:1", ttl_s=30.0)
                return await test(journal)
            finally:
                await journal.close()

        return asyncio.run(whole())

    def test_a_new_one_is_empty(self) -> None:
        async def test(journal: Journal) -> None:
            assert await journal.load() == {}
            assert await journal.read_entries() == []
            await journal.write({}, [])
            assert await journal.load() == {}

        self.run(test)

    def test_records_are_set_and_deleted(self) -> None:
        async def test(journal: Journal) -> None:
            await journal.write({"a": b"1", "b": b"2", "c": b"3"})
            await journal.write({"a": b"4", "b": None, "never there": None})
            assert await journal.load() == {"a": b"4", "c": b"3"}

        self.run(test)

    def test_entries_are_numbered_in_order(self) -> None:
        async def test(journal: Journal) -> None:
            for number in range(1, 11, 2):
                await journal.write({"n": b"%d" % number}, [entry(number), entry(number + 1)])
            found = await journal.read_entries()
            assert found == [
                {"seq": n, "wall_s": 1000.0 + n, "kind": "test", "why": f"number {n}", "number": n}
                for n in range(1, 11)
            ]
            assert await journal.read_entries(after=7) == found[7:]
            assert await journal.read_entries(after=2, limit=3) == found[2:5]
            assert await journal.read_entries(after=10) == []
            assert await journal.read_entries(after=-5, limit=1) == found[:1]
            assert await journal.read_entries(limit=0) == []

        self.run(test)

    def test_an_entry_keeps_its_own_words(self) -> None:
        details = {"seq": 99, "kind": "other", "ü": ["\0", None, {"x": 1.5}], "why": 3}

        async def test(journal: Journal) -> None:
            await journal.write({}, [Entry(1.25, "kind ü", "", details)])
            (found,) = await journal.read_entries()
            assert found == {
                "seq": 1,
                "wall_s": 1.25,
                "kind": "kind ü",
                "why": "",
                "ü": ["\0", None, {"x": 1.5}],
            }

        self.run(test)

    def test_what_cannot_be_written_changes_nothing(self) -> None:
        async def test(journal: Journal) -> None:
            await journal.write({"a": b"1"}, [entry(1)])
            with pytest.raises(TypeError):
                await journal.write({"a": b"2"}, [entry(2), Entry(0.0, "test", "", {"x": object()})])
            assert await journal.load() == {"a": b"1"}
            await journal.write({}, [entry(3)])
            assert [e["number"] for e in await journal.read_entries()] == [1, 3]

        self.run(test)

    def test_odd_names_and_values(self) -> None:
        records: dict[str, bytes] = {name: name.encode() + b"!" for name in ODD_NAMES}
        records |= {f"value {i}": value for i, value in enumerate(ODD_VALUES)}

        async def test(journal: Journal) -> None:
            await journal.write(records)
            assert await journal.load() == records
            await journal.write(dict.fromkeys(ODD_NAMES))
            assert await journal.load() == {name: v for name, v in records.items() if name not in ODD_NAMES}

        self.run(test)

    def test_large_values_are_replaced_and_deleted(self) -> None:
        sizes = [3 * MIB + 1, 384 * KIB, 384 * KIB + 1, MIB, 5, 2 * MIB, 0]

        async def test(journal: Journal) -> None:
            for number, size in enumerate(sizes):
                value = bytes([65 + number]) * size
                await journal.write({"large": value, "small": b"%d" % number}, [entry(number)])
                assert await journal.load() == {"large": value, "small": b"%d" % number}
            await journal.write({"large": b"x" * MIB})
            await journal.write({"large": None})
            assert await journal.load() == {"small": b"6"}

        self.run(test)

    @pytest.mark.parametrize(
        ("records", "size_bytes", "entries"), [(700, 10, 300), (60, 100_000, 1), (119, 10, 2)]
    )
    def test_large_batches(self, records: int, size_bytes: int, entries: int) -> None:
        batch = {f"r{i}": (b"%d " % i) * (size_bytes // 4) for i in range(records)}

        async def test(journal: Journal) -> None:
            await journal.write({"kept": b"k", "r1": b"old"}, [entry(0)])
            await journal.write(batch, [entry(1 + i) for i in range(entries)])
            assert await journal.load() == {"kept": b"k", **batch}
            assert [e["number"] for e in await journal.read_entries()] == list(range(entries + 1))
            await journal.write(dict.fromkeys(batch), [entry(entries + 1)])
            assert await journal.load() == {"kept": b"k"}

        self.run(test)


class DurableJournalConformance(JournalConformance):
    """What a journal that outlives its process must do besides."""

    def load_again(self) -> dict[str, bytes]:
        """The records as the next master finds them."""
        return self.run(lambda journal: journal.load())

    def test_it_outlives_its_master(self) -> None:
        async def first(journal: Journal) -> None:
            await journal.write({"a": b"1", "b": b"2" * MIB, "c": b"3"}, [entry(1)])
            await journal.write({"c": None}, [entry(2)])

        async def second(journal: Journal) -> None:
            assert await journal.load() == {"a": b"1", "b": b"2" * MIB}
            await journal.write({"a": None}, [entry(3)])
            assert [e["seq"] for e in await journal.read_entries()] == [1, 2, 3]

        self.run(first)
        self.run(second)
        assert self.load_again() == {"b": b"2" * MIB}

    def test_writing_without_loading_first_continues(self) -> None:
        for number in (1, 2):
            self.run(lambda journal, n=number: journal.write({f"r{n}": b"x"}, [entry(n)]))  # type: ignore[misc]
        assert self.load_again() == {"r1": b"x", "r2": b"x"}


async def check_batches(
    journal: Journal, batches: Sequence[tuple[Mapping[str, bytes | None], Sequence[Entry]]]
) -> None:
    """Write batches and compare with a dictionary and a list, after each."""
    records: dict[str, bytes] = {}
    whys: list[str] = []
    for changes, entries in batches:
        await journal.write(changes, entries)
        records = {**records, **{n: v for n, v in changes.items() if v is not None}}
        records = {n: v for n, v in records.items() if n not in changes or changes[n] is not None}
        whys += [e.why for e in entries]
        assert await journal.load() == records
    assert [e["why"] for e in await journal.read_entries()] == whys
