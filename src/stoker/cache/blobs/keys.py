"""Keys of blobs: any bytes behind /blob/BUCKET/, as they came. Pure.

The index keeps text. What is UTF-8 is kept as that; bytes that are not stand as code points of a private area, and so
do the bytes of those code points themselves: two keys never have the same text.
"""

from __future__ import annotations

from typing import NamedTuple

from stoker.errors import ConfigError
from stoker.wire.http import KEY_BYTES_MAX

PREFIX = b"/blob/"
_FIRST = 0xF700
_AREA = range(_FIRST + 0x80, _FIRST + 0x100)


class BlobName(NamedTuple):
    """What a request target names."""

    bucket: str
    raw: bytes
    """The key as it was sent, for who is asked in turn."""

    @property
    def key(self) -> str:
        """The key's text."""
        return text_of(self.raw)

    @property
    def target(self) -> bytes:
        """The request target."""
        return PREFIX + self.bucket.encode() + b"/" + self.raw


def parse_target(target: bytes) -> BlobName:
    """Raises ConfigError for one that can name no blob."""
    bucket, slash, raw = target.removeprefix(PREFIX).partition(b"/")
    if not slash or not raw or not bucket.isascii():
        raise ConfigError("a blob is at /blob/BUCKET/KEY")
    if len(raw) > KEY_BYTES_MAX or b"\0" in raw:
        raise ConfigError(f"a key has at most {KEY_BYTES_MAX} bytes and no NUL")
    return BlobName(bucket.decode(), raw)


def text_of(raw: bytes) -> str:
    """The text that stands for a key."""
    text = raw.decode("utf-8", "surrogateescape")
    if text.isascii():
        return text
    return "".join(_escaped(character) for character in text)


def raw_of(text: str) -> bytes:
    """The key that a text stands for."""
    if text.isascii():
        return text.encode()
    return b"".join(
        bytes((ord(character) - _FIRST,)) if ord(character) in _AREA else character.encode()
        for character in text
    )


def _escaped(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:
        return chr(_FIRST + code - 0xDC00)
    if code in _AREA:
        return "".join(chr(_FIRST + byte) for byte in character.encode())
    return character
