"""What real servers tell of principals and tenants: their figures, and from where requests come."""

from __future__ import annotations

import contextlib
import http.client
import json
from pathlib import Path

import pytest

from stoker.cache.client.client import CacheClient
from tests.e2e.cache_helpers import fill, served
from tests.e2e.envoy import Processes
from tests.e2e.test_cache_fleet_start import wait_until
from tests.e2e.test_cache_watch import ask, figures, lines_of

pytestmark = pytest.mark.real

TENANTS = """
[principals.prometheus]
rules = ["*: read"]
tokens = ["prometheus-token"]
[principals.vision]
rules = ["b: read"]
tokens = ["vision-token"]
quota = "500kB"
egress = "1MB"
[principals.audio]
rules = ["b/audio/: read"]
tokens = ["audio-token"]
"""


def test_each_tenant_has_its_figures_and_sees_no_others(tmp_path: Path) -> None:
    keys = [f"k{n:02}" for n in range(30)]
    fill(tmp_path / "o", ["audio/large", *keys], 50_000)
    fill(tmp_path / "o", ["wide"], 2_000_000)
    (tmp_path / "a.toml").write_text(TENANTS)
    (tmp_path / "c.toml").write_text(f'[buckets.b]\norigin_url = "{tmp_path}/o"\ntenant = "vision"\n')
    options = "--config", str(tmp_path / "c.toml"), "--access", str(tmp_path / "a.toml")
    with served(tmp_path / "c", {}, *options) as server:
        sent = 0
        for key in [*keys, "wide"]:  # 3.5 MB at 1 MB/s, of which 500 kB have room
            said = ask(f"{server.url}/b/{key}", "vision-token")
            assert said.status == 200
            sent += len(said.body)
        assert ask(f"{server.url}/b/k00", "audio-token").status == 403
        assert ask(f"{server.url}/b/audio/large", "audio-token").status == 200
        assert ask(f"{server.url}/b/audio/large", "nobodys-token").status == 401
        wait_until(
            lambda: figures(server, "vision-token")["stoker_cache_tenant_evictions_total"][("vision",)] > 10
        )
        told = figures(server, "prometheus-token")
        requests = {
            labels[0]: value for labels, value in told["stoker_cache_principal_requests_total"].items()
        }
        assert requests.pop("prometheus") == 0, "this one is not over"
        assert requests.pop("vision") >= 32
        assert requests == {"audio": 2, "(others)": 1}
        refused = told["stoker_cache_principal_refused_total"]
        assert refused == {("prometheus",): 0, ("vision",): 0, ("audio",): 1, ("(others)",): 1}
        of_each = told["stoker_cache_principal_sent_bytes_total"]
        assert of_each[("vision",)] > sent
        assert 50_000 < of_each[("audio",)] < 60_000
        assert sum(of_each.values()) == told["stoker_cache_sent_bytes_total"][()]
        waited = told["stoker_cache_principal_throttled_seconds_total"]
        assert waited[("vision",)] > 0.5
        assert waited[("audio",)] == 0
        assert told["stoker_cache_tenant_quota_bytes"] == {("vision",): 500_000}
        assert 0 < told["stoker_cache_tenant_used_bytes"][("vision",)] <= 500_000
        # It sees its own, and nothing of others.
        mine = figures(server, "audio-token")
        assert {labels[0] for values in mine.values() for labels in values} == {"audio"}
        # Who is taken out of the file counts among the others, which never grow smaller.
        before = sum(of_each.values())
        (tmp_path / "a.toml").write_text(TENANTS.partition("[principals.audio]")[0])
        wait_until(
            lambda: (
                ("audio",) not in figures(server, "prometheus-token")["stoker_cache_principal_requests_total"]
            )
        )
        after = figures(server, "prometheus-token")["stoker_cache_principal_sent_bytes_total"]
        assert sum(after.values()) >= before
        assert after[("(others)",)] > 50_000


def test_logs_say_for_whom_a_trusted_proxy_asks(tmp_path: Path) -> None:
    fill(tmp_path / "o", ["k"])
    forwarded = "6.6.6.6, 203.0.113.7, 10.0.0.9"
    for options, client in (
        ((), "127.0.0.1"),
        (("--trusted-proxy", "10.0.0.0/8"), "127.0.0.1"),
        (("--trusted-proxy", "127.0.0.1"), "10.0.0.9"),
        (("--trusted-proxy", "127.0.0.0/8", "--trusted-proxy", "10.0.0.0/8"), "203.0.113.7"),
    ):
        log = "--log-format", "json", "--access-log", "--unix", str(tmp_path / "s")
        with served(tmp_path / "c", {"b": str(tmp_path / "o")}, *log, *options) as server:
            assert ask(f"{server.url}/b/none", x_forwarded_for=forwarded).status == 404
            with CacheClient(f"unix://{tmp_path}/s", None, timeout_s=20.0) as near:
                near.refresh("b", "")
            lines = [line for line in lines_of(server) if line["logger"] == "stoker.cache.access"]
            told = [(line["path"], line["client"]) for line in lines]
            assert ("/b/none", client) in told
            assert ("/-/refresh/b", "unix") in told


def test_behind_envoy_the_audit_log_names_who_came_to_envoy(tmp_path: Path) -> None:
    fill(tmp_path / "o", ["k"])
    log = tmp_path / "audit.log"
    options = (
        *("--fleet", f"file://{tmp_path}/members", "--name", "x", "--token", "reader-token:b"),
        *("--token", "operator-token", "--audit-log", str(log), "--trusted-proxy", "127.0.0.1"),
    )
    processes = Processes(tmp_path)
    try:
        with served(tmp_path / "c", {"b": str(tmp_path / "o")}, *options) as server:
            discovery = processes.discovery("--fleet", f"file://{tmp_path}/members")
            envoy = processes.envoy("envoy", "--discovery", discovery.address)
            envoy.wait_for_servers(1)
            link = http.client.HTTPConnection(
                "127.0.0.1", envoy.port, timeout=60, source_address=("127.0.0.2", 0)
            )
            with contextlib.closing(link):
                said = {"Authorization": "Bearer reader-token", "X-Forwarded-For": "6.6.6.6"}
                link.request("POST", "/-/evict/b", headers=said)
                assert link.getresponse().status == 403
            assert ask(f"{server.url}/-/evict/b", "reader-token", "POST").status == 403
            wait_until(lambda: log.read_text().count("\n") >= 2)
            assert [json.loads(line)["client"] for line in log.read_text().splitlines()] == [
                "127.0.0.2",
                "127.0.0.1",
            ]
    finally:
        processes.end()
