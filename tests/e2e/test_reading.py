"""`stoker.open`, `read`, `read_many`, `prefetch` and what can be awaited of them, through a running cache server."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

import stoker
import stoker.aio
from stoker.cache.client.client import CacheClient
from stoker.data import attach
from stoker.errors import (
    AccessDenied,
    CacheUnavailable,
    ConfigError,
    EnvironmentProblem,
    ObjectNotFound,
    StokerError,
)
from tests.conformance.test_cache_fsspec import Nginx, PlainServer
from tests.e2e.cache_helpers import ServerProcess, client_of, fill, served
from tests.http_servers import running

pytestmark = [
    pytest.mark.real,
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]
TOKEN, LESS = "all-buckets-token", "only-one-token"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("origin")


@pytest.fixture(scope="module")
def objects(folder: Path) -> dict[str, bytes]:
    found = fill(folder, [f"small/{n:03}" for n in range(100)], 3000)
    found |= fill(folder, ["a b%20c#d.bin", "deep/er/x"], 5000) | fill(folder, ["big"], 9_000_001)
    (folder / "text").write_text("eins\nzwölf\nende\n")
    return found | {"text": "eins\nzwölf\nende\n".encode()}


@pytest.fixture(scope="module")
def server(
    folder: Path, objects: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    tokens = ("--token", TOKEN, "--token", f"{LESS}:none")
    with served(tmp_path_factory.mktemp("cache"), {"b": str(folder)}, *tokens) as running:
        yield running


@pytest.fixture(autouse=True)
def known(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_CACHE_ENDPOINT", server.url)
    monkeypatch.setenv("STOKER_CACHE_TOKEN", TOKEN)


@pytest.fixture
def client(server: ServerProcess) -> Iterator[CacheClient]:
    with client_of(server, TOKEN) as found:
        yield found


class Held(PlainServer):
    """Sends no bytes of any object before it may."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.may_send = threading.Event()
        self.on_body = lambda: self.may_send.wait(120)  # type: ignore[assignment]


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    (tmp_path / "held").mkdir()
    origin = Held(tmp_path / "held")
    with running(origin):
        yield origin
        origin.may_send.set()


def urls_of(folder: Path, name: str) -> list[str]:
    """One object by every kind of URL that there is for it."""
    path = folder / name
    return [f"stoker://b/{name}", str(path), path.as_uri(), os.path.relpath(path)]


@pytest.mark.parametrize("name", ["big", "small/007", "a b%20c#d.bin", "deep/er/x"])
def test_an_object_is_read_by_each_of_its_urls(folder: Path, objects: dict[str, bytes], name: str) -> None:
    for url in urls_of(folder, name):
        with stoker.open(url) as file:
            assert file.read() == objects[name]
        assert stoker.read(url) == objects[name]
        assert stoker.read(url, 10, 20) == objects[name][10:20]
        assert stoker.read_many([url, url]) == [objects[name]] * 2


def test_text_is_read_as_text() -> None:
    with stoker.open("stoker://b/text", "r") as file:
        assert [line.strip() for line in file] == ["eins", "zwölf", "ende"]
    with stoker.open("stoker://b/text", "rt", encoding="latin-1", newline="\n") as file:
        assert file.read() == "eins\nzwölf\nende\n".encode().decode("latin-1")


def test_many_are_one_request_for_each_bucket(
    folder: Path, objects: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"small/{n:03}" for n in range(50, 0, -1)] + ["text", "small/001"]
    asked: list[str] = []
    real = CacheClient.read_many

    def counted(self: CacheClient, bucket: str, keys: list[str]) -> list[bytes]:
        asked.append(bucket)
        return real(self, bucket, keys)

    monkeypatch.setattr(CacheClient, "read_many", counted)
    expected = [objects[name] for name in names]
    assert stoker.read_many([f"stoker://b/{name}" for name in names]) == expected
    assert asked == ["b"]
    for base in ("stoker://b", "stoker://b/", str(folder), folder.as_uri(), f"{folder.as_uri()}/"):
        assert stoker.read_many(names, base=base) == expected
    assert stoker.read_many(["001", "002"], base="stoker://b/small") == [
        objects["small/001"],
        objects["small/002"],
    ]
    asked.clear()
    mixed = [f"stoker://b/{names[0]}", str(folder / "text"), f"stoker://b/{names[1]}"]
    assert stoker.read_many(mixed) == [objects[names[0]], objects["text"], objects[names[1]]]
    assert len(asked) == 2
    assert stoker.read_many([]) == []


def test_a_folder_is_the_bucket_that_a_dataset_of_it_has(
    folder: Path, objects: dict[str, bytes], client: CacheClient
) -> None:
    """So that the origin is asked once for what both read."""
    found = sorted(stoker.Dataset(f"{folder}/small/"), key=bytes)
    assert found == sorted(data for name, data in objects.items() if name.startswith("small/"))
    before = client.status().origin_bytes
    assert stoker.read(str(folder / "small" / "003")) == objects["small/003"]
    assert stoker.read_many(["004"], base=str(folder / "small")) == [objects["small/004"]]
    assert client.status().origin_bytes == before


def test_a_web_server_is_one_bucket(tmp_path: Path) -> None:
    nginx = Nginx(tmp_path)
    try:
        for name in ("a/one", "b c/%20 two"):
            (tmp_path / "o" / name).parent.mkdir(exist_ok=True)
            (tmp_path / "o" / name).write_bytes(name.encode())
        found = stoker.read_many([f"{nginx.url}/{quote(name)}" for name in ("a/one", "b c/%20 two")])
        assert found == [b"a/one", b"b c/%20 two"]
        assert (
            attach.attach_object(f"{nginx.url}/a/one").bucket == attach.attach_object(f"{nginx.url}/x").bucket
        )
    finally:
        nginx.stop()


@pytest.mark.parametrize(
    ("ask", "error", "says"),
    [
        (lambda: stoker.open("stoker://b/none"), ObjectNotFound, "none"),
        (lambda: stoker.open("stoker://nobucket/k"), ObjectNotFound, "nobucket"),
        (lambda: stoker.read("/no/such/folder/k"), StokerError, "/no/such/folder"),
        (lambda: stoker.read_many(["stoker://b/text", "stoker://b/none"]), ObjectNotFound, "none"),
        (lambda: stoker.open("stoker://b/small/"), ConfigError, "folder"),
        (lambda: stoker.open("stoker://b"), ConfigError, "folder"),
        (lambda: stoker.open("stoker://"), ConfigError, "BUCKET/KEY"),
        (lambda: stoker.read("s3:///key"), ConfigError, "s3://NAME/KEY"),
        (lambda: stoker.open("stoker://b/text", "w"), ConfigError, "read only"),
        (lambda: stoker.open("stoker://b/text", "rb", encoding="utf-8"), ConfigError, "encoding"),
        (lambda: stoker.read_many("stoker://b/text"), ConfigError, "list"),
        (lambda: stoker.open("zip://x::s3://b/k"), ConfigError, "base"),
        (lambda: stoker.read("nosuch://host/key"), ConfigError, "nosuch"),
    ],
)  # fmt: skip
def test_errors_say_what_is_wrong(ask: object, error: type[Exception], says: str) -> None:
    assert callable(ask)
    with pytest.raises(error, match=says):
        ask()


def test_a_token_that_may_not_is_said_to_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_CACHE_TOKEN", LESS)
    with pytest.raises(AccessDenied):
        stoker.open("stoker://b/text")
    with pytest.raises(AccessDenied):
        stoker.prefetch("stoker://b/text").wait(60)


def test_without_a_cache_server_it_is_said_how_to_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STOKER_CACHE_ENDPOINT")
    for ask in (stoker.open, stoker.read):
        with pytest.raises(ConfigError, match="stoker run --bucket b="):
            ask("stoker://b/text")
    monkeypatch.setenv("STOKER_CACHE_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(CacheUnavailable):
        stoker.open("stoker://b/text")


def test_a_script_alone_reads_an_origin_through_a_cache_of_its_own(tmp_path: Path, folder: Path) -> None:
    script = f"""
        import asyncio, stoker, stoker.aio
        url = {str(folder / "text")!r}
        loading = stoker.prefetch([url])
        print(loading.wait(60).is_complete, len(stoker.read(url)), len(asyncio.run(stoker.aio.read(url))))
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("STOKER_CACHE")}
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**environment, "STOKER_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        check=False,
        text=True,
        timeout=120,
    )
    assert (ran.stdout, ran.stderr, ran.returncode) == ("True 17 17\n", "", 0)


def test_the_names_are_there_and_a_star_does_not_hide_pythons_open() -> None:
    assert {"open", "read", "read_many", "prefetch", "aio"} <= set(dir(stoker))
    assert "open" not in stoker.__all__


# -- prefetch --------------------------------------------------------------------------------------------------------


def test_what_was_prefetched_is_read_without_the_origin(tmp_path: Path, server: ServerProcess) -> None:
    objects = fill(tmp_path / "o", [f"{n:03}" for n in range(600)], 2000) | fill(
        tmp_path / "o", ["in/big"], 9_000_000
    )
    with client_of(server, TOKEN) as client:
        loading = stoker.prefetch(f"{tmp_path}/o/")
        counts = loading.wait(60)
        assert loading.is_done
        assert counts.is_complete
        assert (counts.objects, counts.loaded) == (601, 601)
        assert counts.size_bytes == sum(map(len, objects.values()))
        assert loading.progress == counts
        before = client.status().origin_requests
        assert stoker.read_many(objects, base=str(tmp_path / "o")) == list(objects.values())
        assert client.status().origin_requests == before


def test_a_prefetch_of_single_keys_tells_which_were_not_there(tmp_path: Path) -> None:
    fill(tmp_path / "o", ["a", "b", "sub/c", "sub/d"], 2000)
    counts = stoker.prefetch(["a", "none", "sub/"], base=str(tmp_path / "o")).wait(60)
    assert (counts.loaded, counts.is_complete) == (3, False)
    assert [failure.key for failure in counts.failures] == ["none"]
    with pytest.raises(ObjectNotFound, match="nobucket"):
        stoker.prefetch(["stoker://nobucket/k"]).wait(60)
    assert stoker.prefetch([]).wait(60).objects == 0


def test_a_prefetch_asks_another_server_where_the_first_is_gone(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_CACHE_ENDPOINT", f"http://127.0.0.1:9, {server.url}")
    assert stoker.prefetch(["stoker://b/text", "stoker://b/small/"]).wait(60).is_complete


def test_a_prefetch_is_waited_for_no_longer_than_asked_and_goes_on(held: Held) -> None:
    objects = fill(held.folder, [f"{n}" for n in range(5)], 100_000)
    loading = stoker.prefetch(list(objects), base=held.url)
    with pytest.raises(TimeoutError):
        loading.wait(0.01)
    assert not loading.is_done

    async def give_up_then_wait() -> int:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(loading, 0.01)
        held.may_send.set()
        return (await loading).loaded

    async def wait_in_another_loop() -> int:
        return (await loading).loaded

    assert asyncio.run(give_up_then_wait()) == 5
    assert asyncio.run(wait_in_another_loop()) == 5


def test_a_fork_does_not_wait_for_its_parents_prefetch(objects: dict[str, bytes], held: Held) -> None:
    fill(held.folder, ["k"])
    loading = stoker.prefetch(["k"], base=held.url)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            loading.wait(60)
        except EnvironmentProblem:
            code = 0 if stoker.prefetch("stoker://b/text").wait(60).is_complete else 2
        finally:
            os._exit(code)
    held.may_send.set()
    assert loading.wait(60).is_complete
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# -- to be awaited ---------------------------------------------------------------------------------------------------


def test_each_function_has_a_twin_that_gives_the_same(objects: dict[str, bytes]) -> None:
    async def test() -> None:
        url = "stoker://b/big"
        assert await stoker.aio.read(url, 5, 50) == objects["big"][5:50]
        names = [f"small/{n:03}" for n in range(100)]
        assert await stoker.aio.read_many(names, base="stoker://b") == [objects[name] for name in names]
        assert (await (await stoker.aio.prefetch([url]))).is_complete
        async with await stoker.aio.open(url) as file:
            assert await file.seek(8_000_000) == 8_000_000
            assert await file.read(100) == objects["big"][8_000_000:8_000_100]
            assert await file.tell() == 8_000_100
        assert file.wrapped.closed
        async with await stoker.aio.open("stoker://b/text", "r") as file:
            assert await file.readline() == "eins\n"
            assert [line async for line in file] == ["zwölf\n", "ende\n"]
        with pytest.raises(ObjectNotFound):
            await stoker.aio.open("stoker://b/none")
        with pytest.raises(ConfigError):
            await stoker.aio.open(url, "wb")

    asyncio.run(test())
    assert stoker.aio.read.__doc__ == stoker.read.__doc__


def test_hundreds_are_read_at_once_by_a_bounded_number_of_threads(objects: dict[str, bytes]) -> None:
    async def test() -> None:
        names = [f"small/{n % 100:03}" for n in range(400)]
        found = await asyncio.gather(*(stoker.aio.read(f"stoker://b/{name}") for name in names))
        assert found == [objects[name] for name in names]

    asyncio.run(test())
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("stoker-aio")]
    assert 0 < len(threads) <= stoker.aio.THREADS


def test_several_loops_in_several_threads_read(objects: dict[str, bytes]) -> None:
    wrong: list[object] = []

    async def test() -> None:
        for _ in range(5):
            found = await asyncio.gather(*(stoker.aio.read(f"stoker://b/small/{n:03}") for n in range(20)))
            if found != [objects[f"small/{n:03}"] for n in range(20)]:
                wrong.append("other bytes")

    def run() -> None:
        try:
            asyncio.run(test())
        except BaseException as error:  # noqa: BLE001
            wrong.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_who_stops_waiting_disturbs_nobody(held: Held, objects: dict[str, bytes]) -> None:
    """Reads of a slow origin fill all threads and are given up; reads after them find threads and whole answers."""
    slow_objects = fill(held.folder, [f"{n:03}" for n in range(stoker.aio.THREADS + 20)], 1000)
    fill(held.folder, ["late"])
    place = attach.attach_folder(held.url)

    async def test() -> None:
        tasks = [
            asyncio.create_task(stoker.aio.read(f"stoker://{place.bucket}/{name}")) for name in slow_objects
        ]
        await asyncio.sleep(0.05)
        for task in tasks[::2]:
            task.cancel()
        held.may_send.set()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        for number, (name, found) in enumerate(zip(slow_objects, ended, strict=True)):
            if number % 2:
                assert found == slow_objects[name]
            else:
                assert isinstance(found, asyncio.CancelledError)
        for _ in range(3):
            found_now = await asyncio.gather(
                *(stoker.aio.read(f"stoker://b/small/{n:03}") for n in range(100))
            )
            assert found_now == [objects[f"small/{n:03}"] for n in range(100)]
        held.may_send.clear()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stoker.aio.read_many(["late"], base=held.url), 0.01)

    asyncio.run(test())


def test_after_a_fork_the_child_awaits_with_threads_of_its_own(objects: dict[str, bytes]) -> None:
    async def read() -> bytes:
        return await stoker.aio.read("stoker://b/small/001")

    assert asyncio.run(read()) == objects["small/001"]
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if asyncio.run(read()) == objects["small/001"] else 2
        finally:
            os._exit(code)
    assert asyncio.run(read()) == objects["small/001"]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
