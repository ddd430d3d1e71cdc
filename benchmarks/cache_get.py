"""How fast is a GET of a held object against nginx with an Authorization check, by the same wrk command?"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from _common import interleaved, median_ratio, parser, report

from stoker.cache.client.client import CacheClient
from stoker.cache.embedded import EmbeddedCache

SIZES = {"1KiB": (1024, 0.65), "100KiB": (100 * 1024, 0.95)}
TOKEN = "benchmark-token"
CONNECTIONS = 32
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


def main() -> int:
    """Print the ratios of requests per second, ours over nginx's."""
    arguments = parser(__doc__ or "").parse_args()
    missing = [tool for tool in ("nginx", "wrk") if _find(tool) is None]
    if missing:
        print(f"cache_get: skipped, {' and '.join(missing)} not found: apt-get install nginx-light wrk")
        return 0
    rounds, seconds = (5, 1) if arguments.quick else (9, 3)
    figures: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "www" / "b").mkdir(parents=True)
        for label, (size_bytes, _) in SIZES.items():
            (folder / "www" / "b" / label).write_bytes(os.urandom(size_bytes))
        # The folder of mkdtemp is closed to nginx's worker, which runs as another user.
        folder.chmod(0o755)
        with _nginx(folder) as nginx_url, _ours(folder) as our_url:
            for label, (_, goal) in SIZES.items():
                sides = {
                    "nginx": partial(_wrk, f"{nginx_url}/b/{label}", seconds),
                    "stoker": partial(_wrk, f"{our_url}/b/{label}", seconds),
                }
                for run in sides.values():
                    run()
                found = interleaved(sides, rounds)
                figures[f"{label} ratio (goal {goal})"] = median_ratio(found["stoker"], found["nginx"])
                for side, rates in found.items():
                    figures[f"{label} {side} req/s"] = round(statistics.median(rates))
    report("cache_get", figures, arguments.json)
    return 0


def _wrk(url: str, seconds: int) -> float:
    """Requests per second; every answer must be a good one."""
    wrk = _find("wrk")
    assert wrk is not None
    command = [wrk, "-t1", f"-c{CONNECTIONS}", f"-d{seconds}s", "-H", f"Authorization: Bearer {TOKEN}", url]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rate = re.search(r"Requests/sec:\s+([0-9.]+)", text)
    if rate is None or "Non-2xx" in text or "Socket errors" in text:
        raise RuntimeError(f"wrk on {url}:\n{text}")
    return float(rate.group(1))


@contextlib.contextmanager
def _nginx(folder: Path) -> Iterator[str]:
    nginx = _find("nginx")
    assert nginx is not None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = folder / "nginx.conf"
    config.write_text(_NGINX.format(folder=folder, port=port, token=TOKEN))
    server = subprocess.Popen([nginx, "-c", str(config), "-p", str(folder), "-e", str(folder / "error.log")])
    try:
        deadline = time.monotonic() + 10
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            if time.monotonic() > deadline:
                raise RuntimeError("nginx did not start: " + (folder / "error.log").read_text())
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(10)


@contextlib.contextmanager
def _ours(folder: Path) -> Iterator[str]:
    cache = EmbeddedCache(folder / "cache", 10**9, {"b": f"{folder}/www/b"}, TOKEN)
    with cache:
        assert cache.endpoint is not None
        with CacheClient(cache.endpoint.url, TOKEN) as client:
            client.read_many("b", list(SIZES))
        yield cache.endpoint.url


def _find(tool: str) -> str | None:
    return shutil.which(tool, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


if __name__ == "__main__":
    sys.exit(main())
