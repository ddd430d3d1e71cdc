"""Clients of S3 write through a cache server, to a folder and to a real S3 server behind it."""

from __future__ import annotations

import hashlib
import http.client
import io
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pyarrow
import pyarrow.fs
import pyarrow.parquet
import pytest
from boto3.s3.transfer import TransferConfig
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.exceptions import ClientError

from stoker.cache.client.client import CacheClient
from tests.e2e.cache_helpers import served
from tests.e2e.run_helpers import wait_for
from tests.e2e.s3_helpers import boto3_at
from tests.s3_server import BUCKET, KEYS, s3_client, s3_server

pytestmark = pytest.mark.real
WRITER, READER = ("AKIDWRITER", "secret-of-writer"), ("AKIDREADER", "secret-of-reader")
MIB = 1024 * 1024


class Here(NamedTuple):
    """Two servers of a fleet in front of one origin."""

    urls: list[str]
    origin: str

    def boto3(self, which: int = 0, key: tuple[str, str] = WRITER, **config: Any) -> Any:
        return boto3_at(self.urls[which], key, **config)

    def at_origin(self, key: str) -> bytes | None:
        """What the origin has, asked without the cache."""
        if self.origin.startswith("/"):
            path = Path(self.origin) / key
            return path.read_bytes() if path.exists() else None
        client = s3_client(self.origin.partition("endpoint=")[2])
        try:
            return client.get_object(Bucket=BUCKET, Key=f"w/{key}")["Body"].read()  # type: ignore[no-any-return]
        except ClientError:
            return None


@pytest.fixture(scope="module", params=["folder", "s3"])
def here(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    folder = tmp_path_factory.mktemp("all")
    (folder / "origin").mkdir()
    if request.param == "s3":
        with s3_server(folder) as endpoint:
            yield from fleet(folder, f"s3://{BUCKET}/w?endpoint={endpoint}")
    else:
        yield from fleet(folder, str(folder / "origin"))


def fleet(folder: Path, origin: str) -> Iterator[Here]:
    (folder / "members").mkdir()
    options = (
        *("--fleet", f"file://{folder / 'members'}", "--token", "fleet-token", "--writable", "data"),
        *("--key", f"{WRITER[0]}:{WRITER[1]}:data=rw,fixed=rw", "--key", f"{READER[0]}:{READER[1]}:data"),
    )
    buckets = {"data": origin, "fixed": origin}
    with (
        served(folder / "one", buckets, *options, environment=KEYS) as one,
        served(folder / "two", buckets, *options, environment=KEYS) as two,
    ):
        for server in (one, two):
            with CacheClient(server.url, "fleet-token") as client:
                wait_for(lambda client=client: members(client) == 2, 30, why="the fleet")
        yield Here([one.url, two.url], origin)


def members(client: CacheClient) -> int:
    fleet = client.status().fleet
    return 0 if fleet is None else len(fleet.members)


def code_of(caught: pytest.ExceptionInfo[ClientError]) -> tuple[int, str]:
    answer = caught.value.response
    return answer["ResponseMetadata"]["HTTPStatusCode"], answer["Error"]["Code"]


def test_what_is_written_at_one_server_is_read_at_all(here: Here) -> None:
    first, second = here.boto3(0), here.boto3(1)
    for key in ("a/plain", "odd é+&=%2F", "empty"):
        for data in (b"" if key == "empty" else b"one", os.urandom(5 * MIB), b"three"):
            said = first.put_object(
                Bucket="data", Key=key, Body=data, ContentType="text/x", Metadata={"who": "me"}
            )
            assert here.at_origin(key) == data, "the origin has it when it is acknowledged"
            for client in (first, second, first, second):
                found = client.get_object(Bucket="data", Key=key)
                assert found["Body"].read() == data
                assert found["ETag"] == said["ETag"]
            listed = second.list_objects_v2(Bucket="data", Prefix=key)["Contents"]
            assert [(one["Key"], one["Size"]) for one in listed] == [(key, len(data))]
        head = first.head_object(Bucket="data", Key=key)
        assert head["ContentType"] == "text/x"
        assert head["Metadata"] == {"who": "me"}


def test_what_is_removed_at_one_server_is_gone_at_all(here: Here) -> None:
    first, second = here.boto3(0), here.boto3(1)
    keys = [f"gone/{number}" for number in range(5)]
    for key in keys:
        first.put_object(Bucket="data", Key=key, Body=b"x")
        assert second.get_object(Bucket="data", Key=key)["Body"].read() == b"x"
    second.delete_object(Bucket="data", Key=keys[0])
    said = first.delete_objects(
        Bucket="data", Delete={"Objects": [{"Key": key} for key in (*keys[1:], "gone/none")]}
    )
    assert {one["Key"] for one in said["Deleted"]} == {*keys[1:], "gone/none"}
    for key in keys:
        assert here.at_origin(key) is None
        for client in (first, second):
            with pytest.raises(ClientError) as caught:
                client.get_object(Bucket="data", Key=key)
            assert code_of(caught) == (404, "NoSuchKey")
    assert "Contents" not in second.list_objects_v2(Bucket="data", Prefix="gone/")
    first.delete_object(Bucket="data", Key="gone/none")


def test_large_files_are_uploaded_in_parts_at_any_server(here: Here, tmp_path: Path) -> None:
    data = os.urandom(23 * MIB + 5)
    path = tmp_path / "large"
    path.write_bytes(data)
    transfer = TransferConfig(multipart_threshold=5 * MIB, multipart_chunksize=5 * MIB, max_concurrency=4)
    here.boto3().upload_file(str(path), "data", "parts/large", Config=transfer)
    assert hashlib.sha256(here.at_origin("parts/large") or b"").digest() == hashlib.sha256(data).digest()
    found = io.BytesIO()
    here.boto3(1).download_fileobj("data", "parts/large", found, Config=transfer)
    assert found.getvalue() == data


def test_an_upload_is_seen_by_all_servers_and_can_be_given_up(here: Here) -> None:
    first, second = here.boto3(0), here.boto3(1)
    begun = first.create_multipart_upload(Bucket="data", Key="parts/x")
    which = {"Bucket": "data", "Key": "parts/x", "UploadId": begun["UploadId"]}
    parts = []
    for number, client in ((1, first), (2, second)):
        said = client.upload_part(**which, PartNumber=number, Body=bytes([number]) * 5 * MIB)
        parts.append({"PartNumber": number, "ETag": said["ETag"]})
    assert [one["PartNumber"] for one in second.list_parts(**which)["Parts"]] == [1, 2]
    uploads = second.list_multipart_uploads(Bucket="data", Prefix="parts/")["Uploads"]
    assert [(one["Key"], one["UploadId"]) for one in uploads] == [("parts/x", begun["UploadId"])]
    with pytest.raises(ClientError) as caught:
        first.get_object(Bucket="data", Key="parts/x")
    assert code_of(caught) == (404, "NoSuchKey"), "nobody sees it before it is complete"
    wrong = [{"PartNumber": 1, "ETag": '"0123"'}]
    with pytest.raises(ClientError) as caught:
        first.complete_multipart_upload(**which, MultipartUpload={"Parts": wrong})
    assert code_of(caught)[1] == "InvalidPart"
    second.complete_multipart_upload(**which, MultipartUpload={"Parts": parts})
    assert first.get_object(Bucket="data", Key="parts/x")["Body"].read() == b"\1" * 5 * MIB + b"\2" * 5 * MIB
    begun = first.create_multipart_upload(Bucket="data", Key="parts/y")
    which = {"Bucket": "data", "Key": "parts/y", "UploadId": begun["UploadId"]}
    first.upload_part(**which, PartNumber=1, Body=b"small")
    two = second.upload_part(**which, PartNumber=2, Body=b"small")
    listed = [{"PartNumber": number, "ETag": two["ETag"]} for number in (1, 2)]
    with pytest.raises(ClientError) as caught:
        first.complete_multipart_upload(**which, MultipartUpload={"Parts": listed})
    assert code_of(caught)[1] == "EntityTooSmall"
    second.abort_multipart_upload(**which)
    with pytest.raises(ClientError) as caught:
        first.upload_part(**which, PartNumber=3, Body=b"late")
    assert code_of(caught) == (404, "NoSuchUpload")
    assert here.at_origin("parts/y") is None


def test_objects_are_copied(here: Here) -> None:
    client = here.boto3()
    client.put_object(Bucket="data", Key="from", Body=b"copied", ContentType="text/y", Metadata={"k": "v"})
    client.copy_object(Bucket="data", Key="to", CopySource={"Bucket": "data", "Key": "from"})
    assert here.at_origin("to") == b"copied"
    found = here.boto3(1).get_object(Bucket="data", Key="to")
    assert found["Body"].read() == b"copied"
    with pytest.raises(ClientError) as caught:
        client.copy_object(Bucket="data", Key="to", CopySource={"Bucket": "data", "Key": "none"})
    assert code_of(caught) == (404, "NoSuchKey")


def test_writes_under_a_condition(here: Here) -> None:
    client = here.boto3()
    client.delete_object(Bucket="data", Key="cond")
    first = client.put_object(Bucket="data", Key="cond", Body=b"1", IfNoneMatch="*")
    with pytest.raises(ClientError) as caught:
        client.put_object(Bucket="data", Key="cond", Body=b"2", IfNoneMatch="*")
    assert code_of(caught) == (412, "PreconditionFailed")
    client.put_object(Bucket="data", Key="cond", Body=b"3", IfMatch=first["ETag"])
    with pytest.raises(ClientError) as caught:
        here.boto3(1).put_object(Bucket="data", Key="cond", Body=b"4", IfMatch=first["ETag"])
    assert code_of(caught) == (412, "PreconditionFailed")
    assert here.at_origin("cond") == b"3"


def test_who_may_not_write_does_not(here: Here) -> None:
    reader = here.boto3(key=READER)
    for call in (
        lambda: reader.put_object(Bucket="data", Key="no", Body=b"x"),
        lambda: reader.delete_object(Bucket="data", Key="no"),
        lambda: reader.create_multipart_upload(Bucket="data", Key="no"),
        lambda: here.boto3().put_object(Bucket="fixed", Key="no", Body=b"x"),
    ):
        with pytest.raises(ClientError) as caught:
            call()
        assert code_of(caught) == (403, "AccessDenied")
    assert here.at_origin("no") is None


@pytest.mark.parametrize("defect", ["checksum", "hash", "short"])
def test_a_body_that_is_not_what_was_meant_leaves_nothing(here: Here, defect: str) -> None:
    here.boto3().put_object(Bucket="data", Key="kept", Body=b"before")
    data = b"x" * 100_000
    headers = {"x-amz-content-sha256": hashlib.sha256(data).hexdigest()}
    if defect == "checksum":
        headers["x-amz-checksum-crc32"] = "AAAAAA=="
    request = AWSRequest("PUT", f"{here.urls[0]}/data/kept", data=data, headers=headers)
    S3SigV4Auth(Credentials(*WRITER), "s3", "us-east-1").add_auth(request)
    parts = urlsplit(here.urls[0])
    with closing(http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=20)) as link:
        sent = data[:-10] + b"0123456789" if defect == "hash" else data
        link.putrequest("PUT", "/data/kept", skip_host=True)
        for name, value in {"Host": parts.netloc, **dict(request.headers.items())}.items():
            if name.lower() != "content-length":
                link.putheader(name, str(value))
        link.putheader("Content-Length", str(len(data)))
        link.endheaders()
        if defect == "short":
            link.send(sent[:5000])
        else:
            link.send(sent)
            answer = link.getresponse()
            wanted = b"BadDigest" if defect == "checksum" else b"XAmzContentSHA256Mismatch"
            assert (answer.status, wanted in answer.read()) == (400, True)
    assert here.at_origin("kept") == b"before"
    assert here.boto3(1).get_object(Bucket="data", Key="kept")["Body"].read() == b"before"


def test_of_many_writers_one_wins_and_all_read_that(here: Here) -> None:
    clients = [here.boto3(0), here.boto3(1)]
    bodies = [bytes([number]) * 300_000 for number in range(8)]

    def put(number: int) -> None:
        clients[number % 2].put_object(Bucket="data", Key="race", Body=bodies[number])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(put, range(8)))
    found = {clients[which].get_object(Bucket="data", Key="race")["Body"].read() for which in (0, 1)}
    assert found == {here.at_origin("race")}
    assert found <= set(bodies)


def test_pyarrow_writes_a_table(here: Here) -> None:
    files = pyarrow.fs.S3FileSystem(
        access_key=WRITER[0],
        secret_key=WRITER[1],
        endpoint_override=urlsplit(here.urls[0]).netloc,
        scheme="http",
        region="us-east-1",
    )
    table = pyarrow.table({"x": list(range(100_000))})
    pyarrow.parquet.write_table(table, "data/table.parquet", filesystem=files)
    assert pyarrow.parquet.read_table("data/table.parquet", filesystem=files).num_rows == 100_000
