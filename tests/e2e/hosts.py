"""Test hosts: network namespaces joined by a switch, and everything that can go wrong between and on them.

    with Hosts(tmp_path, 3) as hosts:
        first, second, third = hosts
        job = first.stoker("run", "--nnodes", "2:3", "--rdzv-endpoint", hosts.endpoint, TOY)
        ...
        hosts.partition([first, second], [third])
        hosts.heal()

A host has an address, a name, a folder and a runtime folder of its own; the file system is shared. On leaving, all
that ran there is killed and removed; what a killed test run leaves, a guard process removes, or the next test run.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

import psutil
import pytest

from tests.e2e import hosts_census as census
from tests.e2e.hosts_network import (
    NAMESPACES,
    Network,
    guard,
    mount_disk,
    sweep,
    unmount_disks,
    why_not,
)
from tests.e2e.run_helpers import Finished, Stoker, own_environment

T = TypeVar("T")
CLONE_NEWNET = 0x40000000
PORT = 29400
TOKEN = "a-secret-of-the-test-hosts"

needs_hosts = pytest.mark.skipif(
    bool(why_not()) and not os.environ.get("CI"), reason=f"no test hosts: {why_not()}"
)
"""Skips where there can be no hosts; in CI such a test fails instead."""


class Host:
    """One machine of the test."""

    def __init__(self, network: Network, number: int, folder: Path) -> None:
        self.number = number
        self.name = f"h{number}"
        self.address = network.address(number)
        self.namespace = network.namespace(number)
        self.entry = network.entry(number)
        """What stands before a command to run it here."""
        self.folder = folder / self.name
        self.folder.mkdir(parents=True)
        self.inode = os.stat(NAMESPACES / self.namespace).st_ino
        self.environment = {census.MARK: self.namespace, "STOKER_JOB_TOKEN": TOKEN}
        self._started: list[subprocess.Popen[Any]] = []

    def __repr__(self) -> str:
        return self.name

    # -- starting -----------------------------------------------------------------------------------------

    def popen(
        self, *argv: str, environment: dict[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a command here; options as for `subprocess.Popen`. Its process id is the command's own."""
        variables = {**own_environment(self.folder), **self.environment, **(environment or {})}
        process = subprocess.Popen([*self.entry, *argv], cwd=self.folder, env=variables, **options)
        self._started.append(process)
        return process

    def run(self, *argv: str, timeout_s: float = 90.0, environment: dict[str, str] | None = None) -> Finished:
        """Run a command here to its end."""
        pipe = subprocess.PIPE
        process = self.popen(*argv, environment=environment, stdout=pipe, stderr=pipe, text=True)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(
                f"{argv} still runs after {timeout_s} s\n{Finished(-1, out, err).text}"
            ) from None
        return Finished(process.returncode, out, err)

    def stoker(self, *arguments: str, environment: dict[str, str] | None = None, folder: str = ".") -> Stoker:
        """Start a `stoker` command here, in this host's folder (or one below it)."""
        where = self.folder / folder
        where.mkdir(parents=True, exist_ok=True)
        command = Stoker(
            where, *arguments, environment={**self.environment, **(environment or {})}, prefix=self.entry
        )
        self._started.append(command.process)
        return command

    def call(self, function: Callable[[], T]) -> T:
        """Call a function of this process in the host's network: sockets that it makes belong to the host."""
        outcome: list[Any] = []

        def inside() -> None:
            try:
                with (NAMESPACES / self.namespace).open() as handle:
                    _set_namespace(handle.fileno())
                outcome.append((True, function()))
            except BaseException as error:  # noqa: BLE001 - carried over to the caller
                outcome.append((False, error))

        thread = threading.Thread(target=inside)
        thread.start()
        thread.join()
        succeeded, value = outcome[0]
        if not succeeded:
            raise value
        result: T = value
        return result

    # -- what runs here -----------------------------------------------------------------------------------

    def processes(self) -> list[psutil.Process]:
        """Everything that runs here, oldest first."""
        return census.processes_of({self.inode}, lambda mark: mark == self.namespace)

    def agents(self) -> list[psutil.Process]:
        """`stoker run`."""
        return [p for p in self.processes() if census.is_command(p, "run")]

    def workers(self) -> list[psutil.Process]:
        """Processes that run a training script; their loader processes are not among them."""
        return census.workers_among(self.processes())

    def masters(self) -> list[psutil.Process]:
        """`stoker master`, by itself or as a child of `stoker run`."""
        return [p for p in self.processes() if census.is_command(p, "master")]

    def kill(self) -> list[int]:
        """The machine loses power: everything on it dies at once."""
        killed = census.send(signal.SIGKILL, self.processes())
        census.kill_all(self.processes)
        return killed

    # -- disks --------------------------------------------------------------------------------------------

    def disk(self, name: str, size: str) -> Path:
        """A small file system of its own, `size` like `400k` or `8m`."""
        path = self.folder / name
        mount_disk(path, size, self.namespace)
        return path

    # -- the end ------------------------------------------------------------------------------------------

    def close(self) -> None:
        for process in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()


class Hosts:
    """N hosts at one switch."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.count = count
        self.hosts: list[Host] = []
        self.network = Network(count)

    def __enter__(self) -> Hosts:
        problem = why_not()
        if problem:
            raise RuntimeError(f"no test hosts: {problem}")
        sweep()
        self._guard = guard()
        try:
            self.network.make()
            self.hosts = [Host(self.network, number, self.folder) for number in self.network.numbers]
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            census.kill_all(self.processes)
        finally:
            self._remove()

    def _remove(self) -> None:
        for host in self.hosts:
            host.close()
        unmount_disks(self.network.name)
        self.network.remove()
        assert self._guard.stdin is not None
        self._guard.stdin.write(b"done\n")
        self._guard.stdin.close()
        self._guard.wait()

    @overload
    def __getitem__(self, which: int) -> Host: ...
    @overload
    def __getitem__(self, which: slice) -> list[Host]: ...
    def __getitem__(self, which: int | slice) -> Host | list[Host]:
        return self.hosts[which]

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    @property
    def endpoint(self) -> str:
        """`--rdzv-endpoint` of a job whose master is on the first host."""
        return f"{self.network.address(1)}:{PORT}"

    # -- faults -------------------------------------------------------------------------------------------

    def cut(self, *hosts: Host) -> None:
        """Take the link down; the host sees it."""
        for host in hosts:
            self.network.link_down(host.number)

    def drop(self, source: Host, target: Host) -> None:
        """Lose packets of one direction, silently."""
        self.network.drop(source.number, target.number)

    def partition(self, *groups: Sequence[Host]) -> None:
        """Groups hear nothing of each other, silently; hosts that are in none are not touched."""
        for group in groups:
            others = [host for other in groups if other is not group for host in other]
            for source in group:
                for target in others:
                    self.drop(source, target)

    def reset(self, *hosts: Host) -> None:
        """Break the TCP connections between these hosts and all others."""
        for host in hosts:
            self.network.reset(host.number)

    def slow(self, host: Host, rate: str) -> None:
        """Limit a host's bandwidth, like `1mbit`."""
        self.network.slow(host.number, rate)

    def heal(self) -> None:
        """Undo every cut, drop, partition and limit. Resets and deaths stay."""
        self.network.heal()

    # -- census -------------------------------------------------------------------------------------------

    def processes(self) -> list[psutil.Process]:
        """Everything that runs on any host, or was started there and has escaped from it."""
        inodes = {host.inode for host in self.hosts}
        return census.processes_of(inodes, lambda mark: mark.startswith(f"{self.network.name}-"))

    def assert_nothing_left(self, timeout_s: float = 60.0) -> None:
        """No process may be left on any host; ends that are under way get a moment."""
        for _ in census.polls(timeout_s):
            left = self.processes()
            if not left:
                return
        raise AssertionError(f"processes are left:\n{census.describe(left)}")


def freeze(*processes: psutil.Process) -> list[int]:
    """SIGSTOP; returns the pids of those that were there."""
    return census.send(signal.SIGSTOP, processes)


def thaw(*processes: psutil.Process) -> list[int]:
    """SIGCONT."""
    return census.send(signal.SIGCONT, processes)


def kill(*processes: psutil.Process) -> list[int]:
    """SIGKILL."""
    return census.send(signal.SIGKILL, processes)


def fill_disk(disk: Path) -> None:
    """Leave not one byte; `free_disk` gives the room back."""
    with (disk / "filler").open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def free_disk(disk: Path) -> None:
    (disk / "filler").unlink(missing_ok=True)


def _set_namespace(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
