"""What real servers tell those who watch them: figures, health, readiness, and log lines with one request's id."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

from stoker.cache.maglev import Member, Placement, block_owner_name
from stoker.cache.server.metric_names import METRICS
from stoker.cache.server.metrics import BUCKETS_MAX
from stoker.cache.server.observing import ObserveSettings
from stoker.cache.server.server import CacheServer
from stoker.cache.server.settings import ServerSettings
from stoker.wire.cache_api import BucketSpec
from tests.e2e.cache_helpers import ServerProcess, client_of, fill, served, still_told_of, wait_until_held
from tests.e2e.test_cache_commands import started
from tests.e2e.test_cache_fleet_start import wait_until

pytestmark = pytest.mark.real
ALL, ONE = "all-buckets-token", "only-one-token"


class Said(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


def ask(url: str, token: str | None = None, method: str = "GET", **headers: str) -> Said:
    told = {name.replace("_", "-"): value for name, value in headers.items()}
    if token is not None:
        told["Authorization"] = f"Bearer {token}"
    request = urllib.request.Request(url, headers=told, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return Said(answer.status, {k.lower(): v for k, v in answer.headers.items()}, answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return Said(error.code, {k.lower(): v for k, v in error.headers.items()}, error.read())


def figures(server: ServerProcess, token: str | None = ALL) -> dict[str, dict[tuple[str, ...], float]]:
    """By the metric's name, and by its labels' values."""
    said = ask(f"{server.url}/-/metrics", token)
    assert (said.status, said.headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(said.body.decode()):
        assert family.documentation, family.name
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


@contextlib.contextmanager
def fleet(folder: Path, buckets: dict[str, str], *options: str) -> Iterator[list[ServerProcess]]:
    """Two servers, x and y, at ports that they know of each other."""
    with contextlib.ExitStack() as stack:
        servers = []
        for name in "xy":
            place = "--fleet", f"file://{folder}/members", "--name", name
            servers.append(stack.enter_context(served(folder / name, buckets, *place, *options)))
        for server in servers:
            wait_until(lambda server=server: figures(server)["stoker_cache_fleet_members"][("up",)] == 2)  # type: ignore[misc]
        yield servers


def owned_by(name: str, bucket: str, keys: list[str]) -> list[str]:
    placement = Placement([Member("x", 1, ""), Member("y", 1, "")])
    owners = {key: placement.owner(block_owner_name(bucket, key, 0)) for key in keys}
    return [key for key, owner in owners.items() if owner is not None and owner.name == name]


def lines_of(server: ServerProcess) -> list[dict[str, Any]]:
    """Stop a server; its log lines."""
    code, errors = server.stop()
    assert code == 0, errors
    return [json.loads(line) for line in errors.splitlines() if not line.startswith("note: ")]


def test_every_metric_is_told_and_counts_what_was_done(tmp_path: Path) -> None:
    keys = [f"k{n:02}" for n in range(40)]
    objects = fill(tmp_path / "o", keys, 50_000)
    config = tmp_path / "c.toml"
    config.write_text(
        f'[buckets.one]\norigin_url = "{tmp_path}/o"\nquota_bytes = 700000\ntenant = "team"\n'
        "[observe]\naccess_log = true\n"
    )
    (tmp_path / "a.toml").write_text('[principals.team]\nquota = "1MB"\nrules = ["one: read"]\n')
    options = "--config", str(config), "--token", ALL, "--access", str(tmp_path / "a.toml")
    with fleet(tmp_path, {}, *options) as (x, y), client_of(x, ALL) as client:
        here, there = owned_by("x", "one", keys), owned_by("y", "one", keys)
        for key in keys:
            assert client.read("one", key) == objects[key]
        at_x = figures(x)
        assert at_x["stoker_cache_misses_total"] == {("one",): 40}
        assert at_x["stoker_cache_read_bytes_total"][("one", "origin")] == len(here) * 50_000
        assert at_x["stoker_cache_read_bytes_total"][("one", "peer")] == len(there) * 50_000
        assert at_x["stoker_cache_miss_seconds_count"][()] == 40
        at_y = figures(y)
        assert at_y["stoker_cache_read_bytes_total"][("one", "origin")] == len(there) * 50_000
        assert at_y["stoker_cache_origin_seconds_count"][("one",)] >= len(there)
        wait_until(lambda: sum(evicted(server) for server in (x, y)) > 0, "40 of 50 KB in 2 x 700 KB")
        assert at_x["stoker_cache_bucket_quota_bytes"][("one",)] == 700_000
        assert at_x["stoker_cache_bucket_used_bytes"][("one",)] <= 700_000
        assert at_x["stoker_cache_fleet_owned_ratio"][()] == pytest.approx(0.5, abs=0.01)
        assert at_x["stoker_cache_fleet_fair_ratio"][()] == 0.5
        told = {metric.name for metric in METRICS}
        both = at_x.keys() | figures(x).keys() | figures(y).keys()
        for metric in METRICS:
            ending = "_count" if metric.kind == "histogram" else ""
            assert f"{metric.name}{ending}" in both, metric.name
        for name in both:
            base = name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum")
            assert name in told or base in told, name


def evicted(server: ServerProcess) -> float:
    now = figures(server)
    left = now["stoker_cache_evictions_total"][("one", "room")]
    assert (left > 0) == ("stoker_cache_eviction_shortest_unused_seconds" in now)
    return left


def wait_for_hits(url: str) -> None:
    """Until the front answers itself: the back has to have verified what is held."""
    deadline = time.monotonic() + 60
    while "x-request-id" in ask(url).headers:
        assert time.monotonic() < deadline, url
        time.sleep(0.02)


def test_hits_of_the_front_are_counted_and_timed(tmp_path: Path) -> None:
    fill(tmp_path / "o", ["small"], 1000)
    fill(tmp_path / "o", ["large"], 300_000)
    with served(tmp_path / "c", {"b": str(tmp_path / "o")}) as server, client_of(server) as client:
        for key in ("small", "large"):
            ask(f"{server.url}/b/{key}")
        wait_until_held(client, 2)
        for key in ("small", "large"):
            wait_for_hits(f"{server.url}/b/{key}")
        before = figures(server, None)
        for key, size_bytes in (("small", 1000), ("large", 300_000)):
            said = ask(f"{server.url}/b/{key}")
            assert (said.status, len(said.body)) == (200, size_bytes)
            assert "x-request-id" not in said.headers, "it was no hit of the front"
            assert ask(f"{server.url}/b/{key}", Range="bytes=5-7").status == 206
            assert ask(f"{server.url}/b/{key}", method="HEAD").status == 200
        after = figures(server, None)

        def grown(name: str, *labels: str) -> float:
            return after[name].get(labels, 0) - before[name].get(labels, 0)

        while grown("stoker_cache_hit_seconds_count") < 6:  # how long one took is known once it was sent
            after = figures(server, None)
        assert grown("stoker_cache_requests_total", "object", "GET", "200") == 2
        assert grown("stoker_cache_requests_total", "object", "GET", "206") == 2
        assert grown("stoker_cache_requests_total", "object", "HEAD", "200") == 2
        assert grown("stoker_cache_hit_seconds_count") == 6
        assert grown("stoker_cache_hit_seconds_sum") > 0
        assert grown("stoker_cache_hits_total", "b") == 6
        assert grown("stoker_cache_read_bytes_total", "b", "local") == 301_006
        assert grown("stoker_cache_back_seconds_count", "object") == 0


def test_who_may_read_the_figures(tmp_path: Path) -> None:
    fill(tmp_path / "o", ["k"])
    buckets = {"one": str(tmp_path / "o"), "two": str(tmp_path / "o")}
    tokens = "--token", ALL, "--token", f"{ONE}:one", "--token", "reads-both-of-them:one,two"
    with served(tmp_path / "c", buckets, *tokens) as server:
        for token in (None, "wrong-token"):
            assert ask(f"{server.url}/-/metrics", token).status == 401
            assert ask(f"{server.url}/-/health?x=/-/metrics", token).body == b'{"status":"ok"}'
        assert figures(server)["stoker_cache_misses_total"] == {("one",): 0, ("two",): 0}
        mine = figures(server, ONE)
        assert mine["stoker_cache_misses_total"] == {("one",): 0}
        assert {labels[0] for values in mine.values() for labels in values} == {"one", "token-2"}
        assert figures(server, "reads-both-of-them").keys() == figures(server).keys()
    with served(tmp_path / "c", buckets, *tokens, "--open-metrics") as server:
        assert figures(server)["stoker_cache_ready"] == {(): 1}
        for token in (None, "wrong-token", ONE):
            assert figures(server, token).keys() == figures(server).keys()
        assert ask(f"{server.url}/-/status").status == 401
        assert ask(f"{server.url}/-/metrics/x").status == 401
        assert ask(f"{server.url}/-/metrics", method="DELETE").status == 405


def test_clients_cannot_make_figures(tmp_path: Path) -> None:
    fill(tmp_path / "o", ["k"])
    with served(tmp_path / "c", {"b": str(tmp_path / "o")}) as server:
        ask(f"{server.url}/b/k")
        before = {name: set(values) for name, values in figures(server, None).items()}
        for n in range(20):
            ask(f"{server.url}/bucket-{n}/k{n}")
            ask(f"{server.url}/b/none-{n}")
            ask(f"{server.url}/b/k", method=f"METHOD{n}")
        after = {name: set(values) for name, values in figures(server, None).items()}
        more = {name: values - before.get(name, set()) for name, values in after.items()}
        assert sum(map(len, more.values())) <= 4, more


def test_more_buckets_than_may_have_figures_of_their_own_are_summed_up(tmp_path: Path) -> None:
    fill(tmp_path / "o", ["k"])
    config = tmp_path / "c.toml"
    names = [f"b{n:03}" for n in range(BUCKETS_MAX + 3)]
    config.write_text("".join(f'[buckets.{name}]\norigin_url = "{tmp_path}/o"\n' for name in names))
    with served(tmp_path / "c", {}, "--config", str(config)) as server:
        for name in (names[0], *names[-2:]):
            assert ask(f"{server.url}/{name}/k").status == 200
        told = figures(server, None)
        misses = told["stoker_cache_misses_total"]
        assert misses == {**{(name,): 0 for name in names[:BUCKETS_MAX]}, (names[0],): 1, ("(others)",): 2}
        assert told["stoker_cache_origin_breaker"][("(others)", "closed")] == 3
        assert told["stoker_cache_origin_seconds_count"][("(others)",)] >= 2


@pytest.mark.parametrize("route", ["health", "ready"])
def test_strangers_learn_whether_it_lives_and_nothing_else(tmp_path: Path, route: str) -> None:
    fill(tmp_path / "o", ["k"])
    with served(tmp_path / "c", {"one": str(tmp_path / "o")}, "--token", ALL) as server:
        for token in (None, "wrong-token", ALL):
            said = ask(f"{server.url}/-/{route}", token)
            expected = b'{"status":"ok"}' if route == "health" else b'{"is_ready":true,"why":[],"details":[]}'
            assert (said.status, said.body) == (200, expected)
            assert ask(f"{server.url}/-/{route}", token, method="HEAD").status == 200
        for method in ("POST", "PUT", "DELETE"):
            assert ask(f"{server.url}/-/{route}", method=method).status in (401, 405)


def test_a_server_that_cannot_join_its_fleet_lives_and_is_not_ready(tmp_path: Path) -> None:
    away = tmp_path / "mount"
    away.write_text("what is no folder")
    fill(tmp_path / "o", ["k"])
    options = "--token", ALL, "--fleet", f"file://{away}/members", "--name", "x"
    with served(tmp_path / "x", {"b": str(tmp_path / "o")}, *options) as server:
        assert ask(f"{server.url}/-/health").status == 200
        said = ask(f"{server.url}/-/ready")
        assert (said.status, json.loads(said.body)) == (
            503,
            {"is_ready": False, "why": ["not in its fleet"], "details": []},
        )
        told = json.loads(ask(f"{server.url}/-/ready", ALL).body)["details"]
        assert any("is not in its fleet yet" in line for line in told)
        assert figures(server)["stoker_cache_ready"] == {(): 0}
        os.unlink(away)
        away.mkdir()
        wait_until(lambda: ask(f"{server.url}/-/ready").status == 200)
        assert figures(server)["stoker_cache_ready"] == {(): 1}


def test_a_server_that_leaves_is_not_ready_before_it_stops(tmp_path: Path) -> None:
    fill(tmp_path / "o", ["k"])
    settings = ServerSettings(
        tmp_path / "x", 1_000_000, buckets={"b": BucketSpec(str(tmp_path / "o"))}, observe=ObserveSettings()
    )

    async def story() -> None:
        server = CacheServer(settings)
        endpoint = (await server.start()).endpoint
        assert (await asyncio.to_thread(ask, f"{endpoint}/-/ready")).status == 200
        told, may_go = asyncio.Event(), asyncio.Event()
        assert server._engine is not None
        retire = server._engine.fleet.retire

        async def held_up() -> None:
            told.set()
            await may_go.wait()
            await retire()

        server._engine.fleet.retire = held_up  # type: ignore[method-assign]
        stopping = asyncio.ensure_future(server.stop())
        await told.wait()
        said = await asyncio.to_thread(ask, f"{endpoint}/-/ready")
        alive = await asyncio.to_thread(ask, f"{endpoint}/-/health")
        may_go.set()
        await stopping
        assert (said.status, json.loads(said.body)["why"]) == (503, ["draining"])
        assert alive.status == 200

    asyncio.run(story())


LOGS = "--access-log", "--log-format", "json", "--log-level", "debug"


def test_one_id_is_in_the_logs_of_all_servers_that_a_request_touched(tmp_path: Path) -> None:
    keys = [f"k{n}" for n in range(20)]
    fill(tmp_path / "o", keys)
    with fleet(tmp_path, {"b": str(tmp_path / "o")}, "--token", ALL, *LOGS) as (x, y):
        key = owned_by("y", "b", keys)[0]
        said = ask(f"{x.url}/b/{key}?signature=s3cret", ALL, X_Request_Id="train-7/step-3")
        assert (said.status, said.headers["x-request-id"]) == (200, "train-7/step-3")
        at_x, at_y = lines_of(x), lines_of(y)
    mine = [line for line in at_x if line.get("request_id") == "train-7/step-3"]
    theirs = [line for line in at_y if line.get("request_id") == "train-7/step-3"]
    assert any("comes from y" in line["message"] for line in mine)
    assert any("comes from the origin" in line["message"] for line in theirs)
    (access,) = [line for line in mine if line.get("path") == f"/b/{key}"]
    assert access["message"] == f"GET /b/{key} 200"
    assert (access["method"], access["status"], access["dialect"]) == ("GET", 200, "object")
    assert (access["principal"], access["has_missed"], access["is_whole"]) == ("token-1", True, True)
    assert [line for line in theirs if line["logger"] == "stoker.cache.access"]
    assert "s3cret" not in json.dumps(at_x)
    assert ALL not in json.dumps(at_x + at_y)


def test_errors_and_answers_say_the_id(tmp_path: Path) -> None:
    fill(tmp_path / "o", ["k"])
    parent = f"00-{'ab' * 16}-{'cd' * 8}-01"
    with served(tmp_path / "c", {"b": str(tmp_path / "o")}, *LOGS) as server, client_of(server) as client:
        said = ask(f"{server.url}/b/none", X_Request_Id="mine")
        assert (said.status, json.loads(said.body)["request_id"], said.headers["x-request-id"]) == (
            404,
            "mine",
            "mine",
        )
        assert ask(f"{server.url}/b/none", traceparent=parent).headers["x-request-id"] == "ab" * 16
        s3 = ask(f"{server.url}/b/none?versionId=null", X_Request_Id="mine-too")
        assert (s3.status, s3.headers["x-request-id"]) == (404, "mine-too")
        assert b"<RequestId>mine-too</RequestId>" in s3.body
        made = {ask(f"{server.url}/b/none").headers["x-request-id"] for _ in range(3)}
        assert len(made) == 3
        ask(f"{server.url}/b/k", X_Request_Id="first")
        wait_until_held(client, 1)
        wait_for_hits(f"{server.url}/b/k")
        ask(f"{server.url}/b/k", X_Request_Id="a-hit-of-the-front")
        lines = lines_of(server)
    logged = {line.get("request_id") for line in lines}
    assert {"mine", "ab" * 16, "mine-too", "first", *made} <= logged
    assert "a-hit-of-the-front" not in logged


def test_log_lines_as_text_and_no_access_log_without_the_option(tmp_path: Path) -> None:
    fill(tmp_path / "o", ["k"])
    buckets = {"b": str(tmp_path / "o")}
    with served(tmp_path / "c", buckets, "--access-log") as server:
        ask(f"{server.url}/b/k%0Aforged", X_Request_Id="mine")
        _, errors = server.stop()
        (line,) = errors.splitlines()
        assert " info [mine] GET /b/k%0Aforged 404" in line
    with served(tmp_path / "c", buckets, "--log-level", "info") as server:
        ask(f"{server.url}/b/k")
        assert "GET" not in server.stop()[1]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--otlp", "127.0.0.1:4318"), "is not the URL of a collector"),
        (("--otlp", "ftp://h"), "is not the URL of a collector"),
        (("--trusted-proxy", "h"), "'h' is no network such as 10.1.0.0/16"),
    ],
)
def test_what_cannot_be_watched_is_said(tmp_path: Path, options: tuple[str, ...], why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        ServerProcess("--dir", str(tmp_path), "--capacity", "1MB", *options)


def test_top_shows_the_whole_fleet_also_when_a_server_goes(tmp_path: Path) -> None:
    objects = fill(tmp_path / "o", [f"k{n}" for n in range(40)], 2000)
    with fleet(tmp_path, {"b": str(tmp_path / "o")}, "--token", ALL) as (x, y):
        command = started(x, "top", "--json", "--interval", "200ms", "--token", ALL)
        try:
            assert command.stdout is not None
            assert json.loads(command.stdout.readline())["state"] == "ok"
            with client_of(x, ALL) as client:
                for key in objects:
                    client.read("b", key)
            seen = {"x": 0.0, "y": 0.0}
            peers = 0.0
            while not (all(seen.values()) and peers):
                look = json.loads(command.stdout.readline())
                for one in look["servers"]:
                    assert (one["state"], one["fair_ratio"]) == ("ok", 0.5)
                    seen[one["name"]] += one["origin_bytes_per_s"]
                peers += look["buckets"][0]["peer_bytes_per_s"]
            assert look["capacity_bytes"] == 2_000_000_000
            x.stop(signal.SIGKILL)
            states: dict[str, str] = {}
            with still_told_of(tmp_path / "members" / "x.member"):
                while states != {"x": "away", "y": "ok"}:
                    look = json.loads(command.stdout.readline())
                    states = {one["name"]: one["state"] for one in look.get("servers", [])}
                at_y = started(y, "top", "--once", "--interval", "100ms", "--token", ALL)
                out, _ = at_y.communicate(timeout=90)
            assert next(one for one in look["servers"] if one["name"] == "x")["problem"]
        finally:
            command.kill()
            command.communicate()
        lines = [line.split() for line in out.splitlines()]
        assert ["SERVER", "HITS/S", "HIT", "RATIO"] in [line[:4] for line in lines]
        assert ["BUCKET", "HITS/S", "HIT", "RATIO"] in [line[:4] for line in lines]
        assert any(line[0] == "x" and "away:" in line for line in lines)
