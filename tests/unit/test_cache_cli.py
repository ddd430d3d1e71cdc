"""What `stoker cache …` asks, counts and prints, beside servers that do what a real one cannot be made to."""

from __future__ import annotations

import argparse
import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from stoker.cache.client.entries import children, objects
from stoker.cache.client.loading import Wanted
from stoker.cache.server.settings import ServerTlsFiles
from stoker.cli.cache import add_cache_parser
from stoker.cli.cache_manifest import read_manifest
from stoker.cli.cache_options import Below, count, parse_below, seconds
from stoker.cli.cache_rates import rates_between
from stoker.cli.cache_serve import serve_settings
from stoker.cli.main import main
from stoker.errors import ConfigError
from stoker.wire.cache_api import (
    Evicted,
    FleetMember,
    FleetStatus,
    LoadAnswer,
    LoadItem,
    LoadRequest,
    ObjectInfo,
    ObjectPage,
    Pins,
    Refreshed,
)
from stoker.wire.cache_errors import ErrorBody
from tests.unit.cache_fake import BUCKET, STATUS, faked


class Said(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def stoker(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Said]:
    monkeypatch.delenv("STOKER_CACHE_ENDPOINT", raising=False)
    monkeypatch.delenv("STOKER_CACHE_TOKEN", raising=False)

    def run(*arguments: str) -> Said:
        try:
            code = main(["cache", *arguments])
        except SystemExit as left:
            code = int(left.code or 0)
        said = capsys.readouterr()
        return Said(code, said.out, said.err)

    return run


def lister(
    keys: Sequence[str], asked: list[int] | None = None
) -> Callable[[str, str | None, int], ObjectPage]:
    """Lists sorted keys as a server does."""
    ordered = sorted(keys)

    def ask(prefix: str, after: str | None, limit: int) -> ObjectPage:
        start = 0 if after is None else bisect_right(ordered, after)
        rest = [key for key in ordered[start:] if key.startswith(prefix)]
        found = [ObjectInfo(key, 1, "v") for key in rest[:limit]]
        if asked is not None:
            asked.append(len(found))
        return ObjectPage(found, found[-1].key if len(rest) > limit else None)

    return ask


def names(entries: Iterator[ObjectInfo | str]) -> list[str]:
    return [entry if isinstance(entry, str) else entry.key for entry in entries]


def test_urls_name_a_bucket_and_a_prefix_as_it_stands() -> None:
    assert parse_below("stoker://b") == Below("b", "")
    assert parse_below("stoker://b/") == Below("b", "")
    assert parse_below("stoker://b/a b/%20/") == Below("b", "a b/%20/")
    assert parse_below("stoker://b/x").url == "stoker://b/x"
    for wrong in ("b", "s3://b/x", "stoker://", "stoker:///x", ""):
        with pytest.raises(ConfigError, match="write stoker://BUCKET"):
            parse_below(wrong)


def test_times_and_counts_are_above_zero() -> None:
    assert (seconds("250ms"), seconds("3"), count("12")) == (0.25, 3.0, 12)
    for parse, wrong in ((seconds, "0"), (seconds, "soon"), (count, "0"), (count, "-1"), (count, "1.5")):
        with pytest.raises(argparse.ArgumentTypeError, match=wrong):
            parse(wrong)


def test_manifests(tmp_path: Path) -> None:
    file = tmp_path / "m"
    file.write_text('a/1\n\nstoker://b/{x\r\n{"key":"c","size_bytes":5,"version":"v"}\n a b\n')
    found = [Wanted("a/1", None), Wanted("{x", None), Wanted("c", 5), Wanted(" a b", None)]
    assert list(read_manifest(str(file), "b")) == found
    for line, why in (
        ("stoker://other/k", "no object of stoker://b"),
        ("stoker://b/", "no object of stoker://b"),
        ("{x", "write a key that begins"),
        ('{"key":"d/","is_folder":true}', "--recursive"),
        ("k" * 5000, "at most"),
    ):
        file.write_text(f"fine\n{line}\n")
        with pytest.raises(ConfigError, match="line 2") as caught:
            list(read_manifest(str(file), "b"))
        assert why in str(caught.value)
    file.write_bytes(b"\xff\n")
    with pytest.raises(ConfigError, match="UTF-8"):
        list(read_manifest(str(file), "b"))
    with pytest.raises(ConfigError, match="No such file"):
        list(read_manifest(str(tmp_path / "none"), "b"))
    with pytest.raises(ConfigError, match="not a pipe"):
        list(read_manifest("/dev/null", "b"))


def test_folders_are_named_once_and_skipped() -> None:
    keys = [f"d{n}/sub/{m:04}" for n in range(5) for m in range(3000)] + [
        "a",
        "d0",
        "d0-",
        "d4x",
        "z/1",
        "\U0010ffff",
    ]
    asked: list[int] = []
    found = names(children(lister(keys, asked), ""))
    assert found == ["a", "d0", "d0-", "d0/", "d1/", "d2/", "d3/", "d4/", "d4x", "z/", "\U0010ffff"]
    assert sum(asked) < 12_000, "folders are not walked through"
    assert names(children(lister(keys), "d1/")) == ["d1/sub/"]
    assert names(children(lister(keys), "d4")) == ["d4/", "d4x"]
    assert names(children(lister(keys), "none")) == []


def test_lists_come_page_by_page() -> None:
    keys = [f"k{n:03}" for n in range(95)] + ["l"]
    asked: list[int] = []
    listed = objects(lister(keys, asked), "k", 10)
    assert next(listed).key == "k000"
    assert asked == [10]
    assert [info.key for info in listed] == keys[1:95]
    for limit in (1, 7, 95, 96, 1000):
        assert names(children(lister(keys), "", limit)) == keys


def test_servers_that_could_not_be_told_are_named(stoker: Callable[..., Said]) -> None:
    with faked(
        POST_refresh=Refreshed(3, ["y"]),
        POST_evict=Evicted(2, 2000, ["y", "z"]),
        PUT_pin=Pins(["a/", "c/"], ["y"]),
        DELETE_pin=Pins([], []),
    ) as server:
        where = ("--endpoint", server.url)
        assert stoker("refresh", "stoker://b/a?/", *where)[::2] == (
            1,
            "stoker: y could not be told, and may believe what they know until the bucket's ttl is over; "
            "do it again when they are back\n",
        )
        evicted = stoker("evict", "stoker://b/a", *where)
        assert (evicted.code, evicted.out) == (1, "stoker://b/a: 2 blocks are given up, 2 KB\n")
        assert "y, z could not be told" in evicted.err
        pinned = stoker("pin", "stoker://b/a/", "--json", *where)
        assert (pinned.code, json.loads(pinned.out)) == (1, {"prefixes": ["a/", "c/"], "missed": ["y"]})
        assert stoker("unpin", "stoker://b/a/", *where) == (0, "nothing is pinned in b\n", "")
        assert ("POST", "/-/refresh/b?prefix=a%3F%2F") in server.asked


def test_a_whole_bucket_is_given_up_only_by_who_is_sure(
    stoker: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    with faked(POST_evict=Evicted(1, 500)) as server:
        where = ("--endpoint", server.url)
        assert stoker("evict", "stoker://b", *where).code == 2
        monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
        for said, code in (("n\n", 1), ("", 1), ("y\n", 0), ("Yes\n", 0)):
            monkeypatch.setattr("sys.stdin.readline", lambda said=said: said, raising=False)
            evicted = stoker("evict", "stoker://b", *where)
            assert evicted.code == code
            assert "Give up all that is held of stoker://b (here 500 B)? [y/N]" in evicted.err
        assert stoker("evict", "stoker://c", *where).code == 4
        assert len([path for method, path in server.asked if method == "POST"]) == 2


def test_a_server_of_another_version_has_no_fleet(stoker: Callable[..., Said]) -> None:
    with faked() as server:
        said = stoker("status", "--endpoint", server.url)
        assert (said.code, "fleet" in said.out) == (0, False)
        loaded = stoker("load", "stoker://b", "--endpoint", server.url)
        assert (loaded.code, loaded.err) == (4, "stoker: there is no list\n")


def test_an_unreachable_member_is_said(stoker: Callable[..., Said]) -> None:
    with faked() as gone:
        pass
    page = ObjectPage([ObjectInfo("k", 6000, "v")])
    fleet = FleetStatus("x", [FleetMember("x", "url"), FleetMember("y", gone.url)], ["y"])

    def load(body: bytes) -> LoadAnswer:
        keys = msgspec.msgpack.decode(body, type=LoadRequest).keys
        return LoadAnswer([LoadItem(key, "loaded", 6000) for key in keys])

    with faked(GET_list=page, POST_load=load) as server:
        members = [FleetMember("x", server.url), *fleet.members[1:]]
        server.answers["GET", "fleet"] = lambda _: msgspec.structs.replace(fleet, members=members)
        where = ("--endpoint", server.url)
        assert "x in a fleet of 2: x, y; not reached: y" in stoker("status", *where).out
        assert json.loads(stoker("status", "--json", *where).out)["fleet"]["down"] == ["y"]
        loaded = stoker("load", "stoker://b", *where)
        assert (loaded.code, loaded.err) == (
            0,
            f"stoker: {gone.url} does not answer: its room is not counted\n",
        )
        twice = stoker("load", "stoker://b", "--replicas", "2", *where)
        assert twice.code == 0, "copies need a second server"


def test_rates_are_those_of_the_interval() -> None:
    before = msgspec.structs.replace(STATUS, buckets=[msgspec.structs.replace(BUCKET, hits=10, misses=10)])
    row = msgspec.structs.replace(
        BUCKET, hits=40, misses=20, hit_bytes=4000, origin_bytes=1000, origin_requests=6, origin_state="open"
    )
    after = msgspec.structs.replace(STATUS, uptime_s=12.0, buckets=[row])
    (rates,) = rates_between(before, after)
    assert (rates.hits_per_s, rates.hit_ratio) == (15.0, 0.75)
    assert (rates.cache_bytes_per_s, rates.origin_bytes_per_s, rates.origin_requests_per_s) == (
        2000.0,
        500.0,
        3.0,
    )
    assert (rates.held_bytes, rates.origin_state) == (500, "open")
    (idle,) = rates_between(after, msgspec.structs.replace(after, uptime_s=13.0))
    assert (idle.hits_per_s, idle.hit_ratio) == (0.0, None)
    (anew,) = rates_between(after, msgspec.structs.replace(after, uptime_s=4.0))
    assert anew.hits_per_s == 10.0, "it has started anew: all that it counts is of these four seconds"


def test_top_goes_on_while_the_server_is_away(
    stoker: Callable[..., Said], capsys: pytest.CaptureFixture[str]
) -> None:
    looks = 0

    def status(_: bytes) -> Any:
        nonlocal looks
        looks += 1
        if looks == 2:
            return ErrorBody("unavailable", "it stops")
        if looks > 3:
            raise KeyboardInterrupt  # never reached: the command was ended
        return msgspec.structs.replace(STATUS, uptime_s=10.0 + looks)

    with faked(GET_status=status) as server:
        lines: list[str] = []

        def interrupt(*_: object) -> bool:
            lines.append("")
            if len(lines) > 2:
                raise KeyboardInterrupt
            return False

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("stoker.cli.cache_top.Keys.wait", interrupt)
            said = stoker("top", "--json", "--endpoint", server.url)
    assert said.code == 130
    away, back = map(json.loads, said.out.splitlines())
    assert "it stops" in away["problem"]
    assert back["buckets"][0]["name"] == "b"


def test_commands_say_what_to_mend(stoker: Callable[..., Said]) -> None:
    for arguments, words in (
        (("ls", "stoker://b"), "set STOKER_CACHE_ENDPOINT"),
        (("ls", "b/x", "--endpoint", "http://h:1"), "'b/x' names no bucket"),
        (("stat", "stoker://b", "--endpoint", "http://h:1"), "write stoker://BUCKET/KEY"),
        (("pin", "stoker://b/", "--endpoint", "http://h:1"), "stoker://b/PREFIX"),
        (("load", "stoker://b/x", "--manifest", "m", "--endpoint", "http://h:1"), "write stoker://b, not"),
        (("status", "--endpoint", "h:1"), "write http://HOST:PORT"),
    ):
        said = stoker(*arguments)
        assert said.code == 2
        assert words in said.err
        assert said.err.startswith("stoker: ")
    for name in ("serve", "status", "ls", "stat", "refresh", "evict", "pin", "unpin", "load", "top"):
        shown = stoker(name, "--help")
        assert shown.code == 0
        assert "examples:\n  stoker cache" in shown.out


@pytest.mark.parametrize("line", ["capacity = -5", 'capacity = "-5"', "capacity = 5000000\negress = -1"])
def test_sizes_in_a_file_are_not_negative(tmp_path: Path, stoker: Callable[..., Said], line: str) -> None:
    file = tmp_path / "cache.toml"
    file.write_text(f'dir = "{tmp_path}/d"\n{line}\n')
    said = stoker("serve", "--config", str(file))
    assert said.code == 2
    assert f"--{line.split()[-3]}: " in said.err


@pytest.mark.parametrize("said", ["0", "1KB", "0.9MB"])
def test_a_cache_without_room_is_refused(tmp_path: Path, stoker: Callable[..., Said], said: str) -> None:
    file = tmp_path / "cache.toml"
    file.write_text(f'dir = "{tmp_path}/d"\ncapacity = "{said}"\n')
    for words in (("--dir", f"{tmp_path}/d", "--capacity", said), ("--config", str(file))):
        refused = stoker("serve", *words)
        assert refused.code == 2
        assert f"--capacity: {said} is too little: give at least 1 MB" in refused.err
    huge = stoker("serve", "--dir", f"{tmp_path}/d", "--capacity", "9" * 400)
    assert (huge.code, "no disk is that large" in huge.err) == (2, True)


def test_tls_needs_a_certificate_and_its_key(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_cache_parser(parser.add_subparsers())
    words = ["cache", "serve", "--dir", "d", "--capacity", "1GB"]
    assert serve_settings(parser.parse_args(words)).tls is None
    both = [*words, "--tls-cert", "c", "--tls-key", "k"]
    assert serve_settings(parser.parse_args(both)).tls == ServerTlsFiles(Path("c"), Path("k"), None)
    file = tmp_path / "cache.toml"
    file.write_text(
        'dir = "d"\ncapacity = "1GB"\ntls_cert = "c"\ntls_key = "k"\ntls_client_ca = "a"\naccess = "f"\n'
    )
    settings = serve_settings(parser.parse_args(["cache", "serve", "--config", str(file)]))
    assert settings.tls == ServerTlsFiles(Path("c"), Path("k"), Path("a"))
    for missing in (["--tls-cert", "c"], ["--tls-key", "k"], ["--tls-client-ca", "a"]):
        with pytest.raises(ConfigError, match="give both --tls-cert FILE and --tls-key FILE"):
            serve_settings(parser.parse_args([*words, *missing]))
    with pytest.raises(ConfigError, match="of no use without --access FILE"):
        serve_settings(parser.parse_args([*both, "--tls-client-ca", "a"]))
    required = serve_settings(parser.parse_args([*both, "--tls-client-ca", "a", "--tls-client-required"])).tls
    assert required == ServerTlsFiles(Path("c"), Path("k"), Path("a"), is_client_required=True)
    file.write_text(f"{file.read_text()}tls_client_required = true\n")
    assert serve_settings(parser.parse_args(["cache", "serve", "--config", str(file)])).tls == required
    for words_of in (words, both):
        with pytest.raises(ConfigError, match="give --tls-client-ca FILE"):
            serve_settings(parser.parse_args([*words_of, "--tls-client-required"]))


def test_what_may_go_out_is_said_as_a_size() -> None:
    parser = argparse.ArgumentParser()
    add_cache_parser(parser.add_subparsers())
    words = ["cache", "serve", "--dir", "d", "--capacity", "1GB"]
    said = [*words, "--egress", "2GB", "--connection-egress", "500MB"]
    settings = serve_settings(parser.parse_args(said))
    assert (settings.egress_bytes_per_s, settings.connection_bytes_per_s) == (2e9, 5e8)
    for text in ("much", "-1GB"):
        with pytest.raises(ConfigError, match="--egress"):
            serve_settings(parser.parse_args([*words, f"--egress={text}"]))
