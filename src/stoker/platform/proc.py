"""What the kernel says of processes in /proc. Their names are bytes that need not be text, cut off in the middle of a
character."""

from __future__ import annotations

from pathlib import Path


def read_text(path: Path) -> str:
    """A file of the kernel's, without blanks around it; empty where it cannot be read. Never raises."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def stat_fields(pid: int) -> list[str]:
    """The fields of `/proc/PID/stat` from the state on (see proc(5)); empty when the process is gone."""
    after_name = read_text(Path(f"/proc/{pid}/stat")).rpartition(")")[2]  # which may hold anything
    return after_name.split()
