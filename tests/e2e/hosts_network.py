"""Network namespaces joined by a switch: making them, breaking them, sweeping up what a dead test run left.

Only `ip`, `tc` and `ss` (iproute2) are needed, no packet filter: neighbour entries are permanent, and a silent drop is
an entry that leads to a hardware address which nobody has.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.e2e import hosts_census as census

PREFIX = "stoker-test"
NAMESPACES = Path("/run/netns")
NAMES = Path("/run/stoker-test")
"""Host names (UTS namespaces), kept alive by a bind mount."""
NOBODY = "02:77:00:00:ff:ff"
SWITCH = "switch"
_numbers = itertools.count(1)


def why_not() -> str:
    """Why there can be no hosts here; empty: there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc", "ss", "nsenter", "unshare") if not _which(tool)]
    return f"not installed: {', '.join(missing)} (iproute2, util-linux)" if missing else ""


def _which(tool: str) -> bool:
    folders = (*os.environ.get("PATH", "").split(":"), "/usr/sbin", "/sbin")
    return any(os.access(os.path.join(folder, tool), os.X_OK) for folder in folders if folder)


def started_at(pid: int) -> int:
    """When a process began, in clock ticks since boot; 0 when it is dead. With the pid it names a process for ever."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


def owner_name() -> str:
    """The first part of every name: who has to be dead before somebody else may sweep."""
    return f"{PREFIX}-{os.getpid()}-{started_at(os.getpid())}"


def tool(*argv: str, text: str | None = None, check: bool = True) -> str:
    """Run a command of the system; a failure is an error with its words."""
    done = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=30, check=False)
    if check and done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}\n{text or ''}")
    return done.stdout


def ip_batch(namespace: str, lines: Iterable[str], *, check: bool = True) -> None:
    text = "".join(f"{line}\n" for line in lines)
    tool("ip", "-n", namespace, *([] if check else ["-force"]), "-batch", "-", text=text, check=check)


class Network:
    """N hosts, numbered from 1, at one switch. Host n has `10.77.1.n` on its `eth0`."""

    def __init__(self, count: int) -> None:
        self.name = f"{owner_name()}-{next(_numbers)}"
        self.numbers = range(1, count + 1)
        self._slow: set[int] = set()

    def address(self, number: int) -> str:
        """The namespaces see nobody else, so that every network may use the same addresses."""
        return f"10.77.1.{number}"

    def namespace(self, number: int) -> str:
        return f"{self.name}-h{number}"

    @property
    def switch(self) -> str:
        return f"{self.name}-{SWITCH}"

    def entry(self, number: int) -> list[str]:
        """What stands before a command to run it on a host; the process id stays the command's own."""
        namespace = self.namespace(number)
        return ["nsenter", f"--net={NAMESPACES / namespace}", f"--uts={NAMES / namespace}", "--"]

    def make(self) -> None:
        tool("ip", "netns", "add", self.switch)
        wires = ["link add name br0 type bridge", "link set dev br0 up"]
        for number in self.numbers:
            tool("ip", "netns", "add", self.namespace(number))
            self._name_host(number)
            wires.append(
                f"link add name port{number} type veth peer name eth0 address {_hardware(number)}"
                f" netns {self.namespace(number)}"
            )
            wires.append(f"link set dev port{number} master br0 up")
        ip_batch(self.switch, wires)
        for number in self.numbers:
            start = ("link set dev lo up", "link set dev eth0 addrgenmode none")
            own = f"addr add {self.address(number)}/24 dev eth0"
            ip_batch(self.namespace(number), [*start, own, *self._up(number)])

    def _name_host(self, number: int) -> None:
        NAMES.mkdir(exist_ok=True)
        path = NAMES / self.namespace(number)
        path.touch()
        tool("unshare", f"--uts={path}", "sh", "-c", f"echo h{number} > /proc/sys/kernel/hostname")

    def _up(self, number: int) -> list[str]:
        others = [n for n in self.numbers if n != number]
        return ["link set dev eth0 up", *(self._neighbour(n, _hardware(n)) for n in others)]

    def _neighbour(self, number: int, hardware: str) -> str:
        return f"neigh replace {self.address(number)} lladdr {hardware} dev eth0 nud permanent"

    def remove(self) -> None:
        for number in self.numbers:
            remove_namespace(self.namespace(number))
        remove_namespace(self.switch)

    # -- faults -------------------------------------------------------------------------------------------

    def drop(self, source: int, target: int) -> None:
        """Packets from `source` to `target` are lost without a word; the other direction is not touched."""
        ip_batch(self.namespace(source), [self._neighbour(target, NOBODY)])

    def link_down(self, number: int) -> None:
        """The host sees it: sending fails with "network is unreachable"."""
        ip_batch(self.namespace(number), ["link set dev eth0 down"])

    def reset(self, number: int) -> None:
        """Both ends of every TCP connection between this host and another get an error, as from an RST."""
        peers = " or ".join(f"dst {self.address(n)}" for n in self.numbers if n != number)
        tool(*self.entry(number), "ss", "--tcp", "--kill", f"( {peers} )", check=False)

    def slow(self, number: int, rate: str) -> None:
        """Limit what a host sends and receives, each to `rate` (`1mbit`, …)."""
        limit = ("root", "tbf", "rate", rate, "burst", "32k", "latency", "400ms")
        tool("tc", "-n", self.namespace(number), "qdisc", "replace", "dev", "eth0", *limit)
        tool("tc", "-n", self.switch, "qdisc", "replace", "dev", f"port{number}", *limit)
        self._slow.add(number)

    def heal(self) -> None:
        for number in self.numbers:
            ip_batch(self.namespace(number), self._up(number))
        for number in self._slow:
            tool("tc", "-n", self.namespace(number), "qdisc", "del", "dev", "eth0", "root")
            tool("tc", "-n", self.switch, "qdisc", "del", "dev", f"port{number}", "root")
        self._slow.clear()


def _hardware(number: int) -> str:
    return f"02:77:00:00:00:{number:02x}"


def remove_namespace(name: str) -> None:
    """A network namespace and the host name that goes with it; their processes must be dead."""
    tool("ip", "netns", "delete", name, check=False)
    path = NAMES / name
    if path.exists():
        tool("umount", str(path), check=False)
        path.unlink(missing_ok=True)


def mount_disk(path: Path, size: str, name: str) -> None:
    """A file system of its own and of this size (`400k`, `8m`) at `path`."""
    path.mkdir(parents=True, exist_ok=True)
    tool("mount", "-t", "tmpfs", "-o", f"size={size}", name, str(path))


def mounted_disks() -> list[tuple[str, str]]:
    """(name, path) of every disk that `mount_disk` made."""
    rows = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return [(row[0], row[1]) for row in rows if row[0].startswith(PREFIX)]


def unmount_disks(owner: str) -> None:
    for name, path in mounted_disks():
        if name == owner or name.startswith(f"{owner}-"):
            tool("umount", "--lazy", path, check=False)


def _names() -> set[str]:
    """Everything that was ever made and is still there."""
    listed: list[str] = []
    for folder in (NAMESPACES, NAMES):
        with contextlib.suppress(FileNotFoundError):
            listed += os.listdir(folder)
    listed += [name for name, _ in mounted_disks()]
    return {name for name in listed if name.startswith(f"{PREFIX}-")}


def sweep() -> Sequence[str]:
    """Remove what test runs left that are dead: processes, namespaces, disks. Returns the names."""
    dead = sorted(name for name in _names() if not _owner_lives(name))
    inodes = {_inode(name) for name in dead} - {0}
    if dead or inodes:
        census.kill_all(lambda: census.processes_of(inodes, lambda mark: mark in dead))
    for name in dead:
        unmount_disks(name)
        remove_namespace(name)
    return dead


def _owner_lives(name: str) -> bool:
    pid, _, rest = name.removeprefix(f"{PREFIX}-").partition("-")
    start = rest.split("-")[0]
    return pid.isdigit() and start.isdigit() and started_at(int(pid)) == int(start)


def _inode(namespace: str) -> int:
    try:
        return os.stat(NAMESPACES / namespace).st_ino
    except OSError:
        return 0


def guard() -> subprocess.Popen[bytes]:
    """A process that sweeps when this one dies without having done so; writing a line to it sends it home."""
    script = 'read line || exec "$0" -m tests.e2e.hosts_network'
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        ["sh", "-c", script, sys.executable],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=root,
        start_new_session=True,
    )


if __name__ == "__main__":
    time.sleep(0.2)  # the owner's pipe closes a moment before its /proc entry goes
    print("\n".join(sweep()))
