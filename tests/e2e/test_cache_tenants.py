"""Principals of a file: what each may do, how credentials change while the server runs, and who vouches for others."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import jwt
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from stoker.cache.client.client import CacheClient
from stoker.errors import AccessDenied, NotAuthenticated
from tests.e2e.cache_helpers import ServerProcess, fill, served
from tests.e2e.run_helpers import wait_for

pytestmark = pytest.mark.real

FILE = """
[principals.operator]
rules = ["*: all"]
tokens = ["operator-token"]

[principals.vision]
rules = ["data/vision/: all", "data/shared/: read, list"]
token_files = ["vision.token"]
keys = ["VISION:secret-of-vision"]

[principals.everyone]
rules = ["data/public/: read"]
anonymous = true
"""
KEYS = ["vision/a", "vision/b", "shared/c", "public/d", "audio/e"]


@contextmanager
def running(folder: Path, text: str = FILE, *more: str) -> Iterator[tuple[ServerProcess, dict[str, bytes]]]:
    objects = fill(folder / "origin", KEYS)
    (folder / "vision.token").write_text("vision-token\n")
    (folder / "access.toml").write_text(text)
    options = "--access", str(folder / "access.toml"), "--writable", "data", *more
    with served(folder / "cache", {"data": str(folder / "origin")}, *options) as server:
        yield server, objects


def asked(
    server: ServerProcess, target: str, token: str | None = None, method: str = "GET"
) -> tuple[int, bytes]:
    with closing(http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=20)) as link:
        link.request(method, target, headers={} if token is None else {"Authorization": f"Bearer {token}"})
        answer = link.getresponse()
        return answer.status, answer.read()


def s3(server: ServerProcess, access: str, secret: str) -> Any:
    return boto3.client(
        "s3", endpoint_url=server.url, region_name="us-east-1",
        aws_access_key_id=access, aws_secret_access_key=secret,
        config=Config(retries={"total_max_attempts": 1}),
    )  # fmt: skip


def test_a_principal_does_what_its_rules_allow_and_nothing_else(tmp_path: Path) -> None:
    with running(tmp_path) as (server, objects):
        for _ in range(3):  # from the origin, and as hits
            for key, data in objects.items():
                may_vision, may_all = not key.startswith(("audio", "public")), key.startswith("public")
                assert asked(server, f"/data/{key}", "operator-token") == (200, data)
                status, body = asked(server, f"/data/{key}", "vision-token")
                assert (status, body == data) == ((200, True) if may_vision else (403, False)), key
                status, body = asked(server, f"/data/{key}")
                assert (status, body == data) == ((200, True) if may_all else (403, False)), key
            assert asked(server, "/data/vision/a", "wrong-token")[0] == 401
        with CacheClient(server.url, "vision-token", timeout_s=20.0) as client:
            assert [client.stat("data", key).size_bytes for key in KEYS[:3]] == [1000] * 3
            assert [one.key for one in client.list_objects("data", "vision/")] == ["vision/a", "vision/b"]
            assert client.evict("data", "vision/").blocks == 2
            assert len(client.load("data", ["vision/a"])) == 1
            assert client.pin("data", "vision/").prefixes == ["vision/"]
            client.refresh("data", "shared/")
            assert [row.name for row in client.status().buckets] == ["data"]
            for refused in (
                lambda: client.stat("data", "audio/e"),
                lambda: client.list_objects("data"),
                lambda: client.list_objects("data", "vis"),
                lambda: client.evict("data", "shared/"),
                lambda: client.evict("data"),
                lambda: client.pin("data", "shared/"),
                lambda: client.load("data", ["vision/a", "audio/e"]),
                lambda: client.refresh("data", "audio/"),
                lambda: client.read_many("data", ["vision/a", "public/d"]),
                lambda: client.stat("none", "vision/a"),
            ):
                with pytest.raises(AccessDenied, match="vision may not"):
                    refused()


def test_s3_clients_are_held_to_the_same_rules(tmp_path: Path) -> None:
    with running(tmp_path) as (server, objects):
        client = s3(server, "VISION", "secret-of-vision")
        assert client.get_object(Bucket="data", Key="shared/c")["Body"].read() == objects["shared/c"]
        client.put_object(Bucket="data", Key="vision/new", Body=b"written")
        assert (tmp_path / "origin/vision/new").read_bytes() == b"written"
        client.copy_object(Bucket="data", Key="vision/copy", CopySource={"Bucket": "data", "Key": "shared/c"})
        listed = client.list_objects_v2(Bucket="data", Prefix="vision/")
        assert [one["Key"] for one in listed["Contents"]] == [
            "vision/a",
            "vision/b",
            "vision/copy",
            "vision/new",
        ]
        removed = client.delete_objects(
            Bucket="data", Delete={"Objects": [{"Key": "vision/new"}, {"Key": "shared/c"}]}
        )
        assert [one["Key"] for one in removed["Deleted"]] == ["vision/new"]
        assert [(one["Key"], one["Code"]) for one in removed["Errors"]] == [("shared/c", "AccessDenied")]
        assert (tmp_path / "origin/shared/c").exists()
        source = {"Bucket": "data", "Key": "audio/e"}
        for refused in (
            lambda: client.get_object(Bucket="data", Key="audio/e"),
            lambda: client.put_object(Bucket="data", Key="shared/x", Body=b"x"),
            lambda: client.copy_object(Bucket="data", Key="vision/x", CopySource=source),
            lambda: client.delete_object(Bucket="data", Key="shared/c"),
            lambda: client.list_objects_v2(Bucket="data"),
            lambda: client.create_multipart_upload(Bucket="data", Key="shared/x"),
        ):
            with pytest.raises(ClientError, match="AccessDenied"):
                refused()
        assert not (tmp_path / "origin/shared/x").exists()


def test_what_was_changed_and_what_was_refused_is_written_down(tmp_path: Path) -> None:
    log = tmp_path / "audit.log"

    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    with running(tmp_path, FILE, "--audit-log", str(log)) as (server, _):
        client = s3(server, "VISION", "secret-of-vision")
        client.put_object(Bucket="data", Key="vision/new", Body=b"written")
        client.get_object(Bucket="data", Key="vision/new")
        client.delete_objects(Bucket="data", Delete={"Objects": [{"Key": "vision/new"}, {"Key": "shared/c"}]})
        assert asked(server, "/data/audio/e", "vision-token")[0] == 403
        assert asked(server, "/data/vision/a", "vision-token")[0] == 200
        with pytest.raises(ClientError):
            s3(server, "VISION", "wrong-secret-here").get_object(Bucket="data", Key="vision/a")
        with CacheClient(server.url, "operator-token", timeout_s=20.0) as operator:
            operator.evict("data", "vision/")
            operator.status()
        wait_for(lambda: len(lines()) >= 5, 60)
        assert [(one["principal"], one["method"], one["path"], one["status"]) for one in lines()] == [
            ("vision", "PUT", "/data/vision/new", 200),
            ("vision", "POST", "/data", 200),
            ("vision", "GET", "/data/audio/e", 403),
            ("unproven", "GET", "/data/vision/a", 403),
            ("operator", "POST", "/-/evict/data", 200),
        ]
        assert {one["client"] for one in lines()} == {"127.0.0.1"}
        assert lines()[1]["keys"] == ["vision/new", "shared/c"]
        assert all(one["request_id"] and one["time"] for one in lines())
        assert "secret" not in log.read_text()
        # As logrotate does it.
        log.rename(tmp_path / "audit.log.1")
        client.put_object(Bucket="data", Key="vision/new", Body=b"again")
        wait_for(lambda: len(lines()) == 1, 60)


def test_a_log_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with running(tmp_path, FILE, "--audit-log", "/dev/full") as (server, _):
        s3(server, "VISION", "secret-of-vision").put_object(Bucket="data", Key="vision/new", Body=b"written")
        with CacheClient(server.url, "operator-token", timeout_s=20.0) as operator:
            assert any("/dev/full cannot be written" in note for note in operator.status().notes)


def test_credentials_change_while_the_server_runs(tmp_path: Path) -> None:
    with running(tmp_path) as (server, objects):
        with CacheClient(server.url, "operator-token", timeout_s=20.0) as operator:
            kept = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=20)

            def status_of(token: str) -> int:
                kept.request("GET", "/data/vision/a", headers={"Authorization": f"Bearer {token}"})
                answer = kept.getresponse()
                answer.read()
                return answer.status

            assert status_of("vision-token") == 200
            # Both, while one takes the place of the other; and then the new one alone, on a connection that is open.
            (tmp_path / "vision.token").write_text("vision-token\nrenewed-token\n")
            wait_for(lambda: asked(server, "/data/vision/a", "renewed-token")[0] == 200, 60)
            assert status_of("vision-token") == 200
            (tmp_path / "vision.token").write_text("renewed-token\n")
            wait_for(lambda: asked(server, "/data/vision/a", "vision-token")[0] == 401, 60)
            assert status_of("vision-token") == 401
            kept.close()
            # What cannot be understood changes nothing, and is told.
            (tmp_path / "access.toml").write_text(FILE.replace("read, list", "raed"))
            wait_for(lambda: any("'raed'" in note for note in operator.status().notes), 60)
            assert asked(server, "/data/shared/c", "renewed-token") == (200, objects["shared/c"])
            (tmp_path / "access.toml").write_text(
                FILE.replace('"data/shared/: read, list"', '"data/audio/: read"')
            )
            wait_for(lambda: asked(server, "/data/audio/e", "renewed-token")[0] == 200, 60)
            assert asked(server, "/data/shared/c", "renewed-token")[0] == 403
            assert operator.status().notes == []
        # A file without anyone is no open door.
        (tmp_path / "access.toml").write_text("")
        wait_for(lambda: asked(server, "/data/vision/a", "operator-token")[0] == 401, 60)
        assert asked(server, "/data/public/d")[0] == 401


ISSUER, AUDIENCE = "https://issuer.example", "stoker"


class Issuer:
    """Signs tokens, and writes its public keys to a file."""

    def __init__(self, path: Path, name: str = "first") -> None:
        self.key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self.name = name
        public = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(self.key.public_key()))
        path.write_text(json.dumps({"keys": [{**public, "kid": name, "use": "sig", "alg": "RS256"}]}))

    def token(self, **other: Any) -> str:
        claims = {
            "iss": ISSUER,
            "aud": AUDIENCE,
            "sub": "repo:vision/train",
            "exp": time.time() + 600,
            **other,
        }
        said = {name: value for name, value in claims.items() if value is not None}
        return jwt.encode(said, self.key, algorithm="RS256", headers={"kid": self.name})

    @property
    def public_pem(self) -> bytes:
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        return self.key.public_key().public_bytes(serialization.Encoding.PEM, form)


def signed_with_public_key(token: str, secret: bytes) -> str:
    """The claims of a token, signed with what everybody knows."""
    head = base64.urlsafe_b64encode(json.dumps({"alg": "HS256", "kid": "first"}).encode()).rstrip(b"=")
    said = head + b"." + token.split(".")[1].encode()
    proof = hmac.new(secret, said, hashlib.sha256).digest()
    return (said + b"." + base64.urlsafe_b64encode(proof).rstrip(b"=")).decode()


def test_tokens_of_an_issuer_are_taken_for_whom_it_vouches(tmp_path: Path) -> None:
    issuer = Issuer(tmp_path / "jwks.json")
    stranger = Issuer(tmp_path / "other.json")
    text = FILE.replace('keys = ["VISION', 'subjects = ["repo:vision/*"]\nkeys = ["VISION')
    text += f'[jwt]\nissuer = "{ISSUER}"\naudience = "{AUDIENCE}"\njwks = "jwks.json"\n'
    with running(tmp_path, text) as (server, objects):
        token = issuer.token()
        for _ in range(3):  # proved once, and then known
            assert asked(server, "/data/vision/a", token) == (200, objects["vision/a"])
            assert asked(server, "/data/audio/e", token)[0] == 403
        assert asked(server, "/data/public/d")[0] == 200
        unsigned = jwt.encode(
            {"iss": ISSUER, "aud": AUDIENCE, "sub": "repo:vision/train"}, None, algorithm="none"
        )
        for wrong in (
            issuer.token(aud="another"),
            issuer.token(iss="https://another.example"),
            issuer.token(exp=time.time() - 60),
            issuer.token(exp=None),
            issuer.token(aud=None),
            issuer.token(nbf=time.time() + 600),
            stranger.token(),
            unsigned,
            signed_with_public_key(token, issuer.public_pem),
            token[:-8] + "AAAAAAAA",
            token.replace(".", "", 1),
            "a.b.c",
            "x" * 20_000,
        ):
            status, body = asked(server, "/data/vision/a", wrong)
            assert (status, b"nobody vouches" in body or b"not known" in body) == (401, True), (status, body)
        status, body = asked(server, "/data/vision/a", issuer.token(sub="repo:audio/train"))
        assert (status, b"no principal here has the subject" in body) == (401, True)
        with CacheClient(server.url, issuer.token(jti=os.urandom(8).hex()), timeout_s=20.0) as client:
            assert client.read_many("data", ["vision/a", "vision/b"]) == [
                objects["vision/a"],
                objects["vision/b"],
            ]
        # Another key: what the old one has signed opens nothing any more, also where it was known.
        renewed = Issuer(tmp_path / "jwks.json", "second")
        wait_for(lambda: asked(server, "/data/vision/a", renewed.token())[0] == 200, 60)
        assert asked(server, "/data/vision/a", token)[0] == 401
        with CacheClient(server.url, token, timeout_s=20.0) as client, pytest.raises(NotAuthenticated):
            client.stat("data", "vision/a")


def posted(
    server: ServerProcess, token: str, size_bytes: int, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """What is answered to who sends a head and nothing of the body that it speaks of."""
    said = {"Authorization": f"Bearer {token}", "Content-Length": str(size_bytes), **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in said.items())
    with socket.create_connection(
        (urlsplit(server.url).hostname or "", urlsplit(server.url).port or 0), 20
    ) as link:
        link.sendall(f"POST /-/load/data HTTP/1.1\r\nHost: h\r\n{head}\r\n".encode())
        answer = http.client.HTTPResponse(link)
        answer.begin()
        return answer.status, dict(answer.getheaders()), answer.read()


def test_who_is_not_known_is_refused_before_a_body_is_asked_for(tmp_path: Path) -> None:
    issuer = Issuer(tmp_path / "jwks.json")
    text = FILE.replace('keys = ["VISION', 'subjects = ["repo:vision/*"]\nkeys = ["VISION')
    text += f'[jwt]\nissuer = "{ISSUER}"\naudience = "{AUDIENCE}"\njwks = "jwks.json"\n'
    with running(tmp_path, text) as (server, _):
        for size_bytes in (100, 16 * 1024 * 1024, 10**15):
            status, headers, body = posted(server, issuer.token(aud="another"), size_bytes)
            assert (status, headers["Connection"], b"nobody vouches" in body) == (401, "close", True)
        # Whom somebody vouches for is asked for it, and may send no more than others.
        status, headers, _ = posted(server, issuer.token(jti="first"), 17 * 1024 * 1024)
        assert (status, headers["Connection"]) == (413, "close")
        with closing(http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=20)) as link:
            said = {"Authorization": f"Bearer {issuer.token(jti='chunks')}"}
            chunks = iter([bytes(1024 * 1024)] * 17)
            link.request("POST", "/-/load/data", body=chunks, headers=said, encode_chunked=True)
            assert link.getresponse().status == 413
        with CacheClient(server.url, issuer.token(jti="second"), timeout_s=20.0) as client:
            assert len(client.load("data", ["vision/a"])) == 1


def test_the_first_answer_to_a_proved_token_goes_on_its_account(tmp_path: Path) -> None:
    issuer = Issuer(tmp_path / "jwks.json")
    text = '[principals.ci]\nrules = ["data: read"]\nsubjects = ["repo:vision/*"]\n[principals.operator]\n'
    text += 'rules = ["*: all"]\ntokens = ["operator-token"]\n'
    text += f'[jwt]\nissuer = "{ISSUER}"\naudience = "{AUDIENCE}"\njwks = "jwks.json"\n'
    with running(tmp_path, text) as (server, objects):
        assert asked(server, "/data/vision/a", issuer.token()) == (200, objects["vision/a"])

        def sent_bytes() -> int:
            figures = asked(server, "/-/metrics", "operator-token")[1].decode()
            (sent,) = re.findall(r'stoker_cache_principal_sent_bytes_total{principal="ci"} (\d+)', figures)
            return int(sent)

        wait_for(lambda: sent_bytes() > len(objects["vision/a"]), why="account of what was sent just now")
