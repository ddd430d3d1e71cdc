"""Users of origins: whom what is written belongs to, or who signs for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from stoker.cache.origin.s3_signing import Credentials
from stoker.cache.origin.writing_port import Owner, WritableOrigin, Writes
from stoker.errors import WriteDenied


@dataclass(frozen=True, slots=True)
class OriginUser:
    """Somebody at an origin: `owner`, whose files are his in a folder; `credentials`, with which he signs at S3."""

    owner: Owner | None = None
    credentials: Credentials | None = field(default=None, repr=False)


@runtime_checkable
class HasUsers(Protocol):
    """An origin that knows users."""

    def written_as(self, user: OriginUser) -> Writes:
        """What writes there as that user. It has nothing of its own that would have to be closed, and is of no use once
        the origin is. Raises WriteDenied for one who is no user of such an origin."""
        ...


def writes_as(origin: WritableOrigin, user: OriginUser) -> Writes:
    """The same for any origin. Raises WriteDenied."""
    if not isinstance(origin, HasUsers):
        raise WriteDenied(f"{origin.url} knows no users, so that nothing can be written there as one")
    return origin.written_as(user)
