"""From the facts of an exit to its reason. PURE."""

from __future__ import annotations

import re
import signal
from typing import Protocol

from stoker.base.units import format_bytes
from stoker.wire.exits import ExitFacts, Reason

SHELL_BASE = 128
"""A shell, and a script that handles a signal as one, ends with 128 + the signal's number."""

TAKEN_AWAY = frozenset(
    {
        signal.SIGTERM,
        signal.SIGKILL,
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGUSR1,
        signal.SIGUSR2,
    }
)
"""Signals that schedulers, users and systems send to take a process away."""

NATIVE_CRASH = frozenset(
    {
        signal.SIGSEGV,
        signal.SIGABRT,
        signal.SIGILL,
        signal.SIGFPE,
        signal.SIGTRAP,
        signal.SIGSYS,
    }
)

_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")
_FRAME = re.compile(r'^\s*(?:\|\s*)*File "[^"]+", line \d+')
_NOT_THE_SCRIPT = ("gloo", "NCCL", "nccl", "Connection", "TCPStore", "Timed out", "timed out", "Broken pipe")


class Ended(Protocol):
    """What every account of an exit has."""

    @property
    def code(self) -> int | None: ...

    @property
    def signal(self) -> int | None: ...


def signal_of(ended: Ended) -> int | None:
    """The signal that ended it, also where a shell or the script's own handler turned it into an exit code."""
    if ended.signal is not None:
        return ended.signal
    if ended.code is None:
        return None
    number = ended.code - SHELL_BASE
    known = number in TAKEN_AWAY or number in NATIVE_CRASH or number == signal.SIGBUS
    return number if known else None


def classify(facts: ExitFacts) -> Reason:
    """Why a worker is no more.

    What the master found out by itself comes first, then the kernel's word about memory, then the script's last
    words, then signal and exit code. The words of a worker that was taken away are not read: what they tell of
    did not end it.
    """
    if facts.verdict:
        return facts.verdict
    if facts.code == 0:
        return "finished"
    number = signal_of(facts)
    if facts.oom_killed and (number == signal.SIGKILL or facts.sign == "child-killed"):
        return "oom"
    if number in TAKEN_AWAY:
        return "evicted"
    if facts.sign == "child-killed":
        return "crashed"
    if facts.sign:
        return facts.sign
    if number == signal.SIGBUS:
        return "disk-full" if facts.full_disk else "hardware"
    if number is not None:
        return "crashed"
    return "user-error"


def describe_exit(ended: Ended) -> str:
    """`was killed by SIGKILL`, `exited with code 3`."""
    if ended.signal is not None:
        try:
            name = signal.Signals(ended.signal).name
        except ValueError:
            name = f"signal {ended.signal}"
        return f"was killed by {name}"
    return f"exited with code {ended.code}"


def describe(reason: Reason, facts: ExitFacts) -> str:
    """What happened, for people; goes on from "it …"."""
    how = describe_exit(facts)
    said = f": {facts.sign_line}" if facts.sign_line else ""
    match reason:
        case "finished":
            return "finished"
        case "oom" if facts.oom_killed:
            limit = facts.memory_limit_bytes
            bound = f" (its limit was {format_bytes(limit)})" if limit else ""
            return f"was killed by the kernel for want of memory{bound}"
        case "oom" | "device-oom":
            device = " on the device" if reason == "device-oom" else ""
            return f"{how} for want of memory{device}{said}"
        case "disk-full":
            where = f" on {facts.full_disk}" if facts.full_disk else ""
            return f"{how} for want of disk space{where}{said}"
        case "device-error":
            return f"{how}, its device in a state that cannot be trusted{said}"
        case "hardware":
            return f"{how}, which points to broken hardware{said}"
        case "stopped":
            return "is stopped (state T) and does nothing"
        case "hung":
            return "made no progress"
        case "not-ready":
            return "never became ready"
        case _:
            return f"{how}{said}"


def fingerprint(facts: ExitFacts) -> str:
    """What two ranks have in common that fail with the same error: place and words, numbers left out.

    Empty where the words tell of a peer or the network: every rank says so when one of them dies.
    """
    lines = [line.strip() for line in facts.message.splitlines() if line.strip()]
    if not lines:
        return f"exit code {facts.code}" if facts.code is not None else ""
    last = next((line for line in reversed(lines) if not line.startswith(("^", "~"))), lines[-1])
    if any(word in facts.message for word in _NOT_THE_SCRIPT):
        return ""
    place = next((line for line in reversed(lines) if _FRAME.match(line)), "")
    return f"{place} {_NUMBERS.sub('#', last)}".strip()[:400]
