"""Writes to S3 by requests of our own: how they are signed, and what becomes of them where a server misbehaves."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials as BotoCredentials

from stoker.cache.origin import s3_xml
from stoker.cache.origin.open import open_writable_origin
from stoker.cache.origin.s3_signing import IN_CHUNKS, ChunkSigner, Credentials, Signer, chunked_bytes
from stoker.cache.origin.writing_port import Attributes, WritableOrigin
from stoker.errors import BadParts, OriginError, PreconditionFailed, WriteDenied, WriteRefused
from stoker.testing.cache_origin_writable import MIB, Trouble, body

Say = Callable[[int, str, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
DENIED = b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
PUT = b'HTTP/1.1 200 OK\r\nETag: "v"\r\nContent-Length: 0\r\n\r\n'


def answer(status: str, text: bytes, fields: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(text)}\r\n{fields}\r\n".encode() + text


def run(
    say: Say, story: Callable[[WritableOrigin], Awaitable[None]], keys: Mapping[str, str] | None = None
) -> int:
    """An origin at a server that answers each request by `say`, with its number and head. How many requests came."""
    requests = 0

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        try:
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                requests += 1
                await say(requests, head, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def all_of_it() -> None:
        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        origin = open_writable_origin(f"s3://b/p?endpoint=http://127.0.0.1:{port}", keys)
        try:
            await story(origin)
        finally:
            await origin.close()
            server.close()

    asyncio.run(asyncio.wait_for(all_of_it(), 60))
    return requests


def length_of(head: str) -> int:
    return next(int(line[16:]) for line in head.split("\r\n") if line.lower().startswith("content-length: "))


class Counted:
    """A body that tells how much was taken of it."""

    def __init__(self, size_bytes: int = 50 * MIB) -> None:
        self.size_bytes = size_bytes
        self.taken_bytes = 0

    async def parts(self) -> AsyncGenerator[bytes, None]:
        while self.taken_bytes < self.size_bytes:
            self.taken_bytes += MIB
            yield bytes(MIB)


# -- signatures ------------------------------------------------------------------------------------------------------


def test_chunks_are_signed_as_in_the_example_that_amazon_gives() -> None:
    """https://docs.aws.amazon.com/AmazonS3/latest/API/sigv4-streaming.html"""
    credentials = Credentials("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
    fields = {
        "content-encoding": "aws-chunked",
        "content-length": "66824",
        "x-amz-decoded-content-length": "66560",
        "x-amz-storage-class": "REDUCED_REDUNDANCY",
    }
    path, now = "/examplebucket/chunkObject.txt", "20130524T000000Z"
    head, _ = Signer("s3.amazonaws.com", "us-east-1", credentials).request(
        "PUT", path, {}, fields, IN_CHUNKS, now
    )
    assert b"content-length: 66824\r\n" in head
    # There content-length is signed as well, which a proxy could change: chunks go on from the signature given there.
    signer = Signer("s3.amazonaws.com", "us-east-1", credentials)
    key = signer._key_of("20130524")
    seed = "4f232c4386841ef735655705268965c44a0e4690baa4adea153f7db9fa80a0a9"
    chunks = ChunkSigner(key, f"{now}\n20130524/us-east-1/s3/aws4_request", seed)
    sent = [chunks.chunk(b"a" * 65536), chunks.chunk(b"a" * 1024), chunks.chunk(b"")]
    assert [chunk.partition(b"\r\n")[0] for chunk in sent] == [
        b"10000;chunk-signature=ad80c730a21e5b8d04586a2213dd63b9a0e99e0e2307b0ade35a65485a288648",
        b"400;chunk-signature=0055627c9e194cb4542bae2aa5492e3c1575bbb81b612b7d234b86a503ef5497",
        b"0;chunk-signature=b6c6ea8a5354eaf15b3cb7646744f4275b71ea724fed81ceb9323e279d449df9",
    ]
    assert sum(map(len, sent)) == 66824 == chunked_bytes(66560, 65536)


@pytest.mark.parametrize("token", ["", "a-session-token"])
@pytest.mark.parametrize(
    ("method", "path", "query", "fields", "data"),
    [
        ("PUT", "/b/a b/%ü~", {}, {"content-type": "text/plain", "x-amz-meta-a": "two  spaces"}, b"data"),
        ("POST", "/b/k", {"uploads": ""}, {}, b""),
        ("GET", "/b", {"uploads": "", "prefix": "a/b c+&=é", "key-marker": "x"}, {}, b""),
        ("DELETE", "/b/k", {"uploadId": "a~b"}, {"if-match": '"v"'}, b""),
    ],
)
def test_any_request_is_signed_as_botocore_signs_it(
    method: str, path: str, query: dict[str, str], fields: dict[str, str], data: bytes, token: str
) -> None:
    credentials = Credentials("AK", "secret", token)
    signer = Signer("host:9000", "eu-west-1", credentials)
    request = AWSRequest("GET", "http://host")
    head, _ = signer.request(
        method, path, query, fields, hashlib.sha256(data).hexdigest(), "20260102T030405Z"
    )
    first, *lines = head.decode().split("\r\n")
    said = dict(line.split(": ", 1) for line in lines if line)
    target = first.split(" ")[1]
    request = AWSRequest(method, f"http://host:9000{target}", data=data, headers=dict(fields))
    request.headers["X-Amz-Content-SHA256"] = hashlib.sha256(data).hexdigest()
    request.headers["X-Amz-Date"] = "20260102T030405Z"
    if token:
        request.headers["X-Amz-Security-Token"] = token
    request.context["timestamp"] = "20260102T030405Z"
    auth = S3SigV4Auth(BotoCredentials("AK", "secret", token or None), "s3", "eu-west-1")
    canonical = auth.canonical_request(request)
    signature = auth.signature(auth.string_to_sign(request, canonical), request)
    assert said["authorization"].rpartition("=")[2] == signature


# -- servers that misbehave ------------------------------------------------------------------------------------------


def test_a_server_that_refuses_is_not_sent_the_body() -> None:
    async def say(number: int, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert "\r\nexpect: 100-continue\r\n" in head
        writer.write(answer("403 Forbidden", DENIED))
        writer.close()

    async def story(origin: WritableOrigin) -> None:
        for size_bytes in (counted.size_bytes, 6000 * MIB):
            with pytest.raises((WriteDenied, OriginError)):
                await origin.put("k", counted.parts(), size_bytes)
            assert counted.taken_bytes == 0
            return

    counted = Counted()
    assert run(say, story) == 1


def test_a_server_that_answers_amid_the_body_is_sent_no_more() -> None:
    async def say(number: int, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        await reader.readexactly(2 * MIB)
        writer.write(answer("403 Forbidden", DENIED))
        await writer.drain()
        await asyncio.sleep(1.0)

    async def story(origin: WritableOrigin) -> None:
        with pytest.raises(WriteDenied):
            await origin.put("k", counted.parts(), counted.size_bytes)
        assert counted.taken_bytes < 20 * MIB

    counted = Counted()
    run(say, story)


def test_a_server_that_never_asks_for_the_body_gets_it() -> None:
    async def say(number: int, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(length_of(head))
        writer.write(PUT)

    async def story(origin: WritableOrigin) -> None:
        counted = Counted(3 * MIB)
        assert (await origin.put("k", counted.parts(), 3 * MIB)).version == "v"

    run(say, story)


@pytest.mark.parametrize("sha256", ["", "5f" * 32])
def test_a_body_is_signed_by_what_its_sender_says_of_it(sha256: str) -> None:
    heads: list[str] = []

    async def say(number: int, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(head.lower())
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        await reader.readexactly(length_of(head))
        writer.write(PUT)

    async def story(origin: WritableOrigin) -> None:
        await origin.put("k", Counted(3 * MIB).parts(), 3 * MIB, sha256=sha256)

    run(say, story, {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"})
    assert f"x-amz-content-sha256: {sha256 or IN_CHUNKS.lower()}\r\n" in heads[0]
    assert ("content-encoding: aws-chunked" in heads[0]) == (not sha256)
    assert (length_of(heads[0]) == 3 * MIB) == bool(sha256)


@pytest.mark.parametrize("after_bytes", [0, 1, MIB])
def test_a_server_that_is_gone_amid_the_body_is_not_asked_again(after_bytes: int) -> None:
    async def say(number: int, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        await reader.readexactly(after_bytes)
        writer.transport.abort()

    async def story(origin: WritableOrigin) -> None:
        with pytest.raises(OriginError):
            await origin.put("k", Counted().parts(), 50 * MIB)

    assert run(say, story) == 1


def test_a_body_that_fails_is_never_sent_whole() -> None:
    got = bytearray()

    async def say(number: int, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while data := await reader.read(MIB):
            got.extend(data)
        assert len(got) < length_of(head)

    async def story(origin: WritableOrigin) -> None:
        with pytest.raises(Trouble):
            await origin.put("k", body(*[bytes(MIB)] * 3, fails=True), 3 * MIB)
        await asyncio.sleep(0.05)

    assert run(say, story) == 1
    assert len(got) < 3 * MIB


def test_a_connection_that_was_closed_while_it_was_kept_is_made_again() -> None:
    async def say(number: int, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if "expect" in head:
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        await reader.readexactly(length_of(head))
        writer.write(PUT)
        await writer.drain()
        writer.close()  # and does not say so

    async def story(origin: WritableOrigin) -> None:
        for number in range(3):
            await origin.put("k", Counted(MIB).parts(), MIB)
            await origin.put("k", body(b"small"), 5)
            await origin.delete("k")
            if number:
                await asyncio.sleep(0.02)

    assert run(say, story) >= 9


def test_an_error_with_a_good_status_is_an_error() -> None:
    async def say(number: int, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(length_of(head))
        text = b'<?xml version="1.0"?>\n<Error><Code>InvalidPart</Code><Message>none</Message></Error>'
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (b"    ", text[:10], text[10:]))
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")

    async def story(origin: WritableOrigin) -> None:
        for _ in range(2):
            with pytest.raises(BadParts) as error:
                await origin.complete_upload("k", "upload", [(1, '"t"')])
            assert error.value.code == "InvalidPart"

    run(say, story)


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        ("412 Precondition Failed", "PreconditionFailed", PreconditionFailed),
        ("409 Conflict", "ConditionalRequestConflict", PreconditionFailed),
        ("400 Bad Request", "EntityTooLarge", WriteRefused),
        ("507 Insufficient Storage", "XMinioStorageFull", WriteRefused),
        ("501 Not Implemented", "NotImplemented", WriteRefused),
        ("503 Slow Down", "SlowDown", OriginError),
        ("307 Temporary Redirect", "TemporaryRedirect", OriginError),
        ("404 Not Found", "NoSuchBucket", OriginError),
    ],
)
def test_what_refusals_are_called(status: str, code: str, kind: type[Exception]) -> None:
    async def say(number: int, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(length_of(head))
        writer.write(answer(status, f"<Error><Code>{code}</Code></Error>".encode()))

    async def story(origin: WritableOrigin) -> None:
        with pytest.raises(kind, match=code):
            await origin.put("k", body(b"one"), 3)

    assert run(say, story) == 1


@pytest.mark.parametrize(
    "attributes",
    [
        Attributes("a\r\nx: y"),
        Attributes("", {"a\r\nb": "c"}),
        Attributes("", {"a": "é"}),
        Attributes("", {"": ""}),
    ],
)
def test_attributes_cannot_make_other_header_lines(attributes: Attributes) -> None:
    async def say(number: int, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(PUT)

    async def story(origin: WritableOrigin) -> None:
        with pytest.raises(WriteRefused):
            await origin.put("k", body(b"one"), 3, attributes=attributes)
        with pytest.raises(WriteRefused):
            await origin.begin_upload("k", attributes)

    assert run(say, story) == 0


def test_xml_without_entities() -> None:
    for text in (b"", b"<a", b"<!DOCTYPE a [<!ENTITY b 'c'>]><a>&b;</a>", b"\xff"):
        with pytest.raises(OriginError):
            s3_xml.parse(text)
    node = s3_xml.parse(b'<a xmlns="http://x/"><b>1</b><c><d>2</d></c><b>3</b></a>')
    assert (node.name, node.text("b"), node.text("z")) == ("a", "1", "")
    assert [child.text("d") for child in node.all("c")] == ["2"]
    assert s3_xml.deletion(["a<&>b"]).count(b"a&lt;&amp;&gt;b") == 1
    assert not s3_xml.can_say("a\x01")
