"""What S3 clients are told of an object that its origin, a real S3 server, was not written to through the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stoker.cache.client.client import CacheClient
from stoker.wire.cache_api import LOADED
from tests.e2e.cache_helpers import served
from tests.e2e.s3_helpers import boto3_at
from tests.s3_server import BUCKET, KEYS, s3_client, s3_server

pytestmark = pytest.mark.real
WRITER = ("AKIDWRITER", "secret-of-writer")


def test_what_the_origin_says_of_an_object_is_said(tmp_path: Path) -> None:
    """Its very tag, its type and its own fields, also of what was listed and loaded before, and what they are now."""
    with s3_server(tmp_path) as endpoint:
        origin = s3_client(endpoint)
        options = ("--key", f"{WRITER[0]}:{WRITER[1]}", "--token", "a-long-token")
        buckets = {"data": f"s3://{BUCKET}/w?endpoint={endpoint}"}
        with served(tmp_path / "one", buckets, *options, environment=KEYS) as server:
            client = boto3_at(server.url, WRITER)

            def put(who: str) -> str:
                said = origin.put_object(
                    Bucket=BUCKET,
                    Key="w/k",
                    Body=b"data" * 1000,
                    ContentType=f"text/{who}",
                    ContentDisposition="attachment",
                    Metadata={"who": who},
                )
                return str(said["ETag"])

            def check(answer: Any, tag: str, who: str) -> None:
                assert (answer["ETag"], answer["ContentType"]) == (tag, f"text/{who}")
                assert (answer["Metadata"], answer["ContentDisposition"]) == ({"who": who}, "attachment")
                assert answer["LastModified"] is not None

            tag = put("one")
            listed = client.list_objects_v2(Bucket="data")["Contents"]
            assert [(one["Key"], one["ETag"]) for one in listed] == [("k", tag)]
            with CacheClient(server.url, "a-long-token") as own:
                assert own.load("data", ["k"])[0].state == LOADED
            for _ in range(2):
                check(client.get_object(Bucket="data", Key="k"), tag, "one")
                check(client.head_object(Bucket="data", Key="k"), tag, "one")
            assert client.get_object(Bucket="data", Key="k", IfMatch=tag)["ETag"] == tag
            assert put("two") == tag, "the same content, and another type"
            with CacheClient(server.url, "a-long-token") as own:
                own.refresh("data", "")
            check(client.get_object(Bucket="data", Key="k"), tag, "two")
            check(client.head_object(Bucket="data", Key="k"), tag, "two")
