"""What suites that test servers of S3 ask for, of bodies: lengths, checksums, uploads in parts."""

from __future__ import annotations

import hashlib
import re
import socket
import zlib
from base64 import b64encode
from typing import Any
from urllib.parse import urlsplit

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from stoker.cache.auth.crc import Crc32c, Crc64Nvme
from tests.e2e.s3_helpers import BucketMaker, refusal

pytestmark = pytest.mark.real
MIB = 1024 * 1024
FIRST, SECOND = b"A" * (5 * MIB), b"B" * 100


def digest(algorithm: str, data: bytes) -> bytes:
    match algorithm:
        case "CRC32":
            return zlib.crc32(data).to_bytes(4, "big")
        case "SHA1" | "SHA256":
            return hashlib.new(algorithm, data).digest()
    crc = Crc32c() if algorithm == "CRC32C" else Crc64Nvme()
    crc.update(data)
    return crc.digest()


def said(algorithm: str, data: bytes) -> str:
    return b64encode(digest(algorithm, data)).decode()


ALGORITHMS = ("CRC32", "CRC32C", "CRC64NVME", "SHA1", "SHA256")
KINDS = [
    *(("COMPOSITE", one) for one in ("CRC32", "CRC32C", "SHA1", "SHA256")),
    *(("FULL_OBJECT", one) for one in ("CRC32", "CRC32C", "CRC64NVME")),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_object_is_checked_by_its_checksum(here: BucketMaker, client: Any, algorithm: str) -> None:
    bucket, field = here.bucket(client), f"Checksum{algorithm}"
    put = {"Bucket": bucket, "Key": "k", "Body": b"some data"}
    answer = client.put_object(**put, **{field: said(algorithm, b"some data")})
    assert (answer[field], answer["ChecksumType"]) == (said(algorithm, b"some data"), "FULL_OBJECT")
    other = {**put, "Key": "other"}
    assert refusal(client.put_object, **other, **{field: said(algorithm, b"x")}) == (400, "BadDigest")
    assert refusal(client.put_object, **other, **{field: "bad"}) == (400, "InvalidRequest")
    assert refusal(client.head_object, Bucket=bucket, Key="other")[0] == 404


def test_one_checksum_is_said_and_it_is_the_one_that_was_meant(here: BucketMaker, client: Any) -> None:
    target = f"/{here.bucket(client)}/k"
    crc, sha = said("CRC32", b"x"), said("SHA256", b"x")
    two = {"x-amz-checksum-crc32": crc, "x-amz-checksum-sha256": sha}
    other = {"x-amz-checksum-crc32": crc, "x-amz-sdk-checksum-algorithm": "SHA256"}
    for headers in (two, other):
        assert here.ask("PUT", target, b"x", headers)[:2] == (400, "InvalidRequest")
    right = {"x-amz-checksum-crc32": crc, "x-amz-sdk-checksum-algorithm": "CRC32"}
    assert here.ask("PUT", target, b"x", right)[:2] == (200, "")


def test_a_body_has_a_length(here: BucketMaker, client: Any) -> None:
    bucket = here.bucket(client)
    upload = client.create_multipart_upload(Bucket=bucket, Key="k")["UploadId"]
    empty = hashlib.sha256().hexdigest()
    for target in (f"/{bucket}/k", f"/{bucket}/k?partNumber=1&uploadId={upload}"):
        status, code = without_length(here, target, empty)
        assert (status, code) == (411, "MissingContentLength")


def without_length(here: BucketMaker, target: str, body_hash: str) -> tuple[int, str]:
    request = AWSRequest("PUT", f"{here.url}{target}", headers={"x-amz-content-sha256": body_hash})
    S3SigV4Auth(Credentials(*here.admin), "s3", "us-east-1").add_auth(request)
    parts = urlsplit(here.url)
    lines = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    with socket.create_connection((parts.hostname or "", parts.port or 0), 60) as link:
        head = f"PUT {target} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n{lines}\r\n"
        link.sendall(head.encode())
        answer = b""
        while data := link.recv(65536):
            answer += data
    code = re.search(b"<Code>(.*?)</Code>", answer)
    return int(answer.split()[1]), code[1].decode() if code else ""


@pytest.mark.parametrize(("kind", "algorithm"), KINDS)
def test_an_upload_is_checked_by_the_checksums_of_its_parts(
    here: BucketMaker, client: Any, kind: str, algorithm: str
) -> None:
    field = f"Checksum{algorithm}"
    key = {"Bucket": here.bucket(client), "Key": "k"}
    begun = client.create_multipart_upload(**key, ChecksumAlgorithm=algorithm, ChecksumType=kind)
    of_upload = {**key, "UploadId": begun["UploadId"]}
    parts = []
    for number, data in ((1, FIRST), (2, SECOND)):
        checksum = {field: said(algorithm, data)}
        answer = client.upload_part(**of_upload, PartNumber=number, Body=data, **checksum)
        assert answer[field] == checksum[field]
        parts.append({"PartNumber": number, "ETag": answer["ETag"], **checksum})
    whole, wrong = said(algorithm, FIRST + SECOND), said(algorithm, b"other")
    if kind == "COMPOSITE":
        inner = b"".join(digest(algorithm, data) for data in (FIRST, SECOND))
        whole, wrong = f"{said(algorithm, inner)}-2", f"{wrong}-2"

    def complete(value: str, asked: list[dict[str, Any]], **more: Any) -> Any:
        return client.complete_multipart_upload(
            **of_upload, MultipartUpload={"Parts": asked}, ChecksumType=kind, **{field: value}, **more
        )

    swapped = [{**parts[0], field: parts[1][field]}, parts[1]]
    bare = [{name: part[name] for name in ("PartNumber", "ETag")} for part in parts]
    assert refusal(complete, value="bad", asked=parts) == (400, "InvalidRequest")
    assert refusal(complete, value=wrong, asked=parts) == (400, "BadDigest")
    assert refusal(complete, value=whole, asked=swapped) == (400, "BadDigest")
    expected = (400, "InvalidRequest") if kind == "COMPOSITE" else (501, "NotImplemented")
    assert refusal(complete, value=whole, asked=bare) == expected
    assert refusal(complete, value=whole, asked=parts, MpuObjectSize=7) == (400, "InvalidRequest")
    answer = complete(whole, parts, MpuObjectSize=len(FIRST + SECOND))
    assert (answer[field], answer["ChecksumType"]) == (whole, kind)
    assert client.get_object(**key)["Body"].read() == FIRST + SECOND


def test_algorithms_that_there_are_not(here: BucketMaker, client: Any) -> None:
    target = f"/{here.bucket(client)}/k?uploads="
    for algorithm, kind in (
        ("MD4", ""),
        ("SHA1", "FULL_OBJECT"),
        ("CRC64NVME", "COMPOSITE"),
        ("", "COMPOSITE"),
    ):
        headers = {"x-amz-checksum-algorithm": algorithm, "x-amz-checksum-type": kind}
        sent = {name: value for name, value in headers.items() if value}
        assert here.ask("POST", target, b"", sent)[:2] == (400, "InvalidRequest"), headers


def test_parts_that_are_not_what_they_are_said_to_be(here: BucketMaker, client: Any) -> None:
    key = {"Bucket": here.bucket(client), "Key": "k"}
    of_upload = {**key, "UploadId": client.create_multipart_upload(**key)["UploadId"]}
    before = client.upload_part(**of_upload, PartNumber=5, Body=FIRST)["ETag"]
    part = {"PartNumber": 5, "ETag": client.upload_part(**of_upload, PartNumber=5, Body=FIRST + b"x")["ETag"]}

    def complete(*parts: dict[str, Any]) -> Any:
        return client.complete_multipart_upload(**of_upload, MultipartUpload={"Parts": list(parts)})

    for parts in (
        *([[{**part, "ETag": before}]] if here.kind == "folder" else []),  # seaweedfs takes it all the same
        [{**part, "ETag": "0" * 32}],
        [{**part, "PartNumber": 4}],
        [part, {**part, "PartNumber": 9999}],
    ):
        with pytest.raises(client.exceptions.ClientError) as caught:
            complete(*parts)
        assert caught.value.response["Error"]["Code"] == "InvalidPart"
    complete({**part, "ETag": part["ETag"].strip('"')})
    assert client.head_object(**key)["ContentLength"] == len(FIRST) + 1


def test_copied_parts(here: BucketMaker, client: Any) -> None:
    bucket = here.bucket(client)
    client.put_object(Bucket=bucket, Key="s", Body=b"abcde")
    of_upload = {"Bucket": bucket, "Key": "k"}
    of_upload["UploadId"] = client.create_multipart_upload(**of_upload)["UploadId"]
    copy = {**of_upload, "PartNumber": 1, "CopySource": {"Bucket": bucket, "Key": "s"}}
    beyond = refusal(client.upload_part_copy, **copy, CopySourceRange="bytes=0-21")
    assert beyond == (400, "InvalidArgument")
    answer = client.upload_part_copy(**copy, CopySourceRange="bytes=1-3")["CopyPartResult"]
    assert answer["LastModified"].year > 2000
    client.complete_multipart_upload(
        **of_upload, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": answer["ETag"]}]}
    )
    assert client.get_object(Bucket=bucket, Key="k")["Body"].read() == b"bcd"
