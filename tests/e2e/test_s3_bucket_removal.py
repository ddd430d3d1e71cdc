"""A bucket that is removed while it is written to: no write that was acknowledged is lost with it."""

from __future__ import annotations

import http.client
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.exceptions import ClientError

from tests.e2e.s3_helpers import BucketMaker, refusal
from tests.s3_server import BUCKET, s3_client

pytestmark = pytest.mark.real
BODY = b"x" * 300_000


def begun(here: BucketMaker, target: str) -> http.client.HTTPConnection:
    """A PUT of which half has come."""
    request = AWSRequest("PUT", f"{here.url}{target}", data=BODY)
    S3SigV4Auth(Credentials(*here.admin), "s3", "us-east-1").add_auth(request)
    parts = urlsplit(here.url)
    link = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    link.putrequest("PUT", target, skip_host=True)
    for name, value in {**dict(request.headers.items()), "Host": parts.netloc}.items():
        link.putheader(name, value)
    link.putheader("Content-Length", str(len(BODY)))
    link.endheaders()
    link.send(BODY[:150_000])
    return link


def test_a_write_into_a_bucket_that_was_removed_meanwhile_fails(here: BucketMaker) -> None:
    with closing(here.client()) as client:
        bucket = here.bucket(client)
        with closing(begun(here, f"/{bucket}/k")) as link:
            time.sleep(0.5)
            client.delete_bucket(Bucket=bucket)
            link.send(BODY[150_000:])
            answer = link.getresponse()
            assert (answer.status, b"<Code>NoSuchBucket</Code>" in answer.read()) == (404, True)
        if here.kind == "folder":
            assert list(Path(here.place).iterdir()) == [], "the folder is gone with it"
            client.create_bucket(Bucket=bucket)
            assert "Contents" not in client.list_objects_v2(Bucket=bucket)


def test_a_bucket_with_objects_stays_as_it_is(here: BucketMaker) -> None:
    with closing(here.client()) as client:
        bucket = here.bucket(client)
        client.put_object(Bucket=bucket, Key="a/b/c", Body=b"x")
        upload = client.create_multipart_upload(Bucket=bucket, Key="u")["UploadId"]
        assert refusal(client.delete_bucket, Bucket=bucket) == (409, "BucketNotEmpty")
        assert client.get_object(Bucket=bucket, Key="a/b/c")["Body"].read() == b"x"
        client.upload_part(Bucket=bucket, Key="u", UploadId=upload, PartNumber=1, Body=b"x")
        client.delete_object(Bucket=bucket, Key="a/b/c")
        client.delete_bucket(Bucket=bucket)
        assert refusal(client.head_bucket, Bucket=bucket)[0] == 404
        if here.kind == "s3":
            with closing(s3_client(here.place)) as origin:
                left = origin.list_multipart_uploads(Bucket=BUCKET, Prefix=f"made/{bucket}/")
                assert "Uploads" not in left, "nobody could give it up any more"


def test_a_bucket_is_removed_with_no_write_that_was_acknowledged(here: BucketMaker) -> None:
    """Writers against who removes it: a bucket that goes had nothing in it that anybody was told is there."""
    with closing(here.client()) as client:
        for _ in range(12):
            bucket, written, failed = here.bucket(client), list[str](), list[str]()
            starts = threading.Barrier(5)
            threads = [
                threading.Thread(target=write, args=(here, bucket, f"k{number}", starts, written, failed))
                for number in range(4)
            ]
            for thread in threads:
                thread.start()
            starts.wait()
            try:
                client.delete_bucket(Bucket=bucket)
                refused = ""
            except ClientError as error:
                refused = error.response["Error"]["Code"]
            for thread in threads:
                thread.join()
            assert refused in ("", "BucketNotEmpty")
            # What was written while it was looked whether there is anything is to be tried again.
            assert set(failed) <= {"NoSuchBucket", *(["ServiceUnavailable"] if refused else [])}
            if not refused:
                assert written == []
            else:
                keys = {one["Key"] for one in client.list_objects_v2(Bucket=bucket)["Contents"]}
                assert set(written) <= keys
                assert keys


def write(
    here: BucketMaker, bucket: str, key: str, starts: Any, written: list[str], failed: list[str]
) -> None:
    with closing(here.client()) as client:
        starts.wait()
        try:
            client.put_object(Bucket=bucket, Key=key, Body=b"x")
        except ClientError as error:
            failed.append(error.response["Error"]["Code"])
        else:
            written.append(key)
