"""Servers that speak TLS, as processes: all that readers do, whom certificates stand for, fleets, renewal."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import pickle
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import fsspec
import obstore
import pytest
from botocore.config import Config
from obstore.store import S3Store

import stoker
import stoker.aio
from stoker.cache.client.client import ByteRange, CacheClient
from stoker.cache.client.fleet import open_client
from stoker.errors import AccessDenied, CacheUnavailable, ConfigError, StokerError
from stoker.settings import ClientTlsFiles
from tests.certificates import Authority
from tests.e2e.cache_helpers import RUN_CLI, ServerProcess, fill, served
from tests.e2e.run_helpers import wait_for

pytestmark = pytest.mark.real
SIZES = {"small": 1000, "medium": 100_000, "large": 30_000_000}
FILE = """
[principals.operator]
rules = ["*: all"]
tokens = ["operator-token"]

[principals.vision]
rules = ["data/vision/: read, list"]
certificates = ["URI:spiffe://site/vision/*", "CN:vision-*"]
"""


def tls_of(authority: Authority, client: tuple[Path, Path] | None = None) -> ClientTlsFiles:
    certificate, key = ("", "") if client is None else map(str, client)
    return ClientTlsFiles(str(authority.path), certificate, key)


@contextlib.contextmanager
def serving(
    folder: Path, authority: Authority, keys: dict[str, int], *options: str
) -> Iterator[tuple[ServerProcess, dict[str, bytes]]]:
    objects: dict[str, bytes] = {}
    for key, size_bytes in keys.items():
        objects |= fill(folder / "origin", [key], size_bytes)
    certificate, key_file = authority.server("server", "127.0.0.1")
    files = "--tls-cert", str(certificate), "--tls-key", str(key_file)
    with served(folder / "cache", {"data": str(folder / "origin")}, *files, *options) as server:
        assert server.url.startswith("https://127.0.0.1:")
        yield server, objects


def test_readers_of_all_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(tmp_path / "pki")
    with serving(tmp_path, authority, SIZES, "--unix", f"{tmp_path}/socket") as (server, objects):
        tls = tls_of(authority)
        with CacheClient(server.url, tls=tls, timeout_s=60) as client:
            for _ in range(3):  # from the origin, and as hits
                for key, data in objects.items():
                    assert client.read("data", key) == data
                    assert client.read("data", key, 100, 900) == data[100:900]
            assert client.read_many("data", list(objects)) == list(objects.values())
            ranges = [ByteRange("large", start, start + 50_000) for start in range(0, 9_000_000, 999_999)]
            assert client.read_ranges("data", ranges) == [
                objects["large"][one.start : one.stop] for one in ranges
            ]
            assert pickle.loads(pickle.dumps(client._transport))._tls.files == tls
            assert client.status().buckets[0].hits > 0
        monkeypatch.setenv("STOKER_CACHE_CA", str(authority.path))
        with open_client(server.url, timeout_s=60) as client:
            assert client.read("data", "medium") == objects["medium"]
        with fsspec.open("stoker://data/large", endpoint=server.url, ca=str(authority.path)) as file:
            assert file.read() == objects["large"]
        with CacheClient(f"unix://{tmp_path}/socket") as client:
            assert client.read("data", "medium") == objects["medium"], "the Unix socket is plain"


def test_each_way_to_read_can_be_told_whom_to_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For that call alone: what comes after, and goes to the same server, trusts as before."""
    authority, other = Authority(tmp_path / "pki"), Authority(tmp_path / "other")
    sizes = {f"part-{n}": 1000 for n in range(4)}
    with serving(tmp_path, authority, sizes) as (server, objects):
        monkeypatch.setenv("STOKER_CACHE_ENDPOINT", server.url)
        monkeypatch.setenv("STOKER_CACHE_CA", str(other.path))
        ca, one, data = str(authority.path), "stoker://data/part-0", objects["part-0"]
        urls = [f"stoker://data/{key}" for key in objects]

        async def awaited(*reading: Any) -> Any:
            return await reading[0](*reading[1:], ca=ca)

        for _ in range(2):
            with stoker.open(one, ca=ca) as file:
                assert file.read() == data
            assert stoker.read(one, 10, 20, ca=ca) == data[10:20]
            assert stoker.read_many(urls, ca=ca) == list(objects.values())
            assert stoker.read_many(objects, f"file://{tmp_path}/origin", ca=ca) == list(objects.values())
            assert stoker.prefetch("stoker://data/", ca=ca).wait(60).failures == []
            assert asyncio.run(awaited(stoker.aio.read, one)) == data
            assert asyncio.run(awaited(stoker.aio.read_many, urls)) == list(objects.values())
            file_system = fsspec.filesystem("stoker", endpoint=server.url, ca=ca)
            assert file_system.cat_file("data/part-0") == data
            dataset = stoker.Dataset("stoker://data/", ca=ca)
            assert list(dataset) == list(objects.values())
            assert list(pickle.loads(pickle.dumps(dataset))) == list(objects.values())
            loader = stoker.Loader(
                stoker.Dataset("stoker://data/", ca=ca, decode=len), global_batch_size=2, num_workers=1,
                multiprocessing_context="spawn", keep_position=False, report=False,
            )  # fmt: skip
            assert [int(size) for batch in loader for size in batch] == [1000] * 4
            for untrusting in (
                lambda: stoker.read(one),
                lambda: stoker.open(one),
                lambda: list(stoker.Dataset("stoker://data/")),
            ):
                with pytest.raises(CacheUnavailable, match="not trusted here"):
                    untrusting()


def test_http_clients_keep_their_connection_and_plain_ones_are_told(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "pki")
    with serving(tmp_path, authority, {"small": 1000}) as (server, objects):
        where = urlsplit(server.url).netloc
        link = http.client.HTTPSConnection(
            where, timeout=60, context=ssl.create_default_context(cafile=authority.path)
        )
        with contextlib.closing(link):
            link.connect()
            socket = link.sock
            for method, status in (("GET", 200), ("HEAD", 200), ("GET", 200), ("DELETE", 403), ("GET", 200)):
                link.request(method, "/data/small")
                answer = link.getresponse()
                body = answer.read()
                assert (answer.status, link.sock) == (status, socket)
                assert method != "GET" or body == objects["small"]
        with contextlib.closing(http.client.HTTPConnection(where, timeout=60)) as plain:
            plain.request("GET", "/data/small")
            answer = plain.getresponse()
            assert (answer.status, b"https://" in answer.read()) == (400, True)
        with pytest.raises(StokerError, match="https://"):
            CacheClient(f"http://{where}").read("data", "small")


def test_a_server_that_is_not_trusted_is_not_read_from(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path / "pki"), Authority(tmp_path / "other")
    with serving(tmp_path, authority, {"small": 1000}) as (server, _):
        for wrong in (ClientTlsFiles(), tls_of(other)):
            with pytest.raises(CacheUnavailable, match="not trusted here: set STOKER_CACHE_CA"):
                CacheClient(server.url, tls=wrong).read("data", "small")
        port = urlsplit(server.url).port
        with pytest.raises(CacheUnavailable, match=r"not trusted here.*Hostname mismatch"):
            CacheClient(f"https://localhost:{port}", tls=tls_of(authority)).read("data", "small")
        with pytest.raises(ConfigError, match=r"STOKER_CACHE_CA=.*none holds no certificates"):
            CacheClient(server.url, tls=ClientTlsFiles(str(tmp_path / "none"))).read("data", "small")
        said = subprocess.run(
            [sys.executable, "-c", RUN_CLI, "cache", "status", "--endpoint", server.url, "--json"],
            capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        assert (said.returncode, "STOKER_CACHE_CA" in said.stderr) == (4, True)
        for command in (["status", "--json"], ["ls", "stoker://data/"], ["load", "stoker://data/"]):
            ca = "--ca", str(authority.path)
            words = [sys.executable, "-c", RUN_CLI, "cache", *command, "--endpoint", server.url, *ca]
            done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
            assert done.returncode == 0, done.stderr
    with served(tmp_path / "plain", {"data": str(tmp_path / "origin")}) as server:
        url = server.url.replace("http://", "https://")
        with pytest.raises(CacheUnavailable, match="does not speak TLS: write http://"):
            CacheClient(url, tls=tls_of(authority)).read("data", "small")


def s3(server: ServerProcess, authority: Authority) -> Any:
    return boto3.client(
        "s3", endpoint_url=server.url, region_name="us-east-1", verify=str(authority.path),
        aws_access_key_id="WRITER", aws_secret_access_key="secret-of-writer",
        config=Config(retries={"total_max_attempts": 1}),
    )  # fmt: skip


def test_s3_clients_read_and_write(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "pki")
    options = "--writable", "data", "--key", "WRITER:secret-of-writer"
    with serving(tmp_path, authority, {"small": 1000}, *options) as (server, objects):
        client = s3(server, authority)
        data = os.urandom(30_000_000)
        client.put_object(Bucket="data", Key="new", Body=data)
        client.upload_file(Filename=str(tmp_path / "origin/new"), Bucket="data", Key="in parts")
        assert (tmp_path / "origin/new").read_bytes() == (tmp_path / "origin/in parts").read_bytes() == data
        for key, expected in (("new", data), ("in parts", data), ("small", objects["small"])):
            for _ in range(2):
                assert client.get_object(Bucket="data", Key=key)["Body"].read() == expected
        store = S3Store(
            "data", endpoint=server.url, region="us-east-1", access_key_id="WRITER",
            secret_access_key="secret-of-writer", client_options={"allow_invalid_certificates": True},
        )  # fmt: skip
        assert bytes(obstore.get(store, "small").bytes()) == objects["small"]
        obstore.put(store, "from obstore", data)
        assert (tmp_path / "origin/from obstore").read_bytes() == data


def test_certificates_of_clients_stand_for_principals(tmp_path: Path) -> None:
    authority, others = Authority(tmp_path / "pki"), Authority(tmp_path / "others")
    access = tmp_path / "access.toml"
    access.write_text(FILE)
    keys = {"vision/a": 1000, "audio/b": 1000}
    options = "--access", str(access), "--tls-client-ca", str(authority.path)
    with serving(tmp_path, authority, keys, *options) as (server, objects):

        def client(files: tuple[Path, Path] | None, token: str | None = None) -> CacheClient:
            return CacheClient(server.url, token, tls=tls_of(authority, files), timeout_s=60)

        vision = authority.client("any", uri="spiffe://site/vision/7")
        for files in (vision, authority.client("vision-2")):
            with client(files) as link:
                for _ in range(3):
                    assert link.read("data", "vision/a") == objects["vision/a"]
                    with pytest.raises(AccessDenied, match="vision may not"):
                        link.read("data", "audio/b")
                assert [row.key for row in link.list_objects("data", "vision/")] == ["vision/a"]
        with client(vision, "operator-token") as link:
            assert link.read("data", "audio/b") == objects["audio/b"], "a token goes before a certificate"
        with client(None, "operator-token") as link:
            assert link.read("data", "audio/b") == objects["audio/b"]
        # A common name does not count where there is another.
        for nobody in (
            authority.client("vision-3", uri="spiffe://site/audio"),
            authority.client("audio"),
            None,
        ):
            with client(nobody) as link, pytest.raises(AccessDenied):
                link.read("data", "vision/a")
        with client(others.client("vision-2")) as link, pytest.raises(CacheUnavailable):
            link.read("data", "vision/a")
        with client(vision) as link:
            assert link.read("data", "vision/a") == objects["vision/a"]
            access.write_text(FILE.replace("URI:spiffe://site/vision/*", "URI:spiffe://site/other"))

            def is_out() -> bool:
                try:
                    link.read("data", "vision/a")
                except AccessDenied:
                    return True
                return False

            wait_for(is_out, timeout_s=60)


def test_certificates_of_clients_can_be_required(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "pki")
    options = "--tls-client-ca", str(authority.path), "--tls-client-required", "--token", "the-token"
    files = authority.client("any")
    with serving(tmp_path, authority, {"a": 1000}, *options, "--unix", f"{tmp_path}/socket") as (
        server,
        objects,
    ):
        with CacheClient(server.url, "the-token", tls=tls_of(authority, files), timeout_s=60) as link:
            assert link.read("data", "a") == objects["a"]
        with (
            CacheClient(server.url, "the-token", tls=tls_of(authority), timeout_s=60) as link,
            pytest.raises(CacheUnavailable, match=r"STOKER_CACHE_CERT|ended|closed|reset"),
        ):
            link.read("data", "a")
        with (
            CacheClient(server.url, tls=tls_of(authority, files), timeout_s=60) as link,
            pytest.raises(AccessDenied),
        ):
            link.read("data", "a")  # a certificate that nobody's rules name is no token
        with CacheClient(f"unix://{tmp_path}/socket", "the-token") as link:
            assert link.read("data", "a") == objects["a"]
        context = ssl.create_default_context(cafile=authority.path)
        context.load_cert_chain(*files)
        where = urlsplit(server.url).netloc
        with contextlib.closing(http.client.HTTPSConnection(where, timeout=60, context=context)) as asked:
            asked.request("GET", "/-/metrics", headers={"Authorization": "Bearer the-token"})
            figures = asked.getresponse().read().decode()
        (failed,) = [line for line in figures.splitlines() if line.startswith("stoker_cache_tls_handshakes")]
        assert int(failed.split()[1]) > 0


def test_a_renewed_certificate_is_used_and_a_broken_one_is_not(tmp_path: Path) -> None:
    first, second = Authority(tmp_path / "first"), Authority(tmp_path / "second")
    with serving(tmp_path, first, {"small": 1000}) as (server, objects):
        both = tmp_path / "both.pem"
        both.write_bytes(first.path.read_bytes())
        with CacheClient(server.url, tls=ClientTlsFiles(str(both)), timeout_s=60) as client:
            assert client.read("data", "small") == objects["small"]
            (tmp_path / "first/server.pem").write_text("half a certif")
            wait_for(
                lambda: any("new certificate is not taken" in note for note in client.status().notes),
                timeout_s=60,
            )
            client.close()
            assert client.read("data", "small") == objects["small"]
            both.write_bytes(first.path.read_bytes() + second.path.read_bytes())
            for made, used in zip(second.server(), ("server.pem", "server.key"), strict=True):
                made.replace(tmp_path / "first" / used)

            def is_renewed() -> bool:
                with CacheClient(server.url, tls=tls_of(second), timeout_s=60) as newcomer:
                    try:
                        return newcomer.read("data", "small") == objects["small"]
                    except CacheUnavailable:
                        return False

            wait_for(is_renewed, timeout_s=60)
            assert client.read("data", "small") == objects["small"]
            client.close()
            assert client.read("data", "small") == objects["small"], "its file names both"
            assert client.status().notes == []


def test_a_fleet_talks_over_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "pki")
    certificate, key = authority.server()
    objects = fill(tmp_path / "origin", [f"{i}" for i in range(12)]) | fill(
        tmp_path / "origin", ["large"], 30_000_000
    )
    options = (
        *("--capacity", "1GB", "--bucket", f"data={tmp_path}/origin", "--token", "fleet-token"),
        *("--fleet", f"{tmp_path}/members", "--tls-cert", str(certificate), "--tls-key", str(key)),
    )
    environment = {"STOKER_CACHE_CA": str(authority.path)}
    servers: list[ServerProcess] = []
    try:
        for name in ("a", "b"):
            words = "--dir", str(tmp_path / name), "--name", name, *options
            servers.append(ServerProcess(*words, environment=environment))
        clients = [
            CacheClient(one.url, "fleet-token", tls=tls_of(authority), timeout_s=60) for one in servers
        ]
        for client in clients:
            wait_for(
                lambda client=client: (
                    {one.name for one in client.fleet().members} == {"a", "b"} and not client.fleet().down
                ),
                timeout_s=60,
            )
        for _ in range(2):
            for client in clients:
                for key_, data in objects.items():
                    assert client.read("data", key_) == data
        rows = [client.status().buckets[0] for client in clients]
        assert sum(row.origin_bytes for row in rows) == sum(map(len, objects.values()))
        assert all(row.peer_bytes for row in rows)
        endpoints = ",".join(one.url for one in servers)
        with open_client(endpoints, "fleet-token", tls=tls_of(authority), timeout_s=60) as fleet:
            assert fleet.read_many("data", list(objects)) == list(objects.values())
        for client in clients:
            client.close()
    finally:
        for server in servers:
            server.stop()


def test_servers_that_cannot_speak_tls_say_so(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = map(str, authority.server())
    for options, why in (
        (("--tls-cert", certificate), "give both --tls-cert FILE and --tls-key FILE"),
        (("--tls-cert", certificate, "--tls-key", f"{tmp_path}/none"), "none holds no private key"),
        (
            ("--tls-cert", certificate, "--tls-key", key, "--tls-client-ca", certificate),
            "of no use without --access",
        ),
        (("--tls-client-required",), "give --tls-client-ca FILE, who signs"),
        (
            ("--tls-cert", certificate, "--tls-key", key, "--tls-client-required"),
            "give --tls-client-ca FILE, who signs",
        ),
    ):
        words = "--dir", f"{tmp_path}/cache", "--capacity", "1GB", *options
        with pytest.raises(AssertionError, match=why):
            ServerProcess(*words)
    (tmp_path / "cache.toml").write_text("tls_client_required = true\n")
    words = "--dir", f"{tmp_path}/cache", "--capacity", "1GB", "--config", f"{tmp_path}/cache.toml"
    with pytest.raises(AssertionError, match="give --tls-client-ca FILE, who signs"):
        ServerProcess(*words)
    words = "--dir", f"{tmp_path}/cache", "--capacity", "1GB"
    with pytest.raises(AssertionError, match=r"STOKER_CACHE_CA=.*none holds no certificates"):
        ServerProcess(*words, environment={"STOKER_CACHE_CA": f"{tmp_path}/none"})


def test_what_the_file_says_of_clients_is_done(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "pki")
    config = tmp_path / "cache.toml"
    config.write_text(f'tls_client_ca = "{authority.path}"\ntls_client_required = true\n')
    with serving(tmp_path, authority, {"a": 1000}, "--config", str(config)) as (server, objects):
        with CacheClient(server.url, tls=tls_of(authority, authority.client("any")), timeout_s=60) as link:
            assert link.read("data", "a") == objects["a"]
        with (
            CacheClient(server.url, tls=tls_of(authority), timeout_s=60) as link,
            pytest.raises(CacheUnavailable),
        ):
            link.read("data", "a")


def test_servers_believe_each_other_once_they_are_told_whom_to_trust(tmp_path: Path) -> None:
    """Without being started anew."""
    authority, other = Authority(tmp_path / "pki"), Authority(tmp_path / "other")
    certificate, key = authority.server()
    fill(tmp_path / "origin", [f"{i}" for i in range(4000)], 100)
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(other.path.read_bytes())
    options = (
        *("--capacity", "1GB", "--bucket", f"data={tmp_path}/origin", "--token", "fleet-token"),
        *("--fleet", f"{tmp_path}/members", "--tls-cert", str(certificate), "--tls-key", str(key)),
    )
    with contextlib.ExitStack() as stack:
        for name in ("a", "b"):
            server = ServerProcess(
                "--dir",
                str(tmp_path / name),
                "--name",
                name,
                *options,
                environment={"STOKER_CACHE_CA": str(trusted)},
            )
            stack.callback(server.stop)
        link = stack.enter_context(
            CacheClient(server.url, "fleet-token", tls=tls_of(authority), timeout_s=60)
        )
        unread = iter(range(4000))

        def peer_bytes() -> int:
            link.read("data", str(next(unread)))
            return link.status().buckets[0].peer_bytes

        assert [peer_bytes() for _ in range(20)] == [0] * 20
        (tmp_path / "new.pem").write_bytes(authority.path.read_bytes())
        (tmp_path / "new.pem").replace(trusted)
        wait_for(lambda: peer_bytes() > 0, timeout_s=60)
