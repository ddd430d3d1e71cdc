"""Looks at a file of a mount while signals come: `mount_signalled.py PATH HOW`. Says `asks`, and in the end what came
of it and how often a handler was called."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

called = 0


def note(number: int, frame: FrameType | None) -> None:
    global called
    called += 1


def main() -> None:
    path, how = sys.argv[1:]
    for number in (signal.SIGALRM, signal.SIGCHLD, signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, note)
    if how == "alarms":
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    print("asks", flush=True)
    try:
        size_bytes = os.stat(path).st_size  # which Python does not begin again after EINTR
        signal.setitimer(signal.ITIMER_REAL, 0)
        with open(path, "rb", buffering=0) as file:
            print(size_bytes, len(os.pread(file.fileno(), size_bytes, 0)), called > 0)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        raise


if __name__ == "__main__":
    main()
