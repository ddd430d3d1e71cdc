"""A real server before an S3 origin that refuses, cuts, lies, or overwrites what is being read."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.cache.client.client import CacheClient
from stoker.errors import CacheUnavailable, ObjectChanged, OriginError
from tests.chaos.storm_origin import LARGE_BYTES, StormOrigin, content
from tests.e2e.cache_helpers import ServerProcess, client_of, served
from tests.http_servers import running

pytestmark = pytest.mark.real
QUESTIONS = 100
BROKEN = (ObjectChanged, OriginError, CacheUnavailable)
"""What a reader may be told; the last where an answer had begun, and could only be broken off."""


@pytest.fixture
def origin() -> Iterator[StormOrigin]:
    made = StormOrigin()
    with running(made):
        yield made


@pytest.fixture
def server(tmp_path: Path, origin: StormOrigin) -> Iterator[ServerProcess]:
    with served(tmp_path / "d", {"b": origin.url}) as made:
        yield made


def wait_until_closed(client: CacheClient, key: str) -> None:
    """Ask until the origin is not left alone any more: that may be for half a minute at a time."""
    deadline = time.monotonic() + 120
    while client.status().buckets[0].origin_state != "closed":
        assert time.monotonic() < deadline, client.status()
        time.sleep(0.1)
        try:
            client.read("b", key)
        except OriginError:
            continue


def test_a_storm_of_refusals_costs_little_and_ends(server: ServerProcess, origin: StormOrigin) -> None:
    with client_of(server) as client:
        assert client.read("b", "s/0001") == content("s/0001", 0)
        assert client.read("b", "big/00") == content("big/00", 0)
        origin.mood = "refusing"
        before = origin.requests
        errors: list[str] = []

        def ask(number: int) -> None:
            with client_of(server) as reader:
                for n in range(QUESTIONS // 10):
                    try:
                        reader.read("b", f"s/{100 + number * QUESTIONS // 10 + n:04}")
                    except OriginError as error:
                        errors.append(str(error))
                    assert reader.read("b", "s/0001") == content("s/0001", 0), "what is held is served"
                    assert reader.read("b", "big/00", 5, 4_500_000) == content("big/00", 0)[5:4_500_000]

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(errors) == QUESTIONS, "each is told"
        assert any("left alone" in error for error in errors)
        assert origin.requests - before < 2 * QUESTIONS, "with its retries each would be twelve"
        assert client.status().buckets[0].origin_state != "closed"
        origin.mood = "ok"
        wait_until_closed(client, "s/0100")
        for number in range(100, 100 + QUESTIONS):
            assert client.read("b", f"s/{number:04}") == content(f"s/{number:04}", 0)


def test_bodies_that_are_cut_are_gone_on_with(server: ServerProcess, origin: StormOrigin) -> None:
    with client_of(server) as client:
        assert client.stat("b", "big/01").size_bytes == LARGE_BYTES
        origin.mood = "cutting"
        for _ in range(20):
            try:
                data = client.read("b", "big/01", 100, 3_000_000)
            except OriginError:
                continue
            assert data == content("big/01", 0)[100:3_000_000]
            break
        else:
            pytest.fail("half of what is missing comes each time, and still it never comes to an end")
        origin.mood = "ok"
        wait_until_closed(client, "big/01")
        assert client.read("b", "big/01") == content("big/01", 0)


@pytest.mark.parametrize("key", ["s/0001", "s/0003", "big/02"])
def test_an_object_that_is_said_to_be_longer_than_it_is_is_not_served(
    server: ServerProcess, origin: StormOrigin, key: str
) -> None:
    origin.mood = "lying"
    whole = content(key, 0)
    with client_of(server) as client:
        for _ in range(2):
            try:
                data = client.read("b", key)
            except BROKEN:
                continue
            assert data == whole, f"{len(data)} bytes were served of {len(whole)}: the others are made up"
        origin.mood = "ok"
        client.refresh("b", "")
        wait_until_closed(client, key)
        assert client.read("b", key) == whole


def test_what_is_overwritten_while_it_is_read_is_of_one_version_or_refused(
    server: ServerProcess, origin: StormOrigin
) -> None:
    key, done = "big/03", threading.Event()
    wrong: list[str] = []

    def overwrite() -> None:
        with client_of(server) as client:
            while not done.wait(0.05):
                with origin.lock:
                    origin.versions[key] += 1
                client.refresh("b", "big/")

    def read() -> None:
        with client_of(server) as client:
            while not done.is_set():
                try:
                    data = client.read("b", key)
                except BROKEN:
                    continue
                with origin.lock:
                    newest = origin.versions[key]
                if not any(data == content(key, version) for version in range(newest, -1, -1)):
                    wrong.append(f"{len(data)} bytes of no version up to {newest}")

    threads = [threading.Thread(target=overwrite), *(threading.Thread(target=read) for _ in range(4))]
    for thread in threads:
        thread.start()
    done.wait(4.0)
    done.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    with client_of(server) as client:
        client.refresh("b", "")
        assert client.read("b", key) == content(key, origin.versions[key]), (
            "it is read once nobody overwrites it"
        )
