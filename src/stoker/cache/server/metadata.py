"""What is known of keys: from the index while it is fresh, else from the key's owner, which asks the origin."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from stoker.base.clock import Clock
from stoker.cache.maglev import block_owner_name
from stoker.cache.origin.port import Part
from stoker.cache.server.buckets import Bucket
from stoker.cache.server.fleet import Fleet
from stoker.cache.server.flights import Flights
from stoker.cache.server.inquiry import part_of_request
from stoker.cache.server.last_known import LastKnown
from stoker.cache.server.lists import Lists
from stoker.cache.server.questions import Questions
from stoker.cache.store.attributes import attributes_of, checked
from stoker.cache.store.known import Known
from stoker.cache.store.store import Store
from stoker.errors import ObjectNotFound
from stoker.wire.cache_api import ONLY, ObjectInfo, ObjectPage, ObjectStat


class _Stat(NamedTuple):
    """A question that is asked once for all who ask it at the same time. One that was handed on often enough is never
    the same as one that may be handed on: two servers would wait for each other. Nor is one that was asked before a
    refresh the same as one after it; `refreshes` counts them. `begins`: its first bytes are wanted next."""

    bucket: str
    key: str
    hops: int
    is_refreshing: bool
    refreshes: int
    begins: bool


class _Listed(NamedTuple):
    """A page that is asked for once for all who ask for it at the same time; `hops` and `refreshes` as above."""

    bucket: str
    prefix: str
    after: str | None
    limit: int
    delimiter: str
    hops: int
    refreshes: int


class FirstBlocks(Protocol):
    """Where the first bytes of an object go that come together with its version: see `beginnings.py`."""

    def is_wanted(self, bucket: Bucket, key: str, hops: int) -> bool: ...

    def reserve(self, bucket: Bucket, key: str, hops: int) -> bool: ...

    def release(self) -> None: ...

    def begin(self, known: Known, parts: AsyncGenerator[Part, None], hops: int) -> None: ...


class Metadata:
    """Lives on one event loop."""

    def __init__(
        self, store: Store, fleet: Fleet, clock: Clock, buckets: dict[str, Bucket], first: FirstBlocks
    ) -> None:
        self._store = store
        self._first = first
        self._fleet = fleet
        self._clock = clock
        self._buckets = buckets
        self._stats: Flights[_Stat, Known] = Flights(self._stat)
        self._pages: Flights[_Listed, ObjectPage] = Flights(self._page)
        self._lists = Lists()
        self._questions: Questions[tuple[int, str]] = Questions()
        self._last_known = LastKnown(clock)
        # While this server was away the others may have been told to forget what it still knows; and how old that is
        # nobody knows where the clock was set.
        is_trusted = fleet.is_single and not store.index.is_of_later
        self._not_before_s = 0 if is_trusted else store.now_s()

    def rule(self, bucket: Bucket) -> tuple[int, float, int]:
        """What makes a hit of a bucket, for the front: its number, its ttl in seconds, and when the origin must have
        been asked at the earliest."""
        return bucket.number, bucket.spec.ttl_s, self._not_before_s

    def checked_from_s(self, bucket: Bucket) -> int:
        """When the origin must have been asked at the earliest for an object to be served without asking again."""
        return max(self._not_before_s, int(self._store.now_s() - bucket.spec.ttl_s))

    def confirm_all(self) -> None:
        """Have what is known confirmed before it is believed again: this server may not have been told to forget it."""
        self._not_before_s = self._store.now_s() + 1
        self._lists = Lists()

    def fresh(self, bucket: Bucket, key: str) -> Known | None:
        """What is known of a key, if nobody need be asked."""
        known = self._store.find(bucket.number, key)
        if known is None:
            return None
        ttl_s = bucket.spec.ttl_s
        if known.is_absent:
            ttl_s = min(ttl_s, bucket.spec.negative_ttl_s)
        is_fresh = known.checked_s >= self._not_before_s and self._is_within(known, ttl_s)
        return known if is_fresh else None

    async def locate(
        self, bucket: Bucket, key: str, hops: int = 0, *, is_refreshing: bool = False, begins: bool = False
    ) -> Known:
        """The version of a key, which may be that there is none; the origin is asked where it is unknown or old, or
        `is_refreshing`; if it `begins`, for its first bytes as well. Raises OriginError if the origin fails and nothing
        recent enough is known; where something is, that is told soon."""
        known = None if is_refreshing else self.fresh(bucket, key)
        if known is not None:
            return known
        hops = self._fleet.hops(block_owner_name(bucket.name, key, 0), 1, hops)
        asked = _Stat(bucket.name, key, hops, is_refreshing, bucket.refreshes, begins)

        def last() -> Known | None:
            known = self._store.find(bucket.number, key)
            stale_s = bucket.spec.ttl_s + bucket.spec.stale_if_error_s
            return None if is_refreshing or known is None or not self._is_within(known, stale_s) else known

        return await self._last_known.now_or_last(bucket, key, lambda: self._stats.get(asked), last)

    def stat_of(self, known: Known) -> ObjectStat:
        """What to tell a peer."""
        age_s = max(0, self._store.now_s() - known.checked_s)
        return ObjectStat(
            known.key, known.size_bytes, known.version, age_s, known.is_absent, known.attributes
        )

    def _learn(
        self,
        bucket: Bucket,
        number: int,
        info: ObjectInfo,
        refreshes: int,
        *,
        is_absent: bool = False,
        checked_s: int | None = None,
        attributes: str | None = None,
    ) -> Known:
        """Take in what was said about an object: for as long as it is good, if nobody has had it refreshed since it was
        asked; not at all, if a later question was answered before."""
        if not self._questions.is_news((bucket.number, info.key), number):
            known = self._store.find(bucket.number, info.key)
            if known is not None:
                return known
        return self._store.learn(
            bucket.number,
            info.key,
            info.version,
            info.size_bytes,
            is_absent=is_absent,
            checked_s=checked_s if refreshes == bucket.refreshes else 0,
            attributes=_attributes(info, is_absent) if attributes is None else attributes,
        )

    async def page(
        self,
        bucket: Bucket,
        prefix: str,
        after: str | None,
        limit: int,
        hops: int = 0,
        *,
        delimiter: str = "",
    ) -> ObjectPage:
        """A page of a list: of objects under `prefix` that come after `after`. With a delimiter, of what is right below
        the prefix; if nobody lists so it says nothing of folders, and is of no use. Raises OriginError."""
        which, now = (prefix, after, limit), self._clock.now()
        known = self._lists.get(bucket.name, *which, bucket.spec.ttl_s, now, delimiter=delimiter)
        if known is not None:
            return _aged(*known)
        hops = self._fleet.hops(block_owner_name(bucket.name, prefix, 0), 1, hops)
        asked = _Listed(bucket.name, *which, delimiter, hops, bucket.refreshes)

        def last() -> ObjectPage | None:
            stale_s = bucket.spec.ttl_s + bucket.spec.stale_if_error_s
            known = self._lists.get(bucket.name, *which, stale_s, self._clock.now(), delimiter=delimiter)
            return None if known is None else _aged(*known)

        return await self._last_known.now_or_last(bucket, prefix, lambda: self._pages.get(asked), last)

    def page_said(self, bucket: Bucket, prefix: str, after: str | None, limit: int) -> bytes | None:
        """What stands for the page that `page` would answer with, without asking anybody: see `Lists.said`."""
        return self._lists.said(bucket.name, prefix, after, limit, bucket.spec.ttl_s, self._clock.now())

    async def _page(self, asked: _Listed) -> ObjectPage:
        bucket = self._bucket(asked.bucket)
        ttl_s, delimiter = bucket.spec.ttl_s, asked.delimiter
        which = asked.prefix, asked.after, asked.limit
        asked_at = self._clock.now()
        page = await self._fleet.ask(
            block_owner_name(bucket.name, asked.prefix, 0),
            1,
            asked.hops,
            lambda url: self._fleet.peers.list_page(url, bucket.name, *which, asked.hops + 1, delimiter),
        )
        is_useful = page is None or not delimiter or page.folders is not None
        if page is not None:
            # The owner may not have heard of a refresh yet that this server has: by its age it is too old then.
            if is_useful and page.age_s < ttl_s and asked.refreshes == bucket.refreshes:
                self._lists.put(bucket.name, *which, page, asked_at - page.age_s, delimiter=delimiter)
            return page
        page = await self._origins_page(bucket, *which, delimiter)
        is_useful = not delimiter or page.folders is not None
        if is_useful and ttl_s > 0 and asked.refreshes == bucket.refreshes:
            self._lists.put(bucket.name, *which, page, asked_at, delimiter=delimiter)
        return page

    async def refresh(self, bucket: Bucket, prefix: str) -> int:
        """Have the origin asked before anything under the prefix is served again here. Returns how many keys."""
        only = prefix.endswith(ONLY)
        prefix = prefix.removesuffix(ONLY)
        bucket.refreshes += 1
        bucket.refreshed.append((prefix, self._store.now_s()))
        self._lists.refresh(bucket.name, prefix, self._clock.now(), is_key=only)
        if only:
            return int(self._store.forget(bucket.number, prefix))
        return await self._store.refresh(bucket.number, prefix)

    async def wrote(self, bucket: Bucket, key: str, info: ObjectInfo | None) -> Known | None:
        """An object was written, or (None) removed, at the origin: what is known of it now. From then on no server of
        the fleet answers with what was there before; those that cannot be told are as soon as they can be."""
        number = self._questions.number()
        await self.refresh(bucket, key + ONLY)
        known = None if info is None else self._learn(bucket, number, info, bucket.refreshes)
        await self._fleet.refresh_all(bucket.name, key + ONLY)
        return known

    def removed(self, bucket: Bucket) -> None:
        """There is no such bucket any more."""
        bucket.refreshes += 1
        self._lists.refresh(bucket.name, "", self._clock.now())
        self._last_known.removed(bucket)

    def _bucket(self, name: str) -> Bucket:
        found = self._buckets.get(name)
        if found is None:
            raise ObjectNotFound(f"the bucket {name!r} was removed meanwhile")
        return found

    def forget(self, known: Known) -> None:
        """That version is not there any more, unless another is known already."""
        now = self._store.find(known.bucket, known.key)
        if now is not None and now.version == known.version:
            self._store.forget(known.bucket, known.key)

    async def close(self) -> None:
        await self._last_known.close()
        await self._stats.close()
        await self._pages.close()

    def _is_within(self, known: Known, age_s: float) -> bool:
        now_s = self._store.now_s()
        return known.checked_s != 0 and known.checked_s <= now_s and now_s + 1 - known.checked_s <= age_s

    async def _stat(self, asked: _Stat) -> Known:
        bucket = self._bucket(asked.bucket)
        name = bucket.number, asked.key
        number = self._questions.begin(name)
        try:
            said = await self._owner_says(asked, asked.is_refreshing)
            if said is not None and self._store.now_s() - said.age_s <= bucket.refreshed_s(asked.key):
                # The owner has not heard of the refresh yet that this server has.
                said = await self._owner_says(asked, is_refreshing=True)
            if said is not None:
                # A peer's word is as good as the origin's for what was known before this server was away.
                checked_s = max(1, self._not_before_s, self._store.now_s() - said.age_s)
                info = ObjectInfo(said.key, said.size_bytes, said.version)
                return self._learn(
                    bucket,
                    number,
                    info,
                    asked.refreshes,
                    is_absent=said.is_absent,
                    checked_s=checked_s,
                    attributes=checked(said.attributes),
                )
            try:
                return await self._origin_says(asked, bucket, number)
            except ObjectNotFound:
                info = ObjectInfo(asked.key, 0, "")
                return self._learn(bucket, number, info, asked.refreshes, is_absent=True)
        finally:
            self._questions.end(name)

    async def _origin_says(self, asked: _Stat, bucket: Bucket, number: int) -> Known:
        with part_of_request("origin question", bucket=asked.bucket, key=asked.key):
            return await self._origin_tells(asked, bucket, number)

    async def _origin_tells(self, asked: _Stat, bucket: Bucket, number: int) -> Known:
        if not asked.begins or not self._first.reserve(bucket, asked.key, asked.hops):
            return self._learn(bucket, number, await bucket.origin.stat(asked.key), asked.refreshes)
        try:
            info, parts = await bucket.origin.open(asked.key, self._store.holdings.block_size_bytes)
        except BaseException:
            self._first.release()
            raise
        known = self._learn(bucket, number, info, asked.refreshes)
        if known.version == info.version:
            self._first.begin(known, parts, asked.hops)
        else:
            self._first.release()
            await parts.aclose()
        return known

    async def _owner_says(self, asked: _Stat, is_refreshing: bool) -> ObjectStat | None:
        """None: this server is the owner, or the owner cannot be asked."""
        name = block_owner_name(asked.bucket, asked.key, 0)
        peers, hops = self._fleet.peers, asked.hops + 1
        begins = asked.begins and self._first.is_wanted(self._bucket(asked.bucket), asked.key, asked.hops)

        async def ask(url: str) -> ObjectStat:
            with part_of_request("peer question", bucket=asked.bucket, key=asked.key):
                return await peers.stat(
                    url, asked.bucket, asked.key, hops, is_refreshing=is_refreshing, begins=begins
                )

        return await self._fleet.ask(name, 1, asked.hops, ask)

    async def _origins_page(
        self, bucket: Bucket, prefix: str, after: str | None, limit: int, delimiter: str
    ) -> ObjectPage:
        refreshes, number = bucket.refreshes, self._questions.number()
        if delimiter:
            entries = await bucket.origin.folder(prefix, after, limit) if delimiter == "/" else None
            if entries is None:
                return ObjectPage([])
            for info in entries.objects:
                self._learn(bucket, number, info, refreshes)
            return ObjectPage(entries.objects, entries.after, 0.0, entries.folders)
        async with aclosing(bucket.origin.list(prefix, after, limit)) as pages:
            async for found in pages:
                for info in found:
                    self._learn(bucket, number, info, refreshes)
                return ObjectPage(found, found[-1].key if len(found) == limit else None)
        return ObjectPage([])


def _attributes(info: ObjectInfo, is_absent: bool) -> str:
    return "" if is_absent else attributes_of(info)


def _aged(page: ObjectPage, age_s: float) -> ObjectPage:
    return replace(page, age_s=age_s)
