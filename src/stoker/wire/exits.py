"""How a worker ended, as far as its node can tell: the facts from which the relaunch policy takes its reason."""

from __future__ import annotations

from typing import Literal

import msgspec

Reason = Literal[
    "finished",
    "evicted",
    "oom",
    "device-oom",
    "user-error",
    "crashed",
    "device-error",
    "hardware",
    "disk-full",
    "stopped",
    "hung",
    "not-ready",
]
"""Why a worker is no more. What each means and what follows: `job/relaunch.py`."""

Sign = Literal["", "oom", "device-oom", "device-error", "hardware", "disk-full", "child-killed"]
"""What a worker's last words point to. `child-killed`: a process that it had started was killed."""


class ExitFacts(msgspec.Struct, frozen=True, tag_field="type", tag="exit_facts", forbid_unknown_fields=True):
    """How a worker ended."""

    code: int | None
    """Exit code, or None when a signal ended it."""
    signal: int | None
    message: str = ""
    """The script's traceback, or the end of its standard error."""
    sign: Sign = ""
    sign_line: str = ""
    """The line of its last words that says so."""
    oom_killed: bool = False
    """The kernel killed it, or a process that it had started, for want of memory."""
    memory_limit_bytes: int = 0
    """The memory limit that it ran under; 0: none of its own."""
    memory_peak_bytes: int = 0
    """The most memory that it used at once; 0: not known."""
    full_disk: str = ""
    """A folder whose file system has no space left."""
    verdict: Reason | Literal[""] = ""
    """What the master or the platform found out by itself, as that it hung or that its node is lost. It outranks the
    rest; empty: the rest decides."""
    wall_s: float = 0.0
    """When it ended, seconds since 1970."""
