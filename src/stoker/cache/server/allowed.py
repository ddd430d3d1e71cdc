"""Whether who asks may do it."""

from __future__ import annotations

from collections.abc import Iterable

from stoker.cache.auth.principals import Principal
from stoker.cache.auth.rules import READ
from stoker.errors import AccessDenied


def check_may_read(principal: Principal, bucket: str, keys: Iterable[str]) -> None:
    """Raises AccessDenied."""
    if principal.may_read(bucket):
        return
    if not principal.knows(bucket):
        raise AccessDenied(f"{principal.name} may not read the bucket {bucket!r}")
    for key in keys:
        if not principal.may_read(bucket, key):
            raise AccessDenied(f"{principal.name} may not read {key!r} in the bucket {bucket!r}")


def check_may(principal: Principal, verb: str, bucket: str, key: str) -> None:
    """Whether it may do this with that key; who knows nothing of a bucket is not told whether it is there. Raises
    AccessDenied."""
    if not principal.rules.allow(verb, bucket, key):
        raise AccessDenied(f"{principal.name} may not {verb} {key!r} in the bucket {bucket!r}")


def may_have_descriptors(principal: Principal, bucket: str) -> bool:
    """What is passed opens all of the bucket that lies in the same file, and no limit holds for how it is read."""
    return principal.may_read(bucket) and not principal.egress_bytes_per_s


def check_may_order(principal: Principal, bucket: str) -> None:
    """Whether it may say what it reads next of a bucket, of which it reads something. Raises AccessDenied."""
    if not principal.rules.allow_some(READ, bucket):
        raise AccessDenied(f"{principal.name} may not read the bucket {bucket!r}")


def check_may_list(principal: Principal, bucket: str, prefix: str) -> None:
    """Raises AccessDenied."""
    if not principal.may_list(bucket, prefix):
        below = f"what is below {prefix!r} in" if prefix else "all of"
        raise AccessDenied(f"{principal.name} may not list {below} the bucket {bucket!r}")


def check_may_administer(principal: Principal, bucket: str, prefix: str) -> None:
    """Raises AccessDenied."""
    if not principal.may_administer(bucket, prefix):
        below = f"what is below {prefix!r} in" if prefix else "all of"
        raise AccessDenied(f"{principal.name} may not pin or evict {below} the bucket {bucket!r}")


def check_may_do_all(principal: Principal) -> None:
    """Raises AccessDenied."""
    if not principal.is_unrestricted:
        raise AccessDenied(f"this needs a token that opens every bucket, and {principal.name} has none")
