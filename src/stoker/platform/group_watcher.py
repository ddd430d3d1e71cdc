"""A process of its own that ends what an agent leaves behind when it is killed. Run as a script, without Stoker.

It is told on its standard input which process groups there are (`+ PID STARTED`) and which are no more (`- PID`). The
end of its input means that the agent is gone, however that came about. It imports next to nothing, lives in a session
of its own and heeds no signal that ends or stops others of its terminal.
"""

import os
import signal
import sys

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP)


def started_at(pid: int) -> str:
    """When a process started, in the kernel's ticks, which with its id names it for good; empty: there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[19].decode()
    except OSError:
        return ""


def kill_group(leader: int, started: str) -> None:
    """End a process group, unless the leader's id is another process's by now.

    The kernel gives no process the id of a group that is there, so a leader that is gone may have left members behind,
    and one that has another time of start has left none.
    """
    if started_at(leader) in ("", started):
        try:
            os.killpg(leader, signal.SIGKILL)
        except OSError:
            pass


def main() -> None:
    """Listen until the agent is gone."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    groups: dict[int, str] = {}
    for line in sys.stdin.buffer:
        word, pid, *more = line.decode().split()
        if word == "+":
            groups[int(pid)] = more[0]
        else:
            groups.pop(int(pid), None)
    for leader, started in groups.items():
        kill_group(leader, started)


if __name__ == "__main__":
    main()
