"""How large a job does one master hold on one core, beside an asyncio server that only echoes frames?

10,000 simulated agents (`_fleet.py`: real TCP streams, real messages, workers that change worlds at once) against one
`stoker master` with its journal in SQLite, pinned to one core, the fleet on another. Measured: the agents' joining and
the first world; the signs of life that the master takes in; the loss of 1 and of 1,000 nodes until all the others hold
the new world; SIGKILL of the master and its restart; memory; and dynamic shards leased and reported by 100 agents, of
which some vanish.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import resource
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from _common import parser, report
from _jobs import free_port

HERE = Path(__file__).parent
TOKEN = secrets.token_urlsafe(16)
CORES = sorted(os.sched_getaffinity(0))
RATES = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Signs of life per agent and second that are tried, until the master falls behind."""
BUSY = 0.97
"""Share of its core above which a master has fallen behind."""

WORLD_GOES_ON = "master killed: the world goes on unchanged"
SHARDS_WRONG = "shards lost, done twice, or refused"
RIGHT: dict[str, object] = {WORLD_GOES_ON: "yes", SHARDS_WRONG: 0}
"""Figures that are no matter of speed: with any other value the benchmark fails."""


class Master:
    """A `stoker master` in a process of its own, on the first core."""

    def __init__(self, folder: Path, nodes: str) -> None:
        self.folder, self.nodes, self.port = folder, nodes, free_port()
        self.process = self._start()

    def _start(self) -> psutil.Popen:
        environment = {
            **os.environ,
            "STOKER_JOB_TOKEN": TOKEN,
            "XDG_RUNTIME_DIR": str(self.folder / "runtime"),
        }
        (self.folder / "runtime").mkdir(mode=0o700, exist_ok=True)
        command = [
            sys.executable, "-m", "stoker.cli.main", "master", "--listen", f"127.0.0.1:{self.port}",
            "--journal", str(self.folder / "job.db"), "--rdzv-id", "bench", "--nnodes", self.nodes,
        ]  # fmt: skip
        with (self.folder / "master.log").open("ab") as log:
            process = psutil.Popen(command, env=environment, cwd=self.folder, stdout=log, stderr=log)
        process.cpu_affinity(CORES[:1])
        return process

    def restart(self) -> None:
        """SIGKILL, and a new one on the same journal and port."""
        self.process.kill()
        self.process.wait()
        self.process = self._start()

    def wait_until_up(self) -> None:
        """Until it listens."""
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            time.sleep(0.01)

    @property
    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)

    @property
    def rss_mib(self) -> float:
        return float(self.process.memory_info().rss) / 2**20

    def log_tail(self) -> str:
        return (self.folder / "master.log").read_text("utf-8", "replace")[-1500:]


class FleetProcess:
    """The agents, on the last core."""

    def __init__(self, port: int) -> None:
        command = [sys.executable, str(HERE / "_fleet_main.py"), "127.0.0.1", str(port), TOKEN]
        self.process = psutil.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.process.cpu_affinity(CORES[-1:])

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Give a command and wait for its answer."""
        self.tell(do, **arguments)
        return self.hear()

    def tell(self, do: str, **arguments: Any) -> None:
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        print(f"    {answer}", file=sys.stderr, flush=True)
        if "error" in answer:
            raise RuntimeError(f"the fleet says: {answer}")
        return answer


@contextlib.contextmanager
def fleet_and_master(nodes: str) -> Iterator[tuple[FleetProcess, Master]]:
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as folder:
        master = Master(Path(folder), nodes)
        fleet = FleetProcess(master.port)
        try:
            master.wait_until_up()
            yield fleet, master
        except BaseException:
            print(master.log_tail(), file=sys.stderr)
            raise
        finally:
            for process in (fleet.process, master.process):
                process.kill()
                process.wait()


class Probe(threading.Thread):
    """Asks the master's port for something small, again and again: how late it answers says how far it is behind."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.port, self.waits_s = port, [0.0]
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.wait(0.1):
            began = time.monotonic()
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
                connection.request("GET", "/v1/nothing")
                connection.getresponse().read()
                connection.close()
            self.waits_s.append(time.monotonic() - began)

    def worst_s(self) -> float:
        self.stopped.set()
        self.join()
        return max(self.waits_s)


def measure_nodes(count: int, lost: int, seconds: float) -> dict[str, Any]:
    """Joining, signs of life, losses, restart."""
    shown: dict[str, Any] = {}
    with fleet_and_master(f"{count - 2 * lost}:{count}") as (fleet, master):
        empty_mib = master.rss_mib
        joined = fleet.ask("launch", count=count, slots=1, timeout_s=300)
        shown[f"{count} agents join: all answered (s)"] = joined["joined_s"]
        shown[f"{count} agents join: all hold the world (s)"] = joined["world_s"]
        fleet.ask("beat", per_s=-1, seconds=3)
        shown.update(measure_beats(fleet, master, count, seconds))
        for number in (1, lost):
            answer = fleet.ask("lose", count=number, slots=1, timeout_s=120)
            shown[f"{number} of {count} nodes lost: all others hold the new world (s)"] = answer["world_s"]
            fleet.ask("beat", per_s=-1, seconds=2)
            answer = fleet.ask("add", count=number, slots=1, timeout_s=120)
            shown[f"{number} nodes come to {count - number}: all hold the new world (s)"] = answer["world_s"]
            fleet.ask("beat", per_s=-1, seconds=2)
        shown[f"master's memory with {count} nodes (MiB)"] = master.rss_mib
        shown["master's memory per node (KiB)"] = (master.rss_mib - empty_mib) * 1024 / count
        shown.update(measure_restart(fleet, master, count, answer["generation"]))
    return shown


def measure_beats(fleet: FleetProcess, master: Master, count: int, seconds: float) -> dict[str, Any]:
    """More and more signs of life, until the master needs all of its core."""
    held, per_cpu_s = 0.0, 0.0
    for rate in RATES:
        probe = Probe(master.port)
        probe.start()
        cpu, began = master.cpu_s, time.monotonic()
        answer = fleet.ask("beat", per_s=rate * count, seconds=seconds)
        busy = (master.cpu_s - cpu) / (time.monotonic() - began)
        worst_s = probe.worst_s()
        print(f"    {rate} per agent: {busy:.2f} of the core, late by {worst_s:.3f} s", file=sys.stderr)
        if busy > BUSY or worst_s > 1.0 or answer["sent_per_s"] < 0.95 * rate * count:
            break
        held, per_cpu_s = answer["sent_per_s"], answer["sent_per_s"] / busy
    fleet.ask("beat", per_s=-1, seconds=3)
    return {
        "signs of life held (1/s)": held,
        "signs of life per second of the master's CPU (1/s)": per_cpu_s,
        "signs of life held per agent that beats each second": held / count,
    }


def measure_restart(fleet: FleetProcess, master: Master, count: int, generation: int) -> dict[str, Any]:
    """SIGKILL of the master; its nodes come back to the next one, in the same world."""
    fleet.tell("back", timeout_s=120)
    killed = time.monotonic()
    master.restart()
    master.wait_until_up()
    up_s = time.monotonic() - killed
    answer = fleet.hear()
    settled = fleet.ask("beat", per_s=-1, seconds=8)
    is_same = settled["generation"] == generation and not settled["refusals"]
    return {
        "master killed: the next one listens (s)": up_s,
        f"master killed: all {count} nodes are back (s)": answer["back_s"],
        WORLD_GOES_ON: "yes" if is_same else f"no: {settled}",
        "master's memory after its restart (MiB)": master.rss_mib,
    }


def measure_shards(agents: int, slots: int, shards: int, vanish: int) -> dict[str, Any]:
    """Dynamic shards through real streams."""
    with fleet_and_master(f"1:{agents + vanish}") as (fleet, master):
        cpu = master.cpu_s
        answer = fleet.ask("shards", agents=agents, slots=slots, shards=shards, vanish=vanish, timeout_s=300)
        cpu = master.cpu_s - cpu
    wrong = answer["never reported"] + answer["accepted twice"] + answer["errors"]
    if wrong:
        print(f"  shards went wrong: {answer}", file=sys.stderr)
    return {
        f"shards leased and reported by {agents} agents (1/s)": answer["leases"] / answer["seconds"],
        "shards per second of the master's CPU (1/s)": answer["leases"] / cpu,
        "agents that vanished meanwhile": vanish,
        SHARDS_WRONG: wrong,
    }


def measure_null(connections: int, seconds: float) -> float:
    """Frames per second of a server that only echoes, on the master's core."""
    command = [sys.executable, str(HERE / "scripts" / "null_server.py")]
    server = psutil.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        server.cpu_affinity(CORES[:1])
        fleet = FleetProcess(int(server.stdout.readline()))
        rate: float = fleet.ask("echo", connections=connections, seconds=seconds)["frames_per_s"]
        fleet.process.kill()
        fleet.process.wait()
        return rate
    finally:
        server.kill()
        server.wait()


def main() -> None:
    flags = parser(__doc__ or "")
    flags.add_argument("--nodes", type=int, default=0, help="simulated agents (10000; 2000 with --quick)")
    flags.add_argument("--only", choices=["nodes", "shards"])
    options = flags.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    count = options.nodes or (2000 if options.quick else 10_000)
    seconds = 3.0 if options.quick else 8.0
    shown: dict[str, Any] = {"load before": os.getloadavg()[0], "agents": count}
    null = measure_null(min(count, 1000), seconds)
    shown["null server, frames echoed (1/s)"] = null
    if options.only != "shards":
        shown.update(measure_nodes(count, count // 10, seconds))
        shown["signs of life held / frames of the null server"] = shown["signs of life held (1/s)"] / null
    if options.only != "nodes":
        shown.update(measure_shards(100, 4, 10_000 if options.quick else 60_000, 5 if options.quick else 20))
        rate = shown["shards leased and reported by 100 agents (1/s)"]
        shown["shard calls answered / frames of the null server"] = 2 * rate / null
    report("master_scale", shown, options.json)
    wrong = [f"{name}: {shown[name]}" for name, right in RIGHT.items() if shown.get(name, right) != right]
    if wrong:
        sys.exit("; ".join(wrong))


if __name__ == "__main__":
    main()
