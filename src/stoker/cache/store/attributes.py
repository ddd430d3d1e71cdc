"""What is told of an object besides its content and version, as the index keeps it: lines of headers, which the front
sends as they are. Pure."""

from __future__ import annotations

import re

from stoker.wire.cache_api import ObjectInfo
from stoker.wire.http_dates import format_http_date

ATTRIBUTES_BYTES_MAX = 6144
_LINE = re.compile(
    "(Last-Modified|cache-control|content-(disposition|encoding|language|type)|expires|x-amz-meta-[!#$%&'*+.^_`|~a-z0-9-]+)"
    ": [ -~]*"
)
"""No peer can say anything else in the answers of another."""
_TIMES = range(1, 253402300800)
"""Seconds since 1970, until the year 9999; 0: nobody knows."""
CONTENT_TYPE = "application/octet-stream"


def attributes_of(info: ObjectInfo) -> str:
    """The lines for an object, each with its end; nothing, where the origin would tell more than it was asked. What
    cannot be sent as it is, or is too much, is left out."""
    if info.headers is None:
        return ""
    modified_s = int(info.modified_s)
    lines = [f"Last-Modified: {format_http_date(modified_s)}"] if modified_s in _TIMES else []
    lines += [f"{name}: {value}" for name, value in info.headers]
    kept, left_bytes = "", ATTRIBUTES_BYTES_MAX
    for line in lines:
        if _LINE.fullmatch(line) and len(line) + 2 <= left_bytes:
            kept += f"{line}\r\n"
            left_bytes -= len(line) + 2
    return kept or f"content-type: {CONTENT_TYPE}\r\n"


def told_anew(attributes: str, before: str) -> str:
    """What is known of a version of which something else was known `before`. An origin that says nothing of content,
    such as a folder, takes nothing back."""
    is_of_content = any(not line.startswith("Last-Modified: ") for line in attributes.split("\r\n")[:-1])
    return attributes if is_of_content or not before else before


def checked(attributes: str) -> str:
    """They themselves, if they are lines of headers that can be sent as they are; else nothing."""
    if len(attributes) > ATTRIBUTES_BYTES_MAX or not attributes.isascii():
        return ""
    lines = attributes.split("\r\n")
    is_whole = lines[-1] == "" and all(_LINE.fullmatch(line) for line in lines[:-1])
    return attributes if is_whole else ""


def headers_of(attributes: str) -> list[tuple[str, str]]:
    """The same as headers, with the type of the content where that is not said."""
    headers: list[tuple[str, str]] = []
    for line in attributes.split("\r\n"):
        name, _, value = line.partition(": ")
        if name:
            headers.append((name, value))
    if not any(name == "content-type" for name, _ in headers):
        headers.append(("Content-Type", CONTENT_TYPE))
    return headers
