"""The master's port: HTTP/1.1 whose `GET /v1/stream` upgrades to frames in both directions."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from stoker.errors import AccessDenied, MasterUnreachable, WireError

STREAM_PATH = "/v1/stream"
UPGRADE = "stoker-frames/1"
MAX_HEAD_BYTES = 16 * 1024


class ConnectionClosed(WireError):
    """The peer closed the connection before it had said all, as a process does that dies."""


@dataclass(frozen=True)
class Head:
    """Start line and headers; header names in lower case."""

    start_line: str
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def method(self) -> str:
        return self.start_line.split(" ", 1)[0]

    @property
    def path(self) -> str:
        parts = self.start_line.split(" ")
        return parts[1] if len(parts) > 1 else ""


async def read_head(reader: asyncio.StreamReader) -> Head:
    """Read up to the blank line.

    Raises ConnectionClosed when the end comes first, WireError for anything that is not a bounded HTTP head.
    """
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        how = "in the middle of an HTTP head" if error.partial else "without a word"
        raise ConnectionClosed(f"the peer hung up {how}") from None
    except ConnectionError as error:
        raise ConnectionClosed(f"the peer hung up without a word: {error}") from None
    except asyncio.LimitOverrunError as error:
        raise WireError(f"no complete HTTP head: {error}") from None
    if len(raw) > MAX_HEAD_BYTES:
        raise WireError(f"an HTTP head of {len(raw)} bytes is over the limit of {MAX_HEAD_BYTES}")
    lines = raw.decode("latin-1").split("\r\n")
    headers = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if colon:
            headers[name.strip().lower()] = value.strip()
    return Head(lines[0], headers)


SWITCHING = f"HTTP/1.1 101 Switching Protocols\r\nUpgrade: {UPGRADE}\r\nConnection: Upgrade\r\n\r\n".encode()


async def open_stream(
    host: str, port: int, token: str, *, timeout_s: float
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open the two-way stream to a master. Raises MasterUnreachable, AccessDenied, WireError."""
    where = f"{host}:{port}"
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError) as error:
        reason = str(error) or f"no answer within {timeout_s:.1f} s"
        raise MasterUnreachable(f"no master answers at {where}: {reason}") from None
    try:
        async with asyncio.timeout(timeout_s):
            writer.write(
                (
                    f"GET {STREAM_PATH} HTTP/1.1\r\nHost: {where}\r\nAuthorization: Bearer {token}\r\n"
                    f"Upgrade: {UPGRADE}\r\nConnection: Upgrade\r\n\r\n"
                ).encode()
            )
            head = await read_head(reader)
        status = head.start_line.split(" ")[1] if " " in head.start_line else ""
        if status == "401":
            raise AccessDenied(
                f"the master at {where} refuses the job token: give every node the same one in "
                "STOKER_JOB_TOKEN or --job-token-file"
            )
        if status != "101":
            raise WireError(f"{where} answers {head.start_line!r}: is that port a Stoker master's?")
    except TimeoutError:
        writer.close()
        raise MasterUnreachable(f"the master at {where} does not answer") from None
    except ConnectionClosed as error:  # it died just now
        writer.close()
        raise MasterUnreachable(f"the master at {where} does not answer: {error}") from None
    except (AccessDenied, WireError, asyncio.CancelledError):
        writer.close()
        raise
    return reader, writer
