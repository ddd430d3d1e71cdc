"""What lies below what is to be mounted, asked before anybody looks for it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from uuid import uuid4

from stoker.cache.client.client import CacheClient
from stoker.cache.client.fleet import open_client
from stoker.cache.mount.places import BucketPlace
from stoker.cache.mount.sampling import sample
from stoker.cache.origin.open import open_origin
from stoker.errors import (
    AccessDenied,
    CacheError,
    NotAuthenticated,
    OriginReadOnly,
    StokerError,
    WriteDenied,
)
from stoker.settings import environment

_LISTED_OTHERWISE = frozenset(("file", "http", "https", "memory"))
"""A folder has to be there, or is answered with a page as if it were an object."""


def sizes_below(
    place: BucketPlace, timeout_s: float, *, is_sampled: bool, is_writable: bool, token_from: str = ""
) -> list[int]:
    """How large files there are: of a sample, or of one; none: there are none. `token_from`: who said the token that it
    is shown. Raises what the cache says, CacheError where it lets nobody in who shows this token, and WriteRefused
    where nobody may write who wants to."""
    below = _below(place)
    try:
        with _client(place, timeout_s) as client:
            if is_writable:
                check_writable(client, place.bucket, below)
            if is_sampled:
                return sample(client, place.bucket, below)
            return [one.size_bytes for one in client.list_page(place.bucket, below, None, 1).objects]
    except NotAuthenticated as error:
        raise _not_known(place, token_from, error) from None
    except AccessDenied as error:
        raise CacheError(str(error)) from None


def check_token(place: BucketPlace, timeout_s: float, token_from: str) -> None:
    """Where a cache in front of it has failed: whether that is for what the user has said, which only this knows.
    Raises CacheError where it lets nobody in who shows this token."""
    try:
        with _client(place, timeout_s) as client:
            client.list_page(place.bucket, _below(place), None, 1)
    except NotAuthenticated as error:
        raise _not_known(place, token_from, error) from None
    except (StokerError, OSError, TimeoutError):
        pass


def _not_known(place: BucketPlace, token_from: str, error: Exception) -> CacheError:
    shown = f"the token of {token_from}" if token_from else "the token that it is shown"
    why = f"does not know {shown}" if place.token else "wants a token, and is shown none"
    return CacheError(
        f"the cache at {place.endpoint} {why}: say --token-file FILE, or set STOKER_CACHE_TOKEN ({error})"
    )


def _below(place: BucketPlace) -> str:
    """What keys begin with, and not what only begins so."""
    prefix = place.prefix.strip("/")
    return f"{prefix}/" if prefix else ""


def check_writable(client: CacheClient, bucket: str, prefix: str) -> None:
    """Who may not write hears of it before a file is lost whose writer does not look at what `close` says. What is
    asked for does nothing: there is nothing of that name. Raises WriteRefused or AccessDenied."""
    nothing = f"{prefix}.stoker-{uuid4().hex}"
    try:
        client.copy(bucket, nothing, nothing)
    except (AccessDenied, NotAuthenticated, OriginReadOnly, WriteDenied):
        raise
    except StokerError:
        pass  # as it is not there; what else may be wrong is said of what is written


def is_object(place: BucketPlace, timeout_s: float, origin_url: str | None) -> bool:
    """Whether it is the name of an object with bytes: of one at `place`, or of what an origin is. Not where that cannot
    be found out."""
    with suppress(StokerError, OSError, TimeoutError):
        if origin_url is not None:
            return _is_at_origin(origin_url, timeout_s)
        key = place.prefix.strip("/")
        if key:
            with _client(place, timeout_s) as client:
                known = client.known(place.bucket, key)
                return not known.is_absent and known.size_bytes > 0
    return False


def _is_at_origin(url: str, timeout_s: float) -> bool:
    address, mark, query = url.partition("?")
    scheme, _, rest = address.partition("://")
    if scheme.lower() in _LISTED_OTHERWISE or "/" not in rest.strip("/"):
        return False
    parent, _, name = address.rstrip("/").rpartition("/")

    async def size_bytes() -> int:
        origin = open_origin(f"{parent}{mark}{query}", environment())
        try:
            async with asyncio.timeout(timeout_s):
                return (await origin.stat(name)).size_bytes
        finally:
            await origin.close()

    return asyncio.run(size_bytes()) > 0


def _client(place: BucketPlace, timeout_s: float) -> CacheClient:
    return open_client(place.endpoint, place.token, timeout_s=timeout_s, tls=place.tls)
