"""Messages of the meeting service: workers that wait for each other by name."""

from __future__ import annotations

from typing import Literal

import msgspec

from stoker.errors import WireError

NAME_CHARS_MAX = 200


class Arrive(msgspec.Struct, frozen=True, tag="arrive", forbid_unknown_fields=True):
    """This worker has come to a point that all workers of its world come to."""

    kind: Literal["barrier", "sync"]
    """A barrier is answered when all are there, a sync at once."""
    name: str
    generation: int = 0
    """Of the world whose workers are waited for (barrier)."""
    turn: int = 0
    """How often this worker has been at this barrier in this generation (barrier)."""


class Met(msgspec.Struct, frozen=True, tag="met", forbid_unknown_fields=True):
    """Whether every worker is there; at a barrier, whether all have come or the world is about to change instead."""

    all_there: bool
    missing: int = 0
    """How many are not."""


_ARRIVE = msgspec.msgpack.Decoder(Arrive)
_MET = msgspec.msgpack.Decoder(Met)


def decode_arrive(body: bytes) -> Arrive:
    """Read a call. Raises WireError."""
    try:
        arrive = _ARRIVE.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WireError(f"not a call of the meeting service: {error}") from None
    if not 0 < len(arrive.name) <= NAME_CHARS_MAX:
        raise WireError(f"a barrier's name has 1 to {NAME_CHARS_MAX} characters, not {len(arrive.name)}")
    return arrive


def decode_met(body: bytes) -> Met:
    """Read an answer. Raises WireError."""
    try:
        return _MET.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WireError(f"not an answer of the meeting service: {error}") from None
