"""Room in etcd: old revisions are forgotten in time, and an etcd that is full is emptied of them.

etcd keeps every revision of every key until somebody compacts it, and by default nobody does. When a member's file has
grown to its quota (2 GB by default) etcd refuses every write, of everybody. Compaction alone does not end that: the
file shrinks when the member is defragmented, and then the alarm has to be disarmed.

Source: https://etcd.io/docs/v3.4/op-guide/maintenance/
"""

from __future__ import annotations

import logging
import time
from typing import Any

import msgspec

from stoker.errors import StokerError
from stoker.wire.etcd import OUT_OF_RANGE, EtcdClient, EtcdRefused, Transaction

log = logging.getLogger("stoker.journal")
COMPACT_AFTER_REVISIONS = 50_000
COMPACT_AFTER_BYTES = 64 * 1024 * 1024
"""Of this journal's own writes. etcd holds up to twice as much history for each job that keeps its journal there."""
MAKE_STEP_TIMEOUT_S = 30.0
MAKE_EVERY_S = 60.0
NOT_ENOUGH = "removing old revisions was not enough"


class _Alarm(msgspec.Struct, frozen=True):
    memberID: int = 0  # noqa: N815 - etcd's name
    alarm: str = "NONE"


class _Alarms(msgspec.Struct, frozen=True):
    alarms: tuple[_Alarm, ...] = ()


class EtcdRoom:
    """Keeps the etcd of one journal from filling up with what nobody reads any more."""

    def __init__(self, client: EtcdClient, key: bytes, *, compact_after_s: float | None) -> None:
        """`key`: one that may be read. `compact_after_s`: forget at the latest after this long what had been replaced
        by the time before; None: never, something else does.
        """
        self._client = client
        self._key = key
        self._compact_after_s = compact_after_s
        self._marked: tuple[float, int] | None = None
        self._revision = 0
        self._bytes = 0
        self._is_full = False
        self._is_told = False
        self._not_before = 0.0
        self._why = NOT_ENOUGH
        self._emptied_at = -1
        """The revision at which nothing old was left."""

    def note(self, revision: int, size_bytes: int) -> None:
        """A write of that size got through and made this revision."""
        self._revision = revision
        self._bytes += size_bytes
        if self._marked is None:
            self._marked = (time.monotonic(), revision)
        if self._is_full:
            log.warning(
                "etcd was full and takes writes again. If this comes again, start its members with a larger"
                " --quota-backend-bytes"
            )
            self._is_full = self._is_told = False
            self._not_before = 0.0

    async def keep(self) -> None:
        """Let etcd forget what had been replaced by the last time, if it is time for that. Raises StokerError."""
        if self._compact_after_s is None or self._marked is None:
            return
        marked_at, revision = self._marked
        if (
            time.monotonic() - marked_at >= self._compact_after_s
            or self._revision - revision >= COMPACT_AFTER_REVISIONS
            or self._bytes >= COMPACT_AFTER_BYTES
        ):
            self._marked, self._bytes = (time.monotonic(), self._revision), 0
            await self._client.call("kv/compaction", {"revision": revision}, Transaction)

    async def make(self) -> bool:
        """etcd is full: make room. Returns whether it was tried, so that a write may get through now.

        What has been tried without a write getting through since is not tried again for a while. Once each time, the
        log says what the operator can do.
        """
        self._is_full = True
        if self._compact_after_s is None:
            self._complain("nothing is compacted from here (compact_s=off)")
            return False
        now = time.monotonic()
        if now < self._not_before:
            self._complain(self._why)
            return False
        self._not_before = now + MAKE_EVERY_S
        try:
            _, revision = await self._client.get(self._key)
            if revision == self._emptied_at:
                self._complain(self._why)
            else:
                await self._empty(revision)
            await self._disarm()
        except StokerError as error:
            self._complain(f"making room failed: {error}")
            return False
        return True

    async def _empty(self, revision: int) -> None:
        """Remove all that had been replaced by this revision, and have the files shrink."""
        log.info("etcd at %s is full: its old revisions are removed, its members defragmented", self._client)
        failures = await self._at_each("kv/compaction", {"revision": revision, "physical": True})
        failures += await self._at_each("maintenance/defragment", {})
        self._emptied_at = -1 if failures else revision
        self._why = f"making room failed: {failures[0]}" if failures else NOT_ENOUGH

    async def _at_each(self, path: str, request: Any) -> list[str]:
        """Ask one member after the other, since one that is at it answers nobody else; why some have not done it."""
        failures = []
        for url in self._client.urls:
            try:
                await self._client.call_at(url, path, request, Transaction, timeout_s=MAKE_STEP_TIMEOUT_S)
            except StokerError as error:
                if not (isinstance(error, EtcdRefused) and error.code == OUT_OF_RANGE):  # done by one before
                    failures.append(str(error))
        return failures

    async def _disarm(self) -> None:
        found = await self._client.call("maintenance/alarm", {"action": "GET"}, _Alarms)
        for alarm in found.alarms:
            if alarm.alarm == "NOSPACE":
                request = {"action": "DEACTIVATE", "memberID": alarm.memberID, "alarm": alarm.alarm}
                await self._client.call("maintenance/alarm", request, _Alarms)

    def _complain(self, why: str) -> None:
        if not self._is_told:
            self._is_told = True
            log.error(
                "etcd at %s is full (its --quota-backend-bytes) and takes no writes; %s. Delete what is not needed in"
                " it, then `etcdctl compact REVISION`, `etcdctl defrag --cluster` and `etcdctl alarm disarm`; or start"
                " its members with a larger quota, and disarm. The journal is tried again until then",
                self._client,
                why,
            )
