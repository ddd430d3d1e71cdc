"""A fleet that meets in etcd: each member's key is bound to a lease that it renews.

A member that falls silent is gone once its lease ends, on etcd's clock. Changes are pushed. While etcd is away the
members that were known last stay: a fleet goes on without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence

import msgspec

from stoker.errors import EnvironmentProblem, StokerError
from stoker.wire.cache_api import FleetMember
from stoker.wire.etcd import EtcdClient, Lease, Range, Transaction

log = logging.getLogger("stoker.cache")
LEASE_S = 5
RECHECK_S = 10.0
RETRY_S = 0.5


class EtcdMembership:
    """Keys lie below `prefix`, which is one fleet's."""

    def __init__(self, client: EtcdClient, prefix: str, lease_s: int = LEASE_S) -> None:
        self._client = client
        self._prefix = prefix.rstrip("/") + "/"
        self._lease_s = lease_s
        self._me: FleetMember | None = None
        self._lease = 0
        self._keeping: asyncio.Task[None] | None = None

    async def members(self) -> AsyncGenerator[Sequence[FleetMember], None]:
        first = self._prefix.encode()
        last = first[:-1] + bytes([first[-1] + 1])
        known: list[FleetMember] | None = None
        while True:
            try:
                answer = await self._client.call("kv/range", {"key": first, "range_end": last}, Range)
            except StokerError as error:
                log.warning("the fleet's members cannot be read from etcd: %s", error)
                await asyncio.sleep(RETRY_S)
                continue
            found = []
            for pair in answer.kvs:
                with contextlib.suppress(msgspec.DecodeError):
                    found.append(msgspec.json.decode(pair.value, type=FleetMember))
            if found != known:
                known = found
                yield found
            await self._client.wait_for_change(first, answer.header.revision, RECHECK_S, last)

    async def announce(self, me: FleetMember) -> None:
        self._me = me
        await self._put()
        if self._keeping is None:
            self._keeping = asyncio.get_running_loop().create_task(self._keep())

    async def leave(self) -> None:
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
        """Raises EnvironmentProblem."""
        assert self._me is not None
        lease = self._lease or (await self._client.call("lease/grant", {"TTL": self._lease_s}, Lease)).ID
        key = (self._prefix + self._me.name).encode()
        put = {"request_put": {"key": key, "value": msgspec.json.encode(self._me), "lease": lease}}
        await self._client.call("kv/txn", {"success": [put]}, Transaction)
        self._lease = lease  # only now: a lease without its key would be renewed for nothing

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 4)
            try:
                if self._lease and not await self._client.keep_alive(self._lease, timeout_s=self._lease_s):
                    self._lease = 0
                if not self._lease:
                    await self._put()
            except EnvironmentProblem as error:
                log.warning("the lease in etcd cannot be renewed: %s", error)
