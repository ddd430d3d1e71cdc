"""What origins say of an object besides its content: its version, when it was written, its headers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime


def seconds_of(date: str) -> float:
    """A date as HTTP or as ISO 8601 says it, as seconds since 1970; 0 if it is none."""
    for read in (parsedate_to_datetime, datetime.fromisoformat):
        try:
            return read(date).timestamp()
        except (ValueError, OverflowError):
            continue
    return 0.0


_CONTENT = (
    "cache-control",
    "content-disposition",
    "content-encoding",
    "content-language",
    "content-type",
    "expires",
)
"""What every way to ask S3 tells."""
META = "x-amz-meta-"


def version_of_tag(tag: str) -> str:
    """The version that an entity tag of S3 names: the tag without its quotes. A weak one stays as it is. A version is
    given back as it is."""
    return tag if tag.startswith("W/") else tag.strip('"')


def tag_of_version(version: str) -> str:
    """The entity tag, as it stands in a header."""
    return version if version.startswith('W/"') else f'"{version_of_tag(version)}"'


def told_headers(fields: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """What an answer says of an object's content, by the names of its headers in lower case."""
    return tuple(
        (name, value) for name, value in sorted(fields.items()) if name in _CONTENT or name.startswith(META)
    )


def told_attributes(attributes: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The same, as obstore has it: the user's own fields without what their headers begin with."""
    named = {name.lower(): value for name, value in attributes.items() if name.lower() in _CONTENT}
    own = {
        META + name: value
        for name, value in attributes.items()
        if name.lower() not in _CONTENT and name != "Storage-Class"
    }
    return told_headers({**own, **named})
