"""S3 requests that are meant to hurt: mutated ones, uploads of too many parts, bodies that would unpack to much."""

from __future__ import annotations

import gzip
import http.client
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.exceptions import ClientError

from tests.chaos.s3_fuzz import Fuzz
from tests.e2e.cache_helpers import served
from tests.e2e.s3_helpers import boto3_at

pytestmark = pytest.mark.real
KEY = ("AKIDWRITER", "secret-of-writer")
MIB = 1024 * 1024


class Here(NamedTuple):
    """A server, and the folder that it writes to."""

    url: str
    origin: Path

    def ask(self, method: str, target: str, body: bytes, **headers: str) -> tuple[int, bytes]:
        """A signed request, as it is."""
        said = {name.replace("_", "-"): value for name, value in headers.items()}
        request = AWSRequest(method, f"{self.url}{target}", data=body, headers=said)
        S3SigV4Auth(Credentials(*KEY), "s3", "us-east-1").add_auth(request)
        parts = urlsplit(self.url)
        with closing(http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=120)) as link:
            link.request(method, target, body, {**dict(request.headers.items()), "Host": parts.netloc})
            answer = link.getresponse()
            return answer.status, answer.read()


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    folder = tmp_path_factory.mktemp("abuse")
    (folder / "o").mkdir()
    options = ("--key", ":".join(KEY), "--writable", "data", "--token", "a-long-token")
    with served(folder / "d", {"data": str(folder / "o")}, *options) as server:
        yield Here(server.url, folder / "o")


@pytest.fixture
def client(here: Here) -> Iterator[Any]:
    client = boto3_at(here.url, KEY)
    yield client
    client.close()


def test_mutated_requests_end_nothing_and_write_nowhere_else(tmp_path: Path) -> None:
    fuzz = Fuzz(tmp_path, seed=11)
    try:
        for number in range(600):
            fuzz.shoot(number)
        fuzz.check_alive()
    finally:
        fuzz.server.stop()
    assert {200, 400, 403, 404} <= fuzz.seen.keys()


def test_numbers_of_parts_have_bounds(here: Here, client: Any) -> None:
    upload = client.create_multipart_upload(Bucket="data", Key="parts")["UploadId"]
    for number in ("0", "-1", "10001", "9" * 30, "1e3", "", "%D9%A1"):
        status, body = here.ask("PUT", f"/data/parts?partNumber={number}&uploadId={upload}", b"x")
        assert (status, b"<Code>InvalidArgument</Code>" in body) == (400, True), (number, body)
    assert "Parts" not in client.list_parts(Bucket="data", Key="parts", UploadId=upload)
    client.abort_multipart_upload(Bucket="data", Key="parts", UploadId=upload)


@pytest.mark.parametrize(
    ("count", "code"), [(10_000, b"InvalidPart"), (10_001, b"MalformedXML"), (0, b"MalformedXML")]
)
def test_an_upload_of_parts_that_never_came_is_refused(
    here: Here, client: Any, count: int, code: bytes
) -> None:
    upload = client.create_multipart_upload(Bucket="data", Key="bogus")["UploadId"]
    parts = "".join(
        f"<Part><PartNumber>{n}</PartNumber><ETag>{n:032x}</ETag></Part>" for n in range(1, count + 1)
    )
    said = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
    status, body = here.ask("POST", f"/data/bogus?uploadId={upload}", said)
    assert (status, b"<Code>" + code + b"</Code>" in body) == (400, True), body[:300]
    assert not (here.origin / "bogus").exists()
    client.abort_multipart_upload(Bucket="data", Key="bogus", UploadId=upload)


def test_what_is_packed_is_never_unpacked(here: Here, client: Any) -> None:
    packed = gzip.compress(bytes(64 * MIB))
    client.put_object(Bucket="data", Key="bomb", Body=packed, ContentEncoding="gzip")
    assert (here.origin / "bomb").read_bytes() == packed
    for _ in range(2):
        assert here.ask("GET", "/data/bomb", b"") == (200, packed)
    document = b"<Delete><Object><Key>bomb</Key></Object></Delete>"
    for encoding, said in (("gzip", gzip.compress(document)), ("deflate", zlib.compress(document))):
        status, body = here.ask("POST", "/data?delete", said, content_encoding=encoding)
        assert (status, b"<Code>MalformedXML</Code>" in body) == (400, True)
    assert (here.origin / "bomb").exists()


def test_a_document_without_end_is_refused_before_all_of_it_is_there(here: Here) -> None:
    status, body = here.ask("POST", "/data?delete", b"<Delete>" + b" " * (6 * MIB))
    assert (status, b"<Code>MaxMessageLengthExceeded</Code>" in body) == (400, True)


def test_names_lead_nowhere_else(here: Here, client: Any) -> None:
    for key in ("../out", "a/../../out", ".stoker-writes/x", "a//b", "./x"):
        with pytest.raises(ClientError) as caught:
            client.put_object(Bucket="data", Key=key, Body=b"x")
        assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 400
    assert not (here.origin.parent / "out").exists()


def test_a_body_that_says_that_it_ends_before_its_length_is_answered(here: Here) -> None:
    """Its sender waits for the answer, and has nothing more to send."""
    parts = urlsplit(here.url)
    for body in (b"4\r\ndata\r\n0\r\n\r\n", b"2\r\nda\r\n2\r\nta\r\n0\r\n\r\n"):
        with closing(http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=20)) as link:
            link.putrequest("PUT", "/data/short")
            for name, value in (
                ("Authorization", "Bearer a-long-token"),
                ("x-amz-content-sha256", "STREAMING-UNSIGNED-PAYLOAD-TRAILER"),
                ("x-amz-decoded-content-length", "4"),
                ("Content-Length", str(len(body) + 7)),
            ):
                link.putheader(name, value)
            link.endheaders()
            link.send(body)
            answer = link.getresponse()
            assert (answer.status, b"<Code>IncompleteBody</Code>" in answer.read()) == (400, True)
    assert not (here.origin / "short").exists()
