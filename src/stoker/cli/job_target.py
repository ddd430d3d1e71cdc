"""Which job a `stoker job` command means, and patience with a master that is being started again."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from stoker.cli import registry
from stoker.cli.registry import JobRecord
from stoker.errors import ConfigError, MasterUnreachable, StokerError
from stoker.job.journal.open import open_locator
from stoker.settings import job_token
from stoker.wire.control_client import JobClient, split_endpoint

PATIENCE_S = 30.0
"""How long a command that watches a job waits for its master to come back."""
_RETRY_S = 0.5
LOCATE_S = 5.0
"""How long a journal has to say where the master is."""

T = TypeVar("T")


class JobIsOver(Exception):
    """The job that was watched has ended and its master is gone; never leaves the command line."""


class MovingClient(JobClient):
    """A client of a master that may come up elsewhere."""

    def move_to(self, endpoint: str) -> None:
        """Ask there from now on."""
        self.close()
        super().__init__(endpoint, self._token, timeout_s=self.timeout_s)


@dataclass(frozen=True)
class Target:
    """A job's master, and what this machine knows of it."""

    endpoint: str
    token: str
    record: JobRecord | None = None

    def client(self, timeout_s: float) -> MovingClient:
        """Raises ConfigError for an endpoint or token that cannot be."""
        return MovingClient(self.endpoint, self.token, timeout_s=timeout_s)

    def follow(self, client: MovingClient) -> None:
        """Have a client ask where the master is now, as far as that is known."""
        if self.record is not None and self.record.journal:
            with contextlib.suppress(StokerError):
                client.move_to(master_of(self.record))

    def is_over(self) -> bool:
        """Whether a job of this machine has taken its record away. Unknown, and so False, for those of others."""
        mine = self.record
        return mine is not None and all(record.key != mine.key for record in registry.records())


def master_of(record: JobRecord, timeout_s: float = LOCATE_S) -> str:
    """HOST:PORT of the job's master as it is now.

    Raises MasterUnreachable when its journal names none, ConfigError for a journal that cannot be reached from here.
    """
    if not record.journal:
        return record.endpoint

    async def locate() -> str:
        locator = open_locator(record.journal, record.job)
        try:
            async with asyncio.timeout(timeout_s):
                return await locator.locate()
        finally:
            await locator.close()

    try:
        return asyncio.run(locate())
    except TimeoutError:
        raise MasterUnreachable(
            f"the journal of job {record.job!r} at {record.journal} names no master"
        ) from None


def _is_meant(name: str, record: JobRecord) -> bool:
    if name in (record.job, record.endpoint):
        return True
    with contextlib.suppress(StokerError):
        return bool(record.journal) and ":" in name and name == master_of(record)
    return False


def target_of(job: str | None, token_file: str | None) -> Target:
    """The job with this name or HOST:PORT, or the only one of this machine.

    Raises ConfigError when that is not clear or a token is missing, MasterUnreachable when no job runs here.
    """
    here = registry.records()
    if job is None:
        if not here:
            raise MasterUnreachable(
                "no job runs on this machine: name one elsewhere by its master's HOST:PORT; the events of a job that "
                "is over are read by `stoker job events --log-dir DIR`"
            )
        found = here
    else:
        found = [record for record in here if _is_meant(job, record)]
    if len(found) > 1:
        names = ", ".join(f"{record.job} at {record.key[1]}" for record in found)
        raise ConfigError(f"say which job: {names} run here; HOST:PORT is always clear")
    token = registry.read_token(token_file) if token_file is not None else None
    if found:
        return Target(master_of(found[0]), token or found[0].secret(), found[0])
    assert job is not None
    if ":" not in job:
        names = ", ".join(record.job for record in here) or "none"
        raise ConfigError(
            f"no job {job!r} runs on this machine (here: {names}); for one of another machine write HOST:PORT"
        )
    split_endpoint(job)
    token = token or job_token()
    if token is None:
        raise ConfigError(
            f"a token is needed for {job}: give the one of its nodes with --job-token-file FILE or STOKER_JOB_TOKEN"
        )
    return Target(job, token)


def patiently(
    target: Target, client: MovingClient, call: Callable[[], T], *, patience_s: float = PATIENCE_S
) -> T:
    """The result of `call`, which asks `client`, again and again while the master is being started again or elsewhere.

    Raises JobIsOver once the job is known to be over, MasterUnreachable when patience ends.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return call()
        except MasterUnreachable:
            if target.is_over():
                raise JobIsOver from None
            if time.monotonic() >= deadline:
                raise
        time.sleep(_RETRY_S)
        target.follow(client)


def without_secret(record: JobRecord) -> dict[str, object]:
    """A record for printing."""
    said: dict[str, object] = msgspec.to_builtins(record)
    del said["token"]
    return said
