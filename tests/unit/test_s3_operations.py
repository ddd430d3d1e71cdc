"""What requests ask for: as boto3 sends each, as botocore's model names each, and what is refused."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
from botocore.awsrequest import AWSResponse
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.cache.auth.s3_refusal import S3Refusal
from stoker.cache.auth.sigv4_canonical import Head, fold_headers
from stoker.cache.server.s3 import operation_types as ops
from stoker.cache.server.s3.headers import Conditions
from stoker.cache.server.s3.operations import operation_of


def asked(method: str, target: str, domains: tuple[str, ...] = (), **headers: str) -> ops.Operation:
    lines = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    return operation_of(Head(method, target.encode("latin-1"), {b"host": b"h:9000", **lines}), domains)


def code_of(method: str, target: str, **headers: str) -> str:
    with pytest.raises(S3Refusal) as refused:
        asked(method, target, **headers)
    return refused.value.code


class _Answer:
    def stream(self) -> list[bytes]:
        return [b"<LocationConstraint/>"]


def sent_by_boto3(name: str, style: str = "path", **arguments: Any) -> Head:
    """The head of what boto3 sends when it is asked for this."""
    heads: list[Head] = []

    def take(request: Any, **_: Any) -> AWSResponse:
        parts = urlsplit(request.url)
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        lines = [
            (name.encode(), value if isinstance(value, bytes) else value.encode())
            for name, value in request.headers.items()
        ]
        headers = fold_headers([*lines, (b"host", parts.netloc.encode())])
        heads.append(Head(request.method, target.encode(), headers))
        return AWSResponse(request.url, 200, {}, _Answer())

    client = boto3.client(
        "s3",
        endpoint_url="http://s3.example:9",
        region_name="eu-west-1",
        aws_access_key_id="A",
        aws_secret_access_key="S",
        config=Config(s3={"addressing_style": style}, retries={"max_attempts": 0}),
    )
    client.meta.events.register("before-send.s3", take)
    try:
        getattr(client, name)(**arguments)
    except (ClientError, BotoCoreError, KeyError):
        assert heads, "nothing was sent"
    return heads[0]


OF_OBJECT = {"Bucket": "bucket", "Key": "a b/ä+?#%2F"}
OF_UPLOAD = {**OF_OBJECT, "UploadId": "u/+="}
SOURCE = {"Bucket": "other", "Key": "from/ä +"}
BOTO = [
    ("list_buckets", {}),
    ("head_bucket", {"Bucket": "bucket"}),
    ("get_bucket_location", {"Bucket": "bucket"}),
    ("get_bucket_versioning", {"Bucket": "bucket"}),
    ("create_bucket", {"Bucket": "bucket"}),
    ("delete_bucket", {"Bucket": "bucket"}),
    ("list_objects", {"Bucket": "bucket", "Prefix": "p/ä", "Delimiter": "/", "Marker": "m", "MaxKeys": 7}),
    ("list_objects_v2", {"Bucket": "bucket", "StartAfter": "a+b", "FetchOwner": True, "ContinuationToken": "t="}),
    ("list_object_versions", {"Bucket": "bucket", "KeyMarker": "k", "VersionIdMarker": "null"}),
    ("list_multipart_uploads", {"Bucket": "bucket", "KeyMarker": "k", "UploadIdMarker": "u", "MaxUploads": 3}),
    ("get_object", {**OF_OBJECT, "Range": "bytes=0-1", "ResponseContentType": "text/x y", "ChecksumMode": "ENABLED"}),
    ("head_object", {**OF_OBJECT, "PartNumber": 3}),
    ("put_object", {**OF_OBJECT, "Body": b"x", "Metadata": {"a": "b"}, "ContentType": "t", "IfNoneMatch": "*"}),
    ("copy_object", {**OF_OBJECT, "CopySource": SOURCE, "CopySourceIfMatch": "e"}),
    ("delete_object", OF_OBJECT),
    ("delete_objects", {"Bucket": "bucket", "Delete": {"Objects": [{"Key": "a"}]}}),
    ("create_multipart_upload", {**OF_OBJECT, "ChecksumAlgorithm": "CRC32C"}),
    ("upload_part", {**OF_UPLOAD, "PartNumber": 2, "Body": b"x"}),
    ("upload_part_copy", {**OF_UPLOAD, "PartNumber": 2, "CopySource": SOURCE, "CopySourceRange": "bytes=1-5"}),
    ("complete_multipart_upload", {**OF_UPLOAD, "MultipartUpload": {"Parts": [{"ETag": "e", "PartNumber": 1}]}}),
    ("abort_multipart_upload", OF_UPLOAD),
    ("list_parts", {**OF_UPLOAD, "MaxParts": 5, "PartNumberMarker": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments"), BOTO, ids=[name for name, _ in BOTO])
def test_what_boto3_asks_for_is_understood(name: str, arguments: dict[str, Any]) -> None:
    operation = operation_of(sent_by_boto3(name, **arguments))
    assert operation.name.lower() == name.replace("_", "")
    assert operation.bucket == arguments.get("Bucket", "")
    assert operation.key == arguments.get("Key", "")
    said = {
        "Prefix": "prefix", "Delimiter": "delimiter", "Marker": "marker", "MaxKeys": "max_keys", "Range": "range",
        "StartAfter": "start_after", "FetchOwner": "fetch_owner", "ContinuationToken": "continuation_token",
        "KeyMarker": "key_marker", "VersionIdMarker": "version_id_marker", "UploadIdMarker": "upload_id_marker",
        "MaxUploads": "max_keys", "UploadId": "upload_id", "PartNumber": "part_number", "MaxParts": "max_parts",
        "PartNumberMarker": "part_number_marker", "CopySource": "source",
    }  # fmt: skip
    for theirs, ours in said.items():
        if theirs in arguments:
            expected = ("other", "from/ä +") if theirs == "CopySource" else arguments[theirs]
            assert getattr(operation, ours) == expected


def test_what_boto3_says_beside_it() -> None:
    found = {name: operation_of(sent_by_boto3(name, **arguments)) for name, arguments in BOTO}
    read, put, copy = found["get_object"], found["put_object"], found["copy_object"]
    assert isinstance(read, ops.GetObject)
    assert read.overrides == {"content-type": "text/x y"}
    assert read.is_checksum_wanted
    assert isinstance(put, ops.PutObject)
    assert put.written == ops.WrittenHeaders({"content-type": "t"}, {"a": "b"})
    assert put.conditions == Conditions(if_none_match="*")
    assert isinstance(copy, ops.CopyObject)
    assert copy.source_conditions == Conditions(if_match="e")
    part, listed = found["upload_part_copy"], found["list_objects"]
    assert isinstance(part, ops.UploadPartCopy)
    assert part.source_range == (1, 5)
    assert isinstance(listed, ops.ListObjects)
    assert listed.is_url_encoded  # botocore asks for it by itself
    created = found["create_multipart_upload"]
    assert isinstance(created, ops.CreateMultipartUpload)
    assert created.checksum == "CRC32C"


@pytest.mark.parametrize(("name", "arguments"), BOTO, ids=[name for name, _ in BOTO])
def test_the_same_with_the_bucket_in_the_host(name: str, arguments: dict[str, Any]) -> None:
    head = sent_by_boto3(name, "virtual", **arguments)
    # Where a bucket is boto3 asks by its path, whatever it is told.
    is_virtual = bool(arguments) and name != "get_bucket_location"
    assert head.headers[b"host"].startswith(b"bucket.") == is_virtual
    assert operation_of(head, ["s3.example"]) == operation_of(sent_by_boto3(name, **arguments))


@pytest.mark.parametrize(
    ("host", "target", "bucket", "key"),
    [
        ("b.s3.example", "/k", "b", "k"),
        ("B.S3.Example:9000", "/k/l", "b", "k/l"),
        ("a.b.s3.example", "/k", "a.b", "k"),
        ("b.s3.example", "/", "b", ""),
        ("s3.example", "/b/k", "b", "k"),
        (".s3.example", "/b/k", "b", "k"),
        ("xs3.example", "/b/k", "b", "k"),
        ("127.0.0.1:80", "/b/k", "b", "k"),
        ("[::1]:80", "/b/k", "b", "k"),
    ],
)
def test_hosts(host: str, target: str, bucket: str, key: str) -> None:
    operation = operation_of(Head("GET", target.encode(), {b"host": host.encode()}), ["other", "s3.example"])
    assert (operation.bucket, operation.key) == (bucket, key)


@pytest.mark.parametrize(
    ("target", "key"),
    [
        ("/b//", "/"), ("/b//a", "/a"), ("/b/a//b", "a//b"), ("/b/.", "."), ("/b/..", ".."), ("/b/a/../c", "a/../c"),
        ("/b/%2e%2e/c", "../c"), ("/b/a+b", "a+b"), ("/b/a%2Fb", "a/b"), ("/b/a%", "a%"), ("/b/%E9%9B%AA", "雪"),
        ("/b/a%0Ab", "a\nb"), ("/b/" + "%C3%A4" * 512, "ä" * 512), ("/b/k?x=/../y", "k"),
    ],
)  # fmt: skip
def test_keys_are_as_they_were_sent(target: str, key: str) -> None:
    assert asked("GET", target).key == key


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["GET", "PUT", "POST", "DELETE", "HEAD", "OPTIONS", "PATCH", ""]),
    st.binary(max_size=40),
    st.dictionaries(
        st.sampled_from([b"host", b"x-amz-copy-source", b"range", b"x-amz-metadata-directive", b"if-match"]),
        st.binary(),
    ),
)
def test_whatever_comes_is_understood_or_refused(
    method: str, target: bytes, headers: dict[bytes, bytes]
) -> None:
    with suppress(S3Refusal):
        operation_of(Head(method, b"/" + target, headers), ["s3"])


@pytest.mark.parametrize(
    ("method", "target", "code"),
    [
        ("GET", "b/k", "InvalidURI"),
        ("GET", "http://h/b/k", "InvalidURI"),
        ("GET", "/b/%00", "InvalidURI"),
        ("GET", "/b/%FF", "InvalidURI"),
        ("GET", "/b?%FF=1", "InvalidURI"),
        ("GET", "/b?prefix=%FF", "InvalidArgument"),
        ("GET", "/b/" + "a" * 1025, "KeyTooLongError"),
        ("GET", "/b/" + "%C3%A4" * 513, "KeyTooLongError"),
        ("GET", "/-/health", "InvalidBucketName"),
        ("GET", "/blob/k", "InvalidBucketName"),
        ("GET", "/A/k", "InvalidBucketName"),
        ("GET", "/a%2Fb/k", "InvalidBucketName"),
        ("GET", "/a%0A/k", "InvalidBucketName"),
        ("GET", "/%FF/k", "InvalidBucketName"),
        ("PUT", "/ab", "InvalidBucketName"),
        ("PUT", "/a_b", "InvalidBucketName"),
        ("PUT", "/abc-", "InvalidBucketName"),
        ("PUT", "/127.0.0.1", "InvalidBucketName"),
        ("PUT", "/xn--abc", "InvalidBucketName"),
        ("PUT", "/", "MethodNotAllowed"),
        ("PATCH", "/b", "MethodNotAllowed"),
        ("PATCH", "/b/k", "MethodNotAllowed"),
        ("POST", "/b/k", "MethodNotAllowed"),
        ("POST", "/b", "NotImplemented"),
        ("GET", "/b?metrics", "NotImplemented"),
        ("PUT", "/b?policy", "NotImplemented"),
        ("DELETE", "/b?tagging", "NotImplemented"),
        ("PUT", "/b?versioning", "NotImplemented"),
        ("PUT", "/b?lifecycle", "NotImplemented"),
        ("DELETE", "/b?cors", "NotImplemented"),
        ("DELETE", "/b?what-comes-later", "NotImplemented"),
        ("PUT", "/b?what-comes-later", "NotImplemented"),
        ("POST", "/b?delete&what-comes-later", "NotImplemented"),
        ("DELETE", "/b/k?what-comes-later", "NotImplemented"),
        ("PUT", "/b/k?encryption", "NotImplemented"),
        ("POST", "/b/k?uploads&what-comes-later", "NotImplemented"),
        ("GET", "/b/k?torrent", "NotImplemented"),
        ("GET", "/b/k?attributes", "InvalidArgument"),
        ("GET", "/b/k?tagging&versionId=3", "NoSuchVersion"),
        ("GET", "/b/k?attributes&versionId=3", "NoSuchVersion"),
        ("PUT", "/b/k?tagging", "NotImplemented"),
        ("PUT", "/foo.-bar", "InvalidBucketName"),
        ("PUT", "/foo-.bar", "InvalidBucketName"),
        ("PUT", "/foo..bar", "InvalidBucketName"),
        ("POST", "/b/k?select&select-type=2", "NotImplemented"),
        ("GET", "/b?max-keys=-1", "InvalidArgument"),
        ("GET", "/b?max-keys=x", "InvalidArgument"),
        ("GET", "/b?max-keys=2147483648", "InvalidArgument"),
        ("GET", "/b?max-keys=%D9%A1", "InvalidArgument"),
        ("GET", "/b?encoding-type=base64", "InvalidArgument"),
        ("GET", "/b?list-type=3", "InvalidArgument"),
        ("GET", "/b?versions&version-id-marker=x", "InvalidArgument"),
        ("GET", "/?max-buckets=0", "InvalidArgument"),
        ("GET", "/b/k?partNumber=0", "InvalidArgument"),
        ("GET", "/b/k?partNumber=10001", "InvalidArgument"),
        ("GET", "/b/k?versionId=3", "NoSuchVersion"),
        ("DELETE", "/b/k?versionId=3", "NoSuchVersion"),
        ("GET", "/b/k?response-content-type=a%0D%0Ab:c", "InvalidArgument"),
        ("PUT", "/b/k?partNumber=1", "InvalidArgument"),
        ("PUT", "/b/k?uploadId=u", "InvalidArgument"),
        ("PUT", "/b/k?uploadId=&partNumber=1", "InvalidArgument"),
        ("PUT", "/b/k?uploadId=u&partNumber=x", "InvalidArgument"),
        ("GET", "/b/k?uploadId=u&max-parts=x", "InvalidArgument"),
    ],
)
def test_what_is_refused(method: str, target: str, code: str) -> None:
    assert code_of(method, target) == code


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("", "InvalidArgument"),
        ("bucket", "InvalidArgument"),
        ("/bucket/", "InvalidArgument"),
        ("/Bucket/key", "InvalidBucketName"),
        ("/bucket/" + "a" * 1025, "KeyTooLongError"),
        ("/bucket/key?versionId=3", "NoSuchVersion"),
        ("arn:aws:s3:eu-west-1:1:accesspoint/a/object/k", "NotImplemented"),
    ],
)
def test_sources_of_copies_that_are_refused(said: str, code: str) -> None:
    assert code_of("PUT", "/b/k", x_amz_copy_source=said) == code


@pytest.mark.parametrize(
    "said", ["/other/k%20%2B", "other/k%20%2B", "other%2Fk%20%2B", "/other/k +", "other/k +?versionId=null"]
)
def test_sources_of_copies(said: str) -> None:
    operation = asked("PUT", "/b/k", x_amz_copy_source=said)
    assert isinstance(operation, ops.CopyObject)
    assert operation.source == ("other", "k +")


def test_a_copy_to_itself_changes_something() -> None:
    assert code_of("PUT", "/b/k", x_amz_copy_source="/b/k") == "InvalidRequest"
    operation = asked(
        "PUT", "/b/k", x_amz_copy_source="/b/k", x_amz_metadata_directive="REPLACE", content_type="t"
    )
    assert isinstance(operation, ops.CopyObject)
    assert operation.is_replacing
    assert operation.written.headers == {"content-type": "t"}
    assert code_of("PUT", "/b/k", x_amz_copy_source="/c/k", x_amz_metadata_directive="X") == "InvalidArgument"


@pytest.mark.parametrize("said", ["bytes=1-", "bytes=-1", "1-2", "bytes=2-1", "bytes=0-1,3-4", ""])
def test_ranges_of_copies_that_are_refused(said: str) -> None:
    headers = {"x_amz_copy_source": "/c/k", "x_amz_copy_source_range": said}
    assert code_of("PUT", "/b/k?uploadId=u&partNumber=1", **headers) == "InvalidArgument"


def test_a_part_and_a_range_of_an_object() -> None:
    assert code_of("GET", "/b/k?partNumber=1", range="bytes=0-1") == "InvalidRequest"


@pytest.mark.parametrize(
    "name",
    [
        "x_amz_server_side_encryption", "x_amz_server_side_encryption_customer_algorithm", "x_amz_object_lock_mode",
        "x_amz_server_side_encryption_customer_key", "x_amz_tagging",
        "x_amz_website_redirect_location", "x_amz_write_offset_bytes", "x_amz_object_lock_legal_hold",
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_not_taken(name: str) -> None:
    assert code_of("PUT", "/b/k", **{name: "x"}) == "NotImplemented"
    assert code_of("POST", "/b/k?uploads", **{name: "x"}) == "NotImplemented"


def test_metadata_that_is_too_large() -> None:
    assert asked("PUT", "/b/k", x_amz_meta_a="x" * 2047).name == "PutObject"
    assert code_of("PUT", "/b/k", x_amz_meta_a="x" * 2048) == "MetadataTooLarge"


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("aws-chunked", None),
        ("gzip", "gzip"),
        ("aws-chunked,gzip", "gzip"),
        ("gzip, AWS-Chunked", "gzip"),
        ("", None),
    ],
)
def test_the_encoding_of_the_upload_is_not_kept(said: str, kept: str | None) -> None:
    operation = asked("PUT", "/b/k", content_encoding=said)
    assert isinstance(operation, ops.PutObject)
    assert operation.written.headers.get("content-encoding") == kept


def test_more_than_a_thousand_keys_are_a_thousand() -> None:
    for said, expected in (("5000", 1000), ("", 1000), ("0", 0), ("1", 1)):
        operation = asked("GET", f"/b?max-keys={said}")
        assert isinstance(operation, ops.ListObjects)
        assert operation.max_keys == expected


def test_fields_that_mean_nothing_are_passed_over_in_writes() -> None:
    for method, target in (("PUT", "/abc"), ("DELETE", "/abc"), ("PUT", "/abc/k"), ("DELETE", "/abc/k")):
        assert asked(method, f"{target}?x-id=Any&X-Amz-Signature=s&x-own=1&AWSAccessKeyId=a").bucket == "abc"


def test_the_first_of_repeated_fields_counts_and_unknown_ones_are_passed_over() -> None:
    operation = asked("GET", "/b?prefix=a&prefix=b&x-id=ListObjects&X-Amz-Date=1")
    assert isinstance(operation, ops.ListObjects)
    assert operation.prefix == "a"
