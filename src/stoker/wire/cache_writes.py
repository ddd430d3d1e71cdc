"""How objects are written by Stoker's own protocol, through to the origin. Pure.

    PUT    /BUCKET/KEY     the body is the object, of a length that is said; -> Written, once the origin has it
    DELETE /BUCKET/KEY     removes it, if it is there; 204
    PUT    /BUCKET/KEY     with `Stoker-Copy: /BUCKET/KEY`, percent-encoded as a target, and no body: puts what another
                           object of the same bucket holds; -> Written

`Stoker-Sha256` are the hexadecimal digits of the body's SHA-256; where the body is something else, nothing is written.
`If-Match` and `If-None-Match: *` hold where the origin can hold to them, and are refused elsewhere. The bucket's
settings must say `writable`, and who asks must have the right to write, or delete, that key (and to read the source of
a copy). Who writes is at the origin whom the file of access says (`origin_users`), as with S3.
"""

from __future__ import annotations

import re

import msgspec

SHA256 = "Stoker-Sha256"
COPY = "Stoker-Copy"
OBJECT_METHODS = ("GET", "HEAD", "PUT", "DELETE")
_DIGEST = re.compile("[0-9a-f]{64}")


class Written(msgspec.Struct, frozen=True):
    """An object as the origin has it now. `modified_s`: when it was written, as far as that is known; else 0."""

    size_bytes: int
    version: str
    modified_s: float = 0.0


def is_sha256(text: str) -> bool:
    """Whether it can be one."""
    return _DIGEST.fullmatch(text) is not None
