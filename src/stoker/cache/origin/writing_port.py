"""The port of origins that can be written to."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import NamedTuple, Protocol

import msgspec

from stoker.cache.origin.content import META
from stoker.cache.origin.port import STAGING, Origin, Part, changed
from stoker.errors import BadKey, OriginReadOnly, PreconditionFailed, StokerError, WrongBodyLength
from stoker.wire.cache_api import ObjectInfo
from stoker.wire.http import KEY_BYTES_MAX

PART_NUMBER_MAX = 10_000


class Owner(msgspec.Struct, frozen=True):
    """Whom a file belongs to, by numbers."""

    uid: int
    gid: int


class Attributes(msgspec.Struct, frozen=True):
    """What an object is given beside its content.

    Content type, metadata and `headers` (names in lower case; those of CONTENT_HEADERS) are kept where the storage can
    keep them, else forgotten. An owner is never forgotten: where the object cannot be given to it, it is not written.
    """

    content_type: str = ""
    metadata: dict[str, str] = {}
    owner: Owner | None = None
    headers: dict[str, str] = {}


NO_ATTRIBUTES = Attributes()
CONTENT_HEADERS = (
    "cache-control",
    "content-disposition",
    "content-encoding",
    "content-language",
    "expires",
)
"""What is said of an object's content besides its type."""


def told_of(attributes: Attributes) -> tuple[tuple[str, str], ...]:
    """Attributes as `ObjectInfo.headers` has them."""
    said = {**attributes.headers, **{META + name: value for name, value in attributes.metadata.items()}}
    if attributes.content_type:
        said["content-type"] = attributes.content_type
    return tuple(sorted(said.items()))


def attributes_in(headers: Mapping[str, str]) -> Attributes:
    """What headers (names in lower case) say of an object."""
    return Attributes(
        headers.get("content-type", ""),
        {name.removeprefix(META): value for name, value in headers.items() if name.startswith(META)},
        headers={name: headers[name] for name in CONTENT_HEADERS if name in headers},
    )


class Capabilities(NamedTuple):
    """What an origin can do when it is written to."""

    is_atomic: bool
    """Nobody ever sees an object in part, or an instant without one that is overwritten."""
    has_conditions: bool
    """`if_match` and `if_none_match` hold among all who write through Stoker, or among all who write at all."""
    copies_itself: bool
    """A copy costs no bytes through this process."""
    keeps_content_type: bool
    keeps_metadata: bool
    keeps_owner: bool
    part_bytes_min: int = 0
    """Of all parts of an upload but the last."""
    why_not_atomic: str = ""


class Described(NamedTuple):
    """An object and what is kept with it."""

    info: ObjectInfo
    attributes: Attributes


class Upload(NamedTuple):
    """An upload in parts that has not ended; `begun_at` in seconds since 1970."""

    key: str
    upload_id: str
    begun_at: float


class UploadPart(NamedTuple):
    """A part as the origin has it; `written_at` in seconds since 1970."""

    number: int
    etag: str
    size_bytes: int
    written_at: float


class Writes(Protocol):
    """What is written with.

    Every method may raise OriginError, after which it is not known whether what was asked for has happened, and
    WriteRefused, after which it has not.
    """

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        ...

    async def describe(self, key: str) -> Described:
        """An object and its attributes; the owner is not told. Raises ObjectNotFound."""
        ...

    async def put(
        self,
        key: str,
        parts: AsyncIterable[Part],
        size_bytes: int | None = None,
        *,
        attributes: Attributes = NO_ATTRIBUTES,
        if_match: str | None = None,
        if_none_match: bool = False,
        sha256: str = "",
    ) -> ObjectInfo:
        """Create or overwrite an object, as `stat` then tells it, with the parts as they come.

        It is there as a whole once `parts` has ended without an error, and where `size_bytes` is given with so many
        bytes; else what was there stays, and what `parts` raised is raised. Of several at once the last one wins.
        Who made `parts` closes it, as it may be left at any place.
        `if_match`: only over that version; `if_none_match`: only where there is no object. `sha256`: of the content, in
        hexadecimal digits, as who sends it says before; the origin may be told, instead of what is made of it here.
        Raises PreconditionFailed, or ObjectNotFound where there is none to match; WrongBodyLength, BadKey.
        """
        ...

    async def delete(self, key: str) -> None:
        """Remove an object. That there is none is no error."""
        ...

    async def delete_many(self, keys: Sequence[str]) -> dict[str, StokerError]:
        """Remove objects. Why some could not be removed, by their keys. Raises OriginError where none could."""
        ...

    async def copy(
        self, source_key: str, key: str, version: str | None = None, *, attributes: Attributes | None = None
    ) -> ObjectInfo:
        """Put what another object holds, in that version if one is said, with its attributes if none are given.

        Raises ObjectNotFound, ObjectChanged (of the source), and as `put`.
        """
        ...

    async def begin_upload(self, key: str, attributes: Attributes = NO_ATTRIBUTES) -> str:
        """Begin an upload in parts, which outlives this process: its id."""
        ...

    async def put_part(
        self,
        key: str,
        upload_id: str,
        number: int,
        parts: AsyncIterable[Part],
        size_bytes: int,
        *,
        sha256: str = "",
    ) -> str:
        """A part of an upload, numbered from 1 to PART_NUMBER_MAX, over one of that number: its entity tag.

        Raises NoSuchUpload, BadParts for such a number, and as `put`.
        """
        ...

    async def complete_upload(
        self,
        key: str,
        upload_id: str,
        parts: Sequence[tuple[int, str]],
        *,
        if_match: str | None = None,
        if_none_match: bool = False,
    ) -> ObjectInfo:
        """Put what these parts (number and entity tag, in order) make together; the upload has ended then.

        Raises NoSuchUpload, BadParts, and as `put`.
        """
        ...

    async def abort_upload(self, key: str, upload_id: str) -> None:
        """End an upload and give up its parts. Raises NoSuchUpload, but not always for one that has ended."""
        ...

    async def list_parts(
        self, key: str, upload_id: str, after: int = 0, limit: int = 1000
    ) -> list[UploadPart]:
        """At most `limit` parts of an upload, by number, those after a number. Raises NoSuchUpload."""
        ...

    async def list_uploads(
        self, prefix: str = "", after: tuple[str, str] | None = None, limit: int = 1000
    ) -> list[Upload]:
        """At most `limit` uploads of keys under a prefix, by key: those after such a key and id."""
        ...

    async def clean_up(self, now: float, age_s: float) -> int:
        """Give up uploads, and what killed writers have left, that were begun more than `age_s` before `now` (seconds
        since 1970): how many. Nobody should be writing for so long."""
        ...


class WritableOrigin(Origin, Writes, Protocol):
    """Remote storage that can be written to."""


async def whole(
    url: str, key: str, parts: AsyncIterable[Part], size_bytes: int | None
) -> AsyncGenerator[Part, None]:
    """Parts as they come, none of them empty, and the last one only once it is certain to be: whoever sends them on
    cannot send all before they have ended well. Raises WrongBodyLength, and what they raise."""
    come_bytes, last = 0, b""
    async for part in parts:
        come_bytes += len(part)
        if size_bytes is not None and come_bytes > size_bytes:
            break
        if not part:
            continue
        if last:
            yield last
        last = bytes(part)
    if size_bytes is not None and come_bytes != size_bytes:
        more = "more" if come_bytes > size_bytes else f"{come_bytes}"
        raise WrongBodyLength(f"{size_bytes} bytes were announced for {key!r} in {url}, and {more} came")
    if last:
        yield last


async def pieces(parts: AsyncGenerator[Part, None], piece_bytes: int) -> AsyncGenerator[bytes, None]:
    """The same bytes, `piece_bytes` at a time but for the last."""
    waiting = bytearray()
    async for part in parts:
        waiting += part
        at = 0
        while len(waiting) - at > piece_bytes:
            yield bytes(memoryview(waiting)[at : at + piece_bytes])
            at += piece_bytes
        del waiting[:at]
    if waiting:
        yield bytes(waiting)


async def copied(
    origin: WritableOrigin, source_key: str, key: str, version: str | None, attributes: Attributes | None
) -> ObjectInfo:
    """`WritableOrigin.copy` by way of this process."""
    info, kept = await origin.describe(source_key)
    if version is not None and info.version != version:
        raise changed(origin.url, source_key, version, info.version)
    async with aclosing(origin.stream(source_key, 0, info.size_bytes, info.version)) as stream:
        return await origin.put(
            key,
            stream if info.size_bytes else nothing(),
            info.size_bytes,
            attributes=kept if attributes is None else attributes,
        )


async def deleted(origin: WritableOrigin, keys: Iterable[str]) -> dict[str, StokerError]:
    """`WritableOrigin.delete_many`, one after the other."""
    errors: dict[str, StokerError] = {}
    for key in keys:
        try:
            await origin.delete(key)
        except StokerError as error:
            errors[key] = error
    return errors


async def nothing() -> AsyncGenerator[bytes, None]:
    """The parts of an empty object."""
    none: tuple[bytes, ...] = ()
    for part in none:
        yield part


def check_writable_key(url: str, key: str, bytes_max: int = KEY_BYTES_MAX) -> str:
    """Return `key` if what is written there is found under that name again. Raises BadKey."""
    if any(part in ("", ".", "..", STAGING) for part in key.split("/")):
        why = f"an empty part, '.', '..' and {STAGING!r} are no parts of a key"
    elif "\0" in key:
        why = "a key has no NUL"
    elif not key.isascii() and any(0xD800 <= ord(letter) <= 0xDFFF for letter in key):
        why = "a key is UTF-8"
    elif len(key.encode()) > bytes_max:
        why = f"a key has at most {bytes_max} bytes"
    else:
        return key
    raise BadKey(f"{key[:200]!r} cannot be written to {url}: {why}")


def precondition_failed(url: str, key: str, if_match: str | None, found: str | None) -> PreconditionFailed:
    """The error for a write whose condition does not hold. `found`: the version that is there, if it is known."""
    there = f"version {found} is there" if found else "another one is there"
    if if_match is None:
        return PreconditionFailed(f"{key!r} in {url} was to be new, and {there}")
    return PreconditionFailed(f"{key!r} in {url} was to replace version {if_match}, and {there}")


def no_conditions(url: str, if_match: str | None, if_none_match: bool) -> None:
    """Raises OriginReadOnly if there is a condition."""
    if if_match is not None or if_none_match:
        raise OriginReadOnly(f"{url} knows no conditional writes: write without If-Match and If-None-Match")
