"""What a list of hosts says: the lines of a host discovery script, or the value of `--hosts`. PURE."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from stoker.errors import ConfigError

SLOTS_MAX = 1024
HOSTS_MAX = 10_000
_NAME = r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?"
_HOST = re.compile(
    rf"^(?P<user>{_NAME})(?:\[(?P<address>[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?)\]"
    r"|(?P<name>[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}))(?::(?P<slots>.*))?$"
)


class HostSlots(NamedTuple):
    """A host, and the workers that it is to run."""

    host: str
    slots: int


class HostList(NamedTuple):
    """What was listed."""

    hosts: tuple[HostSlots, ...]
    """In the order of the list; a host without slots is left out."""
    remarks: tuple[str, ...] = ()
    """What is odd about it, for people."""


def parse_script_output(text: str, default_slots: int) -> HostList:
    """The answer of a discovery script: `host[:slots]` lines; blank lines and what follows a # are left out.

    Raises ConfigError, naming the line, for anything else: half a list would send away hosts that were meant to stay.
    """
    lines = ((f"line {number}", line.split("#", 1)[0]) for number, line in enumerate(text.splitlines(), 1))
    return _host_list(lines, default_slots)


def parse_hosts_flag(text: str, default_slots: int) -> HostList:
    """`--hosts h1:2,h2:4`. Raises ConfigError, also for an empty list."""
    found = _host_list((("--hosts", item) for item in text.split(",")), default_slots)
    if not found.hosts:
        raise ConfigError(f"--hosts {text!r} names no host: write HOST:SLOTS,HOST:SLOTS")
    return found


def _host_list(items: Iterable[tuple[str, str]], default_slots: int) -> HostList:
    slots: dict[str, int] = {}
    remarks: list[str] = []
    for where, item in items:
        if not item.strip():
            continue
        one = parse_host(item.strip(), default_slots, where)
        if slots.get(one.host, one.slots) != one.slots:
            remarks.append(
                f"{one.host} is listed twice, with {slots[one.host]} and {one.slots} slots: the last counts"
            )
        slots[one.host] = one.slots
        if len(slots) > HOSTS_MAX:
            raise ConfigError(f"{where}: more than {HOSTS_MAX} hosts are listed")
    return HostList(tuple(HostSlots(h, n) for h, n in slots.items() if n > 0), tuple(remarks))


def parse_host(text: str, default_slots: int, where: str) -> HostSlots:
    """One `host[:slots]`; the host may be `user@host`, an IPv6 address stands in brackets. Raises ConfigError.

    No host begins with a dash, so none can be taken for an option of the remote shell.
    """
    match = _HOST.match(text)
    if match is None:
        raise ConfigError(
            f"{where}: {text[:80]!r} is no host: write HOST or HOST:SLOTS, IPv6 as [ADDRESS]:SLOTS"
        )
    digits = match["slots"]
    if digits is None:
        slots = default_slots
    elif re.fullmatch(r"[0-9]{1,5}", digits) and int(digits) <= SLOTS_MAX:
        slots = int(digits)
    else:
        raise ConfigError(f"{where}: {text[:80]!r}: slots must be a number from 0 to {SLOTS_MAX}")
    return HostSlots(match["user"] + (match["address"] or match["name"]), slots)
