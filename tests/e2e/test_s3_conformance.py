"""What suites that test servers of S3 ask for, of objects and buckets: with a folder and a real S3 server behind."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tests.e2e.s3_helpers import BucketMaker, refusal

pytestmark = pytest.mark.real


def fields_of(answer: Any) -> dict[str, str]:
    return dict(answer["ResponseMetadata"]["HTTPHeaders"])


NOT_SET = [
    ("get_bucket_cors", "NoSuchCORSConfiguration"),
    ("get_bucket_encryption", "ServerSideEncryptionConfigurationNotFoundError"),
    ("get_bucket_lifecycle_configuration", "NoSuchLifecycleConfiguration"),
    ("get_bucket_ownership_controls", "OwnershipControlsNotFoundError"),
    ("get_bucket_policy", "NoSuchBucketPolicy"),
    ("get_bucket_policy_status", "NoSuchBucketPolicy"),
    ("get_bucket_replication", "ReplicationConfigurationNotFoundError"),
    ("get_bucket_tagging", "NoSuchTagSet"),
    ("get_bucket_website", "NoSuchWebsiteConfiguration"),
    ("get_object_lock_configuration", "ObjectLockConfigurationNotFoundError"),
    ("get_public_access_block", "NoSuchPublicAccessBlockConfiguration"),
]


def test_settings_that_a_cache_has_not_are_as_they_are_by_default(here: BucketMaker, client: Any) -> None:
    bucket = here.bucket(client)
    for name, code in NOT_SET:
        assert refusal(getattr(client, name), Bucket=bucket) == (404, code), name
        assert refusal(getattr(client, name), Bucket="not-there") == (404, "NoSuchBucket"), name
    assert client.get_bucket_request_payment(Bucket=bucket)["Payer"] == "BucketOwner"
    assert "LoggingEnabled" not in client.get_bucket_logging(Bucket=bucket)
    assert "Status" not in client.get_bucket_accelerate_configuration(Bucket=bucket)
    assert "QueueConfigurations" not in client.get_bucket_notification_configuration(Bucket=bucket)
    versioning = {"Bucket": bucket, "VersioningConfiguration": {"Status": "Enabled"}}
    assert refusal(client.put_bucket_versioning, **versioning) == (501, "NotImplemented")
    assert refusal(client.put_bucket_policy, Bucket=bucket, Policy="{}") == (501, "NotImplemented")
    assert refusal(client.delete_bucket_policy, Bucket=bucket) == (501, "NotImplemented")


def test_lists_of_rights_say_that_all_is_the_owners(here: BucketMaker, client: Any) -> None:
    bucket = here.bucket(client)
    client.put_object(Bucket=bucket, Key="k", Body=b"x", ACL="bucket-owner-full-control")
    owner = client.list_objects(Bucket=bucket)["Contents"][0]["Owner"]
    for said in (client.get_bucket_acl(Bucket=bucket), client.get_object_acl(Bucket=bucket, Key="k")):
        assert said["Owner"] == owner
        (grant,) = said["Grants"]
        assert grant["Permission"] == "FULL_CONTROL"
        assert grant["Grantee"] == {**owner, "Type": "CanonicalUser"}
    client.put_bucket_acl(Bucket=bucket, ACL="private")
    client.put_object_acl(Bucket=bucket, Key="k", ACL="private")
    public = {"ACL": "public-read"}
    assert refusal(client.put_bucket_acl, Bucket=bucket, **public) == (501, "NotImplemented")
    assert refusal(client.put_object_acl, Bucket=bucket, Key="k", **public) == (501, "NotImplemented")
    assert refusal(client.put_object_acl, Bucket=bucket, Key="no", ACL="private") == (404, "NoSuchKey")
    for target in (f"/{bucket}?acl=", f"/{bucket}/k?acl=", f"/{bucket}/k", "/b-never-made"):
        assert here.ask("PUT", target, b"", {"x-amz-acl": "public-ready"})[:2] == (400, "InvalidArgument")


def test_what_is_asked_of_an_object_besides(here: BucketMaker, client: Any) -> None:
    bucket = here.bucket(client)
    client.put_object(Bucket=bucket, Key="k", Body=b"data")
    assert client.get_object_tagging(Bucket=bucket, Key="k")["TagSet"] == []
    wanted = ["ETag", "ObjectSize", "StorageClass", "Checksum"]
    said = client.get_object_attributes(Bucket=bucket, Key="k", ObjectAttributes=wanted)
    etag = client.head_object(Bucket=bucket, Key="k")["ETag"]
    assert (said["ObjectSize"], said["StorageClass"]) == (4, "STANDARD")
    assert said["ETag"].strip('"') == etag.strip('"')
    only = client.get_object_attributes(Bucket=bucket, Key="k", ObjectAttributes=["ObjectSize"])
    assert "ETag" not in only
    for call, more in (
        (client.get_object_acl, {}),
        (client.get_object_tagging, {}),
        (client.get_object_attributes, {"ObjectAttributes": wanted}),
    ):
        assert refusal(call, Bucket=bucket, Key="missing", **more) == (404, "NoSuchKey")
    assert refusal(client.get_object_retention, Bucket=bucket, Key="k") == (400, "InvalidRequest")
    tags = {"Bucket": bucket, "Key": "k", "Tagging": {"TagSet": []}}
    assert refusal(client.put_object_tagging, **tags) == (501, "NotImplemented")


def test_headers_of_content_are_kept_and_copied(here: BucketMaker, client: Any) -> None:
    bucket, other = here.bucket(client), here.bucket(client)
    kept = {
        "CacheControl": "public, max-age=14400",
        "ContentDisposition": 'attachment; filename="x"',
        "ContentEncoding": "gzip",
        "ContentLanguage": "mi",
        "ContentType": "text/x",
        "Metadata": {"a": "b"},
    }
    expires = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
    client.put_object(Bucket=bucket, Key="k", Body=b"x", Expires=expires, **kept)
    upload = client.create_multipart_upload(Bucket=bucket, Key="parts", **kept)["UploadId"]
    of_upload = {"Bucket": bucket, "Key": "parts", "UploadId": upload}
    etag = client.upload_part(**of_upload, PartNumber=1, Body=b"x")["ETag"]
    client.complete_multipart_upload(
        **of_upload, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": etag}]}
    )
    source = {"Bucket": bucket, "Key": "k"}
    for to in (bucket, other):
        copied = client.copy_object(Bucket=to, Key="copy", CopySource=source)["CopyObjectResult"]
        assert copied["LastModified"].year > 2000
        # What is said with a copy counts only where it replaces what there was.
        client.copy_object(Bucket=to, Key="same", CopySource=source, ContentType="a/b", Metadata={"q": "r"})
        client.copy_object(
            Bucket=to, Key="new", CopySource=source, MetadataDirective="REPLACE", Metadata={"q": "r"}
        )
        replaced = client.head_object(Bucket=to, Key="new")
        assert (replaced["Metadata"], replaced.get("CacheControl")) == ({"q": "r"}, None)
    for name, key in (
        (bucket, "k"), (bucket, "parts"), (bucket, "copy"), (bucket, "same"), (other, "copy"), (other, "same"),
    ):  # fmt: skip
        for call in (client.head_object, client.get_object):
            answer = call(Bucket=name, Key=key)
            if "Body" in answer:
                answer["Body"].read()
            assert {field: answer.get(field) for field in kept} == kept, (name, key)
    if here.kind == "folder":  # obstore does not tell it
        assert client.head_object(Bucket=bucket, Key="k")["Expires"] == expires


def test_metadata_beyond_ascii_is_given_back_in_ascii(here: BucketMaker, client: Any) -> None:
    bucket = here.bucket(client)
    for key, raw, text in (("u", "Grüße 日本".encode(), "Grüße 日本"), ("l", b"caf\xe9", "café")):
        status, code, _ = signed_bytes(here, f"/{bucket}/{key}", raw)
        assert (status, code) == (200, "")
        said = client.head_object(Bucket=bucket, Key=key)["Metadata"]["m"]
        assert said == f"=?UTF-8?B?{b64encode(text.encode()).decode()}?="
    for value in ("\x04w", "h\x04", "h\x7fw"):
        status, _, _ = here.ask("PUT", f"/{bucket}/no", b"", {"x-amz-meta-m": value})
        assert status in (400, 403)
    assert refusal(client.head_object, Bucket=bucket, Key="no")[0] == 404


def signed_bytes(here: BucketMaker, target: str, value: bytes) -> tuple[int, str, Any]:
    """botocore signs text; the bytes of it that are sent are what was signed."""

    class Auth(S3SigV4Auth):
        def string_to_sign(self, request: Any, canonical_request: str) -> str:
            raw = canonical_request.encode().replace(b"<value>", value)
            scope = self.credential_scope(request)
            digest = hashlib.sha256(raw).hexdigest()
            return f"AWS4-HMAC-SHA256\n{request.context['timestamp']}\n{scope}\n{digest}"

    request = AWSRequest("PUT", f"{here.url}{target}", data=b"x", headers={"x-amz-meta-m": "<value>"})
    Auth(Credentials(*here.admin), "s3", "us-east-1").add_auth(request)
    return here.send("PUT", target, b"x", {**dict(request.headers.items()), "x-amz-meta-m": value})


def test_sources_of_copies_under_conditions(here: BucketMaker, client: Any) -> None:
    bucket = here.bucket(client)
    client.put_object(Bucket=bucket, Key="k", Body=b"x")
    found = client.head_object(Bucket=bucket, Key="k")
    etag, modified, day = found["ETag"], found["LastModified"], timedelta(1)
    copy = {"Bucket": bucket, "Key": "c", "CopySource": {"Bucket": bucket, "Key": "k"}}
    for bad in (
        {"CopySourceIfMatch": "other"},
        {"CopySourceIfNoneMatch": etag},
        {"CopySourceIfModifiedSince": modified},
        {"CopySourceIfUnmodifiedSince": modified - day},
    ):
        assert refusal(client.copy_object, **copy, **bad) == (412, "PreconditionFailed"), bad
    for good in (
        {"CopySourceIfMatch": etag, "CopySourceIfUnmodifiedSince": modified - day},
        {"CopySourceIfNoneMatch": "other"},
        {"CopySourceIfModifiedSince": modified - day},
        {"CopySourceIfUnmodifiedSince": modified},
    ):
        client.copy_object(**copy, **good)


def test_what_is_asked_for_and_not_done_is_refused(here: BucketMaker, client: Any) -> None:
    bucket = here.bucket(client)
    put = {"Bucket": bucket, "Key": "k", "Body": b"x"}
    assert refusal(client.put_object, **put, ServerSideEncryption="AES256") == (501, "NotImplemented")
    assert refusal(client.put_object, **put, StorageClass="GLACIER") == (400, "InvalidStorageClass")
    client.put_object(**put, StorageClass="STANDARD_IA")
    locked = {"Bucket": "b-never-made", "ObjectLockEnabledForBucket": True}
    assert refusal(client.create_bucket, **locked) == (501, "NotImplemented")
    form = {"content-type": "multipart/form-data; boundary=x"}
    for target in (f"/{bucket}", f"/{bucket}/"):
        assert here.send("POST", target, b"--x--", form)[:2] == (501, "NotImplemented")
    assert here.send("POST", f"/{bucket}?delete", b"<Delete/>", {})[:2] == (403, "AccessDenied")
    for said in ("AWS AKID:signature", "AWS nothing"):
        answer = here.send("PUT", f"/{bucket}/k", b"x", {"authorization": said})
        assert answer[:2] == (400, "InvalidRequest")
    assert here.send("GET", f"/{bucket}/k", b"", {"authorization": "AWS AKID:x"})[:2] == (
        400,
        "InvalidRequest",
    )


def test_lists_take_whatever_marker_and_prefix_there_is(here: BucketMaker, client: Any) -> None:
    bucket = here.bucket(client)
    keys = ["bar", "baz+1", "foo!", "foo/x"]
    for key in keys:
        client.put_object(Bucket=bucket, Key=key, Body=b"")
    for marker, found in (
        ("\n", keys), ("bar", keys[1:]), ("bas\x01", keys[1:]), ("foo/", keys[3:]), ("foo//", keys[3:]),
        ("./a", keys), ("\x7f", []), ("", keys),
    ):  # fmt: skip
        said = client.list_objects(Bucket=bucket, Marker=marker)
        assert [one["Key"] for one in said.get("Contents", [])] == found, marker
        said = client.list_objects_v2(Bucket=bucket, StartAfter=marker)
        assert [one["Key"] for one in said.get("Contents", [])] == found, marker
    for prefix, found in (("baz+", ["baz+1"]), ("\n", []), ("a//", []), ("\t/x", []), ("foo/", ["foo/x"])):
        for call in (client.list_objects, client.list_objects_v2, client.list_object_versions):
            said = call(Bucket=bucket, Prefix=prefix)
            assert [one["Key"] for one in said.get("Contents", said.get("Versions", []))] == found, prefix
            assert said["Prefix"] == prefix
    first = client.list_objects_v2(Bucket=bucket, ContinuationToken="")
    assert first["ContinuationToken"] == ""
    assert [one["Key"] for one in first["Contents"]] == keys


def test_names_of_buckets(here: BucketMaker, client: Any) -> None:
    for name in (
        "foo.-bar",
        "foo-.bar",
        "foo..bar",
        "foo-",
        "-foo",
        ".foo",
        "fo_o",
        "ab",
        "a" * 64,
        "10.0.0.1",
    ):
        assert here.ask("PUT", f"/{name}")[:2] == (400, "InvalidBucketName"), name
    for name in ("foo.bar", "f-o", "a" * 63):
        assert here.ask("PUT", f"/{name}")[:2] == (200, "")
        client.delete_bucket(Bucket=name)


def test_keys_that_could_not_be_read_are_not_written(here: BucketMaker, client: Any) -> None:
    bucket = here.bucket(client)
    for key in ("a\tb", "\x7f", "\n", "a/\x01/b"):
        if here.kind == "folder":
            client.put_object(Bucket=bucket, Key=key, Body=b"v")
            assert client.head_object(Bucket=bucket, Key=key)["ContentLength"] == 1
        else:
            assert refusal(client.put_object, Bucket=bucket, Key=key, Body=b"v") == (400, "InvalidArgument")
