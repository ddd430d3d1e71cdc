"""A response before it is written, and how errors are spelled."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass

import msgspec

from stoker.wire.control import (
    JSON,
)
from stoker.wire.control_errors import ERRORS, ErrorBody


@dataclass(frozen=True)
class Response:
    """Status, headers and either a body or a stream of parts of unknown length."""

    status: int
    body: bytes = b""
    content_type: str = JSON
    headers: tuple[tuple[str, str], ...] = ()
    stream: AsyncGenerator[bytes, None] | None = None


class Refusal(Exception):
    """A request that cannot be answered, with its response; never leaves this package."""

    def __init__(
        self,
        code: str,
        message: str,
        mend: str = "",
        *,
        field: str = "",
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.response = error_response(code, message, mend, field=field, headers=headers)


def json_response(answer: msgspec.Struct, status: int = 200) -> Response:
    """An answer as JSON."""
    return Response(status, msgspec.json.encode(answer))


def error_response(
    code: str, message: str, mend: str = "", *, field: str = "", headers: tuple[tuple[str, str], ...] = ()
) -> Response:
    """An error of `stoker.wire.control.ERRORS` as JSON."""
    extra = headers
    if code == "unauthorized":
        extra = (*headers, ("WWW-Authenticate", 'Bearer realm="stoker"'))
    body = ErrorBody(error=code, message=message, mend=mend, field=field)
    return Response(ERRORS[code].status, msgspec.json.encode(body), headers=extra)
