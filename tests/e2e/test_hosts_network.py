"""The test hosts themselves: they are apart, faults do what they say, and nothing stays behind."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e import hosts_census as census
from tests.e2e.hosts import Host, Hosts, fill_disk, free_disk, freeze, kill, needs_hosts, thaw
from tests.e2e.hosts_network import NAMES, NAMESPACES, mounted_disks, tool
from tests.e2e.run_helpers import wait_for

pytestmark = [pytest.mark.real, needs_hosts]
WAIT_S = 0.3
SLEEP = (sys.executable, "-c", "import time; time.sleep(600)")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(tmp_path, 3) as made:
        yield made


def listener_on(host: Host) -> socket.socket:
    return host.call(lambda: socket.create_server((host.address, 0)))


def connection(server: socket.socket, client: Host) -> tuple[socket.socket, socket.socket]:
    """A connection from `client`; returns its two ends."""
    near = client.call(lambda: socket.create_connection(server.getsockname(), timeout=30))
    far, _ = server.accept()
    for end in (near, far):
        end.settimeout(30)
    return near, far


def is_heard(sender: socket.socket, receiver: socket.socket, within_s: float = 30.0) -> bool:
    sender.send(b"x")
    receiver.settimeout(within_s)
    try:
        return receiver.recv(100) != b""
    except TimeoutError:
        return False


def test_hosts_have_addresses_names_and_folders_of_their_own(hosts: Hosts) -> None:
    first, second, _ = hosts
    code = "import os, socket; print(socket.gethostname(), os.environ['XDG_RUNTIME_DIR'], os.getcwd())"
    said = [host.run(sys.executable, "-c", code).out.split() for host in (first, second)]
    assert said[0] == ["h1", f"{first.folder}/runtime", str(first.folder)]
    assert said[1] == ["h2", f"{second.folder}/runtime", str(second.folder)]
    assert socket.gethostname() != "h1"
    with listener_on(first) as server:
        near, far = connection(server, second)
        with near, far:
            assert far.getpeername()[0] == second.address
            assert is_heard(near, far)
        with pytest.raises(OSError), socket.create_connection(server.getsockname(), timeout=WAIT_S):
            pytest.fail("the hosts can be reached from outside")


def test_a_partition_is_silent_and_heals(hosts: Hosts) -> None:
    first, second, third = hosts
    with listener_on(first) as server:
        one, other = connection(server, second), connection(server, third)
        with one[0], one[1], other[0], other[1]:
            hosts.partition([first, second], [third])
            assert is_heard(*one)
            assert not is_heard(*other, within_s=WAIT_S)
            assert not is_heard(*reversed(other), within_s=WAIT_S)
            hosts.heal()
            other[0].settimeout(30)
            assert other[0].recv(1) == b"x", "what was sent meanwhile arrives after all"


def test_packets_of_one_direction_can_be_lost(hosts: Hosts) -> None:
    first, second, _ = hosts
    ports = [host.call(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) for host in (first, second)]
    with ports[0], ports[1]:
        for port, host in zip(ports, (first, second), strict=True):
            port.bind((host.address, 0))
            port.settimeout(30)
        hosts.drop(first, second)
        ports[1].sendto(b"to the first", ports[0].getsockname())
        assert ports[0].recv(100) == b"to the first"
        ports[1].settimeout(WAIT_S)
        ports[0].sendto(b"to the second", ports[1].getsockname())
        with pytest.raises(TimeoutError):
            ports[1].recv(100)


def test_a_cut_host_knows_it_and_a_reset_is_an_error_at_both_ends(hosts: Hosts) -> None:
    first, second, third = hosts
    with listener_on(first) as server:
        near, far = connection(server, second)
        with near, far:
            hosts.reset(first)
            with pytest.raises(ConnectionResetError):
                near.recv(1)
            with pytest.raises(ConnectionAbortedError):
                far.recv(1)
        hosts.cut(third)
        with pytest.raises(OSError) as refused:
            connection(server, third)
        assert refused.value.errno == errno.ENETUNREACH
        hosts.heal()
        for end in connection(server, third):
            end.close()


def test_a_slow_host(hosts: Hosts) -> None:
    first, second, _ = hosts
    hosts.slow(second, "2mbit")
    with listener_on(first) as server:
        near, far = connection(server, second)
        with near, far:
            near.settimeout(30)
            far.settimeout(30)
            began = time.monotonic()
            near.sendall(bytes(200_000))
            got = 0
            while got < 200_000:
                got += len(far.recv(65536))
            assert time.monotonic() - began > 0.4, "200 kB at 2 Mbit/s take 0.8 s, less the burst"
    hosts.heal()


def test_the_census_finds_what_a_host_runs_and_the_end_ends_it(tmp_path: Path) -> None:
    with Hosts(tmp_path, 2) as hosts:
        first, second = hosts
        started = first.popen(*SLEEP)
        second.popen("sh", "-c", "sleep 600 & exec sleep 600")
        wait_for(lambda: len(second.processes()) == 2, why="a child on the second host")
        assert [p.pid for p in first.processes()] == [started.pid]
        with pytest.raises(AssertionError, match=str(started.pid)):
            hosts.assert_nothing_left(0.1)
        escaped = first.popen("nsenter", f"--net=/proc/{os.getpid()}/ns/net", *SLEEP)
        wait_for(lambda: census.command_of(psutil.Process(escaped.pid)) == [*SLEEP], why="exec")
        assert escaped.pid in [p.pid for p in hosts.processes()], "found by its mark"
        (process,) = (p for p in first.processes() if p.pid == started.pid)
        freeze(process)
        wait_for(lambda: process.status() == psutil.STATUS_STOPPED, why="a stopped process")
        thaw(process)
        kill(process)
        assert started.wait(60) == -signal.SIGKILL
        disk = first.disk("small", "64k")
        fill_disk(disk)
        with pytest.raises(OSError, match="No space"):
            (disk / "more").write_bytes(bytes(100))
        free_disk(disk)
        (disk / "more").write_bytes(bytes(100))
        everything = hosts.processes()
        name = hosts.network.name
    assert len(everything) == 3
    assert not census.alive(everything)
    assert left_of(name) == []


def test_what_a_killed_test_run_leaves_is_swept(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.e2e.hosts import Hosts\n"
        "with Hosts(Path(sys.argv[1]), 2) as hosts:\n"
        "    hosts[0].popen('sleep', '600'); hosts[0].disk('small', '64k')\n"
        "    print(hosts.network.name, flush=True); sys.stdin.read()\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with run:
        assert run.stdout is not None
        name = run.stdout.readline().strip()
        assert name in tool("ip", "netns", "list")
        with Hosts(tmp_path / "other", 1):
            assert name in tool("ip", "netns", "list"), "a living owner's hosts are left alone"
        run.kill()
    wait_for(lambda: name not in tool("ip", "netns", "list"), 60, "sweeping by the guard")
    wait_for(lambda: not [p for p in census.pids() if census.mark_of(p).startswith(name)], 60, "kill")
    wait_for(lambda: not left_of(name), 60, "sweeping of all else")


def left_of(name: str) -> list[str]:
    entries = [entry for folder in (NAMESPACES, NAMES) for entry in os.listdir(folder)]
    return [known for known in [*entries, *(disk for disk, _ in mounted_disks())] if known.startswith(name)]
