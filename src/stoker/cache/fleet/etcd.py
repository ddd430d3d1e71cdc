"""A fleet that meets in etcd: each member's key is bound to a lease that it renews.

A member that falls silent is gone once its lease ends, on etcd's clock. Changes are pushed. While etcd is away the
members that were known last stay: a fleet goes on without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Sequence

import msgspec

from stoker.base.backoff import backoff_s
from stoker.base.clock import BootClock
from stoker.base.rng import Rng
from stoker.cache.fleet.reach import Reach
from stoker.errors import StokerError
from stoker.wire.cache_api import FleetMember
from stoker.wire.etcd import EtcdClient, Lease, Range, Transaction

LEASE_S = 5
RECHECK_S = 2.0
"""So often the members are read also where no change was told of."""
LAG_S = 6.0
"""So long what was read is sure to be so."""
MARGIN_S = 0.5
READ_S = 2.0
RETRY_FIRST_S = 0.5
RETRY_LIMIT_S = 5.0


class EtcdMembership:
    """Keys lie below `prefix`, which is one fleet's."""

    def __init__(self, client: EtcdClient, prefix: str, lease_s: int = LEASE_S) -> None:
        self._client = client
        self._prefix = prefix.rstrip("/") + "/"
        self._lease_s = lease_s
        self._me: FleetMember | None = None
        self._lease = 0
        self._keeping: asyncio.Task[None] | None = None
        self._reach = Reach()
        self._clock = BootClock()
        self._leased_until = 0.0
        self._read_until = 0.0
        self._rng = Rng(int.from_bytes(os.urandom(8), "big"))

    @property
    def problem(self) -> str | None:
        return self._reach.problem

    @property
    def confirmed_until(self) -> float:
        return min(self._leased_until, self._read_until) - MARGIN_S

    @property
    def lag_s(self) -> float:
        return LAG_S

    async def members(self) -> AsyncGenerator[Sequence[FleetMember], None]:
        first = self._prefix.encode()
        last = first[:-1] + bytes([first[-1] + 1])
        known: list[FleetMember] | None = None
        failures = 0
        while True:
            asked_at = self._clock.now()
            try:
                request = {"key": first, "range_end": last}
                answer = await self._client.call("kv/range", request, Range, timeout_s=READ_S)
            except StokerError as error:
                failures += 1
                self._reach.failed("reading", f"the fleet's members cannot be read from etcd: {error}")
                wait_s = backoff_s(failures, self._rng, first_s=RETRY_FIRST_S, limit_s=RETRY_LIMIT_S)
                await asyncio.sleep(RETRY_FIRST_S + wait_s)
                continue
            failures = 0
            self._reach.worked("reading")
            found = []
            for pair in answer.kvs:
                with contextlib.suppress(ValueError):  # it need not even be text
                    found.append(msgspec.json.decode(pair.value, type=FleetMember))
            if found != known:
                known = found
                yield found
            self._read_until = asked_at + LAG_S
            await self._client.wait_for_change(first, answer.header.revision, RECHECK_S, last)

    async def announce(self, me: FleetMember) -> None:
        self._me = me
        try:
            await self._put()
        except StokerError as error:
            self._reach.failed("writing", f"the fleet in etcd cannot be told of this server: {error}")
            raise
        self._reach.worked("writing")
        if self._keeping is None:
            self._keeping = asyncio.get_running_loop().create_task(self._keep())

    async def leave(self) -> None:
        self._leased_until = 0.0
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
            self._keeping = None
        if self._lease:
            with contextlib.suppress(StokerError):
                await self._client.call("lease/revoke", {"ID": self._lease}, Lease, timeout_s=1.0)
            self._lease = 0
        await self._client.close()

    async def _put(self) -> None:
        """Raises EnvironmentProblem, AccessDenied."""
        assert self._me is not None
        asked_at = self._clock.now()
        lease = self._lease or (await self._client.call("lease/grant", {"TTL": self._lease_s}, Lease)).ID
        key = (self._prefix + self._me.name).encode()
        put = {"request_put": {"key": key, "value": msgspec.json.encode(self._me), "lease": lease}}
        await self._client.call("kv/txn", {"success": [put]}, Transaction)
        self._leased_until = asked_at + self._lease_s
        self._lease = lease  # only now: a lease without its key would be renewed for nothing

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 4)
            asked_at = self._clock.now()
            try:
                if self._lease:
                    if await self._client.keep_alive(self._lease, timeout_s=self._lease_s):
                        self._leased_until = asked_at + self._lease_s
                    else:
                        self._lease = 0
                if not self._lease:
                    await self._put()
            except StokerError as error:
                self._reach.failed("writing", f"the lease in etcd cannot be renewed: {error}")
            else:
                self._reach.worked("writing")
