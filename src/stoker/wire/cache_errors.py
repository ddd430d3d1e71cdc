"""How errors travel between a cache server and its clients."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from stoker import errors


class ErrorBody(msgspec.Struct, frozen=True):
    """Why a request failed. `code` is one of ERROR_CODES. `request_id`: by which the logs of the servers know it."""

    code: str
    message: str
    request_id: str = ""


class ErrorCode(NamedTuple):
    """How an error travels: its HTTP status and the class that the client raises."""

    status: int
    error: type[errors.StokerError]


# Most derived classes first: the first that an error is an instance of is its code.
ERROR_CODES: dict[str, ErrorCode] = {
    "not_found": ErrorCode(404, errors.ObjectNotFound),
    "precondition": ErrorCode(412, errors.PreconditionFailed),
    "changed": ErrorCode(412, errors.ObjectChanged),
    "corrupt": ErrorCode(502, errors.CorruptBlock),
    "unavailable": ErrorCode(503, errors.CacheUnavailable),
    "short_body": ErrorCode(502, errors.ShortBody),
    "origin_busy": ErrorCode(502, errors.OriginBusy),
    "origin": ErrorCode(502, errors.OriginError),
    "another_origin": ErrorCode(409, errors.AnotherOrigin),
    "read_only": ErrorCode(403, errors.OriginReadOnly),
    "write_denied": ErrorCode(403, errors.WriteDenied),
    "origin_full": ErrorCode(507, errors.OriginFull),
    "bad_key": ErrorCode(400, errors.BadKey),
    "wrong_length": ErrorCode(400, errors.WrongBodyLength),
    "wrong_checksum": ErrorCode(400, errors.WrongChecksum),
    "too_large": ErrorCode(413, errors.ObjectTooLarge),
    "not_written": ErrorCode(409, errors.WriteRefused),
    "no_token": ErrorCode(401, errors.NotAuthenticated),
    "denied": ErrorCode(403, errors.AccessDenied),
    "environment": ErrorCode(503, errors.EnvironmentProblem),
    "bad_request": ErrorCode(400, errors.ConfigError),
    "length": ErrorCode(411, errors.WireError),
    "method": ErrorCode(405, errors.WireError),
    "no_room": ErrorCode(507, errors.EnvironmentProblem),
    "range": ErrorCode(416, errors.WireError),
    "timeout": ErrorCode(504, errors.OriginError),
    "header_too_large": ErrorCode(431, errors.WireError),
    "conflict": ErrorCode(409, errors.ConfigError),
    "protocol": ErrorCode(400, errors.WireError),
    "failed": ErrorCode(500, errors.CacheError),
}


def code_of(error: errors.StokerError) -> str:
    """The code under which this error travels."""
    for code, entry in ERROR_CODES.items():
        if isinstance(error, entry.error):
            return code
    return "failed"


def error_of(body: ErrorBody) -> errors.StokerError:
    """The typed error that a client raises for an error body; an unknown code is a CacheError."""
    entry = ERROR_CODES.get(body.code)
    return errors.CacheError(body.message) if entry is None else entry.error(body.message)


def failure_of(status: int, body: bytes | bytearray) -> errors.StokerError:
    """The typed error for an answer that is one; WireError where its body is no ErrorBody."""
    try:
        return error_of(msgspec.json.decode(bytes(body), type=ErrorBody))
    except ValueError:
        if status == 503:
            return errors.CacheUnavailable("the server is leaving, or has no room for more connections")
        if status in (401, 403):
            # Of who shows no token to a write nobody knows whether it is S3's: it is refused in S3's words.
            return errors.NotAuthenticated("it is not known who asks: no token, or a wrong one")
        return errors.WireError(f"the server answered {status}: {bytes(body[:200])!r}")
