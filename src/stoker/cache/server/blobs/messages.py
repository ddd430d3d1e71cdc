"""What servers of a fleet say to each other about blobs, in MessagePack.

POST /-/blobs/promise   Asking -> Promised: neither writes nor votes for what is another's for a while
POST /-/blobs/vote      Vote -> Voted: has heard of a version, and gives nothing older from then on
POST /-/blobs/newest    Question -> Told: what it knows of a key
"""

from __future__ import annotations

import msgspec


class Asking(msgspec.Struct, frozen=True):
    """Who wants a promise, in the fleet as it sees it."""

    holder: str
    view: str


class Promised(msgspec.Struct, frozen=True):
    is_promised: bool


class Vote(msgspec.Struct, frozen=True):
    """A version that `writer` is about to acknowledge."""

    writer: str
    view: str
    bucket: str
    key: str
    version: str
    size_bytes: int


class Voted(msgspec.Struct, frozen=True):
    """`objection`: why it must not be acknowledged; `problem`: why it is not known here now, though it may be
    acknowledged; both empty: it is known, and stays so where power is lost. `newest`: what is known of the key."""

    objection: str = ""
    newest: str = ""
    newest_bytes: int = 0
    problem: str = ""


class Question(msgspec.Struct, frozen=True):
    """`writer`: who is about to write the key, in the fleet `view`; empty: it is only read."""

    bucket: str
    key: str
    writer: str = ""
    view: str = ""


class Told(msgspec.Struct, frozen=True):
    """What a server knows of a key, and whom it has seen in its fleet, and when. `objection`: why the key must not be
    written by who asks; empty: it may."""

    version: str
    is_held: bool
    size_bytes: int
    seen_s: dict[str, float]
    objection: str = ""
