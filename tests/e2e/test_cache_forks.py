"""Processes that fork while they have clients of a cache open: parent and child read on, each by sockets of its own."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.cache.client.client import CacheClient
from stoker.cache.client.fleet import open_client
from tests.e2e.cache_helpers import ServerProcess, client_of, fill, served
from tests.e2e.children import ended_well, start_child

pytestmark = [
    pytest.mark.real,
    # From Python 3.12 on, to fork beside threads is warned of; that it works is what is tested.
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]
CHILDREN = 8


@pytest.fixture
def objects(tmp_path: Path) -> dict[str, bytes]:
    found = fill(tmp_path / "o", [f"{n:02}" for n in range(30)], 3000)
    return found | fill(tmp_path / "o", ["big"], 6_000_000)


@pytest.fixture
def server(tmp_path: Path, objects: dict[str, bytes]) -> Iterator[ServerProcess]:
    with served(tmp_path / "d", {"b": str(tmp_path / "o")}) as running:
        yield running


def is_right(client: CacheClient, objects: dict[str, bytes]) -> bool:
    keys = list(objects)
    return (
        client.read_many("b", keys) == [objects[key] for key in keys]
        and all(client.read("b", key) == data for key, data in objects.items())
        and client.read("b", "big", 4_000_000, 5_000_000) == objects["big"][4_000_000:5_000_000]
    )


def sockets() -> set[str]:
    """The sockets that this process has open, as the kernel names them."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue
        if name.startswith("socket:"):
            found.add(name)
    return found


def test_a_child_has_no_socket_of_its_parents(server: ServerProcess, objects: dict[str, bytes]) -> None:
    others = sockets()
    with client_of(server) as client:
        assert is_right(client, objects)
        kept = sockets() - others
        assert kept, "the client keeps its connection"

        def child() -> bool:
            return is_right(client, objects) and not sockets() & kept and bool(sockets() - others)

        assert all(ended_well(start_child(child)) for _ in range(3))
        assert kept <= sockets(), "the parent does not notice"
        assert is_right(client, objects)


@pytest.mark.parametrize("is_fleet", [False, True])
def test_parent_and_children_read_at_once(
    server: ServerProcess, objects: dict[str, bytes], is_fleet: bool
) -> None:
    """The parent's threads are in the midst of requests when it forks."""
    client = open_client(f"{server.url},{server.url}") if is_fleet else CacheClient(server.url)
    assert is_right(client, objects)
    wrong: list[str] = []
    done = threading.Event()

    def read_on() -> None:
        while not done.is_set():
            if not is_right(client, objects):
                wrong.append("other bytes in the parent")

    threads = [threading.Thread(target=read_on) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            children = [start_child(lambda: is_right(client, objects)) for _ in range(CHILDREN)]
            assert [ended_well(child) for child in children] == [True] * CHILDREN
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert is_right(client, objects)
    client.close()


def test_processes_of_a_forked_pool_read(server: ServerProcess, objects: dict[str, bytes]) -> None:
    with client_of(server) as client:
        assert is_right(client, objects)
        results = multiprocessing.get_context("fork").SimpleQueue()
        children = [
            multiprocessing.get_context("fork").Process(target=lambda: results.put(is_right(client, objects)))
            for _ in range(CHILDREN)
        ]
        for child in children:
            child.start()
        assert is_right(client, objects)
        assert [results.get() for _ in children] == [True] * CHILDREN
        for child in children:
            child.join()
            assert child.exitcode == 0
