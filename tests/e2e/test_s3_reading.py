"""Clients of S3, as they are published, read from a cache server."""

from __future__ import annotations

import contextlib
import http.client
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import boto3
import obstore
import pyarrow.fs
import pyarrow.parquet
import pytest
from botocore import UNSIGNED
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials
from botocore.exceptions import ClientError
from obstore.store import S3Store

from tests.e2e.cache_helpers import served

pytestmark = pytest.mark.real
ACCESS, SECRET = "AKIDREADER", "a-secret/of+the=reader"
BIG = bytes(range(256)) * (20 * 1024)
"""5 MiB: two blocks."""
ODD = "odd/a b+c&d=é~%2F.bin"


class Here(NamedTuple):
    """A server with two buckets, of which the key opens `data` only."""

    url: str
    folder: Path

    def boto3(self, access: str = ACCESS, secret: str = SECRET, **config: Any) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name="eu-west-3",
            aws_access_key_id=access,
            aws_secret_access_key=secret,
            config=Config(retries={"total_max_attempts": 1}, **config),
        )


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    folder = tmp_path_factory.mktemp("origin")
    for key, data in {
        "small.txt": b"hello",
        "big.bin": BIG,
        "empty": b"",
        ODD: b"odd",
        "a/1": b"1",
        "a/b/2": b"2",
    }.items():
        path = folder / "data" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (folder / "other").mkdir()
    (folder / "other" / "secret").write_bytes(b"secret")
    table = pyarrow.table({"x": list(range(1000)), "y": [f"row {n}" for n in range(1000)]})
    pyarrow.parquet.write_table(table, folder / "data" / "table.parquet")
    buckets = {name: str(folder / name) for name in ("data", "other")}
    with served(
        tmp_path_factory.mktemp("cache"),
        buckets,
        *("--token", "the-token", "--key", f"{ACCESS}:{SECRET}:data", "--key", "AKIDALL:secret-of-all"),
        *("--s3-domain", "s3.test"),
    ) as server:
        yield Here(server.url, folder)


def code_of(caught: pytest.ExceptionInfo[ClientError]) -> tuple[int, str]:
    answer = caught.value.response
    return answer["ResponseMetadata"]["HTTPStatusCode"], answer["Error"]["Code"]


def test_boto3_reads_objects_and_parts_of_them(here: Here) -> None:
    client = here.boto3()
    for _ in range(2):  # from the origin, and then from what is held
        for key, data in (("small.txt", b"hello"), ("big.bin", BIG), ("empty", b""), (ODD, b"odd")):
            answer = client.get_object(Bucket="data", Key=key)
            assert answer["Body"].read() == data
            assert answer["ContentLength"] == len(data)
            head = client.head_object(Bucket="data", Key=key)
            assert (head["ETag"], head["ContentLength"]) == (answer["ETag"], len(data))
            modified_s = (here.folder / "data" / key).stat().st_mtime
            assert (
                head["LastModified"] == answer["LastModified"] == datetime.fromtimestamp(int(modified_s), UTC)
            )
    part = client.get_object(Bucket="data", Key="big.bin", Range="bytes=4194300-4194309")
    assert part["Body"].read() == BIG[4194300:4194310]
    assert part["ContentRange"] == f"bytes 4194300-4194309/{len(BIG)}"
    assert client.get_object(Bucket="data", Key="big.bin", Range="bytes=-3")["Body"].read() == BIG[-3:]
    said = client.get_object(Bucket="data", Key="small.txt", ResponseContentType="text/plain")
    assert said["ContentType"] == "text/plain"
    with pytest.raises(ClientError) as caught:
        client.get_object(Bucket="data", Key="small.txt", Range="bytes=5-")
    assert code_of(caught) == (416, "InvalidRange")


def test_boto3_lists(here: Here) -> None:
    client = here.boto3()
    assert [one["Name"] for one in client.list_buckets()["Buckets"]] == ["data"], "those that the key opens"
    everything = ["a/1", "a/b/2", "big.bin", "empty", ODD, "small.txt", "table.parquet"]
    for version in ("list_objects", "list_objects_v2"):
        pages = client.get_paginator(version).paginate(Bucket="data", PaginationConfig={"PageSize": 2})
        assert [one["Key"] for page in pages for one in page.get("Contents", ())] == everything
        pages = client.get_paginator(version).paginate(
            Bucket="data", Delimiter="/", PaginationConfig={"PageSize": 1}
        )
        found = [(list(page.get("CommonPrefixes", ())), list(page.get("Contents", ()))) for page in pages]
        assert [one["Prefix"] for prefixes, _ in found for one in prefixes] == ["a/", "odd/"]
        assert [one["Key"] for _, keys in found for one in keys] == [
            "big.bin",
            "empty",
            "small.txt",
            "table.parquet",
        ]
    answer = client.list_objects_v2(Bucket="data", Prefix="small")
    assert answer["Contents"][0]["Size"] == 5
    assert answer["Contents"][0]["ETag"] == client.head_object(Bucket="data", Key="small.txt")["ETag"]
    assert [one["Key"] for one in client.list_object_versions(Bucket="data", Prefix="a/")["Versions"]] == [
        "a/1",
        "a/b/2",
    ]
    assert client.get_bucket_location(Bucket="data")["LocationConstraint"] is None
    client.head_bucket(Bucket="data")


def test_what_is_not_there_and_what_is_not_allowed_is_said_in_s3s_words(here: Here) -> None:
    client = here.boto3()
    for bucket, key, wanted in (
        ("data", "none", (404, "NoSuchKey")),
        ("other", "secret", (403, "AccessDenied")),
        ("nobucket", "x", (403, "AccessDenied")),
    ):
        with pytest.raises(ClientError) as caught:
            client.get_object(Bucket=bucket, Key=key)
        assert code_of(caught) == wanted
    everywhere = here.boto3("AKIDALL", "secret-of-all")
    assert everywhere.get_object(Bucket="other", Key="secret")["Body"].read() == b"secret"
    with pytest.raises(ClientError) as caught:
        everywhere.get_object(Bucket="nobucket", Key="x")
    assert code_of(caught) == (404, "NoSuchBucket")
    with pytest.raises(ClientError) as caught:
        client.head_object(Bucket="data", Key="none")
    assert code_of(caught)[0] == 404
    with pytest.raises(ClientError) as caught:
        client.get_bucket_metrics_configuration(Bucket="data", Id="any")
    assert code_of(caught) == (501, "NotImplemented")


def test_conditions(here: Here) -> None:
    client = here.boto3()
    head = client.head_object(Bucket="data", Key="small.txt")
    for condition, status in (
        ({"IfMatch": head["ETag"]}, 200),
        ({"IfMatch": '"other"'}, 412),
        ({"IfNoneMatch": head["ETag"]}, 304),
        ({"IfNoneMatch": '"other"'}, 200),
        ({"IfModifiedSince": head["LastModified"]}, 304),
        ({"IfModifiedSince": head["LastModified"] - timedelta(seconds=1)}, 200),
        ({"IfUnmodifiedSince": head["LastModified"]}, 200),
        ({"IfUnmodifiedSince": head["LastModified"] - timedelta(seconds=1)}, 412),
    ):
        try:
            found = client.get_object(Bucket="data", Key="small.txt", **condition)["ResponseMetadata"][
                "HTTPStatusCode"
            ]
        except ClientError as error:
            found = error.response["ResponseMetadata"]["HTTPStatusCode"]
        assert found == status, condition


@pytest.mark.parametrize("style", ["path", "virtual"])
def test_presigned_urls_are_good_until_they_expire(here: Here, style: str) -> None:
    client = here.boto3(s3={"addressing_style": "path"}, signature_version="s3v4")
    if style == "virtual":
        client = boto3.client(
            "s3",
            endpoint_url=f"http://s3.test:{urlsplit(here.url).port}",
            aws_access_key_id=ACCESS,
            aws_secret_access_key=SECRET,
            region_name="eu-west-3",
            config=Config(s3={"addressing_style": "virtual"}, signature_version="s3v4"),
        )

    def presigned(seconds: int) -> str:
        wanted = {"Bucket": "data", "Key": ODD}
        return str(client.generate_presigned_url("get_object", wanted, ExpiresIn=seconds))

    url = presigned(300)
    assert fetch(here, url) == (200, b"odd")
    assert fetch(here, url.replace("Expires=300", "Expires=301"))[0] == 403
    assert fetch(here, url.replace("odd/", "oddy/"))[0] == 403
    assert fetch(here, url[:-1] + ("0" if url[-1] != "0" else "1"))[0] == 403
    short = presigned(1)
    deadline = time.monotonic() + 60
    while (said := fetch(here, short)) == (200, b"odd"):
        assert time.monotonic() < deadline
        time.sleep(0.3)
    assert (said[0], b"Request has expired" in said[1]) == (403, True)


def fetch(here: Here, url: str) -> tuple[int, bytes]:
    parts = urlsplit(url)
    return ask(here, "GET", f"{parts.path}?{parts.query}", {"Host": parts.netloc})


def ask(here: Here, method: str, target: str, headers: dict[str, str]) -> tuple[int, bytes]:
    link = http.client.HTTPConnection("127.0.0.1", urlsplit(here.url).port, timeout=60)
    with contextlib.closing(link):
        link.request(method, target, headers=headers)
        answer = link.getresponse()
        return answer.status, answer.read()


def test_a_host_may_name_the_bucket(here: Here) -> None:
    """Also where another bucket has the name of the path's first part."""
    request = AWSRequest("GET", f"http://data.s3.test:{urlsplit(here.url).port}/other/secret")
    S3SigV4Auth(Credentials("AKIDALL", "secret-of-all"), "s3", "x").add_auth(request)
    for _ in range(2):
        status, body = send(here, request)
        assert (status, b"NoSuchKey" in body) == (404, True)
    request = AWSRequest("GET", f"http://other.s3.test:{urlsplit(here.url).port}/secret")
    S3SigV4Auth(Credentials("AKIDALL", "secret-of-all"), "s3", "x").add_auth(request)
    assert send(here, request) == (200, b"secret")


def send(here: Here, request: AWSRequest) -> tuple[int, bytes]:
    parts = urlsplit(request.url)
    headers = {"Host": parts.netloc, **{name: str(value) for name, value in request.headers.items()}}
    return ask(here, request.method, parts.path, headers)


@pytest.mark.parametrize("key", ["small.txt", "big.bin"])
@pytest.mark.parametrize(
    "change",
    [
        "nothing",
        "secret",
        "access key",
        "path",
        "method",
        "range",
        "date",
        "host",
        "unsigned header",
        "payload hash",
        "old",
    ],
)
def test_each_part_of_a_signed_request_is_verified(here: Here, key: str, change: str) -> None:
    """Also where the front could answer at once: it is asked for the second time."""
    assert here.boto3().get_object(Bucket="data", Key=key)["Body"].read()
    access, secret = (
        ("AKIDNONE" if change == "access key" else ACCESS),
        ("wrong-secret" if change == "secret" else SECRET),
    )
    request = AWSRequest("GET", f"{here.url}/data/{key}", headers={"Range": "bytes=0-1"})
    signer = S3SigV4Auth(Credentials(access, secret), "s3", "eu-west-3")
    signer.add_auth(request)
    if change == "path":
        request.url = f"{here.url}/data/empty"
    elif change == "method":
        request.method = "HEAD"
    elif change == "range":
        del request.headers["Range"]
        request.headers["Range"] = "bytes=0-3"
    elif change == "date":
        said = request.headers["X-Amz-Date"]
        request.headers.replace_header("X-Amz-Date", said[:-2] + ("0Z" if said[-2] != "0" else "1Z"))
    elif change == "host":
        request.headers["Host"] = "another.host"
    elif change == "unsigned header":
        request.headers["x-amz-meta-more"] = "x"
    elif change == "payload hash":
        request.headers.replace_header("X-Amz-Content-SHA256", "UNSIGNED-PAYLOAD")
    elif change == "old":
        request = signed_at(here, key, datetime.now(UTC) - timedelta(seconds=1000))
    status, body = send(here, request)
    if change == "nothing":
        assert status == 206
    else:
        assert status == 403
        assert body == b"" if change == "method" else b"<Code>" in body
    if change == "old":
        assert b"RequestTimeTooSkewed" in body


def signed_at(here: Here, key: str, when: datetime) -> AWSRequest:
    """A request that was good when it was made."""
    from stoker.cache.origin.s3_signing import Credentials as Own
    from stoker.cache.origin.s3_signing import Signer

    host = urlsplit(here.url).netloc
    head = Signer(host, "eu-west-3", Own(ACCESS, SECRET)).get(
        f"/data/{key}", "", when.strftime("%Y%m%dT%H%M%SZ")
    )
    lines = [line.partition(": ") for line in head.decode().split("\r\n")[1:] if line]
    return AWSRequest("GET", f"{here.url}/data/{key}", headers={n: v for n, _, v in lines if n != "host"})


def test_what_is_not_signed_is_refused(here: Here) -> None:
    client = here.boto3(signature_version=UNSIGNED)
    for call in (
        lambda: client.get_object(Bucket="data", Key="small.txt"),
        lambda: client.list_objects_v2(Bucket="data"),
    ):
        with pytest.raises(ClientError) as caught:
            call()
        assert code_of(caught)[0] in (401, 403)


def test_what_looks_like_a_signature_in_a_prefix_is_none(here: Here) -> None:
    """Servers of a fleet ask each other for lists of whatever prefix somebody asked for."""
    for prefix in ("X-Amz-Signature=", "X-Amz-3", "&X-Amz-Signature=1"):
        target = f"/-/list/data?prefix={quote(prefix, safe='=&') if prefix[0] != '&' else prefix}"
        assert ask(here, "GET", target, {"Authorization": "Bearer the-token"})[0] == 200
    assert here.boto3().list_objects_v2(Bucket="data", Prefix="X-Amz-Signature=")["KeyCount"] == 0


def test_a_range_of_another_version_is_not_sent(here: Here) -> None:
    request = AWSRequest(
        "GET", f"{here.url}/data/big.bin", headers={"Range": "bytes=1-2", "If-Range": '"other"'}
    )
    S3SigV4Auth(Credentials(ACCESS, SECRET), "s3", "eu-west-3").add_auth(request)
    assert send(here, request) == (200, BIG)


def test_a_query_of_very_many_fields_is_refused_unread(here: Here) -> None:
    assert ask(here, "GET", "/data/x?X-Amz-Signature=1" + "&a" * 5000, {})[0] == 400


def test_obstore_reads_and_lists(here: Here) -> None:
    store = S3Store(
        "data",
        endpoint=here.url,
        access_key_id=ACCESS,
        secret_access_key=SECRET,
        region="us-east-1",
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )
    for _ in range(2):
        assert bytes(obstore.get(store, "small.txt").bytes()) == b"hello"
        assert bytes(obstore.get(store, "big.bin").bytes()) == BIG
        assert obstore.head(store, "big.bin")["size"] == len(BIG)
        assert bytes(obstore.get_range(store, "big.bin", start=7, end=17)) == BIG[7:17]
    keys = [meta["path"] for page in obstore.list(store) for meta in page]
    assert {"a/1", "a/b/2", "big.bin", "small.txt"} <= set(keys)
    assert obstore.list_with_delimiter(store, "a")["common_prefixes"] == ["a/b"]


def test_pyarrow_reads_a_table(here: Here) -> None:
    files = pyarrow.fs.S3FileSystem(
        access_key=ACCESS,
        secret_key=SECRET,
        endpoint_override=urlsplit(here.url).netloc,
        scheme="http",
        region="us-east-1",
    )
    found = pyarrow.parquet.read_table("data/table.parquet", filesystem=files)
    assert found.num_rows == 1000
    names = [info.path for info in files.get_file_info(pyarrow.fs.FileSelector("data/a", recursive=True))]
    assert names == ["data/a/1", "data/a/b", "data/a/b/2"] or set(names) == {
        "data/a/1",
        "data/a/b",
        "data/a/b/2",
    }
