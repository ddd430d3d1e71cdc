"""A worker's part in showing its stacks when it is stuck: once, at its start, it prepares for being asked.

The agent looks with py-spy, from outside. Where that is not installed or not permitted, it sends a signal on which
the interpreter itself writes the stacks of all threads to a file, even if another thread holds the GIL for ever.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
from pathlib import Path

from stoker.wire.health import STACK_SIGNAL_OFFSET

PR_SET_PTRACER = 0x59616D61


def prepare_to_be_looked_at(stack_file: Path) -> None:
    """Let the agent see this process's stacks.

    It registers a real-time signal, which scripts hardly ever use, and where the Yama security module lets only
    ancestors look into a process, it lets the agent and its other children do so as well. The file stays open.
    Raises OSError if it cannot be opened.
    """
    descriptor = os.open(stack_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    file = os.fdopen(descriptor, "ab", buffering=0)  # faulthandler keeps it
    faulthandler.register(signal.SIGRTMIN + STACK_SIGNAL_OFFSET, file=file, all_threads=True)
    ctypes.CDLL(None).prctl(PR_SET_PTRACER, os.getppid(), 0, 0, 0)
