"""Another fleet as an origin: its URL, and servers that misbehave."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from stoker.cache.origin import fleet_origin, fleet_servers
from stoker.cache.origin.fleet_origin import FleetOrigin
from stoker.cache.origin.fleet_url import parse_fleet_url
from stoker.cache.origin.open import open_fleet, open_origin, open_writable_origin, without_query
from stoker.cache.origin.port import ReadRefused, sites_of
from stoker.cache.server.buckets import check_bucket
from stoker.errors import ConfigError, ObjectChanged, ObjectNotFound, OriginError, ShortBody
from stoker.testing.cache_origin import listed, streamed
from stoker.wire.cache_api import BucketSpec, ObjectInfo, ObjectPage, ObjectStat, Sites
from tests.http_servers import running
from tests.unit.cache_far import (
    DATA,
    FarServer,
    Said,
    answered,
    asking,
    failed,
    far,
    packed,
    url_of,
    write_certificate,
)


def test_an_url_names_servers_a_bucket_and_what_is_below() -> None:
    place = parse_fleet_url(
        "stoker+http://a:7070,10.0.0.2:80,[::1]:7071/data/some%20dir/", {"token_file": "/t"}
    )
    assert place.servers == (("a", 7070), ("10.0.0.2", 80), ("::1", 7071))
    assert (place.bucket, place.prefix, place.is_tls, place.token_file) == ("data", "some dir/", False, "/t")
    assert parse_fleet_url("stoker+https://a:1/b", {"ca_file": "/c"}).is_tls
    assert parse_fleet_url("stoker+http://a:1/b/", {}).prefix == ""
    assert parse_fleet_url("stoker+http://a:1/b", {"timeout_s": "2.5"}).timeout_s == 2.5


@pytest.mark.parametrize(
    ("url", "why"),
    [
        *(
            (url, "no URL of a fleet")
            for url in (
                "stoker+http://a:7070",
                "stoker+http://a:7070/",
                "stoker+http:///data",
                "stoker+http://a/data",
                "stoker+http://a:7070,/data",
                "stoker+http://a:7070,b/data",
                "stoker+http://a:0/data",
                "stoker+http://a:70000/data",
                "stoker+http://a b:7070/data",
            )
        ),
        ("stoker+http://me:its-secret@a:7070/data", "names no user"),
        ("stoker+http://a:7070/data?token=its-secret", "'token' means nothing here"),
        ("stoker+http://a:7070/data?ca_file=/x", r"ca_file is for stoker\+https"),
        ("stoker+http://a:7070/data?token_file=/no/such/file", "token_file /no/such/file cannot be read"),
        *(
            (f"stoker+http://a:7070/data?timeout_s={text}", "timeout_s is no number of seconds")
            for text in ("0", "-1", "soon", "nan", "inf", "1e9", "")
        ),
        ("stoker+https://a:7070/data?ca_file=/no/such/file", "ca_file /no/such/file cannot be read"),
    ],
)
def test_an_url_that_is_none_is_refused_and_tells_no_secret(url: str, why: str) -> None:
    for opened in (open_origin, open_fleet):
        with pytest.raises(ConfigError, match=why) as raised:
            opened(url)
        assert "its-secret" not in str(raised.value)


def test_a_token_file_holds_one_token(tmp_path: Path) -> None:
    for text in ("", "two words\n", "two\nlines\n", "é\n"):
        (tmp_path / "token").write_text(text)
        with pytest.raises(ConfigError, match="does not hold one token"):
            open_origin(f"stoker+http://a:1/b?token_file={tmp_path / 'token'}")


def test_a_fleet_is_shown_whole() -> None:
    url = "stoker+http://a:7070,b:7071/data"
    assert without_query(f"{url}?token_file=/secret") == url
    assert open_origin(f"{url}?stoker_latency_ms=1").url == url
    assert open_writable_origin(url).url == url
    with pytest.raises(ConfigError, match="not 'http://a:1'"):
        check_bucket("b", BucketSpec("/x", nearer="http://a:1?secret"))
    with pytest.raises(ConfigError, match="leave out `nearer` or `writable`"):
        check_bucket("b", BucketSpec("/x", nearer=url, writable=True))
    assert check_bucket("b", BucketSpec("/x", nearer=url))


def test_what_is_told_of_an_object_comes_along_either_way() -> None:
    async def story(origin: FleetOrigin) -> None:
        opened = await origin.open("k", 10)
        async with aclosing(opened.parts) as parts:
            assert b"".join([part async for part in parts]) == DATA[:10]
        for info in (await origin.stat("k"), opened.info):
            assert info == ObjectInfo("k", len(DATA), "v1")
            assert info.headers == (("content-type", "text/plain"),)
            assert info.modified_s == 1767225600
        assert origin.counters.bytes_read == 10

    with far() as (server,):
        asking(url_of(server), story)
        for path, headers in server.asked:
            is_sure = headers.get("cache-control") == "no-cache"
            assert is_sure == (not path.startswith("/-/sites/")), (
                "versions are the origin's, not what is known"
            )


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (lambda _: answered(0, 100, "v2"), ObjectChanged),
        (lambda _: failed(412, "changed"), ObjectChanged),
        (lambda _: failed(404, "not_found"), OriginError),  # /-/stat says that it is there
        (lambda _: failed(416, "range"), ShortBody),
        (lambda _: answered(0, 99), ShortBody),
        (lambda _: answered(1, 101), ShortBody),
        (lambda _: answered(0, 101), ShortBody),
        (lambda _: (206, {"Content-Length": "100", **answered(0, 100)[1]}, DATA[:60]), OriginError),
        (lambda _: (200, {}, DATA[:100]), OriginError),
        (lambda _: (206, answered(0, 100)[1], DATA[:150]), OriginError),
        (lambda _: (206, answered(0, 100)[1], DATA[:60]), OriginError),
        (lambda _: (206, {"ETag": '"v1"'}, DATA[:100]), OriginError),
        (lambda _: (206, {"Content-Range": f"bytes 0-99/{len(DATA)}"}, DATA[:100]), OriginError),
        (lambda _: (206, {**answered(0, 100)[1], "Content-Range": "bytes -1-99/9"}, DATA[:100]), OriginError),
        (lambda _: (302, {"Location": "/elsewhere"}, b""), OriginError),
        (lambda _: failed(502, "origin"), OriginError),
        (lambda _: failed(409, "another_origin"), OriginError),
        (lambda _: (500, {}, b"\xff" * 100_000), OriginError),
    ],
)
def test_bytes_of_a_server_that_misbehaves_are_never_taken_for_others(
    said: Callable[[dict[str, str]], Said], error: type[Exception]
) -> None:
    got: list[bytes] = []

    async def story(origin: FleetOrigin) -> None:
        async with aclosing(origin.stream("k", 0, 100, "v1")) as parts:
            async for part in parts:
                got.append(bytes(part))  # noqa: PERF401 - also those before a failure

    with far() as (server,):
        server.answers["/b/k"] = said
        with pytest.raises(error):
            asking(url_of(server), story)
        assert DATA[:99].startswith(b"".join(got))


@pytest.mark.parametrize(
    "said", [(200, {}, b"\xc1"), (200, {}, b""), packed(7), failed(404, "not_found"), failed(403, "denied")]
)
def test_a_bucket_that_cannot_be_asked_is_no_object_that_is_not_there(said: Said) -> None:
    async def story(origin: FleetOrigin) -> None:
        for asked in (origin.stat("k"), listed(origin, "", None, 10), streamed(origin, "none", 0, 1, "v1")):
            with pytest.raises(OriginError):
                await asked

    with far() as (server,):
        server.answers = {
            "/-/sites/": lambda _: said,
            "/-/": lambda _: said,
            "/b/none": lambda _: failed(404, "not_found"),
        }
        asking(url_of(server), story)


def test_what_is_not_there_is_not_found_and_a_list_must_go_on() -> None:
    async def story(origin: FleetOrigin) -> None:
        with pytest.raises(ObjectNotFound):
            await origin.stat("none")
        with pytest.raises(ObjectNotFound):
            await streamed(origin, "none", 0, 1, "v1")
        with pytest.raises(OriginError, match="goes on with its list before"):
            await listed(origin, "", None, 1)

    with far() as (server,):
        server.answers["/b/none"] = lambda _: failed(404, "not_found")
        server.answers["/-/list/b"] = lambda _: packed(ObjectPage([ObjectInfo("k", 1, "v1")], "k"))
        asking(url_of(server), story)


def test_another_server_is_asked_where_one_leaves_and_first_from_then_on() -> None:
    async def story(origin: FleetOrigin) -> None:
        for number in range(40):
            assert (await origin.stat(f"k{number}")).version == "v1"

    with far(2) as (one, two):
        one.answers["/"] = lambda _: (503, {}, b"")
        asking(url_of(one, two), story)
        assert 0 < len(one.asked) < 10, "it is asked last for a while"
        assert len(two.asked) >= 40


def test_what_the_far_fleet_still_knows_is_good_where_its_origin_fails() -> None:
    def stat(headers: dict[str, str]) -> Said:
        is_sure = headers.get("cache-control") == "no-cache"
        return failed(502, "origin") if is_sure else packed(ObjectStat("k", 5, "v0", 100))

    async def story(origin: FleetOrigin) -> ObjectInfo:
        return await origin.stat("k")

    with far() as (server,):
        server.answers["/-/stat/"] = stat
        assert asking(url_of(server), story).version == "v0"


def test_who_must_be_sure_is_told_what_is_only_known_where_that_is_asked_for() -> None:
    def stat(headers: dict[str, str]) -> Said:
        is_sure = headers.get("cache-control") == "no-cache"
        return failed(502, "origin") if is_sure else packed(ObjectStat("k", 5, "v0", 100))

    async def story(origin: FleetOrigin) -> None:
        for asked in (origin.stat("k"), origin.open("k", 10)):
            with pytest.raises(OriginError, match="so it is"):
                await asked
        assert (await origin.known("k")).version == "v0"

    with far() as (server,):
        server.answers["/-/stat/"] = stat
        server.answers["/b/k"] = lambda _: failed(502, "origin")
        asking(url_of(server), story, is_sure=True)
        stats = [headers for path, headers in server.asked if path.startswith("/-/stat/")]
        assert len(stats) == 2, "the question is not made again in another way"


@pytest.mark.parametrize(("version", "error"), [("v1", OriginError), ("v2", ObjectChanged)])
def test_what_is_gone_and_there_again_is_changed_only_where_it_is_another_version(
    version: str, error: type[Exception]
) -> None:
    async def story(origin: FleetOrigin) -> None:
        with pytest.raises(error):
            await streamed(origin, "k", 0, 10, "v1")

    with far() as (server,):
        server.answers["/b/k"] = lambda _: failed(404, "not_found")
        server.answers["/-/stat/b/k"] = lambda _: packed(ObjectStat("k", len(DATA), version, 0))
        asking(url_of(server), story)


def test_what_is_written_while_it_is_opened_is_opened() -> None:
    said = iter([failed(404, "not_found")])

    async def story(origin: FleetOrigin) -> None:
        opened = await origin.open("k", 10)
        assert opened.info.version == "v1"
        async with aclosing(opened.parts) as parts:
            assert b"".join([part async for part in parts]) == DATA[:10]

    with far() as (server,):
        server.answers["/b/k"] = lambda _: next(said, answered(0, 10))
        asking(url_of(server), story)


def test_a_refusal_of_one_key_is_an_answer_and_no_other_server_is_asked() -> None:
    async def story(origin: FleetOrigin) -> None:
        for asked in (
            origin.stat("secret"),
            streamed(origin, "secret", 0, 1, "v1"),
            origin.open("secret", 5),
        ):
            with pytest.raises(ReadRefused, match="does not let who shows no token read this"):
                await asked
        assert (await origin.stat("k")).version == "v1"

    with far(2) as servers:
        for server in servers:
            server.answers["/b/secret"] = server.answers["/-/stat/b/secret"] = lambda _: failed(403, "denied")
        asking(url_of(*servers), story)
        asked = [path for server in servers for path, _ in server.asked if "secret" in path]
        assert len(asked) == 3


def test_who_lives_and_does_not_answer_is_waited_for_no_longer_than_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a connection that was lost on the way, while others to that server are not."""
    monkeypatch.setattr(fleet_servers, "SILENCE_S", 0.1)
    over = threading.Event()

    def never(_: dict[str, str]) -> Said:
        over.wait(60)
        return failed(500, "failed")

    async def lost(origin: FleetOrigin) -> None:
        for asked in (origin.stat("k"), origin.read("k", 0, 10, "v1")):
            began = time.monotonic()
            with pytest.raises(OriginError, match="lives, and has not answered for"):
                await asked
            assert 0.9 < time.monotonic() - began < 50

    async def answered_by_the_other(origin: FleetOrigin) -> None:
        for number in range(8):
            assert (await origin.stat(f"k{number}")).version == "v1"

    with far(2) as (one, two):
        one.answers = {"/-/stat/": never, "/b/": never}
        try:
            asking(f"{url_of(one)}?timeout_s=1", lost)
            asking(f"{url_of(one, two)}?timeout_s=5", answered_by_the_other)
        finally:
            over.set()


def test_bytes_that_do_not_go_on_are_waited_for_no_longer_than_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet_servers, "SILENCE_S", 0.1)
    over = threading.Event()
    got: list[int] = []

    async def read(origin: FleetOrigin) -> None:
        async with aclosing(origin.stream("k", 0, 1_000_000, "v1")) as parts:
            async for part in parts:
                got.append(len(part))  # noqa: PERF401 - also those before a failure

    async def story(origin: FleetOrigin) -> None:
        with pytest.raises(OriginError, match=r"lives, and has not answered for 1\.0 s"):
            await read(origin)

    with far() as (server,):
        fields = {**answered(0, 1)[1], "Content-Range": "bytes 0-999999/1000000", "Content-Length": "1000000"}
        server.answers["/b/k"] = lambda _: (206, fields, bytes(600_000))
        server.after = lambda: over.wait(60)
        try:
            asking(f"{url_of(server)}?timeout_s=1", story)
        finally:
            over.set()
        assert sum(got) > 0


def test_a_token_is_shown_and_read_again_when_it_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("the-first\n")

    def check(headers: dict[str, str]) -> Said:
        if headers.get("authorization") != "Bearer the-second":
            return failed(401, "no_token")
        return packed(ObjectStat("k", 5, "v0", 0))

    async def story(origin: FleetOrigin) -> ObjectInfo:
        with pytest.raises(OriginError, match=f"refuses the token of {path}"):
            await origin.stat("k")
        path.unlink()
        with pytest.raises(OriginError, match="refuses"):
            await origin.stat("k")
        path.write_text("the-second\n")
        with pytest.raises(OriginError):
            await origin.stat("none")
        return await origin.stat("k")

    with far() as (server,):
        server.answers["/-/stat/b/k"] = check
        server.answers["/-/stat/b/none"] = lambda _: failed(401, "no_token")
        assert asking(f"{url_of(server)}?token_file={path}", story).version == "v0"


def test_a_server_that_is_silent_is_waited_for_while_it_lives() -> None:
    """And no longer: this one takes connections and says nothing."""

    async def story(origin: FleetOrigin) -> None:
        with pytest.raises(OriginError, match="is silent"):
            await origin.read("k", 0, 1, "v1")

    with socket.create_server(("127.0.0.1", 0)) as silent:
        asking(f"stoker+http://127.0.0.1:{silent.getsockname()[1]}/b", story)


def test_a_circle_of_fleets_is_found_and_asked_no_further() -> None:
    async def story(origin: FleetOrigin) -> None:
        assert await origin.sites(0) == 5
        assert await origin.sites(4) == 1
        with pytest.raises(OriginError, match="more than 4 fleets"):
            await origin.stat("k")
        throttled = open_origin(f"{origin.url}?stoker_latency_ms=1")
        assert await sites_of(throttled, 4) == 1
        await throttled.close()

    with far() as (server,):
        server.answers["/-/sites/"] = lambda headers: packed(Sites(5 - int(headers["stoker-sites"])))
        asking(url_of(server), story)
        assert all(path.startswith("/-/sites/") for path, _ in server.asked)
        assert {headers["stoker-sites"] for _, headers in server.asked} == {"1"}, "the fifth asks nobody"


def test_nobody_waits_for_what_is_asked_again_about_circles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_origin, "_SITES_S", 0.0)
    over, answers = threading.Event(), iter([packed(Sites(0))])

    def sites(_: dict[str, str]) -> Said:
        said = next(answers, None)
        if said is None:
            over.wait(60)
            return packed(Sites(9))
        return said

    async def again_and_again(origin: FleetOrigin) -> None:
        for _ in range(1000):
            await origin.stat("k")

    async def story(origin: FleetOrigin) -> None:
        began = time.monotonic()
        for _ in range(5):
            assert (await origin.stat("k")).version == "v1"
            assert await origin.read("k", 0, 10, "v1") == DATA[:10]
        assert time.monotonic() - began < 20, "over is not yet"
        over.set()
        with pytest.raises(OriginError, match="more than 4 fleets"):
            await again_and_again(origin)

    with far() as (server,):
        server.answers["/-/sites/"] = sites
        try:
            asking(url_of(server), story)
        finally:
            over.set()
        assert sum(path.startswith("/-/sites/") for path, _ in server.asked) >= 2


def test_over_tls_the_certificate_is_verified(tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = FarServer()
    server.socket = context.wrap_socket(server.socket, server_side=True)

    async def story(origin: FleetOrigin) -> tuple[bytes, str]:
        return await origin.read("k", 0, 300, "v1"), (await origin.stat("k")).version

    with running(server):
        url = f"stoker+https://localhost:{server.server_port}/b"
        assert asking(f"{url}?ca_file={certificate}", story) == (DATA[:300], "v1")
        with pytest.raises(OriginError, match="certificate verify failed"):
            asking(url, story)
        with pytest.raises(OriginError):
            asking(f"stoker+http://localhost:{server.server_port}/b", story)


def test_renewed_authorities_are_believed_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fleet_servers, "_LOOK_S", 0.0)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    (tmp_path / "ca.pem").write_bytes(renewed(tmp_path, context))
    server = FarServer()
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.closes = True  # or it would be asked on the connection that there is

    async def story(origin: FleetOrigin) -> None:
        assert (await origin.stat("k")).version == "v1"
        new = renewed(tmp_path, context)
        with pytest.raises(OriginError, match="certificate verify failed"):
            await origin.read("k", 0, 10, "v1")
        (tmp_path / "ca.pem").write_text("half of it")
        with pytest.raises(OriginError, match="certificate verify failed"):
            await origin.read("k", 0, 10, "v1")
        (tmp_path / "ca.pem").write_bytes(new)
        assert await origin.read("k", 0, 10, "v1") == DATA[:10]
        assert (await origin.stat("k")).version == "v1"

    with running(server):
        asking(f"stoker+https://localhost:{server.server_port}/b?ca_file={tmp_path / 'ca.pem'}", story)
    assert caplog.text.count("is not taken, and what it held before is used") == 1


def renewed(folder: Path, context: ssl.SSLContext) -> bytes:
    """Another certificate for the server. Returns who signed it."""
    certificate, key = write_certificate(folder)
    context.load_cert_chain(certificate, key)
    return certificate.read_bytes()
