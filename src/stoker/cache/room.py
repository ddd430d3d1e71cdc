"""The hard byte limit, and who has to give when it is reached. Pure.

Room is taken before the first byte is written and given back when the bytes are gone, so that what is used never
exceeds the limit, also while filling. It is shared by lots: a bucket, or what lies under a prefix of it with a quota of
its own, or pinned. A lot of an `lru` bucket gives up what was used longest ago; one of a `uniform` bucket never
gives, and what does not fit is not stored; a pinned one never gives either, and may take from those that do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from stoker.cache.evict import UNIFORM


@dataclass(frozen=True, slots=True)
class Lot:
    """What is kept, counted and given up together. `quota_bytes` 0: no limit of its own."""

    number: int
    bucket: str
    prefix: str = ""
    policy: str = "lru"
    quota_bytes: int = 0
    is_pinned: bool = False

    @property
    def gives(self) -> bool:
        """Whether what is in it may leave for something else."""
        return self.policy != UNIFORM and not self.is_pinned


class Need(NamedTuple):
    """What must leave first: `missing_bytes` of any of these lots. Nothing may, where it is refused."""

    missing_bytes: int
    lots: frozenset[int]
    is_refused: bool
    why: str

    @property
    def fits(self) -> bool:
        return self.missing_bytes <= 0 and not self.is_refused


class Room:
    """Bytes that are used of a limit, by lot. `spare_bytes` of it are only for moving what is there already."""

    def __init__(self, limit_bytes: int, spare_bytes: int = 0) -> None:
        if limit_bytes < 0 or not 0 <= spare_bytes <= limit_bytes:
            raise ValueError(f"a limit of {limit_bytes} bytes with {spare_bytes} spare is none")
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.kept_bytes = 0
        """Of files that were given up, and that readers have open: so much less is the limit."""
        self._spare_bytes = spare_bytes
        self._lots: dict[int, Lot] = {}
        self._used: dict[int, int] = {}
        self._quotas: dict[str, int] = {}
        self._tenants: dict[str, str] = {}
        self._tenant_quotas: Mapping[str, int] = {}
        self._foreseen: set[str] = set()

    def set_lot(self, lot: Lot) -> None:
        """Add a lot, or change what it may do."""
        self._lots[lot.number] = lot
        self._used.setdefault(lot.number, 0)

    def set_quota(self, bucket: str, quota_bytes: int) -> None:
        """What all lots of a bucket may use together; 0: no limit."""
        self._quotas[bucket] = quota_bytes

    def set_tenant(self, bucket: str, tenant: str) -> None:
        """Whose bucket it is; empty: nobody's."""
        self._tenants[bucket] = tenant

    def set_tenant_quotas(self, quotas: Mapping[str, int]) -> None:
        """What all buckets of each tenant may use together; 0, or none: no limit."""
        self._tenant_quotas = dict(quotas)

    def set_foreseen(self, bucket: str, *, is_foreseen: bool) -> None:
        """Whether it is known of a bucket what is read next: `uniform` replaces what is read later, then."""
        if is_foreseen:
            self._foreseen.add(bucket)
        else:
            self._foreseen.discard(bucket)

    def lot(self, number: int) -> Lot:
        """Raises KeyError."""
        return self._lots[number]

    def used_by(self, number: int) -> int:
        """Bytes that a lot uses."""
        return self._used.get(number, 0)

    def used_by_bucket(self, bucket: str) -> int:
        """Bytes that a bucket uses."""
        return sum(self._used[lot.number] for lot in self._lots.values() if lot.bucket == bucket)

    def used_by_tenant(self, tenant: str) -> int:
        """Bytes that all buckets of a tenant use."""
        return sum(self._used[lot.number] for lot in self._lots_of_tenant(tenant))

    @property
    def tenant_quotas(self) -> Mapping[str, int]:
        """Of the tenants that have one."""
        return self._tenant_quotas

    def _lots_of_tenant(self, tenant: str) -> list[Lot]:
        return [lot for lot in self._lots.values() if self._tenants.get(lot.bucket) == tenant]

    def ask(
        self,
        number: int,
        size_bytes: int,
        leaving_bytes: int = 0,
        *,
        is_moving: bool = False,
        is_loading: bool = False,
    ) -> Need:
        """Whether `size_bytes` fit into a lot. `leaving_bytes`: of files that are unlinked and still sent from.

        `is_moving`: it is here already and written anew. `is_loading`: nobody waits for it, and nothing of another
        bucket leaves for it.
        """
        lot = self._lots[number]
        limit_bytes = self.limit_bytes - self.kept_bytes - (0 if is_moving else self._spare_bytes)
        if size_bytes > limit_bytes:
            return _refused(f"it is larger than the limit of {limit_bytes} bytes")
        if is_moving:
            over = self.used_bytes + size_bytes + leaving_bytes - limit_bytes
            return _refused("there is no room to write it anew") if over > 0 else _FITS
        if lot.quota_bytes and (over := self._used[number] + size_bytes - lot.quota_bytes) > 0:
            return self._from(lot, over, [lot], f"the quota of {lot.bucket}/{lot.prefix}")
        quota_bytes = self._quotas.get(lot.bucket, 0)
        if quota_bytes and (over := self.used_by_bucket(lot.bucket) + size_bytes - quota_bytes) > 0:
            own = [other for other in self._lots.values() if other.bucket == lot.bucket]
            return self._from(lot, over, own, f"the quota of {lot.bucket}")
        tenant = self._tenants.get(lot.bucket, "")
        quota_bytes = self._tenant_quotas.get(tenant, 0) if tenant else 0
        if quota_bytes and (over := self.used_by_tenant(tenant) + size_bytes - quota_bytes) > 0:
            return self._from(lot, over, self._lots_of_tenant(tenant), f"the quota of the tenant {tenant}")
        over = self.used_bytes + size_bytes - limit_bytes
        if over > 0:
            among = [other for other in self._lots.values() if not is_loading or other.bucket == lot.bucket]
            return self._from(lot, over, among, "the limit")
        if over + leaving_bytes > 0:
            return _refused("files that are given up, but still sent from, take the room")
        return _FITS

    def take(self, number: int, size_bytes: int) -> None:
        """Count it as used. Who asked first stays below the limit."""
        self._used[number] += size_bytes
        self.used_bytes += size_bytes

    def give(self, number: int, size_bytes: int) -> None:
        """It is gone. Raises ValueError if the lot does not use so much: a defect."""
        if size_bytes > self._used[number]:
            raise ValueError(f"lot {number} uses {self._used[number]} bytes and gives {size_bytes}")
        self._used[number] -= size_bytes
        self.used_bytes -= size_bytes

    def move(self, number: int, to: int, size_bytes: int) -> None:
        """Count it in another lot. Raises ValueError as `give` does."""
        self.give(number, size_bytes)
        self.take(to, size_bytes)

    def over(self, *, with_pinned: bool = False) -> Need:
        """What must leave because the limit is lower than it was; whatever the policies are, but what is pinned only
        `with_pinned`."""
        over = self.used_bytes - (self.limit_bytes - self._spare_bytes)
        lots = frozenset(
            number
            for number, used in self._used.items()
            if used and (with_pinned or not self._lots[number].is_pinned)
        )
        return Need(max(0, over), lots if over > 0 else frozenset(), False, "the limit is lower than it was")

    def _from(self, lot: Lot, missing_bytes: int, among: list[Lot], what: str) -> Need:
        is_foreseen = lot.bucket in self._foreseen
        if lot.policy == UNIFORM and not lot.is_pinned and not is_foreseen:
            return _refused(f"{what} is reached, and uniform never replaces")
        giving = frozenset(
            other.number for other in among if self._gives(other, lot) and self._used[other.number]
        )
        if not giving:
            return _refused(f"{what} is reached, and nothing in it may leave")
        return Need(missing_bytes, giving, False, f"{what} is reached")

    def _gives(self, lot: Lot, newcomer: Lot) -> bool:
        """One that never replaces does so for its own bucket, where it is known what is read next."""
        if lot.gives:
            return True
        return not lot.is_pinned and lot.bucket == newcomer.bucket and lot.bucket in self._foreseen


_FITS = Need(0, frozenset(), False, "there is room")


def _refused(why: str) -> Need:
    return Need(0, frozenset(), True, why)
