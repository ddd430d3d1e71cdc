"""Why a program cannot be started, in words from which its user can mend it."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping

from stoker.errors import EnvironmentProblem

INTERPRETER_BYTES = 256
"""How much of a script's first line the kernel reads."""
_MENDS = {
    errno.EAGAIN: "this user, container or control group has too many processes: end some, or raise `ulimit -u` or "
    "the limit of pids",
    errno.ENOMEM: "there is not enough memory to start another process",
    errno.EMFILE: "this process has too many files open: raise `ulimit -n`",
    errno.ENFILE: "this machine has too many files open",
    errno.E2BIG: "its arguments and environment are too long together",
    errno.ENOEXEC: "it is neither a program of this kind of machine nor a script that begins with a #! line",
    errno.EISDIR: "it is a folder",
}


def require_program(program: str, environment: Mapping[str, str]) -> None:
    """Raises EnvironmentProblem where no such program could be started with this environment."""
    if shutil.which(program, path=environment.get("PATH")) is None:
        raise EnvironmentProblem(f"cannot start {program}: {_why_not_found(program)}")


def why_not_started(program: str, environment: Mapping[str, str], error: Exception) -> str:
    """Which program could not be started, why, and what to do about it."""
    number = error.errno if isinstance(error, OSError) else None
    why = (error.strerror if isinstance(error, OSError) else None) or str(error)
    found = shutil.which(program, path=environment.get("PATH"))
    if number in (errno.ENOENT, errno.EACCES, errno.ENOTDIR):
        interpreter = _interpreter(found) if found is not None else ""
        if interpreter:
            why = f"its first line names an interpreter that cannot be started here, {interpreter}: mend that line"
        elif found is None:
            why = _why_not_found(program)
        elif number == errno.ENOENT:
            why = "the loader that it was linked for is not on this machine: it was built for another system"
    elif number in _MENDS:
        why = f"{why}: {_MENDS[number]}"
    return f"cannot start {program}: {why}"


def _why_not_found(program: str) -> str:
    if os.path.isdir(program):
        return "it is a folder"
    if os.path.isfile(program):
        if os.path.dirname(program):
            return f"it may not be executed: `chmod +x {program}`"
        return f"there is no such program on this machine's PATH; for the one in this folder give ./{program}"
    if os.path.dirname(program):
        return f"there is no such file on this machine (from {os.getcwd()})"
    return "there is no such program on this machine's PATH; install it, or give its path"


def _interpreter(path: str) -> str:
    """What a script's first line says is to run it; empty where it is no such script."""
    try:
        with open(path, "rb") as file:
            first = file.read(INTERPRETER_BYTES).partition(b"\n")[0]
    except OSError:
        return ""
    return first[2:].decode("utf-8", "replace").strip() if first.startswith(b"#!") else ""
