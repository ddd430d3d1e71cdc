"""Signed GETs, beside what botocore signs."""

from __future__ import annotations

import datetime
from typing import Any
from unittest.mock import patch

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials as BotoCredentials

from stoker.cache.origin.s3_signing import Credentials, Signer, is_plain

NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)


def signed_by_botocore(path: str, credentials: Credentials) -> str:
    request = AWSRequest("GET", f"http://host:9000{path}", headers={"x-amz-content-sha256": "UNUSED"})
    boto = BotoCredentials(
        credentials.access_key_id, credentials.secret_access_key, credentials.session_token or None
    )
    times: Any = patch("botocore.auth.get_current_datetime", return_value=NOW.replace(tzinfo=None))
    with times:
        auth = S3SigV4Auth(boto, "s3", "eu-west-1")
        request.context["payload_signing_enabled"] = True
        auth.add_auth(request)
    return str(request.headers["Authorization"])


@pytest.mark.parametrize("token", ["", "a-session-token"])
@pytest.mark.parametrize("path", ["/bucket/key", "/b/a/b%20c/d%3De%40f%2Cg%3Ah%2Bi", "/b/x-._0"])
def test_a_signature_is_the_one_that_botocore_makes(path: str, token: str) -> None:
    from urllib.parse import unquote

    credentials = Credentials("AK", "secret", token)
    request = Signer("host:9000", "eu-west-1", credentials).get(
        unquote(path), "range: bytes=0-1\r\n", "20260102T030405Z"
    )
    first, *lines = request.decode().split("\r\n")
    assert first == f"GET {path} HTTP/1.1"
    fields = dict(line.split(": ", 1) for line in lines if line)
    assert fields["authorization"] == signed_by_botocore(path, credentials)
    assert fields["range"] == "bytes=0-1"
    assert request.endswith(b"\r\n\r\n")


def test_the_key_is_of_its_day() -> None:
    signer = Signer("h", "r", Credentials("AK", "secret"))
    first = signer.get("/b/k", "", "20260102T235959Z")
    assert signer.get("/b/k", "", "20260103T000000Z") != first
    assert signer.get("/b/k", "", "20260102T235959Z") == first


def test_without_credentials_nothing_is_signed() -> None:
    request = Signer("h", "r", None).get("/b/k", "", "20260102T030405Z")
    assert request == b"GET /b/k HTTP/1.1\r\nhost: h\r\n\r\n"


@pytest.mark.parametrize("path", ["a", "a/b", "train/0001.tar", "x=1/y@2,3:4+5 6", "..a/b..", "..."])
def test_plain_names(path: str) -> None:
    assert is_plain(path)


@pytest.mark.parametrize(
    "path", ["", "/a", "a/", "a//b", ".", "a/..", "./a", "ä", "a%20b", "a?b", "a#b", "a~b", "a\nb"]
)
def test_names_that_are_not_left_to_chance(path: str) -> None:
    assert not is_plain(path)
