"""Messages of the remark service: what a worker wants to be in the job's event log."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from stoker.errors import WireError

TEXT_CHARS_MAX = 2000
FIGURES_MAX = 64

Name = Annotated[str, msgspec.Meta(max_length=64)]


class Remark(msgspec.Struct, frozen=True, tag="remark", forbid_unknown_fields=True):
    """One line for the event log."""

    kind: Literal[
        "checkpoint-failed",
        "checkpoint-written-again",
        "snapshot-failed",
        "snapshot-taken-again",
        "state-loaded",
        "time-spent",
    ]
    text: str
    figures: Annotated[dict[Name, float], msgspec.Meta(max_length=FIGURES_MAX)] = {}


_REMARK = msgspec.msgpack.Decoder(Remark)


def decode_remark(body: bytes) -> Remark:
    """Read a call. Raises WireError."""
    try:
        return _REMARK.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WireError(f"not a call of the remark service: {error}") from None
