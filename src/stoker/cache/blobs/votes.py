"""Which version of a blob is the newest, by what the servers of a fleet say. Pure.

An acknowledged version is known to two servers, beside those that had given up older bytes by then: who hears nothing
of a newer one from all others but one, of all that were in the fleet since its own was written, has the newest. Who is
not sure which fleet is the fleet needs to hear all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum
from typing import NamedTuple

from stoker.cache.blobs.clock import parse_version
from stoker.cache.blobs.standing import missing_max

KEPT_S = 30 * 86400.0
"""What is older is served no more."""
SKEW_S = 60.0
"""By so much the machines' clocks may differ."""
REMEMBERED_S = KEPT_S + 2 * SKEW_S
"""So long servers remember versions whose bytes they do not hold, and who was in their fleet: longer than any other
serves what is older."""


class Said(NamedTuple):
    """What a server knows of a key. `version`: the newest that it has heard of; empty: none. `is_held`: all its bytes
    are there."""

    version: str
    is_held: bool
    size_bytes: int = 0


class Which(Enum):
    """Whose bytes are the newest."""

    MINE = "mine"
    THEIRS = "theirs"
    NOBODYS = "nobody's"


class Verdict(NamedTuple):
    """`newest`: the newest version that anybody knows; `holder`: who holds its bytes, where that is another."""

    which: Which
    newest: Said
    holder: str
    why: str


def judge(
    mine: Said,
    said: Mapping[str, Said],
    members: Collection[str],
    last_seen_s: Mapping[str, float],
    now_s: float,
    *,
    is_confirmed: bool,
) -> Verdict:
    """`said`: by the others that have answered. `members`: the others that are in the fleet now; `last_seen_s`: when
    servers were seen in it last, seconds since 1970; `is_confirmed`: as `Standing` has it."""
    holder, newest = max([("", mine), *sorted(said.items())], key=lambda one: one[1].version)
    if not newest.version:
        return Verdict(Which.NOBODYS, newest, "", "nobody knows it")
    version = parse_version(newest.version)
    written_s = version.ms / 1000
    if version.is_removed:
        return Verdict(Which.NOBODYS, newest, "", "it was removed")
    if written_s < now_s - KEPT_S:
        return Verdict(Which.NOBODYS, newest, "", "what is newer may be forgotten by now")
    silent = too_many_silent(said, members, last_seen_s, written_s, is_confirmed=is_confirmed)
    if silent:
        return Verdict(Which.NOBODYS, newest, "", f"{silent} may know of a newer one")
    if mine.version == newest.version and mine.is_held:
        return Verdict(Which.MINE, newest, "", "nobody knows of a newer one")
    for name, one in sorted(said.items()):
        if one.version == newest.version and one.is_held:
            return Verdict(Which.THEIRS, newest, name, f"{name} holds it")
    return Verdict(Which.NOBODYS, newest, holder, "nobody who answers holds it")


def too_many_silent(
    said: Collection[str],
    members: Collection[str],
    last_seen_s: Mapping[str, float],
    since_s: float,
    *,
    is_confirmed: bool,
) -> str:
    """Who has not answered of those that were in the fleet since then, if any of what was acknowledged meanwhile may
    be known to no other; else nothing. What is written is newer than what was written before by those who had left by
    then, for clocks differ by less than SKEW_S."""
    everyone = {*members, *(name for name, at in last_seen_s.items() if at >= since_s - SKEW_S)}
    silent = everyone.difference(said)
    allowed = missing_max(len(everyone)) if is_confirmed else 0
    return ", ".join(sorted(silent)) if len(silent) > allowed else ""
