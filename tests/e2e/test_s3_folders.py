"""Folders as clients of S3 make them, objects without content whose keys end with a slash: with a folder and a real S3
server behind."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import pyarrow
import pyarrow.dataset
import pyarrow.fs
import pytest

from tests.e2e.s3_helpers import BucketMaker, refusal

pytestmark = pytest.mark.real


def keys_of(client: Any, bucket: str, **asked: Any) -> tuple[list[str], list[str]]:
    said = client.list_objects_v2(Bucket=bucket, **asked)
    keys = [one["Key"] for one in said.get("Contents", [])]
    return keys, [one["Prefix"] for one in said.get("CommonPrefixes", [])]


def test_a_folder_is_an_object(here: BucketMaker, client: Any) -> None:
    bucket = here.bucket(client)
    kind = {"ContentType": "application/x-directory", "Metadata": {"a": "b"}}
    put = client.put_object(Bucket=bucket, Key="dir/", **kind)
    for key in ("dir-1/x", "dir/x", "dir0"):
        client.put_object(Bucket=bucket, Key=key, Body=b"x")
    client.put_object(Bucket=bucket, Key="dir/sub/deep/")
    with client.get_object(Bucket=bucket, Key="dir/")["Body"] as body:
        assert body.read() == b""
    said = client.head_object(Bucket=bucket, Key="dir/")
    assert (said["ContentLength"], said["ETag"]) == (0, put["ETag"])
    assert said["ContentType"] == kind["ContentType"]
    if here.kind == "folder":  # seaweedfs forgets it
        assert said["Metadata"] == kind["Metadata"]
    if here.kind == "folder":  # seaweedfs says that there is one
        assert refusal(client.head_object, Bucket=bucket, Key="dir/sub/")[0] == 404, "nobody has made it"
    everything = ["dir-1/x", "dir/", "dir/sub/deep/", "dir/x", "dir0"]
    assert keys_of(client, bucket) == (everything, [])
    assert keys_of(client, bucket, Delimiter="/") == (["dir0"], ["dir-1/", "dir/"])
    assert keys_of(client, bucket, Delimiter="/", Prefix="dir/") == (["dir/", "dir/x"], ["dir/sub/"])
    assert keys_of(client, bucket, Prefix="dir/s") == (["dir/sub/deep/"], [])
    assert keys_of(client, bucket, StartAfter="dir/") == (everything[2:], [])
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, PaginationConfig={"PageSize": 1})
    assert [one["Key"] for page in pages for one in page["Contents"]] == everything

    client.copy_object(Bucket=bucket, Key="other/", CopySource={"Bucket": bucket, "Key": "dir/"})
    assert client.head_object(Bucket=bucket, Key="other/")["Metadata"] == said["Metadata"]
    client.put_object(Bucket=bucket, Key="other/", ContentType="text/x")
    assert client.head_object(Bucket=bucket, Key="other/")["Metadata"] == {}, "it is another one"
    new = {"Bucket": bucket, "Key": "other/", "IfNoneMatch": "*"}
    assert refusal(client.put_object, **new) == (412, "PreconditionFailed")
    for key in ("dir/", "dir/x", "dir/sub/deep/"):
        client.delete_object(Bucket=bucket, Key=key)
        if here.kind == "folder":  # seaweedfs keeps folders in which something is
            assert refusal(client.head_object, Bucket=bucket, Key=key)[0] == 404
    if here.kind == "folder":
        assert keys_of(client, bucket) == (["dir-1/x", "dir0", "other/"], [])


def test_a_folder_has_no_content(here: BucketMaker, client: Any) -> None:
    bucket = here.bucket(client)
    assert refusal(client.put_object, Bucket=bucket, Key="dir/", Body=b"x") == (400, "InvalidArgument")
    assert refusal(client.create_multipart_upload, Bucket=bucket, Key="dir/") == (400, "InvalidArgument")
    for key in ("dir//", "/", "../", "a/./"):
        assert refusal(client.put_object, Bucket=bucket, Key=key) == (400, "InvalidArgument"), key
    client.put_object(Bucket=bucket, Key="k", Body=b"x")
    to = {"Bucket": bucket, "Key": "dir/", "CopySource": {"Bucket": bucket, "Key": "k"}}
    assert refusal(client.copy_object, **to) == (400, "InvalidArgument")
    assert keys_of(client, bucket) == (["k"], [])


def test_a_folder_is_something_in_a_bucket(here: BucketMaker, client: Any) -> None:
    bucket = here.bucket(client)
    client.put_object(Bucket=bucket, Key="a/b/")
    assert refusal(client.delete_bucket, Bucket=bucket) == (409, "BucketNotEmpty")
    if here.kind == "folder":  # where `a/b` cannot stand beside it
        assert refusal(client.put_object, Bucket=bucket, Key="a/b", Body=b"x") == (400, "InvalidArgument")
    assert keys_of(client, bucket) == (["a/b/"], [])
    client.delete_object(Bucket=bucket, Key="a/b/")
    client.put_object(Bucket=bucket, Key="a/b", Body=b"x")
    client.delete_object(Bucket=bucket, Key="a/b")
    client.delete_bucket(Bucket=bucket)


def test_pyarrow_makes_folders_and_moves_and_removes_them(here: BucketMaker, client: Any) -> None:
    bucket = here.bucket(client)
    files = pyarrow.fs.S3FileSystem(
        access_key=here.admin[0],
        secret_key=here.admin[1],
        endpoint_override=urlsplit(here.url).netloc,
        scheme="http",
        allow_bucket_creation=True,
        allow_bucket_deletion=True,
    )
    files.create_dir(f"{bucket}/made/inside")
    assert files.get_file_info(f"{bucket}/made/inside").type == pyarrow.fs.FileType.Directory
    table = pyarrow.table({"a": list(range(100)), "p": ["x", "y"] * 50})
    pyarrow.dataset.write_dataset(
        table, f"{bucket}/set", filesystem=files, format="parquet", partitioning=["p"]
    )
    found = pyarrow.dataset.dataset(f"{bucket}/set", filesystem=files, partitioning=["p"])
    assert found.count_rows() == 100
    (part, _) = sorted(one for one in found.files)
    files.move(part, f"{bucket}/moved")
    files.delete_dir(f"{bucket}/set")
    assert files.get_file_info(f"{bucket}/set").type == pyarrow.fs.FileType.NotFound
    files.delete_dir_contents(bucket)
    assert keys_of(client, bucket) == ([], [])
    files.delete_dir(bucket)
    assert refusal(client.head_bucket, Bucket=bucket)[0] == 404
