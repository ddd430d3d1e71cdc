"""How do one, two and four servers scale whose links are limited?

Each server in a network namespace of its own, what it sends shaped by `tbf`; readers on a host more, which is not
limited, in processes of their own. Three things, each with 1, 2 and 4 servers:

- bytes a second of objects of 128 KiB and of files of 128 MiB, read by the fleet's client from their owners, over the
  links' rate together. Who owns what is a matter of chance, and the server that owns most is full first: what of the
  links that allows is told as well;
- HEAD requests a second, each owner asked for what it owns, over the same with one server; with links so slow that two
  processors carry four servers and their clients;
- what limits them where links do not: processor time of all servers for one HEAD, over that of one server.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from _common import interleaved, parser, report
from _serving import Readers, Server, serve
from _web import TOKEN, cpu_s, find, wrk
from tests.e2e.hosts_network import Network, tool, why_not

from stoker.cache.layout import DEFAULT_BLOCK_SIZE_BYTES
from stoker.cache.maglev import Member, Placement, block_owner_name

SERVERS = (1, 2, 4)
CLIENT = 5
PORT = 7070
LINK_BYTES_PER_S = 40e6
HEAD_LINK_BYTES_PER_S = 0.75e6
PAYLOAD = 1448 / 1514
"""What of a link can be bytes of bodies: the rest is headers of packets, which `tbf` counts."""
SIZES = {"objects": (128 << 10, 2048), "files": (128 << 20, 6)}
SHAPE = ("burst", "256kb", "latency", "50ms")
SCRIPT = str(Path(__file__).parent / "scripts" / "fleet_readers.py")
READERS_A_SERVER = 3


def main() -> int:
    """Print how much of so many links, and of so many times one server, there is."""
    arguments = parser(__doc__ or "").parse_args()
    missing = "wrk not found: apt-get install wrk" if find("wrk") is None else why_not()
    if missing:
        print(f"fleet_scale: skipped, {missing}")
        return 0
    rounds, seconds = (3, 3) if arguments.quick else (5, 5)
    figures: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name, _network() as network, contextlib.ExitStack() as stack:
        folder = Path(name)
        _fill(folder / "origin")
        fleets = {count: stack.enter_context(_fleet(folder, network, count)) for count in SERVERS}
        time.sleep(2.5)  # until all have seen all
        for fleet in fleets.values():
            for what in SIZES:
                subprocess.run(_reader(network, fleet, "once", what), check=True)  # until all is held
        bench = Bench(network, fleets, rounds, seconds)
        for what in SIZES:
            figures |= bench.bytes(what)
        figures |= bench.heads()
        figures |= bench.head_costs()
    report("fleet_scale", figures, arguments.json)
    return 0


class Bench:
    """All fleets, of which one is asked at a time."""

    def __init__(self, network: Network, fleets: dict[int, list[Server]], rounds: int, seconds: int) -> None:
        self._network = network
        self._fleets = fleets
        self._rounds = rounds
        self._seconds = seconds

    def bytes(self, what: str) -> dict[str, object]:
        """Bytes a second over the links'."""
        self._shape(LINK_BYTES_PER_S)

        def rate(count: int) -> float:
            seeds = [str(seed) for seed in range(READERS_A_SERVER * count)]
            with Readers(
                _reader(self._network, self._fleets[count], seed, what) for seed in seeds
            ) as readers:
                before, began = readers.read_bytes(), time.perf_counter()
                time.sleep(self._seconds)
                return (readers.read_bytes() - before) / (time.perf_counter() - began)

        sides = {str(count): partial(rate, count) for count in SERVERS}
        figures: dict[str, object] = {}
        for side, rates in interleaved(sides, self._rounds).items():
            count, rate_bytes = int(side), statistics.median(rates)
            label = f"{what}, {side} servers"
            figures[f"{label}: ratio to the links (goal 0.9)"] = rate_bytes / (
                count * LINK_BYTES_PER_S * PAYLOAD
            )
            figures[f"{label}: the fullest allows"] = 1 / (count * max(_shares(count, what)))
            figures[f"{label}: MB/s"] = rate_bytes / 1e6
        return figures

    def heads(self) -> dict[str, object]:
        """Requests a second over those of one server."""
        for count in SERVERS:
            self._heads_per_s(count)  # until all is known
        self._shape(HEAD_LINK_BYTES_PER_S)
        sides = {str(count): partial(self._heads_per_s, count) for count in SERVERS}
        found = {side: statistics.median(rates) for side, rates in interleaved(sides, self._rounds).items()}
        figures: dict[str, object] = {}
        for side, rate in found.items():
            figures[f"HEAD, slow links, {side} servers: ratio to linear (goal 0.9)"] = (
                rate / int(side) / found["1"]
            )
            figures[f"HEAD, slow links, {side} servers: req/s"] = round(rate)
        return figures

    def head_costs(self) -> dict[str, object]:
        """Processor time for a request, where nothing is limited."""
        self._shape(None)
        sides = {str(count): partial(self._cost_s, count) for count in SERVERS}
        found = {side: statistics.median(costs) for side, costs in interleaved(sides, self._rounds).items()}
        figures: dict[str, object] = {"HEAD, 1 server: CPU a request, µs": found["1"] * 1e6}
        for side, cost in found.items():
            figures[f"HEAD, {side} servers: CPU a request, ratio to one server"] = cost / found["1"]
        return figures

    def _cost_s(self, count: int) -> float:
        before = sum(cpu_s(server.pid) for server in self._fleets[count])
        requests = self._heads_per_s(count) * self._seconds
        return (sum(cpu_s(server.pid) for server in self._fleets[count]) - before) / requests

    def _heads_per_s(self, count: int) -> float:
        """Each owner is asked for the objects that it owns."""
        fleet, network = self._fleets[count], self._network
        owned = _owned(count)

        def ask(number: int) -> float:
            script = Path(tempfile.gettempdir(), f"{network.name}-{count}-{number}.lua")
            keys = ", ".join(f'"/b/{key}"' for key in owned[number])
            script.write_text(
                f"local keys, asked, at = {{{keys}}}, {{}}, 0\n"
                "function init()\n  for i, key in ipairs(keys) do asked[i] = wrk.format('HEAD', key) end\nend\n"
                "function request()\n  at = at % #asked + 1\n  return asked[at]\nend\n"
            )
            try:
                return wrk(
                    fleet[number].url, self._seconds, 16, script=str(script), entry=network.entry(CLIENT)
                ).per_s
            finally:
                script.unlink()

        with ThreadPoolExecutor(count) as threads:
            return sum(threads.map(ask, range(count)))

    def _shape(self, bytes_per_s: float | None) -> None:
        """What each server may send."""
        for number in range(1, max(SERVERS) + 1):
            command = ["tc", "-n", self._network.namespace(number), "qdisc"]
            if bytes_per_s is None:
                tool(*command, "del", "dev", "eth0", "root", check=False)
            else:
                rate = f"{int(bytes_per_s * 8)}bit"
                tool(*command, "replace", "dev", "eth0", "root", "tbf", "rate", rate, *SHAPE)


@contextlib.contextmanager
def _network() -> Iterator[Network]:
    network = Network(CLIENT)
    network.make()
    try:
        yield network
    finally:
        network.remove()


def _fill(origin: Path) -> None:
    origin.mkdir()
    for kind, (size_bytes, count) in SIZES.items():
        (origin / kind).mkdir()
        for number in range(count):
            (origin / kind / f"{number:05}").write_bytes(os.urandom(size_bytes))
    (origin / "empty").mkdir()
    for number in range(1000):
        (origin / "empty" / f"{number:05}").touch()


@contextlib.contextmanager
def _fleet(folder: Path, network: Network, count: int) -> Iterator[list[Server]]:
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                serve(
                    folder / f"{count}-{number}",
                    folder / "origin",
                    *(("--fleet", f"file://{folder}/fleet-{count}") if count > 1 else ()),
                    *("--name", f"s{number}"),
                    listen=f"{network.address(number)}:{PORT + count}",
                    entry=network.entry(number),
                )
            )
            for number in range(1, count + 1)
        ]


def _placement(count: int) -> Placement:
    return Placement(tuple(Member(f"s{number}") for number in range(1, count + 1)))


def _owned(count: int) -> list[list[str]]:
    """Empty objects that each server owns."""
    owned: list[list[str]] = [[] for _ in range(count)]
    placement = _placement(count)
    for number in range(1000):
        key = f"empty/{number:05}"
        owner = next(iter(placement.owners(block_owner_name("b", key, 0), 1)))
        owned[int(owner.name[1:]) - 1].append(key)
    return owned


def _shares(count: int, what: str) -> list[float]:
    """The part of the bytes that each server owns."""
    placement = _placement(count)
    size_bytes, files = SIZES[what]
    blocks = -(-size_bytes // DEFAULT_BLOCK_SIZE_BYTES)
    names = [block_owner_name("b", f"{what}/{n:05}", block) for n in range(files) for block in range(blocks)]
    owners = [next(iter(placement.owners(name, 1))).name for name in names]
    return [owners.count(member.name) / len(owners) for member in placement.members]


def _reader(network: Network, fleet: Sequence[Server], seed: str, what: str) -> list[str]:
    urls = ",".join(server.url for server in fleet)
    size_bytes, count = SIZES[what]
    return [
        *network.entry(CLIENT),
        sys.executable,
        SCRIPT,
        urls,
        TOKEN,
        seed,
        what,
        str(count),
        str(size_bytes),
    ]


if __name__ == "__main__":
    sys.exit(main())
