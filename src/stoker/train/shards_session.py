"""Where a process's shards come from: the master, or a core in the process."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from stoker.errors import ConfigError
from stoker.settings import worker_settings
from stoker.train.channel import LateAnswer
from stoker.train.shards_alone import AloneCaller
from stoker.wire.shards import (
    CommitShards,
    ExportShards,
    ImportShards,
    LeaseShard,
    ReportShard,
    ShardAnswer,
    ShardCall,
    ShardLeased,
    decode_answer,
    encode,
)

_WHOLE = (CommitShards, ExportShards, ImportShards)
"""Calls that belong to the sealing of a commit."""


class Caller(Protocol):
    """Carries calls to the master. Several threads may call."""

    def call(self, message: ShardCall, *, is_ahead: bool = False) -> ShardAnswer:
        """The answer, however long it takes. `is_ahead`: a lease call that is not the training loop's own. Raises
        MasterUnreachable when there will be none."""
        ...


class ServiceCaller:
    """Calls the master's service `shards` by functions that carry bytes: `call(service, body) -> body`, and for what
    may be long in coming `lease(service, body, on_late) -> body`. `commit` is as `call`, but must not be broken off: it
    would be unknown what counts, and a State would be sealed in halves. `ahead` is as `lease`, for loader processes.

    `on_late` is given an answer that comes after the call was interrupted, and returns what is to be called then.
    """

    def __init__(
        self,
        call: Callable[[str, bytes], bytes],
        lease: Callable[[str, bytes, LateAnswer], bytes],
        commit: Callable[[str, bytes], bytes] | None = None,
        ahead: Callable[[str, bytes, LateAnswer], bytes] | None = None,
    ) -> None:
        self._call = call
        self._lease = lease
        self._commit = commit if commit is not None else call
        self._ahead = ahead if ahead is not None else lease

    def call(self, message: ShardCall, *, is_ahead: bool = False) -> ShardAnswer:
        """See Caller. A shard that comes when nobody waits for it any more is handed back."""
        if isinstance(message, LeaseShard):
            on_late = functools.partial(_hand_back, message.dataset)
            lease = self._ahead if is_ahead else self._lease
            return decode_answer(lease("shards", encode(message), on_late))
        call = self._commit if isinstance(message, _WHOLE) else self._call
        return decode_answer(call("shards", encode(message)))


def _hand_back(dataset: str, body: bytes) -> bytes | None:
    """The call that follows from the late answer to a lease call."""
    answer = decode_answer(body)
    if not isinstance(answer, ShardLeased):
        return None
    shard = answer.shard
    return encode(ReportShard(dataset, shard.number, answer.lease, "returned", rewinds=shard.rewinds))


class ShardSession:
    """Where this process's shards come from. The training runtime sets `caller` when an agent has started it."""

    def __init__(self) -> None:
        self.caller: Caller | None = None
        self.is_interrupted: Callable[[], bool] = lambda: False
        """Whether exceptions that are on their way now are the runtime's own, and no fault of a shard."""
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        """Around it the training loop waits for what loader processes read."""
        self._alone = AloneCaller(time.monotonic)
        self._pid = os.getpid()

    def find(self) -> Caller:
        """The way to the master, or to a core in this process. Raises ConfigError."""
        if os.getpid() != self._pid:
            raise ConfigError(
                "stoker.shards was first used in the parent of this process: lease shards in the training process and "
                "hand their records to its data-loading processes"
            )
        if self.caller is not None:
            return self.caller
        if worker_settings().agent_socket is not None:
            raise ConfigError(
                "call stoker.init() before stoker.shards(): this process is not connected to its agent yet"
            )
        return self._alone


@functools.cache
def shard_session() -> ShardSession:
    """The process's one session: a process is one worker."""
    return ShardSession()
