"""The control API's routes, through the router alone."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from stoker.errors import EnvironmentProblem, JobTimeout
from stoker.job.control.metrics import prometheus_text
from stoker.job.control.response import Response
from stoker.job.control.router import ControlRouter
from stoker.job.control.routes import ROUTES
from stoker.wire.control import (
    PROMETHEUS,
    Advice,
    EventPage,
    JobStatus,
    ShardList,
    StackDump,
    WorkerStatus,
)
from stoker.wire.control_errors import ERRORS, ErrorBody
from tests.unit.control_fake import TOKEN, FakeJob, some_advice

AUTHORIZED = {"authorization": f"Bearer {TOKEN}"}


def ask(
    job: FakeJob, method: str, target: str, body: bytes = b"", headers: dict[str, str] | None = None
) -> Response:
    router = ControlRouter(job, TOKEN)
    return asyncio.run(router.handle(method, target, AUTHORIZED if headers is None else headers, body))


def error(response: Response) -> ErrorBody:
    body = msgspec.json.decode(response.body, type=ErrorBody)
    assert ERRORS[body.error].status == response.status
    return body


def test_status_says_all_there_is() -> None:
    job = FakeJob()
    response = ask(job, "GET", "/v1/status")
    assert response.status == 200
    assert msgspec.json.decode(response.body, type=JobStatus) == job.told


def test_an_older_client_reads_what_a_newer_master_says() -> None:
    said = msgspec.to_builtins(FakeJob().told)
    said["colour"] = "green"
    said["nodes"][0]["workers"][0]["phase"] = "a phase of tomorrow"
    assert msgspec.convert(said, JobStatus).nodes[0].workers[0].phase == "a phase of tomorrow"


def test_events_come_in_pages_and_say_when_there_will_be_no_more() -> None:
    job = FakeJob()
    for number in range(5):
        job.record("generation", f"reason {number}", generation=number)
    first = msgspec.json.decode(ask(job, "GET", "/v1/events?limit=3").body, type=EventPage)
    assert [event.seq for event in first.events] == [1, 2, 3]
    assert (first.after, first.ended) == (3, False)
    job.end()
    rest = msgspec.json.decode(ask(job, "GET", f"/v1/events?after={first.after}").body, type=EventPage)
    assert [event.kind for event in rest.events] == ["generation", "generation", "ended"]
    assert rest.ended
    empty = msgspec.json.decode(ask(job, "GET", "/v1/events?after=6&wait_s=60").body, type=EventPage)
    assert empty == EventPage((), 6, True), "nothing can come any more, so nothing is waited for"


def test_a_long_poll_is_answered_by_the_next_event_and_not_by_time() -> None:
    async def story() -> EventPage:
        job = FakeJob()
        router = ControlRouter(job, TOKEN)
        asked = asyncio.create_task(router.handle("GET", "/v1/events?wait_s=60", AUTHORIZED, b""))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not asked.done()
        job.record("node-joined", "host1 offers 2 workers", node="node-a1")
        response = await asyncio.wait_for(asked, 20)
        return msgspec.json.decode(response.body, type=EventPage)

    page = asyncio.run(story())
    assert [event.details for event in page.events] == [{"node": "node-a1"}]


def test_what_is_asked_reaches_the_job() -> None:
    job = FakeJob()
    assert ask(job, "POST", "/v1/scale", b'{"nodes": 3}').status == 202
    assert ask(job, "POST", "/v1/nodes/node-b2/leave").status == 202
    assert ask(job, "POST", "/v1/nodes/node-a1/leave", b'{"why": "new disks"}').status == 202
    assert ask(job, "POST", "/v1/stop", b'{"why": "enough", "exit_code": 7}').status == 202
    assert job.asked == [
        ("scale", 3),
        ("leave", "node-b2", "drained through the control API"),
        ("leave", "node-a1", "new disks"),
        ("stop", "enough", 7),
    ]


def test_stacks_shards_and_advice() -> None:
    job = FakeJob()
    dump = msgspec.json.decode(ask(job, "GET", "/v1/stacks?timeout_s=2.5").body, type=StackDump)
    assert job.asked == [("stacks", 2.5)]
    assert [worker.rank for worker in dump.workers] == [0, 1, 2, None]
    shards = msgspec.json.decode(ask(job, "GET", "/v1/shards").body, type=ShardList)
    assert list(shards.shards) == job.shards()
    assert msgspec.json.decode(ask(job, "GET", "/v1/advice").body, type=Advice).advice is None
    job.advice = some_advice()
    assert msgspec.json.decode(ask(job, "GET", "/v1/advice").body, type=Advice).advice == job.advice


@pytest.mark.parametrize(
    ("headers"),
    [
        {},
        {"authorization": ""},
        {"authorization": TOKEN},
        {"authorization": f"Basic {TOKEN}"},
        {"authorization": f"Bearer {TOKEN}x"},
        {"authorization": f"Bearer {TOKEN[:-1]}"},
        {"authorization": f"Bearer {TOKEN}, Bearer {TOKEN}"},
        {"authorization": "Bearer \xff\xfe"},
    ],
)
def test_without_the_token_nothing_is_said(headers: dict[str, str]) -> None:
    for route in ROUTES:
        response = ask(FakeJob(), route.method, route.path, headers=headers)
        if route.operation == "healthz":
            assert response.status == 200
            continue
        assert error(response).error == "unauthorized", route.path
        assert ("WWW-Authenticate", 'Bearer realm="stoker"') in response.headers
    assert ask(FakeJob(), "GET", "/v1/nothing", headers=headers).status == 401, "nor which routes there are"


def test_a_router_without_a_token_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="token"):
        ControlRouter(FakeJob(), "")


@pytest.mark.parametrize(
    ("method", "target", "allow"),
    [("POST", "/v1/status", "GET"), ("GET", "/v1/scale", "POST"), ("DELETE", "/v1/nodes/a/leave", "POST")],
)
def test_another_method_is_told_which_ones_there_are(method: str, target: str, allow: str) -> None:
    response = ask(FakeJob(), method, target)
    assert error(response).error == "method_not_allowed"
    assert ("Allow", allow) in response.headers


@pytest.mark.parametrize(
    "target", ["/", "/v1", "/v1/status/", "/v2/status", "/v1//status", "/v1/nodes/leave", "//"]
)
def test_no_such_route(target: str) -> None:
    assert error(ask(FakeJob(), "GET", target)).error == "not_found"


@pytest.mark.parametrize(
    ("method", "target", "body", "field"),
    [
        ("POST", "/v1/scale", b"", "nodes"),
        ("POST", "/v1/scale", b"{}", "nodes"),
        ("POST", "/v1/scale", b'{"nodes": "two"}', "nodes"),
        ("POST", "/v1/scale", b'{"nodes": 0}', "nodes"),
        ("POST", "/v1/scale", b'{"nodes": 2.5}', "nodes"),
        ("POST", "/v1/scale", b'{"nodes": 2, "node": 3}', "node"),
        ("POST", "/v1/stop", b'{"why": ""}', "why"),
        ("POST", "/v1/stop", b'{"why": "x", "exit_code": 256}', "exit_code"),
        ("POST", "/v1/nodes/node-a1/leave", b'{"why": 3}', "why"),
        ("POST", "/v1/stop", b'{"why": "' + b"x" * 1001 + b'"}', "why"),
        ("GET", "/v1/events?after=-1", b"", "after"),
        ("GET", "/v1/events?after=x", b"", "after"),
        ("GET", "/v1/events?limit=0", b"", "limit"),
        ("GET", "/v1/events?wait_s=61", b"", "wait_s"),
        ("GET", "/v1/events?wait_s=nan", b"", "wait_s"),
        ("GET", "/v1/events?since=1", b"", "since"),
        ("GET", "/v1/events?after=1&after=2", b"", "after"),
        ("GET", "/v1/events?follow=perhaps", b"", "follow"),
        ("GET", "/v1/stacks?timeout_s=0", b"", "timeout_s"),
    ],
)
def test_bad_arguments_are_refused_by_name(method: str, target: str, body: bytes, field: str) -> None:
    job = FakeJob()
    refused = error(ask(job, method, target, body))
    assert (refused.error, refused.field) == ("bad_request", field), refused
    assert field in refused.message
    assert refused.mend
    assert not job.asked


@pytest.mark.parametrize(
    "body", [b"nodes=3", b"[1]", b"{", b'"x"', b"\xff", b"[" * 5000, b'{"nodes": 1e999}']
)
def test_a_body_that_is_no_such_object(body: bytes) -> None:
    assert error(ask(FakeJob(), "POST", "/v1/scale", body)).error == "bad_request"


def test_what_the_job_refuses_is_a_bad_request_with_its_words() -> None:
    refused = error(ask(FakeJob(), "POST", "/v1/scale", b'{"nodes": 5}'))
    assert (refused.error, refused.message) == ("bad_request", "5 nodes: this job takes 1 to 4 (--nnodes)")


def test_a_node_that_is_not_there() -> None:
    refused = error(ask(FakeJob(), "POST", "/v1/nodes/no%20such/leave", b"{}"))
    assert refused.error == "not_found"
    assert "'no such'" in refused.message
    assert "node-a1, node-b2" in refused.mend


def test_an_error_names_some_nodes_of_thousands() -> None:
    job = FakeJob()
    one = job.told.nodes[0]
    many = tuple(msgspec.structs.replace(one, node=f"node-{number}") for number in range(3000))
    job.told = msgspec.structs.replace(job.told, nodes=many)
    refused = error(ask(job, "POST", "/v1/nodes/x/leave"))
    assert refused.mend.startswith("it has node-0, node-1, ")
    assert refused.mend.endswith("node-19 and 2980 more")
    assert ask(job, "POST", "/v1/nodes/node-2999/leave").status == 202


class HugeJob(FakeJob):
    """Its status would keep the master from everything else."""

    def status(self) -> JobStatus:
        raise AssertionError("the whole status was built")


@pytest.mark.parametrize("has_ended", [False, True])
@pytest.mark.parametrize("node", ["node-a1", "nobody"])
def test_only_who_asks_for_the_whole_status_pays_for_it(node: str, has_ended: bool) -> None:
    for route in ROUTES:
        if route.operation in ("status", "metrics"):
            continue
        job = HugeJob()
        job.record("generation", "first")
        if has_ended:
            job.end()
        expected = 404 if "{node}" in route.path and node == "nobody" else route.status
        body = b'{"nodes": 2}' if route.operation == "scale" else b""
        response = ask(job, route.method, route.path.replace("{node}", node), body)
        assert response.status == (409 if route.changes and has_ended else expected), route.path


def test_a_job_that_has_ended_can_be_looked_at_and_not_changed() -> None:
    job = FakeJob()
    job.end("every worker finished")
    for route in ROUTES:
        response = ask(job, route.method, route.path.replace("{node}", "node-a1"), b'{"nodes": 2}')
        if route.changes:
            assert "every worker finished" in error(response).message
            assert error(response).error == "ended"
        else:
            assert response.status == 200, route
    assert not any(asked[0] in ("scale", "stop", "leave") for asked in job.asked)


def test_a_long_body_is_refused() -> None:
    assert error(ask(FakeJob(), "POST", "/v1/scale", b" " * 70_000)).error == "too_large"


@pytest.mark.parametrize(
    ("raised", "code"),
    [(JobTimeout("nobody answers"), "timeout"), (EnvironmentProblem("the disk is full"), "environment")],
)
def test_errors_of_the_job_are_typed(raised: Exception, code: str) -> None:
    refused = error(ask(FakeJob(error=raised), "GET", "/v1/stacks"))
    assert (refused.error, refused.message) == (code, str(raised))


def test_metrics_are_what_prometheus_reads() -> None:
    job = FakeJob()
    job.told = msgspec.structs.replace(job.told, job='a "quoted"\\\nname')
    response = ask(job, "GET", "/v1/metrics")
    assert response.content_type == PROMETHEUS
    families = {f.name: f for f in text_string_to_metric_families(response.body.decode())}

    def values(name: str) -> list[tuple[dict[str, str], float]]:
        return [(s.labels, s.value) for s in families[name].samples]

    of_job = {"job": 'a "quoted"\\\nname'}
    assert values("stoker_job_generation") == [(of_job, 4.0)]
    assert values("stoker_job_world_size") == [(of_job, 3.0)]
    assert values("stoker_job_commits") == [(of_job, 120.0)]
    assert values("stoker_job_steps_per_second") == [(of_job, 8.5)]
    assert values("stoker_job_restarts") == [(of_job, 2.0)]
    assert values("stoker_job_restart_budget_used") == [(of_job, 1.0)]
    assert values("stoker_job_seconds_since_commit") == [(of_job, 0.1)]
    states = {labels["state"]: value for labels, value in values("stoker_job_nodes")}
    assert states == {"checking": 0, "standby": 0, "active": 1, "away": 0, "leaving": 1, "cordoned": 0}
    assert [labels["phase"] for labels, value in values("stoker_job_phase") if value == 1] == ["running"]
    assert [value for _, value in values("stoker_worker_straggler_score")] == [1.0, 2.5]
    loss = {labels["rank"]: value for labels, value in values("stoker_worker_report")}
    assert loss["0"] == 0.25
    assert math.isnan(loss["1"])


@given(st.dictionaries(st.text(max_size=8), st.none() | st.floats()), st.text(max_size=20))
@settings(max_examples=60, deadline=None)
def test_no_name_or_figure_breaks_the_metrics(metrics: dict[str, float | None], job: str) -> None:
    told = FakeJob().told
    worker = WorkerStatus("worker-0", 0, 0, 1, "member", 1, None, None, metrics)
    node = msgspec.structs.replace(told.nodes[0], workers=(worker,))
    text = prometheus_text(msgspec.structs.replace(told, job=job, nodes=(node,)))
    families: list[Any] = list(text_string_to_metric_families(text))
    said = [s for f in families if f.name == "stoker_worker_report" for s in f.samples]
    assert {s.labels["name"] for s in said} == set(metrics)
