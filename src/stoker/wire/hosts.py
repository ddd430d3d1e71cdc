"""What a job's driver says to the agents that it started on other hosts: one JSON message per line, on their standard
input. The end of that input says that the driver is gone.

The lines go through a remote shell that has said who is speaking; they hold the job's secret, which for that reason
is on no command line.
"""

from __future__ import annotations

import msgspec

from stoker.errors import WireError

LINE_BYTES_MAX = 8 * 1024 * 1024
"""Longest line: an environment and a command line, with room to spare."""

OptionValue = str | int | float | bool | list[str] | None


class HostMessage(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    """Base of these messages."""


class AgentStart(HostMessage, frozen=True, tag="start"):
    """The first line: all that an agent needs."""

    version: str
    """The driver's version of Stoker; an agent of another one refuses."""
    host: str
    """The host's name in the driver's list."""
    slots: int
    """Workers that it is to run."""
    order: int
    """Its place among the hosts, the first listed being 0: lower ones get lower ranks when the job begins."""
    master_host: str
    master_port: int
    token: str
    """The job's secret."""
    directory: str
    """Working directory."""
    environment: dict[str, str]
    """Variables to set before anything is started."""
    options: dict[str, OptionValue]
    """The flags of the `stoker run` that started the job, as they were parsed."""
    grace_s: float
    """Seconds between asking the workers to leave and killing them, once the driver is gone."""


class AgentLeave(HostMessage, frozen=True, tag="leave"):
    """Leave the job in good order."""

    why: str


class AgentEnd(HostMessage, frozen=True, tag="end"):
    """End now, workers and all."""

    why: str


ToHost = AgentStart | AgentLeave | AgentEnd
_TO_HOST: msgspec.json.Decoder[ToHost] = msgspec.json.Decoder(ToHost)


def encode_line(message: ToHost) -> bytes:
    """The message and its line end."""
    return msgspec.json.encode(message) + b"\n"


def decode_line(line: bytes) -> ToHost:
    """Raises WireError; the line itself is not told, since it may hold the secret."""
    try:
        return _TO_HOST.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WireError(f"the driver's line of {len(line)} bytes is not understood: {error}") from None
