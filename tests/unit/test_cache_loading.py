"""Loading objects: what is asked for together, what is counted, and what is done while servers come and go."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from stoker.cache.client.client import CacheClient
from stoker.cache.client.loading import Failure, LoadCounts, Loader, Wanted, batches
from stoker.cache.client.servers import Servers, SlowAnswer
from stoker.errors import CacheUnavailable, ConfigError, WireError
from stoker.wire.cache_api import (
    FleetMember,
    FleetStatus,
    LoadAnswer,
    LoadItem,
)
from stoker.wire.cache_errors import ErrorBody
from tests.unit.cache_fake import STATUS, faked


def test_batches_are_of_few_keys_and_few_bytes() -> None:
    wanted = [Wanted(f"k{n}", size) for n, size in enumerate((1, 1, 50, 3, 200, None, 4, 4, 4))]
    assert [[one.key for one in batch] for batch in batches(wanted, 3, 60)] == [
        ["k0", "k1", "k2"],
        ["k3"],
        ["k4"],
        ["k5", "k6", "k7"],
        ["k8"],
    ]
    assert list(batches([])) == []


class FakeServers(Servers):
    """Loads as a function of the keys says."""

    def __init__(self, load: Callable[[list[str]], list[LoadItem]]) -> None:
        super().__init__("http://127.0.0.1:1", None, timeout_s=1.0)
        self.asked: list[list[str]] = []
        self._load = load

    def call(self, question: Callable[[Any], Any], timeout_s: float | None = None) -> Any:
        return question(self)

    def load(self, bucket: str, keys: list[str], *, replicas: int, age_s: int) -> list[LoadItem]:
        self.asked.append(keys)
        return self._load(keys)


def run_load(load: Callable[[list[str]], list[LoadItem]], number: int = 600) -> tuple[Loader, FakeServers]:
    servers = FakeServers(load)
    loader = Loader(servers, "b", jobs=3)
    loader.run([Wanted(f"k{n}", 10) for n in range(number)], lambda _: None, 0.01)
    return loader, servers


def test_everything_is_counted_once() -> None:
    states = ("held", "loaded", "failed")

    def load(keys: list[str]) -> list[LoadItem]:
        return [
            LoadItem(key, states[int(key[1:]) % 3], 10, "why" if int(key[1:]) % 3 == 2 else "")
            for key in keys
        ]

    loader, servers = run_load(load)
    counts = loader.counts
    assert (counts.objects, counts.size_bytes, counts.held, counts.loaded) == (600, 6000, 200, 200)
    assert sorted(failure.key for failure in counts.failures) == sorted(f"k{n}" for n in range(2, 600, 3))
    assert {failure.why for failure in counts.failures} == {"why"}
    assert not counts.is_complete
    assert sorted(len(keys) for keys in servers.asked) == [88, 256, 256]


def test_what_is_passed_is_asked_for_once_more() -> None:
    """A server was lost in the middle: others have what was its."""
    seen: set[str] = set()
    lock = threading.Lock()

    def load(keys: list[str]) -> list[LoadItem]:
        with lock:
            items = [LoadItem(key, "held" if key in seen else "passed", 10) for key in keys]
            seen.update(keys)
        return items

    loader, _ = run_load(load)
    assert (loader.counts.loaded, loader.counts.held, loader.counts.passed) == (600, 0, 0)
    assert loader.counts.is_complete


def test_what_has_no_room_is_not_read_again_and_again() -> None:
    loader, servers = run_load(lambda keys: [LoadItem(key, "passed", 10) for key in keys], 2560)
    assert (loader.counts.passed, loader.counts.objects, loader.counts.passed_bytes) == (2560, 2560, 25600)
    assert len(servers.asked) == 11, "one batch shows that there is none"


def test_a_second_pass_is_told_together_with_the_first() -> None:
    """Of 100 objects 30 were held and 70 loaded; 25 were lost with a server, of which 5 cannot be had any more."""
    first = LoadCounts(objects=100, size_bytes=1000, held=30, held_bytes=300, loaded=70, loaded_bytes=700)
    second = LoadCounts(
        objects=100, size_bytes=950, held=75, held_bytes=750, loaded=20, loaded_bytes=200,
        failures=[Failure(f"k{n}", "why") for n in range(5)],
    )  # fmt: skip
    both = second.after(first)
    assert (both.objects, both.held, both.loaded, len(both.failures)) == (100, 30, 65, 5)
    assert (both.held_bytes, both.loaded_bytes) == (300, 650)


def test_a_slow_server_is_asked_for_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast ones of a batch are not lost with the slow one, which is given up in the end."""
    monkeypatch.setattr("stoker.cache.client.loading._OBJECT_S_MIN", 0.05)

    def load(keys: list[str]) -> list[LoadItem]:
        if "k7" in keys:
            time.sleep(0.01)
            raise SlowAnswer("no answer")
        return [LoadItem(key, "loaded", 10) for key in keys]

    loader, _ = run_load(load, 20)
    assert loader.counts.loaded == 19
    assert [failure.key for failure in loader.counts.failures] == ["k7"]
    assert "not there after" in loader.counts.failures[0].why


def test_an_error_ends_a_load_with_what_was_done() -> None:
    def load(keys: list[str]) -> list[LoadItem]:
        if "k599" in keys:
            time.sleep(0.05)
            raise CacheUnavailable("nobody is there")
        return [LoadItem(key, "loaded", 10) for key in keys]

    servers = FakeServers(load)
    loader = Loader(servers, "b", jobs=1)
    with pytest.raises(CacheUnavailable, match="nobody"):
        loader.run([Wanted(f"k{n}", 10) for n in range(600)], lambda _: None)
    assert loader.counts.loaded == 512


def test_another_server_of_the_fleet_is_asked() -> None:
    with faked() as gone:
        pass  # it has stopped: nobody listens there
    with faked() as other:
        fleet = FleetStatus(
            "x", [FleetMember("x", gone.url), FleetMember("y", other.url), FleetMember("z", "http://h:1", 0)]
        )
        with faked(GET_fleet=fleet) as first, Servers(first.url, None, timeout_s=5.0) as servers:
            assert servers.fleet() == fleet
            first.answers["GET", "status"] = lambda _: ErrorBody("unavailable", "it stops")
            assert servers.call(lambda client: client.status()) == STATUS
            assert servers.call(lambda client: client.endpoint) == other.url, (
                "whoever answered is asked first now"
            )


def test_it_waits_for_a_server_to_come_back() -> None:
    answers = iter([ErrorBody("unavailable", "it starts")] * 4 + [STATUS])
    with faked(GET_status=lambda _: next(answers)) as server:
        with Servers(server.url, None, timeout_s=5.0) as servers:
            assert servers.call(lambda client: client.status()) == STATUS
        assert len(server.asked) == 5
    began = time.monotonic()
    servers = Servers(server.url, None, timeout_s=5.0, patience_s=0.3)
    with servers, pytest.raises(CacheUnavailable, match="no cache server answers"):
        servers.call(lambda client: client.status())
    assert 0.25 < time.monotonic() - began < 30.0


def test_who_waits_gives_up_when_it_is_closed() -> None:
    with faked() as gone:
        pass
    servers = Servers(gone.url, None, timeout_s=5.0)
    threading.Timer(0.2, servers.close).start()
    began = time.monotonic()
    with pytest.raises(CacheUnavailable):
        servers.call(lambda client: client.status())
    assert time.monotonic() - began < 30.0


def test_a_server_at_work_is_not_a_server_that_is_gone() -> None:
    stays = threading.Event()
    alone = FleetStatus("x", [FleetMember("x", "http://h:1")])
    try:
        with faked(GET_fleet=alone, POST_load=lambda _: stays.wait(60)) as server:
            with Servers(server.url, None, timeout_s=5.0) as servers:
                assert servers.fleet() is None
                with pytest.raises(SlowAnswer):
                    servers.call(lambda client: client.load("b", ["k"]), 0.2)
            stays.set()
    finally:
        stays.set()


def test_an_answer_about_other_keys_is_refused() -> None:
    with (
        faked(POST_load=LoadAnswer([LoadItem("other", "held")])) as server,
        CacheClient(server.url) as client,
        pytest.raises(WireError, match="not about the objects"),
    ):
        client.load("b", ["k"])


@pytest.mark.parametrize("endpoint", ["", " ", ",", " , "])
def test_an_endpoint_that_names_nobody_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="names no cache server"):
        Servers(endpoint, None, timeout_s=1.0)
