"""Whom a name stands for that somebody else vouches for: the subject of a token, a service account, the name in a
certificate. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from stoker.cache.auth.principals import Principal

SUBJECT = "subject"
SERVICE_ACCOUNT = "service account"
CERTIFICATE = "certificate"
CLAIM_KINDS = {SUBJECT: "subjects", SERVICE_ACCOUNT: "service_accounts", CERTIFICATE: "certificates"}
"""And where the file of access says who they are."""


class Claimant(NamedTuple):
    """A principal is all whose names of that kind are like `pattern`, in which `*` is anything."""

    kind: str
    pattern: str
    principal: Principal


class Claim(NamedTuple):
    """A name that somebody has proved, until `until_s` (`time.time`)."""

    kind: str
    name: str
    until_s: float


def principal_of(claim: Claim, claimants: Iterable[Claimant]) -> Principal | None:
    """The first of them that it stands for."""
    return next(
        (one.principal for one in claimants if one.kind == claim.kind and is_like(claim.name, one.pattern)),
        None,
    )


def is_like(name: str, pattern: str) -> bool:
    """Whether a name is as a pattern has it, in which `*` is anything and nothing else is special."""
    first, *others = pattern.split("*")
    if not others:
        return name == pattern
    *between, last = others
    if not name.startswith(first) or not name.endswith(last) or len(name) < len(first) + len(last):
        return False
    at, end = len(first), len(name) - len(last)
    for part in between:
        found = name.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True
