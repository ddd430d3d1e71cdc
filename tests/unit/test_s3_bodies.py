"""Bodies of uploads: as the SDKs send them, as AWS documents them, and each way of being wrong."""

from __future__ import annotations

import hashlib
import hmac
import io
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
from botocore.awsrequest import AWSResponse
from botocore.config import Config
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.cache.auth.aws_chunked import LINE_BYTES_MAX, SIGNED_CHUNK_BYTES_MAX
from stoker.cache.auth.s3_refusal import S3Refusal
from stoker.cache.auth.sigv4 import ChunkSigning, Payload, PayloadMode, SigningKeys, verify
from stoker.cache.auth.sigv4_body import Body, body_of
from stoker.cache.auth.sigv4_canonical import Head, Scope, fold_headers
from stoker.cache.origin.s3_signing import Credentials, signing_key
from stoker.wire.http_dates import parse_amz_date
from tests.unit.s3_signed import ALICE, credentials_of
from tests.unit.test_s3_checksums import said

DOC = Credentials("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
DOC_SCOPE = Scope("20130524T000000Z", "us-east-1")
DOC_KEY = signing_key(DOC.secret_access_key, "20130524", "us-east-1")
DOC_SEED = ChunkSigning(
    DOC_KEY, DOC_SCOPE, "4f232c4386841ef735655705268965c44a0e4690baa4adea153f7db9fa80a0a9"
)
DOC_TRAILER_SEED = DOC_SEED._replace(
    signature="106e2a8a18243abcf37539882f36619c00e2dfc72633413f02d3b74544bfeb8e"
)
SIGNED = Payload(PayloadMode.SIGNED_CHUNKS)
SIGNED_TRAILER = Payload(PayloadMode.SIGNED_CHUNKS_TRAILER)
UNSIGNED_TRAILER = Payload(PayloadMode.UNSIGNED_CHUNKS_TRAILER)
CRC = {b"x-amz-trailer": b"x-amz-checksum-crc32c"}


def sized(size_bytes: int, **more: bytes) -> dict[bytes, bytes]:
    return {b"x-amz-decoded-content-length": str(size_bytes).encode(), **(CRC if more else {})}


def read(body: Body, sent: bytes, step: int = 0) -> bytes:
    parts: list[bytes] = []
    for at in range(0, len(sent), step or len(sent) or 1):
        parts += body.feed(sent[at : at + (step or len(sent))])
    body.finish()
    return b"".join(parts)


def refusal(body: Body, sent: bytes) -> tuple[str, bytes]:
    """What it is refused as, and what was given out before."""
    given_out = b""
    try:
        for at in range(len(sent)):
            given_out += b"".join(body.feed(sent[at : at + 1]))
        body.finish()
    except S3Refusal as error:
        return error.code, given_out
    return "", given_out


def chunked(signing: ChunkSigning, chunks: list[bytes], trailers: dict[str, str] | None = None) -> bytes:
    """Encoded and signed as AWS documents it."""
    before, sent = signing.signature, b""

    def sign(algorithm: str, text: str) -> str:
        asked = f"{algorithm}\n{signing.scope.time}\n{signing.scope}\n{before}\n{text}"
        return hmac.new(signing.key, asked.encode(), "sha256").hexdigest()

    for chunk in [*chunks, b""]:
        hashes = f"{hashlib.sha256(b'').hexdigest()}\n{hashlib.sha256(chunk).hexdigest()}"
        before = sign("AWS4-HMAC-SHA256-PAYLOAD", hashes)
        sent += f"{len(chunk):x};chunk-signature={before}\r\n".encode() + chunk + (b"\r\n" if chunk else b"")
    if trailers:
        lines = "".join(f"{name}:{value}\n" for name, value in sorted(trailers.items()))
        signature = sign("AWS4-HMAC-SHA256-TRAILER", hashlib.sha256(lines.encode()).hexdigest())
        sent += lines.replace("\n", "\r\n").encode() + f"x-amz-trailer-signature:{signature}\r\n".encode()
    return sent + b"\r\n"


def test_the_published_example_of_signed_chunks() -> None:
    # docs.aws.amazon.com/AmazonS3/latest/API/sigv4-streaming.html
    head = Head(
        "PUT",
        b"/examplebucket/chunkObject.txt",
        {
            b"host": b"s3.amazonaws.com",
            b"x-amz-date": b"20130524T000000Z",
            b"x-amz-storage-class": b"REDUCED_REDUNDANCY",
            b"x-amz-content-sha256": b"STREAMING-AWS4-HMAC-SHA256-PAYLOAD",
            b"content-encoding": b"aws-chunked",
            b"x-amz-decoded-content-length": b"66560",
            b"content-length": b"66824",
            b"authorization": b"AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request,"
            b"SignedHeaders=content-encoding;content-length;host;x-amz-content-sha256;x-amz-date;"
            b"x-amz-decoded-content-length;x-amz-storage-class,Signature=" + DOC_SEED.signature.encode(),
        },
    )
    proof = verify(head, parse_amz_date("20130524T000000Z") or 0, credentials_of(DOC), SigningKeys())
    assert proof.chunks == DOC_SEED
    sent = (
        b"10000;chunk-signature=ad80c730a21e5b8d04586a2213dd63b9a0e99e0e2307b0ade35a65485a288648\r\n"
        + b"a" * 65536
        + b"\r\n400;chunk-signature=0055627c9e194cb4542bae2aa5492e3c1575bbb81b612b7d234b86a503ef5497\r\n"
        + b"a" * 1024
        + b"\r\n0;chunk-signature=b6c6ea8a5354eaf15b3cb7646744f4275b71ea724fed81ceb9323e279d449df9\r\n\r\n"
    )
    assert len(sent) == 66824
    for step in (0, 1000, 65536, 65537):
        assert read(body_of(head.headers, proof.payload, proof.chunks), sent, step) == b"a" * 66560


@pytest.mark.parametrize("between", [b"", b"\r\n"])
@pytest.mark.parametrize("end", [b"", b"\r\n"])
def test_the_published_example_of_a_signed_trailer(between: bytes, end: bytes) -> None:
    # docs.aws.amazon.com/AmazonS3/latest/API/sigv4-streaming-trailers.html
    sent = (
        b"10000;chunk-signature=b474d8862b1487a5145d686f57f013e54db672cee1c953b3010fb58501ef5aa2\r\n"
        + b"a" * 65536
        + b"\r\n400;chunk-signature=1c1344b170168f8e65b41376b44b20fe354e373826ccbbe2c1d40a8cae51e5c7\r\n"
        + b"a" * 1024
        + b"\r\n0;chunk-signature=2ca2aba2005185cf7159c6277faf83795951dd77a3a99e6e65d5c9f85863f992\r\n"
        + between
        + b"x-amz-checksum-crc32c:sOO8/Q==\r\n"
        + b"x-amz-trailer-signature:d81f82fc3505edab99d459891051a732e8730629a2e4a59689829ca17fe2e435\r\n"
        + end
    )
    body = body_of({**sized(66560), **CRC}, SIGNED_TRAILER, DOC_TRAILER_SEED)
    assert read(body, sent) == b"a" * 66560


CHUNKS = st.lists(st.binary(min_size=1, max_size=40), max_size=5)


@settings(max_examples=60, deadline=None)
@given(CHUNKS, st.integers(1, 50), st.booleans())
def test_signed_chunks_come_out_as_they_went_in(chunks: list[bytes], step: int, has_trailer: bool) -> None:
    data = b"".join(chunks)
    trailers = {"x-amz-checksum-crc32c": said("crc32c", data)} if has_trailer else None
    headers = {**sized(len(data)), **(CRC if has_trailer else {})}
    body = body_of(headers, SIGNED_TRAILER if has_trailer else SIGNED, DOC_SEED)
    assert read(body, chunked(DOC_SEED, chunks, trailers), step) == data


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_byte_of_a_signed_body_can_be_changed(data: st.DataObject) -> None:
    chunks = [b"first chunk", b"second"]
    trailers = {"x-amz-checksum-crc32c": said("crc32c", b"".join(chunks))}
    sent = chunked(DOC_SEED, chunks, trailers)
    at = data.draw(st.integers(0, len(sent) - 1))
    byte = data.draw(st.integers(0, 255))
    other = sent[:at] + bytes([byte]) + sent[at + 1 :]
    code, given_out = refusal(body_of({**sized(17), **CRC}, SIGNED_TRAILER, DOC_SEED), other)
    assert code or given_out == b"first chunksecond"
    assert given_out in (b"", b"first chunk", b"first chunksecond")


def test_chunks_cannot_change_places_or_be_left_out_or_come_from_another_request() -> None:
    sent = chunked(DOC_SEED, [b"aaaa", b"bbbb"])
    first, second, end = sent[:90], sent[90:180], sent[180:]
    assert read(body_of(sized(8), SIGNED, DOC_SEED), first + second + end) == b"aaaabbbb"
    for other in (second + first + end, second + end, first + end, first + first + second + end):
        assert refusal(body_of(sized(8), SIGNED, DOC_SEED), other)[0] == "SignatureDoesNotMatch"
    elsewhere = DOC_SEED._replace(signature="0" * 64)
    assert refusal(body_of(sized(8), SIGNED, elsewhere), sent) == ("SignatureDoesNotMatch", b"")


def test_data_is_held_back_until_its_chunk_is_proved() -> None:
    sent = chunked(DOC_SEED, [b"a" * 100])
    body = body_of(sized(100), SIGNED, DOC_SEED)
    assert body.feed(sent[:180]) == []
    assert b"".join(body.feed(sent[180:])) == b"a" * 100


def test_a_chunk_with_another_signature() -> None:
    sent = chunked(DOC_SEED, [b"data"]).replace(b"signature=", b"signature=0", 1)
    other = sent[:17] + sent[17:18] + sent[18:82] + sent[83:]
    assert refusal(body_of(sized(4), SIGNED, DOC_SEED), other) == ("SignatureDoesNotMatch", b"")


def test_the_last_chunk_is_signed_too() -> None:
    sent = chunked(DOC_SEED, [b"data"])
    cut = sent[: sent.rindex(b"0;")] + b"0;chunk-signature=" + b"0" * 64 + b"\r\n\r\n"
    assert refusal(body_of(sized(4), SIGNED, DOC_SEED), cut) == ("SignatureDoesNotMatch", b"data")


def test_a_trailer_with_another_signature() -> None:
    trailers = {"x-amz-checksum-crc32c": said("crc32c", b"data")}
    sent = chunked(DOC_SEED, [b"data"], trailers)
    cut = sent[: sent.rindex(b":") + 1] + b"0" * 64 + b"\r\n\r\n"
    body = body_of({**sized(4), **CRC}, SIGNED_TRAILER, DOC_SEED)
    assert refusal(body, cut) == ("SignatureDoesNotMatch", b"data")


def test_a_trailer_without_its_signature() -> None:
    trailers = {"x-amz-checksum-crc32c": said("crc32c", b"data")}
    sent = chunked(DOC_SEED, [b"data"], trailers)
    cut = sent[: sent.index(b"x-amz-trailer-signature")] + b"\r\n"
    body = body_of({**sized(4), **CRC}, SIGNED_TRAILER, DOC_SEED)
    assert refusal(body, cut)[0] == "MalformedTrailerError"


def test_a_trailer_after_the_signature() -> None:
    headers = {**sized(4), b"x-amz-trailer": b"x-amz-checksum-crc32c,x-amz-checksum-crc32"}
    sent = chunked(DOC_SEED, [b"data"], {"x-amz-checksum-crc32c": said("crc32c", b"data")})
    late = sent[:-2] + f"x-amz-checksum-crc32:{said('crc32', b'data')}\r\n\r\n".encode()
    body = body_of(headers, SIGNED_TRAILER, DOC_SEED)
    assert refusal(body, late)[0] == "MalformedTrailerError"


def test_a_chunk_that_is_too_large_is_refused_before_it_comes() -> None:
    body = body_of(sized(1 << 40), SIGNED, DOC_SEED)
    line = f"{SIGNED_CHUNK_BYTES_MAX + 1:x};chunk-signature={'0' * 64}\r\n".encode()
    with pytest.raises(S3Refusal) as refused:
        body.feed(line)
    assert refused.value.code == "InvalidChunkSizeError"


def test_a_line_without_an_end_is_not_gathered() -> None:
    with pytest.raises(S3Refusal, match="longer than"):
        body_of(sized(4), UNSIGNED_TRAILER, None).feed(b"0" * (LINE_BYTES_MAX + 3))


def test_a_trailer_without_an_end_is_not_gathered() -> None:
    body = body_of({**sized(0), **CRC}, UNSIGNED_TRAILER, None)
    with pytest.raises(S3Refusal, match="more than"):
        body.feed(b"0\r\n" + b"\r\n" * 17)


CRC_OF_DATA = b"x-amz-checksum-crc32c:" + said("crc32c", b"data").encode()


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"4\r\ndata\r\n0\r\n" + CRC_OF_DATA + b"\r\n\r\n", ""),
        (b"2\r\nda\r\n2\r\nta\r\n0\r\n" + CRC_OF_DATA + b"\r\n", ""),
        (b"4\r\ndata\r\n0\r\n\r\n" + CRC_OF_DATA + b"\r\n\r\n", ""),
        (b"4\r\ndata\r\n0\r\n" + CRC_OF_DATA + b"\n\r\n", ""),
        (b"", "IncompleteBody"),
        (b"4\r\nda", "IncompleteBody"),
        (b"4\r\ndata\r\n", "IncompleteBody"),
        (b"4\r\ndata\r\n0", "IncompleteBody"),
        (b"4\r\ndata\r\n0\r\n" + CRC_OF_DATA, "IncompleteBody"),
        (b"3\r\ndat\r\n0\r\n" + CRC_OF_DATA + b"\r\n\r\n", "IncompleteBody"),
        (b"5\r\ndata!\r\n0\r\n" + CRC_OF_DATA + b"\r\n\r\n", "IncompleteBody"),
        (b"3\r\ndata\r\n0\r\n" + CRC_OF_DATA + b"\r\n\r\n", "IncompleteBody"),
        (b"-4\r\ndata\r\n0\r\n\r\n", "IncompleteBody"),
        (b"4;chunk-signature=" + b"0" * 64 + b"\r\ndata\r\n0\r\n\r\n", "IncompleteBody"),
        (b"ffffffffffffffff\r\ndata\r\n0\r\n\r\n", "IncompleteBody"),
        (b"4\r\ndata\r\n0\r\n" + CRC_OF_DATA + b"\r\n\r\nmore", "IncompleteBody"),
        (b"4\r\ndata\r\n0\r\n" + CRC_OF_DATA + b"\r\n\r\nmore\r\n", "IncompleteBody"),
        (b"4\r\ndata\r\n0\r\n\r\n", "MalformedTrailerError"),
        (b"4\r\ndata\r\n0\r\nx-amz-meta-a:b\r\n\r\n", "MalformedTrailerError"),
        (b"4\r\ndata\r\n0\r\nx-amz-checksum-crc32c\r\n\r\n", "MalformedTrailerError"),
        (b"4\r\ndata\r\n0\r\n" + CRC_OF_DATA + b"\r\n" + CRC_OF_DATA + b"\r\n\r\n", "MalformedTrailerError"),
        (b"4\r\ndate\r\n0\r\n" + CRC_OF_DATA + b"\r\n\r\n", "BadDigest"),
        (b"4\r\ndata\r\n0\r\nx-amz-checksum-crc32c:AAAAAA==\r\n\r\n", "BadDigest"),
        (b"4\r\ndata\r\n0\r\nx-amz-checksum-crc32c:AA==\r\n\r\n", "InvalidRequest"),
    ],
)
def test_unsigned_chunks(sent: bytes, code: str) -> None:
    assert refusal(body_of({**sized(4), **CRC}, UNSIGNED_TRAILER, None), sent)[0] == code


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=20),
            st.sampled_from([b"4\r\ndata\r\n", b"0\r\n", b"\r\n", b"\n", CRC_OF_DATA, b"\xc0:\xe9"]),
        ),
        max_size=8,
    ).map(b"".join),
    st.booleans(),
)
def test_whatever_comes_is_read_or_refused(sent: bytes, is_signed: bool) -> None:
    payload, signing = (SIGNED_TRAILER, DOC_SEED) if is_signed else (UNSIGNED_TRAILER, None)
    code, given_out = refusal(body_of({**sized(4), **CRC}, payload, signing), sent)
    assert len(given_out) <= 4
    assert code or given_out == b"data"


def test_a_chunk_that_is_longer_than_it_says() -> None:
    body = body_of(sized(3), UNSIGNED_TRAILER, None)
    assert refusal(body, b"3\r\ndata\r\n0\r\n\r\n") == ("IncompleteBody", b"dat")


def test_more_than_was_announced_is_never_given_out() -> None:
    body = body_of({**sized(4), **CRC}, UNSIGNED_TRAILER, None)
    assert refusal(body, b"5\r\ndata!") == ("IncompleteBody", b"")
    plain = body_of({b"content-length": b"4"}, Payload(PayloadMode.UNSIGNED), None)
    assert refusal(plain, b"data!") == ("IncompleteBody", b"data")


@pytest.mark.parametrize(
    ("headers", "payload", "signing", "code"),
    [
        ({}, SIGNED, DOC_SEED, "MissingContentLength"),
        ({b"x-amz-decoded-content-length": b"-1"}, SIGNED, DOC_SEED, "InvalidArgument"),
        ({b"x-amz-decoded-content-length": b"9" * 19}, SIGNED, DOC_SEED, "InvalidArgument"),
        ({b"content-length": b"1e3"}, Payload(PayloadMode.UNSIGNED), None, "InvalidArgument"),
        (sized(4), SIGNED, None, "AccessDenied"),
        ({**sized(4), b"x-amz-trailer": b"x-amz-meta-a"}, UNSIGNED_TRAILER, None, "InvalidRequest"),
        ({**sized(4), b"x-amz-trailer": b"x-amz-checksum-type"}, UNSIGNED_TRAILER, None, "InvalidRequest"),
        ({**sized(4), b"content-md5": b"x"}, UNSIGNED_TRAILER, None, "InvalidDigest"),
    ],
)
def test_bodies_that_are_refused_at_once(
    headers: dict[bytes, bytes], payload: Payload, signing: ChunkSigning | None, code: str
) -> None:
    with pytest.raises(S3Refusal) as refused:
        body_of(headers, payload, signing)
    assert refused.value.code == code


def test_a_plain_body_that_is_what_was_signed() -> None:
    payload = Payload(PayloadMode.HASH, hashlib.sha256(b"data").hexdigest())
    headers = {b"content-length": b"4", b"content-md5": said("content-md5", b"data").encode()}
    assert read(body_of(headers, payload, None), b"data", 3) == b"data"
    assert read(body_of({}, payload, None), b"data", 3) == b"data"


def test_a_plain_body_that_is_not_what_was_signed() -> None:
    payload = Payload(PayloadMode.HASH, hashlib.sha256(b"data").hexdigest())
    assert refusal(body_of({}, payload, None), b"date")[0] == "XAmzContentSHA256Mismatch"


def test_a_plain_body_that_ends_early() -> None:
    body = body_of({b"content-length": b"4"}, Payload(PayloadMode.UNSIGNED), None)
    assert refusal(body, b"dat") == ("IncompleteBody", b"dat")


def test_a_plain_body_with_another_checksum() -> None:
    headers = {b"content-length": b"4", b"x-amz-checksum-crc32": said("crc32", b"date").encode()}
    assert refusal(body_of(headers, Payload(PayloadMode.UNSIGNED), None), b"data")[0] == "BadDigest"


def test_checksums_of_an_object_that_is_completed_are_not_those_of_the_body() -> None:
    headers = {b"content-length": b"4", b"x-amz-checksum-crc32": b"AAAAAA==-3"}
    assert (
        read(body_of(headers, Payload(PayloadMode.UNSIGNED), None, has_own_checksums=False), b"data")
        == b"data"
    )
    headers[b"content-md5"] = said("content-md5", b"date").encode()
    body = body_of(headers, Payload(PayloadMode.UNSIGNED), None, has_own_checksums=False)
    assert refusal(body, b"data")[0] == "BadDigest"


def test_a_header_and_a_trailer_that_say_different_things() -> None:
    headers = {**sized(4), **CRC, b"x-amz-checksum-crc32c": said("crc32c", b"date").encode()}
    body = body_of(headers, UNSIGNED_TRAILER, None)
    assert refusal(body, b"4\r\ndata\r\n0\r\n" + CRC_OF_DATA + b"\r\n\r\n")[0] == "InvalidRequest"


class Sent:
    """What boto3 sends, as it goes over the wire."""

    def __init__(self) -> None:
        self.head = Head("", b"", {})
        self.body = b""

    def take(self, request: Any, **_: Any) -> AWSResponse:
        parts = urlsplit(request.url)
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        lines = [
            (name.encode(), value if isinstance(value, bytes) else value.encode())
            for name, value in request.headers.items()
        ]
        self.head = Head(
            request.method, target.encode(), fold_headers([*lines, (b"host", parts.netloc.encode())])
        )
        body = request.body
        self.body = body if isinstance(body, bytes) else (body.read() if body else b"")
        return AWSResponse(request.url, 200, {"ETag": '"e"'}, _Nothing())


class _Nothing:
    def stream(self) -> list[bytes]:
        return []


@pytest.mark.parametrize("algorithm", ["CRC32", "SHA1", "SHA256"])
@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("size", [0, 5, 300_000])
def test_what_boto3_uploads_is_read(algorithm: str, scheme: str, size: int) -> None:
    sent = Sent()
    client = boto3.client(
        "s3",
        endpoint_url=f"{scheme}://127.0.0.1:9",
        region_name="eu-west-1",
        aws_access_key_id=ALICE.access_key_id,
        aws_secret_access_key=ALICE.secret_access_key,
        config=Config(s3={"addressing_style": "path"}),
    )
    client.meta.events.register("before-send.s3", sent.take)
    data = bytes(size)
    client.put_object(Bucket="bucket", Key="a b/ä+", Body=io.BytesIO(data), ChecksumAlgorithm=algorithm)
    now_s = parse_amz_date(sent.head.headers[b"x-amz-date"].decode()) or 0
    proof = verify(sent.head, now_s, credentials_of(), SigningKeys())
    is_streaming = proof.payload.mode is PayloadMode.UNSIGNED_CHUNKS_TRAILER
    assert is_streaming == (scheme == "https")
    body = body_of(sent.head.headers, proof.payload, proof.chunks)
    assert b"".join(body.feed(sent.body)) == data
    assert list(body.finish()) == [f"x-amz-checksum-{algorithm.lower()}"]
    other = body_of(sent.head.headers, proof.payload, proof.chunks)
    if size:
        with pytest.raises(S3Refusal) as refused:
            read(other, sent.body.replace(b"\0", b"\1"))
        assert refused.value.code in ("BadDigest", "XAmzContentSHA256Mismatch")
