"""What the kernel says of threads that ask the mount for something. Nothing of those that are gone, or of another
namespace."""

from __future__ import annotations

import signal

_STAT_FLAGS, _STAT_EXIT_CODE, _EXITING, _SIGNALS = 6, 49, 0x4, 0x7F
"""Of /proc/PID/stat, counted from its third field; of those, as Linux has them."""
_ENDS = sum(1 << (number - 1) for number in (signal.SIGKILL, signal.SIGINT, signal.SIGQUIT))


def process_of(thread: int) -> int:
    """The number of the process that a thread is of; 0, if nothing is known of it."""
    return int(_status(thread).get(b"Tgid", b"0"))


def is_killed(thread: int) -> bool:
    """Whether it ends by a signal, which it has taken."""
    fields = _read(thread, "stat").rpartition(b")")[2].split()
    if len(fields) <= _STAT_EXIT_CODE:
        return False
    return bool(int(fields[_STAT_FLAGS]) & _EXITING and int(fields[_STAT_EXIT_CODE]) & _SIGNALS)


def is_ending(thread: int) -> bool:
    """Whether a signal ends it as soon as its system call does, or it has a Ctrl-C or Ctrl-\\ to answer then."""
    status = _status(thread)
    pending, shared, blocked = (int(status.get(name, b"0"), 16) for name in (b"SigPnd", b"ShdPnd", b"SigBlk"))
    # What ends a process is pending with each of its threads, as SIGKILL.
    return bool((pending | shared) & ~blocked & _ENDS)


def _status(thread: int) -> dict[bytes, bytes]:
    lines = (line.partition(b":") for line in _read(thread, "status").splitlines())
    return {name: value.strip() for name, _, value in lines}


def _read(thread: int, what: str) -> bytes:
    try:
        with open(f"/proc/{thread}/{what}", "rb") as file:
            return file.read()
    except OSError:
        return b""
