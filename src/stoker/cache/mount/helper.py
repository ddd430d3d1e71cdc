"""Mounting without being root: `fusermount3`, of the package fuse3, may do it for anybody on a folder of their own."""

from __future__ import annotations

import shutil
import socket
import subprocess

from stoker.errors import EnvironmentProblem
from stoker.settings import environment

PROGRAM = "fusermount3"
SUBTYPE = "stoker"
_MEND = f"install it (Debian: apt-get install fuse3), or mount as root ({PROGRAM} is what lets others)"


def mount(folder: str, source: str, *, is_writable: bool, lets_others: bool, runs_programs: bool) -> int:
    """A descriptor that the mount's requests are read from. Raises EnvironmentProblem."""
    options = ["rw" if is_writable else "ro", "nosuid", "nodev", "default_permissions"]
    options += [f"fsname={_escaped(source)}", f"subtype={SUBTYPE}", *(["allow_other"] if lets_others else [])]
    options += [] if runs_programs else ["noexec"]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        done = subprocess.run(
            [_program(), "-o", ",".join(options), "--", folder],
            env={**environment(), "_FUSE_COMMFD": str(theirs.fileno())},
            pass_fds=[theirs.fileno()],
            capture_output=True,
            text=True,
            check=False,
        )
        theirs.close()
        if done.returncode != 0:
            raise EnvironmentProblem(f"cannot mount {source} on {folder}: {done.stderr.strip()}")
        _, fds, _, _ = socket.recv_fds(ours, 1, 1)
    if not fds:
        raise EnvironmentProblem(f"cannot mount {source} on {folder}: {PROGRAM} passed no descriptor")
    return fds[0]


def unmount(folder: str, *, is_lazy: bool) -> str:
    """Why it could not be done, in English; empty: it is. Raises EnvironmentProblem."""
    words = [_program(), "-u", *(["-z"] if is_lazy else []), "--", folder]
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, env={**environment(), "LC_ALL": "C"}
    )
    return "" if done.returncode == 0 else done.stderr.strip() or f"{PROGRAM} ends with {done.returncode}"


def _program() -> str:
    found = shutil.which(PROGRAM)
    if found is None:
        raise EnvironmentProblem(f"there is no {PROGRAM}: {_MEND}")
    return found


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace(",", "\\,")
