"""Who is a job's master, agreed upon through one etcd key that is bound to the master's lease.

The key's create revision is the leader's epoch: it grows from leader to leader. Whatever a leader writes to etcd is
compared with it, so a deposed one writes nothing. For what it does elsewhere it has a deadline on its own clock: a
lease that was granted for t seconds, asked for at s, cannot end before s + t, so a leader that stops at that moment
has stopped before another can win. (Gray and Cheriton, "Leases", SOSP 1989; the key with its create revision is
etcd's own election recipe, clientv3/concurrency.)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, NamedTuple

from stoker.errors import JournalDamaged, JournalUnavailable, LeadershipLost, StokerError
from stoker.job.journal.etcd_layout import Keys
from stoker.job.journal.etcd_room import EtcdRoom
from stoker.wire.etcd import EtcdClient, EtcdFull, KeyValue, Lease, Transaction

log = logging.getLogger("stoker.journal")
RECHECK_S = 10.0
RETRY_S = 0.5
RENEWALS_PER_TTL = 4
CLOCK_TOLERANCE = 0.02
RESIGN_TIMEOUT_S = 2.0


class Leader(NamedTuple):
    """The master's endpoint (host:port) and its epoch."""

    endpoint: str
    epoch: int


def boot_clock_s() -> float:
    """Seconds that go on while the machine sleeps, as etcd's leases do elsewhere."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class EtcdLocator:
    """Tells who leads a job, by etcd's pushes; asks anew every `RECHECK_S` only to be sure."""

    def __init__(self, client: EtcdClient, keys: Keys) -> None:
        self._client = client
        self._key = keys.master

    async def locate(self) -> str:
        """The current master's endpoint; waits until there is one, however long etcd or the master are away."""
        async with contextlib.aclosing(self.changes()) as changes:
            async for leader in changes:
                if leader is not None:
                    return leader.endpoint
        raise AssertionError("unreachable")

    async def wait_for_nobody(self) -> None:
        """Return when there is no master."""
        async with contextlib.aclosing(self.changes()) as changes:
            async for leader in changes:
                if leader is None:
                    return

    async def changes(self) -> AsyncGenerator[Leader | None, None]:
        """The leader now, then each change of it; None while there is none. Ends only by `aclose` or cancellation."""
        known: tuple[Leader | None] | None = None
        complained = False
        while True:
            try:
                found, revision = await self._client.get(self._key)
                complained = False
            except JournalUnavailable as error:
                log.log(logging.DEBUG if complained else logging.WARNING, "looking for the master: %s", error)
                complained = True
                await asyncio.sleep(RETRY_S)
                continue
            leader = None if found is None else leader_of(found)
            if known != (leader,):
                known = (leader,)
                yield leader
            else:
                await self._client.wait_for_change(self._key, revision, RECHECK_S)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()


class EtcdLeadership:
    """Leadership of one job. `campaign` gets it, `resign` gives it up; in between it is renewed by itself."""

    def __init__(
        self,
        client: EtcdClient,
        keys: Keys,
        *,
        ttl_s: float,
        room: EtcdRoom | None = None,
        clock: Callable[[], float] = boot_clock_s,
    ) -> None:
        """`room`: what makes some, where etcd is too full to grant a lease."""
        self.epoch = 0
        self.waited = False
        self._client = client
        self._keys = keys
        self._ttl_s = max(1, math.ceil(ttl_s))
        self._room = room
        self._clock = clock
        self._lease = 0
        self._deadline = -math.inf
        self._lost: asyncio.Future[str] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def campaign(self, endpoint: str) -> None:
        """Wait until there is no leader, then become it.

        Raises JournalUnavailable if etcd cannot be reached to begin with; later on its return is waited for.
        """
        locator = EtcdLocator(self._client, self._keys)
        found, _ = await self._client.get(self._keys.master)
        self.waited = found is not None
        try:
            await locator.wait_for_nobody()
            while not await self._try_to_win(endpoint):
                self.waited = True
                await locator.wait_for_nobody()
        except BaseException:
            await asyncio.shield(self._revoke())
            raise
        self._lost = asyncio.get_running_loop().create_future()
        self._tasks = [
            asyncio.create_task(self._renew(), name="master-lease"),
            asyncio.create_task(self._look_on(locator), name="master-key"),
        ]
        log.info("this process is the job's master at %s (epoch %d)", endpoint, self.epoch)

    @property
    def lost(self) -> str | None:
        if self._lost is None:
            return "this process never was the job's master, or gave it up"
        if not self._lost.done() and self.remaining_s() <= 0:
            self._lose(f"the lease could not be renewed within its {self._ttl_s} s")
        return self._lost.result() if self._lost.done() else None

    def check(self) -> None:
        """Raises LeadershipLost unless this process leads by its own clock."""
        if (why := self.lost) is not None:
            raise LeadershipLost(f"this process is not the job's master any more: {why}")

    def remaining_s(self) -> float:
        """Seconds for which nobody else can lead, whatever happens; not positive once that is over."""
        return self._deadline - self._clock()

    async def wait_lost(self) -> str:
        if self._lost is None:
            return str(self.lost)
        return await asyncio.shield(self._lost)

    def depose(self, why: str) -> None:
        """Take note that somebody else leads. Raises LeadershipLost."""
        self._lose(why)
        self.check()

    async def resign(self) -> None:
        """Let a successor in at once, if etcd can be reached. Leadership is lost from here on."""
        self._lose("this process gave it up")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        await self._revoke()

    def _lose(self, why: str) -> None:
        self._deadline = -math.inf
        if self._lost is not None and not self._lost.done():
            log.debug("leadership is lost: %s", why)
            self._lost.set_result(why)

    async def _try_to_win(self, endpoint: str) -> bool:
        """Create the key if there is none. A request that won but whose answer was lost is recognised by its lease."""
        await self._revoke()
        asked_at = self._clock()
        try:
            granted = await self._client.call("lease/grant", {"TTL": self._ttl_s}, Lease)
            self._lease = granted.ID
            answer = await self._client.call("kv/txn", self._claim(endpoint), Transaction)
        except JournalUnavailable as error:
            if isinstance(error, EtcdFull) and self._room is not None and await self._room.make():
                return False
            log.warning("trying to become the job's master: %s", error)
            await asyncio.sleep(RETRY_S)
            return False
        held = next((kv for found in answer.ranges for kv in found.kvs), KeyValue())
        if not answer.succeeded and held.lease != self._lease:
            return False
        self.epoch = answer.header.revision if answer.succeeded else held.create_revision
        self._extend(asked_at, granted.TTL)
        return self.remaining_s() > 0

    def _claim(self, endpoint: str) -> dict[str, Any]:
        key = self._keys.master
        put = {"key": key, "value": endpoint.encode(), "lease": self._lease}
        return {
            "compare": [key_was_created_at(key, 0)],
            "success": [{"request_put": put}],
            "failure": [{"request_range": {"key": key}}],
        }

    def _extend(self, asked_at: float, ttl_s: float) -> None:
        self._deadline = max(self._deadline, asked_at + ttl_s * (1 - CLOCK_TOLERANCE))

    async def _renew(self) -> None:
        """Keep the lease alive, until that fails for as long as it lasts."""
        while self.lost is None:
            await asyncio.sleep(min(self._ttl_s / RENEWALS_PER_TTL, max(self.remaining_s(), 0.0)))
            asked_at = self._clock()
            if (left_s := self._deadline - asked_at) <= 0:
                continue
            try:
                ttl_s = await self._client.keep_alive(self._lease, timeout_s=left_s)
            except JournalUnavailable:
                continue
            except StokerError as error:
                self._lose(f"the lease cannot be renewed: {error}")
                return
            if ttl_s <= 0:
                self._lose("the lease has run out in etcd")
                return
            self._extend(asked_at, ttl_s)

    async def _look_on(self, locator: EtcdLocator) -> None:
        """Notice at once when the key is deleted or another's."""
        async with contextlib.aclosing(locator.changes()) as changes:
            async for leader in changes:
                if leader is None or leader.epoch != self.epoch:
                    self._lose(
                        "its key was deleted" if leader is None else f"{leader.endpoint} is the master now"
                    )
                    return

    async def _revoke(self) -> None:
        """Give the lease back, and with it the key; if that fails it runs out by itself."""
        lease, self._lease = self._lease, 0
        if lease:
            with contextlib.suppress(StokerError):
                await self._client.call("lease/revoke", {"ID": lease}, Lease, timeout_s=RESIGN_TIMEOUT_S)


def leader_of(found: KeyValue) -> Leader:
    """The leader that the key names. Raises JournalDamaged if it is no endpoint."""
    try:
        endpoint = found.value.decode()
    except UnicodeDecodeError:
        raise JournalDamaged(
            f"the key {found.key!r} in etcd holds {found.value[:80]!r}, which no master wrote: delete it"
        ) from None
    return Leader(endpoint, found.create_revision)


def key_was_created_at(key: bytes, revision: int) -> dict[str, Any]:
    """The comparison that holds while the key is the one made at this revision; 0: while there is none."""
    return {"key": key, "target": "CREATE", "result": "EQUAL", "create_revision": revision}
