"""A real cache server under requests that no client would send.

    python -m tests.chaos.http_fuzz --seconds 600 --seed 1

It ends with 1 if the server dies, says an error of its own, answers with a wrong byte or a status that is not for what
was asked, answers what was no request, hangs, or grows without end. `--only N` sends the one shot of that number.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.chaos.http_answers import Judge, WrongAnswerError
from tests.chaos.http_shapes import CANARY, Shapes, Shot
from tests.e2e.cache_helpers import ServerProcess, client_of

TOKEN = "a-token-of-the-fuzzer"
AT_ONCE = 4
BATCH = 200
PATIENCE_S = 60.0
SIZES = {
    "small-0": 1,
    "small-1": 500,
    "small-2": 2049,
    "mid/a": 70_000,
    "mid/b": 300_001,
    "empty": 0,
    "big": 1_200_000,
}
RSS_GROWTH_MAX_BYTES = 32 * 1024 * 1024
RSS_EACH_MAX_BYTES = 256
"""For each shot: names that were asked for are remembered, also of what is not there; a connection that leaks takes
more."""
FILES_GROWTH_MAX = 40
WARM_UP_SHOTS = 2000


class Fuzz:
    """One server, and who sends to it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.seed = seed
        chance = random.Random(seed)
        sizes = {**SIZES, CANARY: 64}
        self.objects = {key: chance.randbytes(size) for key, size in sizes.items()}
        for key, data in self.objects.items():
            (folder / "o" / key).parent.mkdir(parents=True, exist_ok=True)
            (folder / "o" / key).write_bytes(data)
        options = ("--dir", str(folder / "d"), "--capacity", "1GB", "--token", TOKEN)
        self.server = ServerProcess(*options, "--bucket", f"b={folder}/o")
        host, port = self.server.url.removeprefix("http://").split(":")
        self.address = host, int(port)
        self.shapes = Shapes(self.objects, TOKEN)
        self.judge = Judge({self.tag(key): data for key, data in self.objects.items()}, self.objects[CANARY])
        self.wrong: list[str] = []
        self.kinds: Counter[str] = Counter()
        self.answers = 0
        self.rss_bytes: list[int] = []
        self.files: list[int] = []
        self.said: list[str] = []
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def tag(self, key: str) -> str:
        with client_of(self.server, TOKEN) as client:
            return f'"{client.stat("b", key).version}"'

    def run(self, seconds: float, on_batch: Callable[[], None] = lambda: None) -> None:
        """Send shots until the time is over or something is wrong."""
        until = time.monotonic() + seconds
        first = 0
        with ThreadPoolExecutor(AT_ONCE) as threads:
            while time.monotonic() < until and not self.wrong:
                list(threads.map(self.shoot, range(first, first + BATCH)))
                first += BATCH
                self.look(first)
                on_batch()

    def stop(self) -> None:
        """End the server, which must end well."""
        self.server.child.send_signal(signal.SIGTERM)
        code = self.server.child.wait(PATIENCE_S)
        self._listener.join()
        if code != 0:
            self.wrong.append(f"the server ended with {code}")
        if self.said:
            self.wrong.append("the server said: " + "".join(self.said)[:3000])

    # -- one connection -----------------------------------------------------------------------------------------

    def shoot(self, number: int) -> None:
        """Send the shot of that number and look at what comes."""
        rng = random.Random(f"{self.seed}/{number}")
        shot = self.shapes.draw(rng)
        self.kinds[shot.name] += 1
        try:
            data = self._send(shot, rng)
            if shot.ends == "shut":
                self.answers += self.judge.check(shot, data)
        except (WrongAnswerError, TimeoutError, ValueError, KeyError) as error:
            sent = b"".join(shot.parts)
            self.wrong.append(
                f"shot {number} ({shot.name}): {type(error).__name__}: {error}; "
                f"in {len(shot.parts)} parts it was {sent[:1000]!r}"
            )

    def _send(self, shot: Shot, rng: random.Random) -> bytes:
        with socket.create_connection(self.address, PATIENCE_S) as link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Who refuses a request closes before it has taken all of it.
            with contextlib.suppress(ConnectionError):
                for part in shot.parts:
                    link.sendall(part)
                    if len(shot.parts) < 10 and rng.random() < 0.2:
                        time.sleep(rng.choice([0.0, 0.001, 0.01]))
                if shot.ends == "shut":
                    link.shutdown(socket.SHUT_WR)
            if shot.ends == "shut":
                return self._read(link)
            if shot.ends == "leave":
                link.settimeout(0.02)
                with contextlib.suppress(OSError):
                    link.recv(rng.choice([1, 1000, 100_000]))
            else:
                link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return b""

    def _read(self, link: socket.socket) -> bytes:
        parts = []
        with contextlib.suppress(ConnectionError):
            while part := link.recv(1 << 20):
                parts.append(part)
        return b"".join(parts)

    # -- between batches ----------------------------------------------------------------------------------------

    def look(self, shots: int) -> None:
        """The server lives, answers what is right, and has let go of what it took."""
        if self.server.child.poll() is not None:
            self.wrong.append(f"the server died: {self.server.child.returncode}")
            return
        with client_of(self.server, TOKEN) as client:
            keys = [key for key in self.objects if key != CANARY]
            if client.read_many("b", keys) != [self.objects[key] for key in keys]:
                self.wrong.append("a batch that is right is answered with other bytes")
            if any(client.read("b", key) != self.objects[key] for key in keys):
                self.wrong.append("an object that is asked for rightly comes with other bytes")
        if shots < WARM_UP_SHOTS:
            return
        self.rss_bytes.append(rss_bytes(self.server.child.pid))
        self.files.append(self._files_at_rest())
        if self.rss_bytes[-1] - self.rss_bytes[0] > RSS_GROWTH_MAX_BYTES + shots * RSS_EACH_MAX_BYTES:
            self.wrong.append(f"memory grows: {self.rss_bytes[0]} to {self.rss_bytes[-1]} bytes")
        if self.files[-1] - self.files[0] > FILES_GROWTH_MAX:
            self.wrong.append(f"open files grow: {self.files[0]} to {self.files[-1]}")

    def _files_at_rest(self) -> int:
        """How many the server has open once it has let go of connections that have ended."""
        folder = f"/proc/{self.server.child.pid}/fd"
        deadline = time.monotonic() + 30.0
        most = self.files[0] + FILES_GROWTH_MAX if self.files else 64
        while (count := len(os.listdir(folder))) > most and time.monotonic() < deadline:
            time.sleep(0.02)
        return count

    def _listen(self) -> None:
        assert self.server.child.stderr is not None
        self.said.extend(self.server.child.stderr)

    def story(self) -> str:
        first, last = (self.rss_bytes[0], self.rss_bytes[-1]) if self.rss_bytes else (0, 0)
        files = f"{self.files[0]} to {self.files[-1]}" if self.files else "not looked at"
        return (
            f"{sum(self.kinds.values())} connections ({dict(self.kinds)}), {self.answers} answers; "
            f"resident memory {first / 1e6:.1f} to {last / 1e6:.1f} MB, open files {files}"
        )


def rss_bytes(pid: int) -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="the number of one shot")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="http-fuzz-") as folder:
        fuzz = Fuzz(Path(folder), arguments.seed)
        try:
            if arguments.only is None:
                fuzz.run(arguments.seconds)
            else:
                fuzz.shoot(arguments.only)
        finally:
            fuzz.stop()
    print(fuzz.story())
    verdict = "; ".join(fuzz.wrong[:5])
    print(f"seed {arguments.seed}: {verdict or 'all is well'}")
    return 1 if fuzz.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
