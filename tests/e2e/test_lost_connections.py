"""Connections that are cut on the way, and nobody is told: a network of its own, in which packets are dropped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]
CUT_OFF = ("unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "sh")
SCRIPT = """\
import asyncio, socket, subprocess, sys, threading, time
from stoker.cache.client.transport import Transport
from stoker.cache.origin.http_calls import HttpCalls
from stoker.cache.origin.http_gets import HttpGets
from tests.http_servers import QuietHandler, QuietServer, running

REQUEST = b"GET /k HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n"
clients = set()

class Handler(QuietHandler):
    def do_GET(self):
        clients.add(self.client_address[1])
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

def cut():
    for port in clients:
        for way in ("--sport", "--dport"):
            subprocess.run(["iptables", "-A", "INPUT", "-p", "tcp", way, str(port), "-j", "DROP"], check=True)
    clients.clear()

async def gets(server):
    of = HttpGets("x", "127.0.0.1", server.server_port, 1000)
    async def get():
        head, connection = await of.ask(REQUEST)
        return [bytes(part) async for part in of.parts(connection)]
    await asyncio.gather(*(get() for _ in range(3)))
    yield get
    of.close()

def client(server):
    transport = Transport(server.url, None, 60.0)
    threads = [threading.Thread(target=transport.request, args=("GET", "/k")) for _ in range(3)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    cut()
    began = time.monotonic()
    assert transport.request("GET", "/k")[1] == b"ok"
    return time.monotonic() - began

async def origin(server):
    async for get in gets(server):
        cut()
        began = time.monotonic()
        assert await get() == [b"ok"]
        return time.monotonic() - began

server = QuietServer(Handler)
with running(server):
    print(client(server) if sys.argv[1] == "client" else asyncio.run(origin(server)))
"""


def can_cut() -> bool:
    try:
        done = subprocess.run([*CUT_OFF, "iptables", "-L"], capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0


@pytest.mark.skipif(not can_cut(), reason="needs the right to make a network namespace, and iptables")
@pytest.mark.parametrize("who", ["client", "origin"])
def test_what_was_kept_and_is_lost_costs_some_seconds_and_no_error(who: str) -> None:
    """Once, however many were kept: the first that is lost tells of the others."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [*CUT_OFF, sys.executable, "-c", SCRIPT, who],
        capture_output=True, text=True, timeout=100, check=False, cwd=root,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert 5 < float(done.stdout) < 25
