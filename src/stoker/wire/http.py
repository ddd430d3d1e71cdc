"""The small part of HTTP/1.1 that clients and servers here share: names, heads, chunks."""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import parse_qsl, quote, unquote_to_bytes

from stoker.errors import ConfigError, WireError

HEAD_BYTES_MAX = 32 * 1024
BODY_BYTES_MAX = 16 * 1024 * 1024
KEY_BYTES_MAX = 4096
_WITHOUT_BODY = (204, 304)
_TAG_SAFE = "-._~:+=,@/!#$&'()*;?[]^`{|}"
_PLAIN_TAG = re.compile(f"[A-Za-z0-9{re.escape(_TAG_SAFE)}]*")

REASONS = {
    200: "OK", 201: "Created", 204: "No Content", 206: "Partial Content", 304: "Not Modified",
    400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed",
    408: "Request Timeout", 409: "Conflict", 411: "Length Required", 412: "Precondition Failed",
    413: "Content Too Large",
    416: "Range Not Satisfiable", 431: "Request Header Fields Too Large", 500: "Internal Server Error",
    501: "Not Implemented",
    502: "Bad Gateway", 503: "Service Unavailable", 504: "Gateway Timeout",
    507: "Insufficient Storage",
}  # fmt: skip


def split_target(target: bytes) -> tuple[str, str, dict[str, str]]:
    """A request target as (bucket, key, query), percent-decoded. A key keeps its slashes as they are.

    Raises ConfigError for what cannot be a name: not UTF-8, NUL bytes, no leading slash, too long.
    """
    path, _, query = target.partition(b"?")
    if not path.startswith(b"/"):
        raise ConfigError("the request target does not start with /")
    if len(path) > 3 * KEY_BYTES_MAX:
        raise ConfigError(f"the key is longer than {KEY_BYTES_MAX} bytes")
    bucket, _, key = path[1:].partition(b"/")
    try:
        names = unquote_to_bytes(bucket).decode(), unquote_to_bytes(key).decode()
        fields = dict(parse_qsl(query.decode("ascii"), keep_blank_values=True)) if query else {}
    except UnicodeDecodeError as error:
        raise ConfigError("names must be UTF-8") from error
    except ValueError as error:
        raise ConfigError(f"the query cannot be read: {error}") from error
    check_key(names[1])
    return names[0], names[1], fields


def check_key(key: str) -> str:
    """Return `key` if it can be an object's name. Raises ConfigError."""
    if "\0" in key or len(key) > KEY_BYTES_MAX or len(key.encode("utf-8", "replace")) > KEY_BYTES_MAX:
        raise ConfigError(f"a key has at most {KEY_BYTES_MAX} bytes and no NUL")
    return key


def object_target(bucket: str, key: str) -> str:
    """The request target of an object."""
    return f"/{quote(bucket, safe='')}/{quote(key, safe='/')}"


def response_head(status: int, headers: Iterable[tuple[str, str]]) -> bytes:
    """Status line and headers, with the empty line."""
    lines = [f"HTTP/1.1 {status} {REASONS.get(status, 'Unknown')}"]
    lines += [f"{name}: {value}" for name, value in headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")


def etag_of(version: str) -> str:
    """A version as an entity tag: any text, kept inside the characters that a tag may have."""
    if _PLAIN_TAG.fullmatch(version) is not None:
        return f'"{version}"'
    return f'"{quote(version, safe=_TAG_SAFE)}"'


def version_of(etag: str) -> str:
    """The version in an entity tag that `etag_of` wrote."""
    return unquote_to_bytes(etag.strip().removeprefix("W/").strip('"')).decode("utf-8", "replace")


class ResponseHead:
    """A parsed status line with headers (names in lower case)."""

    __slots__ = ("headers", "status")

    def __init__(self, status: int, headers: dict[str, str]) -> None:
        self.status = status
        self.headers = headers

    @property
    def content_length(self) -> int | None:
        """None if the body is chunked. Raises WireError if there is no way to know where it ends."""
        if self.status in _WITHOUT_BODY:
            return 0
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            return None
        value = self.headers.get("content-length", "")
        if not (value.isascii() and value.isdigit()):
            raise WireError(f"the server sent no usable Content-Length ({value!r})")
        return int(value)

    @property
    def closes(self) -> bool:
        """Whether the connection ends with this response."""
        return self.headers.get("connection", "").lower() == "close"


def parse_response_head(head: bytes) -> ResponseHead:
    """Parse the bytes before the empty line. Raises WireError."""
    first, *lines = head.decode("latin-1").split("\r\n")
    parts = first.split(" ", 2)
    if len(parts) < 2 or not parts[0].startswith("HTTP/1.") or not parts[1].isdigit():
        raise WireError(f"not an HTTP/1.1 answer: {first[:60]!r}; is this a Stoker cache server's port?")
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon:
            raise WireError(f"not a header line: {line[:60]!r}")
        headers[name.strip().lower()] = value.strip()
    return ResponseHead(int(parts[1]), headers)
