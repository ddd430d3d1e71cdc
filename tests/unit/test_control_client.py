"""The client of the control API, against the shipping router over real sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from stoker.errors import AccessDenied, ConfigError, JobError, JobTimeout, MasterUnreachable, WireError
from stoker.job.control.connection import Limits
from stoker.wire.control import Health
from stoker.wire.control_client import JobClient, split_endpoint
from tests.unit.control_fake import TOKEN, FakeJob, served, some_advice


def test_every_method_brings_what_the_job_says() -> None:
    job = FakeJob(advice=some_advice())
    job.record("generation", "because", generation=1, depth={"a": [1, None]})
    with served(job) as server, JobClient(server.endpoint, TOKEN) as client:
        assert client.status() == job.told
        page = client.events()
        assert (list(page.events), page.after, page.ended) == (job.log, 1, False)
        assert client.scale(3).why == "the target is 3 nodes now"
        assert client.leave_node("node-b2", "new disks").why
        assert [stack.problem for stack in client.stacks(1.0)][-1] == "it has not started"
        assert list(client.shards()) == job.shards()
        assert client.advice() == job.advice
        assert "stoker_job_generation" in client.metrics()
        assert client.health() == Health("ok")
        assert client.openapi()["openapi"] == "3.1.0"
        assert client.stop("enough", 9).why == "the job ends now"
        assert job.asked == [
            ("scale", 3),
            ("leave", "node-b2", "new disks"),
            ("stacks", 1.0),
            ("stop", "enough", 9),
        ]
        with pytest.raises(JobError, match="has ended: enough"):
            client.scale(2)


def test_events_are_followed_to_the_end() -> None:
    job = FakeJob()
    with served(job) as server, JobClient(server.endpoint, TOKEN) as client:
        server.do(lambda: job.record("generation", "one"))
        following = client.follow(wait_s=30.0)
        assert next(following).why == "one"
        timer = threading.Timer(0.05, lambda: server.do(job.end))
        timer.start()
        assert [event.kind for event in following] == ["ended"]
        timer.join()


@pytest.mark.parametrize("token", ["wrong", ""])
def test_a_wrong_token_is_told_with_the_mend(token: str) -> None:
    with (
        served(FakeJob()) as server,
        JobClient(server.endpoint, token) as client,
        pytest.raises(AccessDenied, match="--job-token-file FILE or STOKER_JOB_TOKEN"),
    ):
        client.status()


@pytest.mark.parametrize("token", ["two\nlines", "schlüssel", "a\r\nX: y"])
def test_a_token_that_cannot_be_one_is_refused_before_it_is_sent(token: str) -> None:
    with pytest.raises(ConfigError, match="token"):
        JobClient("127.0.0.1:1", token)


def test_refusals_are_typed() -> None:
    job = FakeJob(error=JobTimeout("no rank answers"))
    with served(job) as server, JobClient(server.endpoint, TOKEN) as client:
        with pytest.raises(ConfigError, match="1 to 4"):
            client.scale(9)
        with pytest.raises(ConfigError, match=r"no node 'a/b c'.*it has node-a1, node-b2"):
            client.leave_node("a/b c", "why")
        with pytest.raises(JobTimeout, match="no rank answers"):
            client.stacks()
        with pytest.raises(ConfigError, match="exit_code"):
            client.stop("why", 1000)


def test_nobody_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with (
            JobClient(f"127.0.0.1:{port}", TOKEN) as client,
            pytest.raises(MasterUnreachable, match="refused"),
        ):
            client.status()
    with JobClient("no-such-host.invalid:1", TOKEN) as client, pytest.raises(MasterUnreachable):
        client.status()


def test_a_connection_that_the_master_has_closed_is_opened_anew() -> None:
    job = FakeJob()
    with served(job, limits=Limits(idle_s=0.05)) as server, JobClient(server.endpoint, TOKEN) as client:
        client.status()
        assert server.hung_up.wait(20)
        assert client.status() == job.told
        server.hung_up.clear()
        assert server.hung_up.wait(20)
        assert client.scale(3).why


def test_a_master_that_dies_in_the_middle() -> None:
    with served(FakeJob()) as server:
        client = JobClient(server.endpoint, TOKEN)
        client.status()
        server.stop()
        with pytest.raises(MasterUnreachable):
            client.status()


@contextmanager
def saying(answer: bytes) -> Iterator[str]:
    """Something else on the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.recv(65536)
                sock.sendall(answer)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join(10)


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (b"SSH-2.0-OpenSSH_9.9\r\n", WireError, "is that port a Stoker master's"),
        (b"", MasterUnreachable, "no master answers"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nnope", WireError, "answers 404"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", WireError, "upgrade one of them"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n\xff\xff", WireError, "upgrade one of them"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n{}", MasterUnreachable, "in the middle of an answer"),
    ],
)
def test_something_else_on_the_port(answer: bytes, error: type[Exception], words: str) -> None:
    with saying(answer) as endpoint, JobClient(endpoint, TOKEN) as client, pytest.raises(error, match=words):
        client.status()


def test_a_master_that_says_nothing_is_not_waited_for_for_ever() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        JobClient(f"127.0.0.1:{listener.getsockname()[1]}", TOKEN, timeout_s=0.2) as client,
        pytest.raises(MasterUnreachable, match="does not answer in time"),
    ):
        client.status()


def test_endpoints() -> None:
    assert split_endpoint("host1:29400") == ("host1", 29400)
    assert split_endpoint("[::1]:5") == ("::1", 5)
    assert split_endpoint("http://host1:5/") == ("host1", 5)
    for text in ("host1", ":5", "host1:", "host1:0", "host1:65536", "host1:x", "a b:5", "a/b:5", "u@h:5", ""):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            split_endpoint(text)
