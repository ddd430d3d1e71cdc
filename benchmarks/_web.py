"""nginx to compare with, and wrk to ask both."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from stoker.platform.proc import stat_fields

TOKEN = "benchmark-token"
_NGINX = """
worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/error.log; daemon off;
events {{ worker_connections 1024; }}
http {{
  access_log off; sendfile on; tcp_nopush on; tcp_nodelay on; keepalive_requests 100000000;
  open_file_cache max=1000 inactive=60s; types {{ }} default_type application/octet-stream;
  client_body_temp_path {folder}/t1; proxy_temp_path {folder}/t2; fastcgi_temp_path {folder}/t3;
  uwsgi_temp_path {folder}/t4; scgi_temp_path {folder}/t5;
  server {{
    listen 127.0.0.1:{port};
    if ($http_authorization != "Bearer {token}") {{ return 401; }}
    location / {{ root {folder}/www; }}
  }}
}}
"""


class Asked(NamedTuple):
    """What wrk saw."""

    per_s: float
    requests: int
    p50_s: float
    p99_s: float


def missing_tools() -> list[str]:
    """Those of nginx and wrk that are not installed."""
    return [tool for tool in ("nginx", "wrk") if find(tool) is None]


def wrk(
    url: str,
    seconds: int,
    connections: int,
    *headers: str,
    script: str = "",
    entry: Sequence[str] = (),
    authorization: str = f"Bearer {TOKEN}",
) -> Asked:
    """Ask as fast as that goes; every answer must be a good one. `script`: a file in Lua; `entry`: what stands before
    the command."""
    program = find("wrk")
    assert program is not None
    named = [part for header in (f"Authorization: {authorization}", *headers) for part in ("-H", header)]
    command = [*entry, program, "-t1", "--latency", "--timeout", "30s", f"-c{connections}", f"-d{seconds}s"]
    command += [*named, *(["-s", script] if script else []), url]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rate, count = re.search(r"Requests/sec:\s+([0-9.]+)", text), re.search(r"(\d+) requests in", text)
    p50, p99 = (re.search(rf"{part}%\s+([0-9.]+)(us|ms|s|m)\s*\n", text) for part in (50, 99))
    if not (rate and count and p50 and p99) or "Non-2xx" in text or "Socket errors" in text:
        raise RuntimeError(f"wrk on {url}:\n{text}")
    return Asked(float(rate.group(1)), int(count.group(1)), _seconds(p50), _seconds(p99))


def _seconds(found: re.Match[str]) -> float:
    return float(found.group(1)) * {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0}[found.group(2)]


@contextlib.contextmanager
def nginx(folder: Path) -> Iterator[tuple[str, int]]:
    """Serve FOLDER/www; yields the address and the pid of the worker."""
    program = find("nginx")
    assert program is not None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = folder / "nginx.conf"
    config.write_text(_NGINX.format(folder=folder, port=port, token=TOKEN))
    server = subprocess.Popen(
        [program, "-c", str(config), "-p", str(folder), "-e", str(folder / "error.log")]
    )
    try:
        deadline = time.monotonic() + 10
        while True:
            # It listens before it has its worker.
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                if worker := _child_of(server.pid):
                    break
            if time.monotonic() > deadline:
                raise RuntimeError("nginx did not start: " + (folder / "error.log").read_text())
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}", worker
    finally:
        server.terminate()
        server.wait(10)


def cpu_s(pid: int) -> float:
    """Processor time that a process has had, in seconds."""
    fields = stat_fields(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _child_of(pid: int) -> int:
    """0: there is none yet."""
    return next(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()), 0)


def find(tool: str) -> str | None:
    """Where a program is; nginx is often where only root looks."""
    return shutil.which(tool, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
