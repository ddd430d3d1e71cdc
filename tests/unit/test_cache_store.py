"""The store against a naive twin, on a real disk: what it serves, what it takes, and what it gives up."""

from __future__ import annotations

import asyncio
import resource
import tempfile
import time
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.base.rng import Rng
from stoker.cache.store import writing as writing_module
from stoker.cache.store.known import Known
from stoker.cache.store.lots import PrefixRule
from stoker.cache.store.store import Store
from stoker.errors import CorruptBlock, EnvironmentProblem
from stoker.testing.cache_fakes import FullFiles
from tests.clocks import HandClock

BLOCK = 64 * 1024
PAGE = 4096
SIZES = [10, 3000, 5000, 70_000, 300_000]


def content(bucket: str, key: str, version: int) -> bytes:
    """Objects of the same key differ from version to version, also in size now and then."""
    size = SIZES[(zlib.crc32(key.encode()) + version // 3) % len(SIZES)]
    return (f"{bucket}/{key}@{version};".encode() * (size // 8 + 1))[:size]


class Twin:
    """A store, what its objects should be, and the disk that it uses."""

    def __init__(self, folder: Path, limit_bytes: int, *policies: str) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes
        self.policies = policies or ("lru", "lru")
        self.clock = HandClock()
        self.versions: dict[tuple[str, str], int] = {}
        self.rules: dict[str, list[PrefixRule]] = {}
        self.quotas: dict[str, int] = {}
        self.open()

    def open(self) -> None:
        self.store = Store(self.folder, self.limit_bytes, BLOCK, self.clock, Rng(1))
        self.numbers = {}
        for name, policy in zip("ab", self.policies, strict=False):
            bucket = self.store.open_bucket(
                name,
                f"memory://{name}",
                policy=policy,
                rules=self.rules.get(name, []),
                quota_bytes=self.quotas.get(name, 0),
            )
            self.numbers[name] = bucket.number

    def known(self, bucket: str, key: str) -> Known:
        data = content(bucket, key, version := self.versions.get((bucket, key), 0))
        return self.store.learn(self.numbers[bucket], key, f"v{version}", len(data))

    async def put(self, bucket: str, key: str) -> bool:
        known = self.known(bucket, key)
        data = content(bucket, key, self.versions.get((bucket, key), 0))
        stored = [
            await self.store.put(known, n, memoryview(data)[n * BLOCK : (n + 1) * BLOCK])
            for n in range(-(-len(data) // BLOCK))
        ]
        return all(stored)

    async def check(self, bucket: str, key: str) -> int:
        """How many blocks are held; each is what it should be."""
        known = self.store.find(self.numbers[bucket], key)
        if known is None:
            return 0
        data = content(bucket, key, int(known.version[1:]))
        count = 0
        for n in range(-(-len(data) // BLOCK)):
            piece = await self.store.verified(known, n)
            if piece is not None:
                assert await self.store.read(piece) == data[n * BLOCK : (n + 1) * BLOCK]
                count += 1
        return count

    def disk_bytes(self) -> int:
        return sum(p.stat().st_blocks * 512 for p in (self.folder / "files").rglob("*") if p.is_file())

    def check_room(self) -> None:
        used_bytes = self.store.room.used_bytes
        assert used_bytes <= self.limit_bytes
        assert self.disk_bytes() <= used_bytes


keys = st.tuples(st.sampled_from("ab"), st.sampled_from([f"k{n}" for n in range(12)]))
moves = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["put", "put", "put", "get", "change", "forget", "lose"]), keys),
        st.tuples(st.sampled_from(["rewrite", "restart", "kill", "refresh", "wait"]), keys),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(moves, st.integers(0, 1_500_000), st.sampled_from([("lru", "lru"), ("lru", "uniform")]))
def test_a_store_serves_only_what_was_put_and_keeps_its_limit(
    todo: list[tuple[str, tuple[str, str]]], limit_bytes: int, policies: tuple[str, str]
) -> None:
    async def whole(folder: Path) -> None:
        twin = Twin(folder, limit_bytes, *policies)
        for move, (bucket, key) in todo:
            twin.clock.at += 1
            await step(twin, move, bucket, key)
            twin.check_room()
        for bucket in "ab":
            for n in range(12):
                await twin.check(bucket, f"k{n}")
        await twin.store.close()

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        asyncio.run(whole(Path(folder)))


async def step(twin: Twin, move: str, bucket: str, key: str) -> None:
    if move == "put":
        if await twin.put(bucket, key):
            assert await twin.check(bucket, key) > 0
    elif move == "get":
        await twin.check(bucket, key)
    elif move == "change":
        twin.versions[bucket, key] = twin.versions.get((bucket, key), 0) + 1
        twin.known(bucket, key)
        assert await twin.check(bucket, key) == 0
    elif move == "forget":
        twin.store.forget(twin.numbers[bucket], key)
        assert await twin.check(bucket, key) == 0
    elif move == "lose":
        known = twin.store.find(twin.numbers[bucket], key)
        piece = None if known is None else twin.store.held(known, 0)
        if piece is not None:
            twin.store.clearing.lose(piece)
            assert known is not None
            assert twin.store.held(known, 0) is None
    elif move == "rewrite":
        twin.clock.at += 100
        while await twin.store.clearing.rewrite_sparse():
            twin.check_room()
    elif move == "refresh":
        await twin.store.refresh(twin.numbers[bucket], key)
    elif move == "wait":
        twin.clock.at += 1000
    else:
        if move == "restart":
            await twin.store.close()
        else:
            twin.store.holdings.close()
        twin.open()
        await twin.store.clearing.shrink()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        await test()

    asyncio.run(whole())


def test_what_nobody_used_leaves_and_what_was_used_stays(tmp_path: Path) -> None:
    async def test() -> None:
        twin = Twin(tmp_path, 4_000_000)
        names = [f"k{n}" for n in range(400)]
        for name in names:
            twin.clock.at += 1
            assert await twin.put("a", name)
            assert await twin.check("a", "k0") >= 1, "it is used again and again"
            twin.check_room()
        held = [name for name in names if await twin.check("a", name)]
        assert 10 < len(held) < 400
        newest = [name for name in names[-20:] if name in held]
        assert len(newest) >= 15
        await twin.store.close()

    run(test)


def test_a_uniform_bucket_is_filled_once(tmp_path: Path) -> None:
    async def test() -> None:
        twin = Twin(tmp_path, 2_000_000, "uniform")
        stored = [await twin.put("a", f"k{n}") for n in range(100)]
        first = [f"k{n}" for n, was_stored in enumerate(stored) if was_stored]
        assert stored[0]
        assert not all(stored)
        assert all([await twin.check("a", name) for name in first])
        await twin.store.close()

    run(test)


def test_quotas_and_pins_hold_against_others(tmp_path: Path) -> None:
    async def test() -> None:
        twin = Twin(tmp_path, 6_000_000)
        twin.rules["a"] = [PrefixRule("pinned/", 0, True), PrefixRule("little/", 500_000)]
        twin.quotas["b"] = 1_000_000
        await twin.store.close()
        twin.open()
        lots = twin.store.holdings.lots
        pinned = [f"pinned/{n}" for n in range(10)]
        for name in pinned:
            assert await twin.put("a", name)
        for n in range(200):
            twin.clock.at += 1
            for bucket, key in (("a", f"little/{n}"), ("b", f"x{n}"), ("a", f"y{n}")):
                await twin.put(bucket, key)
            twin.check_room()
            assert twin.store.room.used_by_bucket("b") <= 1_000_000
            little = lots[twin.numbers["a"]].lot_of("little/x").number
            assert twin.store.room.used_by(little) <= 500_000
        assert all([await twin.check("a", name) for name in pinned])
        assert twin.store.room.used_by(little) > 300_000
        used = {lot.prefix: twin.store.room.used_by(lot.number) for lot in lots[twin.numbers["a"]].lots}
        twin.rules["a"] = []
        await twin.store.close()
        twin.open()
        assert twin.store.room.used_by_bucket("a") <= sum(used.values())
        for n in range(200):
            twin.clock.at += 1
            await twin.put("a", f"z{n}")
        held = [await twin.check("a", name) for name in pinned]
        assert not all(held), "they are pinned no more"
        await twin.store.close()

    run(test)


@pytest.mark.parametrize("size_bytes", [10_000, 300_000])
def test_what_a_load_has_brought_does_not_leave_for_it(tmp_path: Path, size_bytes: int) -> None:
    """Small objects lie in segments, large ones in blocks of their own."""

    async def test() -> None:
        twin = Twin(tmp_path, 6_000_000)
        clearing, now_s = twin.store.clearing, twin.store.now_s

        async def load(key: str) -> bool:
            known = twin.store.learn(twin.numbers["a"], key, "v", size_bytes)
            parts = [min(BLOCK, size_bytes - at) for at in range(0, size_bytes, BLOCK)]
            stored = [
                await twin.store.put(known, n, bytes(part), is_loading=True) for n, part in enumerate(parts)
            ]
            return all(stored)

        def held(key: str) -> bool:
            known = twin.store.find(twin.numbers["a"], key)
            assert known is not None
            return all(twin.store.has(known, n) for n in range(-(-size_bytes // BLOCK)))

        number = 6_000_000 // size_bytes
        with clearing.loading("a", now_s()):
            for n in range(number // 2):
                assert await load(f"old{n}")
        twin.clock.at += 10
        with clearing.loading("a", began_s := now_s()):
            loaded = []
            for n in range(2 * number):
                with clearing.loading("a", now_s()):  # another load, of later
                    twin.clock.at += 0.1
                    if await load(f"new{n}"):
                        loaded.append(f"new{n}")
            assert began_s < now_s()
            assert all(map(held, loaded)), "what it has brought is there"
            assert len(loaded) > 0.8 * number, "what was there before has left"
            assert not any(held(f"old{n}") for n in range(number // 2))
        twin.clock.at += 10
        with clearing.loading("a", now_s()):
            assert await load("later"), "for the next load it may leave"
        twin.check_room()
        await twin.store.close()

    run(test)


def test_a_load_is_limited_by_those_of_its_own_bucket_and_makes_no_room_once_it_has_ended(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        twin = Twin(tmp_path, 6_000_000)
        clearing, now_s = twin.store.clearing, twin.store.now_s

        async def put(key: str) -> bool:
            known = twin.store.learn(twin.numbers["b"], key, "v", 50_000)
            return await twin.store.put(known, 0, bytes(50_000), is_loading=True)

        filled = 0
        while await put(f"old{filled}"):
            filled += 1
        assert filled > 50, "there was room, and nothing has left"
        assert all(twin.store.holds(twin.numbers["b"], f"old{n}", "v", 0) for n in range(filled))
        twin.clock.at += 10
        with clearing.loading("a", now_s() - 1000), clearing.loading("b", now_s()):
            assert await put("new"), "the load of the other bucket is older"
        with clearing.loading("b", now_s() - 1000):
            assert not await put("newer")
        await twin.store.close()

    run(test)


def test_what_is_pinned_stays_when_the_limit_is_lower_as_long_as_it_can(tmp_path: Path) -> None:
    async def test() -> None:
        twin = Twin(tmp_path, 10_000_000)
        twin.rules["a"] = [PrefixRule("pinned/", 0, True)]
        await twin.store.close()
        twin.open()
        pinned = [f"pinned/{n}" for n in range(20)]
        for name in pinned:
            assert await twin.put("a", name)
        pinned_bytes = twin.store.room.used_bytes
        for n in range(100):
            twin.clock.at += 1
            assert await twin.put("a", f"x{n}")
        for limit_bytes in (pinned_bytes * 2, pinned_bytes // 2):
            assert twin.store.room.used_bytes > limit_bytes
            twin.limit_bytes = limit_bytes
            await twin.store.close()
            twin.open()
            await twin.store.clearing.shrink()
            twin.check_room()
            are_all_held = all([await twin.check("a", name) for name in pinned])
            assert are_all_held == (limit_bytes > pinned_bytes)
        await twin.store.close()

    run(test)


def test_rules_that_come_later_count_what_is_there(tmp_path: Path) -> None:
    async def test() -> None:
        twin = Twin(tmp_path, 50_000_000)
        for n in range(30):
            await twin.put("a", f"pinned/{n}")
        before = twin.store.room.used_bytes
        bucket = twin.store.open_bucket("a", "memory://a", rules=[PrefixRule("pinned/", 0, True)])
        assert twin.store.room.used_bytes == before
        assert twin.store.room.used_by(bucket.lot_of("pinned/x").number) == before
        assert twin.store.room.used_by(bucket.lots[0].number) == 0
        for n in range(30):
            assert await twin.check("a", f"pinned/{n}")
        await twin.store.close()

    run(test)


def test_what_is_kept_for_a_time_leaves_when_it_is_over(tmp_path: Path) -> None:
    async def test() -> None:
        twin = Twin(tmp_path, 50_000_000)
        bucket = twin.store.open_bucket("a", "memory://a", evict_after_s=100)
        for n in range(5):
            await twin.put("a", f"old{n}")
            await twin.put("b", f"old{n}")
        twin.clock.at += 150
        await twin.store.clearing.give_up_old()
        assert not any([await twin.check("a", f"old{n}") for n in range(5)])
        assert all([await twin.check("b", f"old{n}") for n in range(5)])
        assert twin.store.room.used_by(bucket.lots[0].number) == 0
        await twin.store.close()

    run(test)


def test_looking_for_what_may_leave_takes_little_of_the_time(tmp_path: Path) -> None:
    """Large objects' files, of which there may be very many, are looked at now and then only."""

    async def test() -> None:
        twin = Twin(tmp_path, 50_000_000)
        twin.store.open_bucket("a", "memory://a", evict_after_s=1000)
        for n in range(5):
            known = twin.store.learn(twin.numbers["a"], f"large{n}", "v", 2_000_000)
            assert await twin.store.put(known, 0, bytes(BLOCK))
        clearing, held = twin.store.clearing, twin.store.holdings
        looks: list[object] = []
        run_in_thread = held.run

        async def count(work: Callable[..., object], *arguments: object) -> object:
            looks.append(work)
            twin.clock.at += 0.2
            return await run_in_thread(work, *arguments)

        held.run = count  # type: ignore[assignment, method-assign]
        began_s = twin.clock.at
        while twin.clock.at < began_s + 900:
            twin.clock.at += 1
            await clearing.give_up_old()
            await clearing.rewrite_sparse()
        assert 40 <= looks.count(clearing._live_bytes) <= 45, "a hundredth of the time"
        assert 85 < looks.count(held.index.containers) < 95
        twin.clock.at = began_s + 1012
        await clearing.give_up_old()
        assert twin.store.room.used_by_bucket("a") == 0
        await twin.store.close()

    run(test)


def test_another_origin_under_the_same_name_begins_with_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        twin = Twin(tmp_path, 50_000_000)
        for n in range(5):
            await twin.put("a", f"k{n}")
            await twin.put("b", f"k{n}")
        twin.store.open_bucket("a", "memory://other")
        assert not any([await twin.check("a", f"k{n}") for n in range(5)])
        assert all([await twin.check("b", f"k{n}") for n in range(5)])
        assert twin.store.room.used_by_bucket("a") == 0
        twin.check_room()
        await twin.store.close()

    run(test)


def test_a_file_that_somebody_removes_is_lost_and_never_made_again(tmp_path: Path) -> None:
    async def test() -> None:
        twin = Twin(tmp_path, 50_000_000)
        names = [f"k{n}" for n in range(20)]
        for name in names:
            await twin.put("a", name)
        for path in (tmp_path / "files").rglob("*"):
            if path.is_file():
                path.unlink()
        for name in names:
            known = twin.store.find(twin.numbers["a"], name)
            assert known is not None
            piece = twin.store.held(known, 0)
            if piece is not None:
                with pytest.raises(CorruptBlock):
                    await twin.store.read(piece)
            assert twin.store.held(known, 0) is None
        for name in names:
            assert await twin.put("a", name)
            assert await twin.check("a", name)
        await twin.store.close()
        twin.open()
        for name in names:
            assert await twin.check("a", name)
        await twin.store.close()

    run(test)


def test_a_full_disk_takes_nothing_until_it_does(tmp_path: Path) -> None:
    async def test() -> None:
        clock = HandClock()
        store = Store(tmp_path, 50_000_000, BLOCK, clock, Rng(1), FullFiles)
        number = store.open_bucket("a", "memory://a").number
        assert isinstance(store.files, FullFiles)
        for size, key in ((100, "small"), (300_000, "large")):
            assert not await store.put(store.learn(number, key, "v", size), 0, bytes(min(size, BLOCK)))
            assert "No space left" in str(store.problem)
            clock.at += 10
        store.files.is_full = False
        for size, key in ((100, "small"), (300_000, "large")):
            assert await store.put(store.learn(number, key, "v", size), 0, bytes(min(size, BLOCK)))
        assert store.problem is None
        await store.close()

    run(test)


def test_the_same_block_is_written_once_however_often_it_is_put(tmp_path: Path) -> None:
    async def test() -> None:
        twin = Twin(tmp_path, 50_000_000)
        assert all(await asyncio.gather(*(twin.put("a", f"k{n % 4}") for n in range(40))))
        for n in range(4):
            assert await twin.check("a", f"k{n}")
        sizes = [len(content("a", f"k{n}", 0)) for n in range(4)]
        assert twin.store.room.used_bytes <= sum(sizes) + 8 * PAGE
        await twin.store.close()

    run(test)


def test_a_version_that_comes_while_a_block_is_written_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing_module, "AT_ONCE_BYTES", 0)

    async def test() -> None:
        twin = Twin(tmp_path, 50_000_000)
        large = next(f"k{n}" for n in range(99) if len(content("a", f"k{n}", 0)) == 300_000)
        known = twin.known("a", large)
        writing = asyncio.ensure_future(twin.store.put(known, 1, bytes(BLOCK)))
        await asyncio.sleep(0)
        twin.versions["a", large] = 1
        twin.known("a", large)
        assert not await writing
        assert await twin.check("a", large) == 0
        assert twin.store.room.used_bytes == 0
        assert twin.disk_bytes() == 0
        await twin.store.close()

    run(test)


def test_a_folder_is_one_stores(tmp_path: Path) -> None:
    async def test() -> None:
        twin = Twin(tmp_path, 50_000_000)
        with pytest.raises(EnvironmentProblem, match="in use by another cache server"):
            Store(tmp_path, 1, BLOCK, HandClock(), Rng(1))
        await twin.store.close()

    run(test)


def test_a_file_loses_its_last_held_block_while_another_is_written(tmp_path: Path) -> None:
    async def test() -> None:
        twin = Twin(tmp_path, 50_000_000)
        large = next(f"k{n}" for n in range(99) if len(content("a", f"k{n}", 0)) == 300_000)
        assert await twin.put("a", large)
        known = twin.known("a", large)
        for block in range(1, 5):
            piece = twin.store.held(known, block)
            assert piece is not None
            twin.store.clearing.lose(piece)
        data = memoryview(content("a", large, 0))
        first = asyncio.ensure_future(twin.store.put(known, 1, data[BLOCK : 2 * BLOCK]))
        await asyncio.sleep(0)
        last = twin.store.held(known, 0)
        assert last is not None
        twin.store.clearing.lose(last)
        second = asyncio.ensure_future(twin.store.put(known, 2, data[2 * BLOCK : 3 * BLOCK]))
        assert await first
        assert await second
        assert await twin.check("a", large) == 2
        twin.store.large_files.mend()
        assert twin.store.room.used_bytes == 2 * BLOCK
        twin.check_room()
        await twin.store.close()

    run(test)


def test_what_the_index_cannot_learn_gives_its_room_back(tmp_path: Path) -> None:
    async def test() -> None:
        twin = Twin(tmp_path, 50_000_000)
        large = next(f"k{n}" for n in range(99) if len(content("a", f"k{n}", 0)) == 300_000)
        assert await twin.put("a", large)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (twin.store.index.file_bytes(), hard))
        try:
            known = twin.store.learn(twin.numbers["a"], large, "v9", 300_000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert known.tag == 0, "it is served, and nothing can be held of it"
        assert twin.store.problem is not None
        assert twin.store.room.used_bytes == 0
        assert twin.disk_bytes() == 0
        await twin.store.close()

    run(test)


def test_a_segment_that_cannot_be_written_anew_stays(tmp_path: Path) -> None:
    async def test() -> None:
        twin = Twin(tmp_path, 3_000_000, "uniform")
        names = [f"k{n}" for n in range(300)]
        stored = [name for name in names if await twin.put("a", name)]
        small = [name for name in stored if len(content("a", name, 0)) < 6000]
        for name in small[::3] + small[1::3]:
            twin.store.forget(twin.numbers["a"], name)
        left = [name for name in small if await twin.check("a", name)]
        files = twin.store.files
        real = files.write

        def full(number: int, offset: int, data: bytes) -> None:
            raise EnvironmentProblem("no room")

        files.write = full  # type: ignore[method-assign, assignment]
        twin.clock.at += 100
        while await twin.store.clearing.rewrite_sparse():
            pass
        files.write = real  # type: ignore[method-assign]
        assert all([await twin.check("a", name) for name in left])
        await twin.store.close()

    run(test)


def test_closing_waits_for_what_the_upkeep_writes(tmp_path: Path) -> None:
    async def test() -> None:
        twin = Twin(tmp_path, 3_000_000)
        for n in range(200):
            await twin.put("a", f"k{n}")
        for n in range(200):
            if n % 4:
                twin.store.forget(twin.numbers["a"], f"k{n}")
        real = twin.store.files.write
        ended: list[float] = []
        late: list[int] = []

        def slow(number: int, offset: int, data: bytes) -> None:
            time.sleep(0.01)
            real(number, offset, data)
            late.extend([number] if ended else [])

        twin.store.files.write = slow  # type: ignore[method-assign, assignment]
        twin.clock.at += 100
        rewriting = asyncio.ensure_future(twin.store.clearing.rewrite_sparse())
        await asyncio.sleep(0.005)
        await twin.store.close()
        ended.append(twin.clock.at)
        await asyncio.gather(rewriting, return_exceptions=True)
        assert late == [], "written after the folder was let go"

    run(test)
