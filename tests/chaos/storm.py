"""A fleet of cache servers under mixed load, while servers are killed at random and the origin fails in between.

    python -m tests.chaos.storm --seconds 600 --seed 1

It ends with 1 if a reader gets one wrong byte, or an error that does not go away by asking again, or if the origin
served a block more often than the fleet changed.
"""

from __future__ import annotations

import argparse
import itertools
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from pathlib import Path

from stoker.cache.client.client import CacheClient
from stoker.errors import StokerError
from tests.chaos.storm_origin import StormOrigin, content, names
from tests.e2e.cache_helpers import ServerProcess

TOKEN = "a-token-of-the-storm"
SERVERS = "wxyz"
READERS = 6
PATIENCE_S = 60.0
ENDS_WITHIN_S = 60.0


class Storm:
    """The fleet, its origin, its readers, and who makes trouble."""

    def __init__(self, folder: Path, seed: int, capacity: str = "1GB") -> None:
        self.folder = folder
        self.seed = seed
        self.capacity = capacity
        self.origin = StormOrigin()
        self.servers: dict[str, ServerProcess] = {}
        self.lock = threading.Lock()
        self.done = threading.Event()
        self.faults: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()
        self.cured = 0
        self.wrong: list[str] = []
        self.changes = 0
        config = [f'tokens = ["{TOKEN}"]', f'fleet = "{folder}/members"', "[buckets.b]"]
        config += [f'origin_url = "{self.origin.url}"', "ttl_s = 2.0"]
        (folder / "cache.toml").write_text("\n".join(config))

    def start(self, name: str) -> None:
        options = ("--dir", str(self.folder / name), "--capacity", self.capacity, "--name", name)
        server = ServerProcess(*options, "--config", str(self.folder / "cache.toml"))
        with self.lock:
            self.servers[name] = server
            self.changes += 1
        threading.Thread(target=self.listen, args=(name, server), daemon=True).start()

    def listen(self, name: str, server: ServerProcess) -> None:
        """Take what a server says, or it would wait for somebody to; a traceback is a defect."""
        said: deque[str] = deque(maxlen=40)
        assert server.child.stderr is not None
        for line in server.child.stderr:
            said.append(line)
            if line.startswith("Traceback"):
                lines = itertools.islice(server.child.stderr, 40)
                self.wrong.append(f"{name} said: {''.join([*said, *lines])}")

    def end(self, name: str, number: signal.Signals) -> None:
        server = self.servers[name]
        server.child.send_signal(number)
        try:
            server.child.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.wrong.append(f"{name} goes on {ENDS_WITHIN_S:g} s after {number.name}")
            server.child.kill()
            server.child.wait()

    def run(self, seconds: float) -> None:
        threading.Thread(target=self.origin.serve_forever, args=(0.05,), daemon=True).start()
        for name in SERVERS:
            self.start(name)
        threads = [threading.Thread(target=self.read, args=(n,), name=f"reader-{n}") for n in range(READERS)]
        for thread in threads:
            thread.start()
        try:
            self.make_trouble(seconds)
        finally:
            self.origin.mood = "ok"
            self.done.set()
            for thread in threads:
                thread.join()
            for name in self.servers:
                self.end(name, signal.SIGKILL)
            self.origin.shutdown()
            self.origin.server_close()

    # -- trouble ------------------------------------------------------------------------------------------------

    def make_trouble(self, seconds: float) -> None:
        chance = random.Random(self.seed)
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.wrong:
            self.done.wait(chance.uniform(0.5, 2.5))
            fault = chance.choice(
                ["kill", "kill", "leave", "pause", "origin", "origin", "overwrite", "refresh"]
            )
            self.faults[fault] += 1
            getattr(self, f"do_{fault}")(chance)

    def do_kill(self, chance: random.Random, number: signal.Signals = signal.SIGKILL) -> None:
        name = chance.choice(SERVERS)
        with self.lock:
            self.changes += 1
        self.end(name, number)
        self.done.wait(chance.uniform(0.0, 4.0))
        if chance.random() < 0.2:
            shutil.rmtree(self.folder / name)  # its disk is new
        self.start(name)

    def do_leave(self, chance: random.Random) -> None:
        self.do_kill(chance, signal.SIGTERM)

    def do_pause(self, chance: random.Random) -> None:
        with self.lock:
            server = self.servers[chance.choice(SERVERS)]
            self.changes += 2
        server.child.send_signal(signal.SIGSTOP)
        self.done.wait(chance.uniform(1.0, 9.0))
        server.child.send_signal(signal.SIGCONT)

    def do_origin(self, chance: random.Random) -> None:
        self.origin.mood = chance.choice(["slow", "refusing", "cutting"])
        self.done.wait(chance.uniform(0.5, 4.0))
        self.origin.mood = "ok"

    def do_overwrite(self, chance: random.Random) -> None:
        with self.origin.lock:
            for key in chance.sample(names(), 20):
                self.origin.versions[key] += 1

    def do_refresh(self, chance: random.Random) -> None:
        try:
            with self.client(chance) as client:
                client.refresh("b", chance.choice(["", "s/00", "big/"]))
        except StokerError:
            pass

    # -- load ---------------------------------------------------------------------------------------------------

    def client(self, chance: random.Random) -> CacheClient:
        with self.lock:
            server = self.servers[chance.choice(SERVERS)]
        return CacheClient(server.url, TOKEN, timeout_s=15.0)

    def read(self, number: int) -> None:
        chance = random.Random(self.seed * 1000 + number)
        while not self.done.is_set():
            what = chance.choice(["whole", "whole", "part", "part", "many", "stat", "list"])
            state = chance.getstate()
            began, tries = time.monotonic(), 0
            while True:
                try:
                    with self.client(random.Random()) as client:
                        chance.setstate(state)
                        getattr(self, f"ask_{what}")(client, chance)
                    self.asked[what] += 1
                    self.cured += tries > 0
                    break
                except StokerError as error:
                    tries += 1
                    if time.monotonic() - began > PATIENCE_S:
                        self.wrong.append(f"{what} fails for {PATIENCE_S:g} s: {error}")
                        return
                    time.sleep(0.3)
            if self.wrong:
                return

    def ask_whole(self, client: CacheClient, chance: random.Random) -> None:
        key = chance.choice(names())
        self.check(key, client.read("b", key))

    def ask_part(self, client: CacheClient, chance: random.Random) -> None:
        key = chance.choice([name for name in names() if name.startswith("big/")])
        start = chance.randrange(len(content(key, 0)))
        stop = start + chance.choice([1, 4096, 100_000, 5_000_000])
        self.check(key, client.read("b", key, start, stop), start, stop)

    def ask_many(self, client: CacheClient, chance: random.Random) -> None:
        keys = chance.sample(names()[:300], 40)
        for key, data in zip(keys, client.read_many("b", keys), strict=True):
            self.check(key, data)

    def ask_stat(self, client: CacheClient, chance: random.Random) -> None:
        key = chance.choice(names())
        if client.stat("b", key).size_bytes != len(content(key, 0)):
            self.wrong.append(f"{key} has another size")

    def ask_list(self, client: CacheClient, chance: random.Random) -> None:
        found = [info.key for info in client.list_objects("b", "big/")]
        if found != [name for name in names() if name.startswith("big/")]:
            self.wrong.append(f"the list is {found}")

    def check(self, key: str, data: bytes, start: int = 0, stop: int | None = None) -> None:
        with self.origin.lock:
            newest = self.origin.versions[key]
        # Bytes of one version, whichever it is: what is known is good for its ttl.
        for version in range(newest, -1, -1):
            if data == content(key, version)[start:stop]:
                return
        self.wrong.append(f"{key} [{start}, {stop}): {len(data)} bytes of no version up to {newest}")

    def verdict(self) -> str | None:
        """What went wrong; None if nothing did."""
        if self.wrong:
            return "; ".join(self.wrong[:5])
        most = self.origin.reads.most_common(1)
        if most and most[0][1] > 1 + self.changes:
            return f"{most[0][0]} was read {most[0][1]} times over {self.changes} changes of the fleet"
        return None

    def story(self) -> str:
        reads = sum(self.origin.reads.values())
        once = reads / max(1, len(self.origin.reads))
        return (
            f"{sum(self.asked.values())} requests ({dict(self.asked)}), {self.cured} of them asked again; faults "
            f"{dict(self.faults)}; {self.changes} changes of the fleet; {len(self.origin.reads)} blocks "
            f"of all versions read {once:.2f} times each, at most {max(self.origin.reads.values(), default=0)}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--capacity", default="1GB", help="of each server; small ones evict")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="storm-") as folder:
        storm = Storm(Path(folder), arguments.seed, arguments.capacity)
        storm.run(arguments.seconds)
    print(storm.story())
    verdict = storm.verdict()
    print(f"seed {arguments.seed}: {verdict or 'all is well'}")
    return 0 if verdict is None else 1


if __name__ == "__main__":
    sys.exit(main())
