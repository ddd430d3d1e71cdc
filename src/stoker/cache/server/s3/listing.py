"""Pages of S3's listings, made of an origin's sorted ones: prefixes, delimiters, markers and tokens. Pure.

A listing is a row of entries in the order of their names: keys, and in place of all keys that are the same up to the
first delimiter behind the prefix that common prefix, once. A page is the entries after the marker, as many as are asked
for. So the marker may be a key, a common prefix, or neither.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from stoker.cache.auth.s3_refusal import S3Refusal
from stoker.cache.server.s3.operation_fields import KEY_BYTES_MAX
from stoker.cache.server.s3.operation_types import (
    LIST_MAX,
    Listing,
    ListObjects,
    ListObjectsV2,
    ListObjectVersions,
)
from stoker.wire.cache_api import ObjectInfo

HIGHEST = "\U0010ffff"
"""No character comes after it: with it a name ends that comes after all that begin as it does."""
_MARK_BYTES = 8
ASKS_MAX = 32
"""For one page: each common prefix may cost one. What there is by then is a page, as S3 may always give fewer."""
ASKS_IN_VAIN_MAX = 1000
"""Without an entry: it stands amid a common prefix that is too long to be stepped over."""


class Ask(NamedTuple):
    """What the origin's list is to be asked for next: at most `limit` objects after that key."""

    prefix: str
    after: str | None
    limit: int


class Page(NamedTuple):
    """`last`: the name of the last entry, after which the next page begins; empty, if there is no entry."""

    objects: list[ObjectInfo]
    common_prefixes: list[str]
    is_truncated: bool
    last: str
    last_is_prefix: bool


class Lister:
    """Asks for what it needs, and no more: what lies below a common prefix is skipped."""

    def __init__(self, prefix: str, delimiter: str, after: str, max_keys: int) -> None:
        self._prefix = prefix
        self._delimiter = delimiter
        self._max_keys = max_keys
        self._objects: list[ObjectInfo] = []
        self._prefixes: list[str] = []
        self._last = after
        self._last_is_prefix = False
        self._is_truncated = False
        self._is_done = max_keys == 0
        self._asks = 0
        below = self._entry_of(after) if after.startswith(prefix) else after
        self._after: str | None = _behind(below, after) if below != after or self._ends(after) else after
        if after < prefix:
            self._after = None

    @property
    def ask(self) -> Ask | None:
        """What `feed` needs; None: the page is complete."""
        if self._is_done:
            return None
        limit = LIST_MAX if self._delimiter else self._max_keys - len(self._objects) + 1
        return Ask(self._prefix, self._after, min(limit, LIST_MAX))

    def feed(self, objects: Sequence[ObjectInfo], is_last: bool) -> None:
        """What the origin has answered to `ask`; `is_last`: there is nothing after it. Raises S3Refusal where the
        origin leads nowhere."""
        entry = ""
        for info in objects:
            entry = self._entry_of(info.key)
            if entry <= self._last or not info.key.startswith(self._prefix):
                continue
            if len(self._objects) + len(self._prefixes) == self._max_keys:
                self._is_truncated = self._is_done = True
                return
            self._last, self._last_is_prefix = entry, entry != info.key or self._ends(entry)
            if self._last_is_prefix:
                self._prefixes.append(entry)
            else:
                self._objects.append(info)
        if is_last or not objects:
            self._is_done = True
            return
        key = objects[-1].key
        before, self._after = self._after, _behind(entry, key) if entry != key or self._ends(entry) else key
        if before is not None and self._after <= before:
            raise S3Refusal("InternalError", f"The origin lists {key[:100]!r} behind {before[:100]!r}")
        self._asks += 1
        if self._asks >= ASKS_MAX and (self._objects or self._prefixes):
            self._is_truncated = self._is_done = True
        elif self._asks >= ASKS_IN_VAIN_MAX:
            raise S3Refusal("ServiceUnavailable", f"Too much lies below {entry[:100]!r} to list what follows")

    def page(self) -> Page:
        """The page, once nothing is to be asked for."""
        assert self._is_done
        is_empty = not self._objects and not self._prefixes
        last = "" if is_empty else self._last
        return Page(self._objects, self._prefixes, self._is_truncated, last, self._last_is_prefix)

    def _entry_of(self, key: str) -> str:
        return entry_of(key, self._prefix, self._delimiter)

    def _ends(self, entry: str) -> bool:
        """Whether a name that is its own entry is a common prefix all the same: it ends with the delimiter."""
        return bool(self._delimiter) and entry.find(self._delimiter, len(self._prefix)) >= 0


def entry_of(key: str, prefix: str, delimiter: str) -> str:
    """The entry that a key with that prefix belongs to: its common prefix, or itself."""
    at = key.find(delimiter, len(prefix)) if delimiter else -1
    return key if at < 0 else key[: at + len(delimiter)]


def _behind(common_prefix: str, key: str) -> str:
    """A name behind all that lie below the prefix but those that begin with the highest character, and not before
    `key`; `key` where it would be too long for a name."""
    behind = max(common_prefix + HIGHEST, key)
    return behind if len(behind.encode()) <= KEY_BYTES_MAX else key


def lister_of(operation: Listing) -> Lister:
    """For ListObjects, ListObjectsV2 and ListObjectVersions. Raises S3Refusal: the token is not one of ours."""
    return Lister(operation.prefix, operation.delimiter, _start_of(operation), operation.max_keys)


def _start_of(operation: Listing) -> str:
    if isinstance(operation, ListObjects):
        return operation.marker
    if isinstance(operation, ListObjectVersions):
        # There is one version of each key: after it comes the next key.
        return operation.key_marker
    assert isinstance(operation, ListObjectsV2)
    if not operation.continuation_token:
        return operation.start_after
    return _read_token(operation, operation.continuation_token)


def token_of(operation: Listing, last: str) -> str:
    """What the next page is asked for with. It is good at each server of a fleet, for this listing only."""
    name = last.encode()
    return base64.urlsafe_b64encode(_mark(operation, name) + name).decode()


def _read_token(operation: ListObjectsV2, token: str) -> str:
    try:
        raw = base64.b64decode(token.encode(), altchars=b"-_", validate=True)
        mark, name = raw[:_MARK_BYTES], raw[_MARK_BYTES:]
        if hmac.compare_digest(mark, _mark(operation, name)):
            return name.decode()
    except (binascii.Error, ValueError):
        pass
    raise S3Refusal(
        "InvalidArgument",
        "The continuation token provided is incorrect",
        (("ArgumentName", "continuation-token"), ("ArgumentValue", token[:200])),
    )


def _mark(operation: Listing, name: bytes) -> bytes:
    """That it was not changed by mistake: who makes one up gets what `start-after` would give."""
    mark = blake2b(digest_size=_MARK_BYTES)
    for part in (operation.bucket, operation.prefix, operation.delimiter):
        mark.update(len(part).to_bytes(4, "big") + part.encode())
    mark.update(name)
    return mark.digest()
