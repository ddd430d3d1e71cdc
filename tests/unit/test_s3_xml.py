"""S3's documents: as botocore reads what is written, and what is refused when read."""

from __future__ import annotations

from typing import Any

import botocore.session
import pytest
from botocore.parsers import create_parser
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker import errors
from stoker.cache.auth.s3_refusal import S3Refusal
from stoker.cache.server.s3 import results
from stoker.cache.server.s3.errors import (
    STATUSES,
    error_answer,
    no_such_bucket,
    no_such_key,
    no_such_upload,
    refusal_of,
)
from stoker.cache.server.s3.listing import Lister, lister_of
from stoker.cache.server.s3.listing_xml import Described, Owner, list_document
from stoker.cache.server.s3.operation_types import (
    CompleteMultipartUpload,
    CreateMultipartUpload,
    GetBucketLocation,
    ListBuckets,
    Listing,
    ListMultipartUploads,
    ListObjects,
    ListObjectsV2,
    ListObjectVersions,
    ListParts,
    WrittenHeaders,
)
from stoker.cache.server.s3.xml import (
    BODY_BYTES_MAX,
    DeletedKey,
    document,
    element,
    read_complete,
    read_delete,
    read_location,
    read_xml,
)
from stoker.wire.cache_api import ObjectInfo

OWNER = Owner("id", "a name & more")
ODD = "a<b>&\"'\t\r\n c%+ä雪🙂]]>"
MODEL = botocore.session.Session().get_service_model("s3")


def parsed(
    operation: str, body: bytes, status: int = 200, headers: list[tuple[str, str]] | None = None
) -> Any:
    """What botocore makes of an answer."""
    shape = MODEL.operation_model(operation).output_shape
    answer = {"body": body, "headers": dict(headers or []), "status_code": status}
    return create_parser("rest-xml").parse(answer, shape)


def listed(operation: Listing, *keys: str) -> Any:
    lister = lister_of(operation)
    if lister.ask is not None:
        lister.feed([ObjectInfo(key, len(key), f"v-{key}") for key in sorted(keys)], is_last=True)
    body = list_document(operation, lister.page(), lambda info: Described(info.version, 1e9), OWNER)
    return parsed(type(operation).__name__, body)


def test_a_first_version_listing() -> None:
    operation = ListObjects(bucket="b", prefix=ODD, marker="A", delimiter="/", max_keys=2)
    found = listed(operation, f"{ODD}1", f"{ODD}2/x", f"{ODD}3")
    assert found["Name"] == "b"
    assert (found["Prefix"], found["Marker"], found["Delimiter"], found["MaxKeys"]) == (ODD, "A", "/", 2)
    assert found["IsTruncated"]
    assert found["NextMarker"] == f"{ODD}2/"
    assert found["CommonPrefixes"] == [{"Prefix": f"{ODD}2/"}]
    [one] = found["Contents"]
    assert (one["Key"], one["Size"], one["ETag"]) == (f"{ODD}1", len(ODD) + 1, f'"v-{ODD}1"')
    assert one["LastModified"].timestamp() == 1e9
    assert one["StorageClass"] == "STANDARD"
    assert one["Owner"] == {"ID": "id", "DisplayName": "a name & more"}


def test_next_marker_is_said_only_with_a_delimiter_and_more_to_come() -> None:
    assert "NextMarker" not in listed(ListObjects(bucket="b", max_keys=1), "a", "b")
    assert "NextMarker" not in listed(ListObjects(bucket="b", max_keys=2, delimiter="/"), "a", "b")


def test_a_second_version_listing() -> None:
    operation = ListObjectsV2(bucket="b", start_after="a", max_keys=2, delimiter="/")
    found = listed(operation, "a", "b/1", "b/2", "c", "d")
    assert (found["KeyCount"], found["MaxKeys"], found["IsTruncated"]) == (2, 2, True)
    assert found["StartAfter"] == "a"
    assert [one["Key"] for one in found["Contents"]] == ["c"]
    assert "Owner" not in found["Contents"][0]
    token = found["NextContinuationToken"]
    later = ListObjectsV2(bucket="b", continuation_token=token, max_keys=2, delimiter="/", fetch_owner=True)
    found = listed(later, "a", "b/1", "b/2", "c", "d")
    assert found["ContinuationToken"] == token
    assert (found["KeyCount"], found["IsTruncated"]) == (1, False)
    assert "NextContinuationToken" not in found
    assert found["Contents"][0]["Owner"]["ID"] == "id"


def test_a_listing_of_versions() -> None:
    operation = ListObjectVersions(bucket="b", key_marker="a", version_id_marker="null", max_keys=1)
    found = listed(operation, "a", "b", "c")
    assert (found["KeyMarker"], found["VersionIdMarker"]) == ("a", "null")
    assert (found["NextKeyMarker"], found["NextVersionIdMarker"]) == ("b", "null")
    [one] = found["Versions"]
    assert (one["Key"], one["VersionId"], one["IsLatest"], one["Size"]) == ("b", "null", True, 1)
    assert one["Owner"]["ID"] == "id"
    found = listed(ListObjectVersions(bucket="b", delimiter="/", max_keys=1), "a/1", "c")
    assert found["NextKeyMarker"] == "a/"
    assert "NextVersionIdMarker" not in found


@pytest.mark.parametrize("kind", [ListObjects, ListObjectsV2, ListObjectVersions])
def test_nothing_is_listed(kind: type[Listing]) -> None:
    found = listed(kind(bucket="b"))
    assert not found["IsTruncated"]
    assert "Contents" not in found
    found = listed(kind(bucket="b", max_keys=0), "a")
    assert (found["MaxKeys"], found["IsTruncated"]) == (0, False)


KEYS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8)


@settings(max_examples=100, deadline=None)
@given(st.lists(KEYS, max_size=5, unique=True), st.sampled_from(["", "/", "%", "\x01"]))
def test_any_key_comes_through_when_it_is_encoded(keys: list[str], delimiter: str) -> None:
    from botocore.compat import unquote_str

    operation = ListObjectsV2(bucket="b", delimiter=delimiter, is_url_encoded=True)
    found = listed(operation, *keys)
    assert found["EncodingType"] == "url"
    lister = Lister("", delimiter, "", 1000)
    lister.feed([ObjectInfo(key, 0, "v") for key in sorted(keys)], is_last=True)
    page = lister.page()
    assert [unquote_str(one["Key"]) for one in found.get("Contents", [])] == [
        info.key for info in page.objects
    ]
    prefixes = [unquote_str(one["Prefix"]) for one in found.get("CommonPrefixes", [])]
    assert prefixes == page.common_prefixes


@settings(max_examples=100, deadline=None)
@given(KEYS)
def test_a_listing_can_always_be_read(key: str) -> None:
    [one] = listed(ListObjectsV2(bucket="b"), key)["Contents"]
    forbidden = {*range(32), 0xFFFE, 0xFFFF} - {9, 10, 13}
    assert one["Key"] == "".join("\ufffd" if ord(letter) in forbidden else letter for letter in key)


def test_the_list_of_buckets() -> None:
    buckets = [("a", 1.0), ("b", 2.0), ("ba", 3.0), ("c", 4.0)]
    found = parsed("ListBuckets", results.buckets_document(ListBuckets(), buckets, OWNER, "r"))
    assert [one["Name"] for one in found["Buckets"]] == ["a", "b", "ba", "c"]
    assert found["Buckets"][1]["CreationDate"].timestamp() == 2
    assert found["Buckets"][1]["BucketRegion"] == "r"
    assert found["Owner"]["DisplayName"] == OWNER.name
    assert "ContinuationToken" not in found
    first = results.buckets_document(ListBuckets(prefix="b", max_buckets=1), buckets, OWNER, "r")
    found = parsed("ListBuckets", first)
    assert ([one["Name"] for one in found["Buckets"]], found["ContinuationToken"]) == (["b"], "b")
    rest = ListBuckets(prefix="b", max_buckets=1, continuation_token="b")
    found = parsed("ListBuckets", results.buckets_document(rest, buckets, OWNER, "r"))
    assert [one["Name"] for one in found["Buckets"]] == ["ba"]
    assert "ContinuationToken" not in found


def test_other_answers() -> None:
    location = results.location_document(GetBucketLocation(bucket="b"), "eu-west-1")
    assert parsed("GetBucketLocation", location) is not None
    assert b">eu-west-1</LocationConstraint>" in location
    assert b"></LocationConstraint>" in results.location_document(GetBucketLocation(bucket="b"), "us-east-1")
    assert "Status" not in parsed("GetBucketVersioning", results.versioning_document())
    checksums = {"x-amz-checksum-crc32c": "AAAAAA==", "x-amz-checksum-crc64nvme": "AAAAAAAAAAA="}
    copied = results.copied_document("CopyObjectResult", "e", 5, checksums)
    found = parsed("CopyObject", copied)["CopyObjectResult"]
    assert (found["ETag"], found["LastModified"].timestamp()) == ('"e"', 5)
    assert (found["ChecksumCRC32C"], found["ChecksumCRC64NVME"]) == ("AAAAAA==", "AAAAAAAAAAA=")
    written = WrittenHeaders({}, {})
    created = CreateMultipartUpload(bucket="b", key=ODD, written=written)
    found = parsed("CreateMultipartUpload", results.created_document(created, "u"))
    assert (found["Bucket"], found["Key"], found["UploadId"]) == ("b", ODD, "u")
    completed = CompleteMultipartUpload(bucket="b", key=ODD, upload_id="u")
    body = results.completed_document(completed, "http://h/b/k", "e-2", checksums)
    found = parsed("CompleteMultipartUpload", body)
    assert (found["Location"], found["Key"], found["ETag"]) == ("http://h/b/k", ODD, '"e-2"')
    assert found["ChecksumCRC32C"] == "AAAAAA=="


def test_the_answer_to_deletes() -> None:
    done, failed = DeletedKey(ODD, ""), DeletedKey("b", "null")
    why = S3Refusal("AccessDenied", "no & never")
    found = parsed("DeleteObjects", results.deleted_document([done], [(failed, why)], False))
    assert found["Deleted"] == [{"Key": ODD}]
    expected = {"Key": "b", "VersionId": "null", "Code": "AccessDenied", "Message": "no & never"}
    assert found["Errors"] == [expected]
    found = parsed("DeleteObjects", results.deleted_document([done], [(failed, why)], True))
    assert "Deleted" not in found
    assert found["Errors"] == [expected]


def test_the_list_of_parts() -> None:
    parts = [
        results.StoredPart(n, f"e{n}", n * 10, n, {"x-amz-checksum-crc32": "AAAAAA=="}) for n in (1, 3, 7)
    ]
    operation = ListParts(bucket="b", key=ODD, upload_id="u", max_parts=1, part_number_marker=1)
    found = parsed("ListParts", results.parts_document(operation, parts, OWNER))
    assert (found["Key"], found["UploadId"], found["MaxParts"]) == (ODD, "u", 1)
    assert (found["PartNumberMarker"], found["NextPartNumberMarker"], found["IsTruncated"]) == (1, 3, True)
    [part] = found["Parts"]
    assert (part["PartNumber"], part["Size"], part["ETag"]) == (3, 30, '"e3"')
    assert part["ChecksumCRC32"] == "AAAAAA=="
    none = ListParts(bucket="b", key="k", upload_id="u", max_parts=0)
    found = parsed("ListParts", results.parts_document(none, parts, OWNER))
    assert not found["IsTruncated"]
    assert "Parts" not in found


def listed_uploads(keys: list[tuple[str, str]], **arguments: Any) -> Any:
    uploads = [results.StoredUpload(key, upload_id, 7) for key, upload_id in keys]
    operation = ListMultipartUploads(bucket="b", **arguments)
    return parsed("ListMultipartUploads", results.uploads_document(operation, uploads, OWNER))


def test_the_list_of_uploads() -> None:
    found = listed_uploads([(ODD, "u2"), (ODD, "u1"), ("p/1", "u3"), ("p/2", "u4")], delimiter="/")
    assert [(one["Key"], one["UploadId"]) for one in found["Uploads"]] == [(ODD, "u1"), (ODD, "u2")]
    assert found["Uploads"][0]["Initiated"].timestamp() == 7
    assert found["Uploads"][0]["Owner"]["ID"] == found["Uploads"][0]["Initiator"]["ID"] == "id"
    assert found["CommonPrefixes"] == [{"Prefix": "p/"}]
    assert (found["IsTruncated"], found["MaxUploads"]) == (False, 1000)
    assert not listed_uploads([("a", "u")], max_keys=0)["IsTruncated"]
    assert "Uploads" not in listed_uploads([("a", "u")], key_marker="a")
    assert len(listed_uploads([("a", "u"), ("a", "v")], key_marker="a", upload_id_marker="u")["Uploads"]) == 1


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "a/", "a/1", "a/2", "b", "pa", "p/a"]), st.sampled_from("uvw")),
        unique=True,
    ),
    st.sampled_from(["", "a", "p"]),
    st.sampled_from(["", "/"]),
    st.integers(1, 3),
)
def test_each_upload_is_listed_once(
    keys: list[tuple[str, str]], prefix: str, delimiter: str, max_keys: int
) -> None:
    found: list[Any] = []
    marks = {"key_marker": "", "upload_id_marker": ""}
    while True:
        page = listed_uploads(keys, prefix=prefix, delimiter=delimiter, max_keys=max_keys, **marks)
        found += [(one["Key"], one["UploadId"]) for one in page.get("Uploads", [])]
        found += [one["Prefix"] for one in page.get("CommonPrefixes", [])]
        if not page["IsTruncated"]:
            break
        marks = {"key_marker": page["NextKeyMarker"], "upload_id_marker": page["NextUploadIdMarker"]}
    expected: set[Any] = set()
    for key, upload_id in keys:
        if key.startswith(prefix):
            head, slash, _ = key[len(prefix) :].partition(delimiter or "\0")
            expected.add(prefix + head + slash if slash else (key, upload_id))
    assert len(found) == len(expected)
    assert set(found) == expected


@pytest.mark.parametrize("code", STATUSES)
def test_botocore_reads_each_error(code: str) -> None:
    refusal = S3Refusal(code, "why & how", (("BucketName", "b"),))
    answer = error_answer(refusal, f"/b/{ODD}", "request-1", "host-1")
    assert answer.status == STATUSES[code] >= 400
    found = parsed("GetObject", answer.body, answer.status, answer.headers)
    assert (found["Error"]["Code"], found["Error"]["Message"]) == (code, "why & how")
    assert (found["Error"]["BucketName"], found["Error"]["Resource"]) == ("b", f"/b/{ODD}")
    assert found["ResponseMetadata"]["RequestId"] == "request-1"
    assert found["ResponseMetadata"]["HostId"] == "host-1"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ObjectNotFound("x"), "NoSuchKey"),
        (errors.AccessDenied("x"), "AccessDenied"),
        (errors.ObjectChanged("x"), "PreconditionFailed"),
        (errors.ShortBody("x"), "ServiceUnavailable"),
        (errors.ConfigError("x"), "InvalidRequest"),
        (errors.CorruptBlock("x"), "InternalError"),
        (S3Refusal("SlowDown", "x"), "SlowDown"),
        (no_such_bucket("b"), "NoSuchBucket"),
        (no_such_key("k"), "NoSuchKey"),
        (no_such_upload("u"), "NoSuchUpload"),
    ],
)
def test_errors_in_the_words_of_s3(error: errors.StokerError, code: str) -> None:
    refusal = refusal_of(error)
    assert refusal.code == code
    assert code in STATUSES


def serialized(operation: str, **arguments: Any) -> bytes:
    """The body that botocore makes of them."""
    from botocore.serialize import create_serializer

    request = create_serializer("rest-xml").serialize_to_request(arguments, MODEL.operation_model(operation))
    body = request["body"]
    return body if isinstance(body, bytes) else body.encode()


def test_what_botocore_says_is_read() -> None:
    objects = [{"Key": ODD.replace("\r", "")}, {"Key": "b", "VersionId": "v"}]
    body = serialized("DeleteObjects", Bucket="b", Delete={"Objects": objects, "Quiet": True})
    keys = [DeletedKey(ODD.replace("\r", ""), ""), DeletedKey("b", "v")]
    assert read_delete(body) == (keys, True)
    parts = [
        {"PartNumber": 1, "ETag": '"e1"', "ChecksumCRC32C": "AAAAAA=="},
        {"PartNumber": 10_000, "ETag": "e2"},
    ]
    upload = {"Bucket": "b", "Key": "k", "UploadId": "u", "MultipartUpload": {"Parts": parts}}
    read = read_complete(serialized("CompleteMultipartUpload", **upload))
    assert read == [(1, "e1", {"x-amz-checksum-crc32c": "AAAAAA=="}), (10_000, "e2", {})]
    where = {"LocationConstraint": "eu-west-1"}
    assert (
        read_location(serialized("CreateBucket", Bucket="b", CreateBucketConfiguration=where)) == "eu-west-1"
    )
    assert read_location(b"") == read_location(b" \n") == ""


def test_the_most_parts_and_keys_fit() -> None:
    etag, checksum = "e" * 32, "A" * 43 + "="
    parts = [{"PartNumber": n, "ETag": f'"{etag}"', "ChecksumSHA256": checksum} for n in range(1, 10_001)]
    upload = {"Bucket": "b", "Key": "k", "UploadId": "u", "MultipartUpload": {"Parts": parts}}
    assert len(read_complete(serialized("CompleteMultipartUpload", **upload))) == 10_000
    objects = [{"Key": f"{n:04}" + "&" * 700} for n in range(1000)]
    body = serialized("DeleteObjects", Bucket="b", Delete={"Objects": objects})
    assert len(read_delete(body).keys) == 1000


def refused(body: bytes, root: str = "Delete") -> str:
    with pytest.raises(S3Refusal) as error:
        read_xml(body, root)
    return f"{error.value.code}: {error.value}"


LAUGHS = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 10))


@pytest.mark.parametrize(
    "body",
    [
        f'<!DOCTYPE Delete [<!ENTITY l0 "ha">{LAUGHS}]><Delete>&l9;</Delete>',
        '<!DOCTYPE Delete [<!ENTITY x SYSTEM "file:///etc/passwd">]><Delete>&x;</Delete>',
        '<!DOCTYPE Delete SYSTEM "http://127.0.0.1/x.dtd"><Delete/>',
        "<!DOCTYPE Delete><Delete/>",
        '<!DOCTYPE Delete [<!ENTITY % p SYSTEM "file:///x"> %p;]><Delete/>',
        "<?php x?><Delete/>",
        "<Delete>&unknown;</Delete>",
    ],
)
def test_nothing_is_declared_or_fetched(body: str) -> None:
    assert refused(body.encode()).startswith("MalformedXML")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"x",
        b"<Delete>",
        b"<Delete/><Delete/>",
        b"<Delete>\xff</Delete>",
        b"<Delete>\0</Delete>",
        b"<Other/>",
    ],
)
def test_what_is_no_such_document(body: bytes) -> None:
    assert refused(body).startswith("MalformedXML")


def test_the_encodings_of_xml_are_read() -> None:
    body = "<?xml version='1.0' encoding='utf-16'?><Delete><Quiet>ä</Quiet></Delete>"
    assert read_xml(body.encode("utf-16"), "Delete").get("Quiet") == "ä"


def test_a_document_that_is_too_deep() -> None:
    assert "deeper" in refused(b"<Delete>" + b"<a>" * 10_000)
    read_xml(b"<Delete><a><b><c><d/></c></b></a></Delete>", "Delete")


def test_a_document_that_is_too_large() -> None:
    assert refused(b"<Delete>" + b" " * BODY_BYTES_MAX + b"</Delete>").startswith("MaxMessageLengthExceeded")


def test_a_text_in_pieces_is_one() -> None:
    text = "ä&amp;<![CDATA[<x>]]>&#65;" * 10_000
    body = f"<Delete xmlns='urn:any'>\n <a/><Quiet>{text}</Quiet> </Delete>".encode()
    assert read_xml(body, "Delete").get("Quiet") == "ä&<x>A" * 10_000


@pytest.mark.parametrize(
    ("inner", "code"),
    [
        ("", "MalformedXML"),
        ("<Object/>", "MalformedXML"),
        ("<Object><Key></Key></Object>", "MalformedXML"),
        ("<Object><Key>a</Key><Key>b</Key></Object>", "MalformedXML"),
        ("<Object><Key>a</Key></Object>" * 1001, "MalformedXML"),
    ],
)
def test_deletes_that_are_refused(inner: str, code: str) -> None:
    with pytest.raises(S3Refusal) as error:
        read_delete(document("Delete", inner))
    assert error.value.code == code


@pytest.mark.parametrize(
    ("numbers", "code"),
    [
        ([], "MalformedXML"),
        (["2", "1"], "InvalidPartOrder"),
        (["1", "1"], "InvalidPartOrder"),
        (["0"], "InvalidArgument"),
        (["10001"], "InvalidArgument"),
        (["x"], "InvalidArgument"),
        ([""], "InvalidArgument"),
        (["1"] * 10_001, "MalformedXML"),
    ],
)
def test_lists_of_parts_that_are_refused(numbers: list[str], code: str) -> None:
    inner = "".join(f"<Part>{element('PartNumber', n)}{element('ETag', 'e')}</Part>" for n in numbers)
    with pytest.raises(S3Refusal) as error:
        read_complete(document("CompleteMultipartUpload", inner))
    assert error.value.code == code


def test_a_part_without_its_tag() -> None:
    with pytest.raises(S3Refusal, match="ETag"):
        read_complete(document("CompleteMultipartUpload", "<Part><PartNumber>1</PartNumber></Part>"))
