"""How errors of the control API travel: as an ErrorBody, under a code with an HTTP status and a class of ours."""

from __future__ import annotations

from typing import NamedTuple

from stoker import errors
from stoker.wire.control import Answer


class ErrorBody(Answer, frozen=True):
    """Why a request failed."""

    error: str
    """A code that stays the same."""
    message: str
    mend: str = ""
    """What to do about it."""
    field: str = ""
    """The field or parameter at fault."""


class ErrorCode(NamedTuple):
    """How an error travels: its HTTP status and the class that the client raises."""

    status: int
    error: type[errors.StokerError]


# Most derived classes first: the first one that an error is an instance of is its code.
ERRORS: dict[str, ErrorCode] = {
    "bad_request": ErrorCode(400, errors.ConfigError),
    "unauthorized": ErrorCode(401, errors.AccessDenied),
    "forbidden": ErrorCode(403, errors.AccessDenied),
    "not_found": ErrorCode(404, errors.ConfigError),
    "method_not_allowed": ErrorCode(405, errors.WireError),
    "slow_request": ErrorCode(408, errors.WireError),
    "ended": ErrorCode(409, errors.JobError),
    "length_required": ErrorCode(411, errors.WireError),
    "too_large": ErrorCode(413, errors.WireError),
    "upgrade_required": ErrorCode(426, errors.WireError),
    "head_too_large": ErrorCode(431, errors.WireError),
    "environment": ErrorCode(503, errors.EnvironmentProblem),
    "timeout": ErrorCode(504, errors.JobTimeout),
    "failed": ErrorCode(500, errors.JobError),
}


def code_of(error: errors.StokerError) -> str:
    """The code under which an error of the master travels."""
    if isinstance(error, errors.AccessDenied):
        return "forbidden"
    for code in ("bad_request", "environment", "timeout"):
        if isinstance(error, ERRORS[code].error):
            return code
    return "failed"


def error_of(body: ErrorBody) -> errors.StokerError:
    """The typed error that a client raises for an error body; an unknown code is a JobError."""
    entry = ERRORS.get(body.error)
    text = f"{body.message}: {body.mend}" if body.mend else body.message
    return errors.JobError(text) if entry is None else entry.error(text)
