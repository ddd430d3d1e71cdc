"""GETs of what another server of the fleet holds: whole, right, allowed, and counted, whatever happens to its owner."""

from __future__ import annotations

import contextlib
import http.client
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.e2e.cache_helpers import ServerProcess, fill
from tests.e2e.s3_helpers import boto3_at
from tests.e2e.test_cache_watch import ALL, ask, figures, fleet, owned_by

pytestmark = pytest.mark.real
KEY = "READER", "the-secret-of-the-reader"
FEW = "only-of-the-other-bucket"
OPTIONS = "--token", ALL, "--key", ":".join(KEY), "--token", f"{FEW}:other"
SIZE = 5000


@contextlib.contextmanager
def two(folder: Path, *options: str) -> Iterator[tuple[list[ServerProcess], dict[str, bytes]]]:
    """Servers x and y, and what x owns."""
    names = owned_by("x", "b", [f"k{number:03}" for number in range(60)])
    objects = fill(folder / "o", names, SIZE)
    (folder / "other").mkdir()
    with fleet(
        folder, {"b": str(folder / "o"), "other": str(folder / "other")}, *OPTIONS, *options
    ) as servers:
        yield servers, objects


def read(server: ServerProcess, key: str) -> tuple[bytes, bool]:
    """Its bytes, and whether a front alone has answered."""
    said = ask(f"{server.url}/b/{key}", ALL)
    assert said.status == 200, said
    return said.body, "x-request-id" not in said.headers


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def handed_on(server: ServerProcess, objects: dict[str, bytes]) -> None:
    """Until all is."""
    for key, data in objects.items():
        until(lambda key=key, data=data: read(server, key) == (data, True))  # type: ignore[misc]


def test_signed_gets_go_from_front_to_front_and_are_counted(tmp_path: Path) -> None:
    with two(tmp_path) as ((x, y), objects):
        handed_on(y, objects)
        client = boto3_at(y.url, KEY)
        before, before_x = figures(y), figures(x)
        for key, data in objects.items():
            got = client.get_object(Bucket="b", Key=key)
            assert got["Body"].read() == data
            assert "x-amz-request-id" not in got["ResponseMetadata"]["HTTPHeaders"]
            part = client.get_object(Bucket="b", Key=key, Range="bytes=10-29")
            assert (part["Body"].read(), part["ContentRange"]) == (data[10:30], f"bytes 10-29/{SIZE}")
        after, after_x = figures(y), figures(x)

        def grown(name: str, *labels: str) -> float:
            return after[name].get(labels, 0) - before[name].get(labels, 0)

        count = len(objects)
        assert grown("stoker_cache_requests_total", "s3", "GET", "200") == count
        assert grown("stoker_cache_requests_total", "s3", "GET", "206") == count
        assert grown("stoker_cache_misses_total", "b") == 2 * count
        assert grown("stoker_cache_read_bytes_total", "b", "peer") == count * (SIZE + 20)
        assert grown("stoker_cache_miss_seconds_count") == 2 * count
        assert grown("stoker_cache_back_seconds_count", "s3") == 0
        assert grown("stoker_cache_hits_total", "b") == 0
        assert grown("stoker_cache_read_bytes_total", "b", "origin") == 0
        assert grown("stoker_cache_principal_requests_total", f"key-{KEY[0]}") == 2 * count
        assert grown("stoker_cache_principal_sent_bytes_total", f"key-{KEY[0]}") > count * (SIZE + 20)
        hits = "stoker_cache_hits_total"
        assert after_x[hits]["b",] - before_x[hits]["b",] == 2 * count


def test_who_may_not_read_a_bucket_is_not_asked_for(tmp_path: Path) -> None:
    with two(tmp_path) as ((x, y), objects):
        handed_on(y, objects)
        before = figures(x)["stoker_cache_hits_total"]["b",]
        key = next(iter(objects))
        assert ask(f"{y.url}/b/{key}", FEW).status == 403
        assert ask(f"{y.url}/b/{key}", "nobody-has-this").status == 401
        for wrong in (KEY[0], "another-secret"), ("ANOTHER", KEY[1]):
            with pytest.raises(ClientError) as refused:
                boto3_at(y.url, wrong).get_object(Bucket="b", Key=key)
            assert refused.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403
        assert figures(x)["stoker_cache_hits_total"]["b",] == before


def test_conditions_are_answered_as_ever(tmp_path: Path) -> None:
    with two(tmp_path) as ((_, y), objects):
        handed_on(y, objects)
        client = boto3_at(y.url, KEY)
        key, data = next(iter(objects.items()))
        etag = client.head_object(Bucket="b", Key=key)["ETag"]
        assert client.get_object(Bucket="b", Key=key, IfMatch=etag)["Body"].read() == data
        for condition, status in (({"IfNoneMatch": etag}, 304), ({"IfMatch": '"other"'}, 412)):
            with pytest.raises(ClientError) as refused:
                client.get_object(Bucket="b", Key=key, **condition)
            assert refused.value.response["ResponseMetadata"]["HTTPStatusCode"] == status


def test_what_is_written_meanwhile_is_never_mixed_and_never_old(tmp_path: Path) -> None:
    with two(tmp_path, "--writable", "b") as ((x, y), objects):
        handed_on(y, objects)
        writer, reader = boto3_at(x.url, KEY), boto3_at(y.url, KEY)
        acknowledged, is_over = 0, threading.Event()
        failed: list[Any] = []
        key = next(iter(objects))
        writer.put_object(Bucket="b", Key=key, Body=bytes([0]) * SIZE)

        def follow() -> None:
            while not is_over.is_set():
                least = acknowledged
                try:
                    body = reader.get_object(Bucket="b", Key=key)["Body"].read()
                except ClientError as error:
                    # What was begun to be read is there no more: that is said, in place of a mixture.
                    if error.response["Error"]["Code"] != "PreconditionFailed":
                        raise
                    continue
                if len(set(body)) != 1 or len(body) != SIZE or body[0] < least:
                    failed.append((least, len(body), set(body)))

        readers = [threading.Thread(target=follow) for _ in range(2)]
        for one in readers:
            one.start()
        for number in range(1, 60):
            writer.put_object(Bucket="b", Key=key, Body=bytes([number]) * SIZE)
            acknowledged = number
        is_over.set()
        for one in readers:
            one.join()
        assert failed == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_readers_see_nothing_of_an_owner_that_is_gone_or_hangs(
    tmp_path: Path, number: signal.Signals
) -> None:
    with two(tmp_path) as ((x, y), objects):
        handed_on(y, objects)
        begun, is_over = threading.Barrier(5), threading.Event()
        failed: list[Any] = []

        def follow() -> None:
            is_first = True
            while not is_over.is_set():
                for key, data in objects.items():
                    said = ask(f"{y.url}/b/{key}", ALL)
                    if (said.status, said.body) != (200, data):
                        failed.append((key, said.status, len(said.body)))
                if is_first:
                    begun.wait(60)
                    is_first = False

        readers = [threading.Thread(target=follow) for _ in range(4)]
        for one in readers:
            one.start()
        begun.wait(60)
        x.child.send_signal(number)
        # Until the origin has given what the owner does not.
        until(lambda: figures(y)["stoker_cache_read_bytes_total"]["b", "origin"] >= SIZE * len(objects))
        is_over.set()
        for one in readers:
            one.join()
        if number is signal.SIGKILL:
            x.finish()
        else:
            x.child.send_signal(signal.SIGCONT)
        assert failed == []


def test_lists_tell_at_once_what_was_written_elsewhere_and_nobody_else(tmp_path: Path) -> None:
    """Documents are kept: for who may see them, and until anything is written."""
    with two(tmp_path, "--writable", "b", "--key", "FEW:a-secret-of-few:other") as ((x, y), objects):
        writer, reader, few = (
            boto3_at(x.url, KEY),
            boto3_at(y.url, KEY),
            boto3_at(y.url, ("FEW", "a-secret-of-few")),
        )
        sizes = {key: len(data) for key, data in objects.items()}

        def listed(**asked: Any) -> dict[str, int]:
            said = reader.list_objects_v2(Bucket="b", **asked)
            return {one["Key"]: one["Size"] for one in said.get("Contents", [])}

        for number in range(5):
            for _ in range(4):
                assert listed() == sizes
                assert listed(Prefix="k00") == {key: size for key, size in sizes.items() if key < "k01"}
                assert len(listed(MaxKeys=3)) == 3
                assert reader.list_objects(Bucket="b", Delimiter="k")["CommonPrefixes"] == [{"Prefix": "k"}]
                owners = reader.list_objects_v2(Bucket="b", FetchOwner=True)["Contents"]
                assert all("Owner" in one for one in owners)
                with pytest.raises(ClientError) as refused:
                    few.list_objects_v2(Bucket="b")
                assert refused.value.response["Error"]["Code"] == "AccessDenied"
            sizes[f"new-{number}"] = number
            writer.put_object(Bucket="b", Key=f"new-{number}", Body=b"x" * number)
            gone = next(iter(sizes))
            del sizes[gone]
            writer.delete_object(Bucket="b", Key=gone)


def test_where_each_request_is_logged_the_back_asks(tmp_path: Path) -> None:
    with two(tmp_path, "--access-log") as ((_, y), objects):
        key, data = next(iter(objects.items()))
        for _ in range(20):
            assert read(y, key) == (data, False)


def test_what_only_backs_hand_on_the_front_of_its_owner_answers(tmp_path: Path) -> None:
    """Blobs, of which the front hands on nothing: each is asked for under a name, which is told of nowhere."""
    key = owned_by("x", "p", [f"k{number:03}" for number in range(20)])[0]
    with fleet(tmp_path, {}, *OPTIONS, "--blob-bucket", "p=200MB") as (x, y):
        link = http.client.HTTPConnection(y.url.removeprefix("http://"), timeout=30)

        def said(method: str, body: bytes | None = None) -> tuple[int, bytes]:
            link.request(method, f"/blob/p/{key}", body, {"Authorization": f"Bearer {ALL}"})
            answer = link.getresponse()
            return answer.status, answer.read()

        def by_back() -> float:
            return figures(x)["stoker_cache_back_seconds_count"]["blob",]

        def is_by_front() -> bool:
            before = by_back()
            return said("GET") == (200, b"data") and by_back() == before

        until(lambda: said("PUT", b"data")[0] == 201)
        assert by_back() > 0, "it is the owner"
        until(is_by_front)
        link.close()
