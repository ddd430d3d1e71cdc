"""What other clients than boto3 sign and send, each to a server of its own: it is proved, understood and read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from stoker.cache.auth.sigv4 import PayloadMode, Proof, SigningKeys, verify
from stoker.cache.auth.sigv4_body import body_of
from stoker.cache.auth.sigv4_canonical import Head, fold_headers
from stoker.cache.server.s3 import operation_types as ops
from stoker.cache.server.s3.listing import lister_of
from stoker.cache.server.s3.listing_xml import Described, Owner, list_document
from stoker.cache.server.s3.operation_types import Operation
from stoker.cache.server.s3.operations import operation_of
from stoker.cache.server.s3.results import completed_document, created_document, deleted_document
from stoker.cache.server.s3.xml import read_complete, read_delete
from stoker.wire.cache_api import ObjectInfo
from stoker.wire.http_dates import parse_amz_date
from tests.unit.s3_signed import ALICE, credentials_of

KEY = "folder a/b+c%2F~d,e=f@ä雪"
LISTED = sorted([KEY, *(f"p/{number:04}&<" for number in range(1500)), "q"])
ETAG = {"ETag": '"e"', "Last-Modified": "Fri, 02 Jan 2026 03:04:05 GMT"}


class Seen:
    """What came, in order, once it was proved and read."""

    def __init__(self) -> None:
        self.proofs: list[Proof] = []
        self.operations: list[Operation] = []
        self.data: list[bytes] = []
        self.checksums: list[dict[str, str]] = []
        self.errors: list[BaseException] = []

    def take(self, head: Head, body: bytes) -> None:
        now_s = parse_amz_date(head.headers[b"x-amz-date"].decode()) or 0
        proof = verify(head, now_s, credentials_of(), SigningKeys())
        reader = body_of(head.headers, proof.payload, proof.chunks)
        data = b"".join(reader.feed(body))
        self.checksums.append(reader.finish())
        self.proofs.append(proof)
        self.operations.append(operation_of(head))
        self.data.append(data)


def answer_to(operation: Operation, body: bytes) -> bytes:
    """A body for those whose answer has one."""
    if isinstance(operation, ops.DeleteObjects):
        return deleted_document(read_delete(body).keys, [], False)
    if isinstance(operation, ops.CreateMultipartUpload):
        return created_document(operation, "upload+/=1")
    if isinstance(operation, ops.CompleteMultipartUpload):
        return completed_document(operation, "http://h/k", f"e-{len(read_complete(body))}", {})
    if isinstance(operation, ops.ListObjectsV2):
        lister = lister_of(operation)
        lister.feed([ObjectInfo(key, 1, "v") for key in LISTED], is_last=True)
        return list_document(operation, lister.page(), lambda _: Described("v", 1e9), Owner("o", "o"))
    return b""


@contextmanager
def listening(seen: Seen) -> Iterator[str]:
    """A server that takes everything; where."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one_request(self) -> None:
            self.raw_requestline = self.rfile.readline(65537)
            if not self.raw_requestline or not self.parse_request():
                self.close_connection = True
                return
            lines = [(name.encode(), value.encode("latin-1")) for name, value in self.headers.items()]
            head = Head(self.command, self.path.encode("latin-1"), fold_headers(lines))
            if head.headers.get(b"expect"):
                self.send_response_only(100)
                self.end_headers()
            body = self.read_body(head)
            try:
                seen.take(head, body)
            except BaseException as error:  # noqa: BLE001  (told to the test)
                seen.errors.append(error)
            answer = answer_to(seen.operations[-1], body)
            self.send_response_only(200)
            for name, value in {**ETAG, "Content-Length": str(len(answer))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer)

        def read_body(self, head: Head) -> bytes:
            if head.headers.get(b"transfer-encoding") != b"chunked":
                return self.rfile.read(int(head.headers.get(b"content-length", b"0")))
            body = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def check(seen: Seen, *names: str) -> None:
    if seen.errors:
        raise seen.errors[0]
    assert [operation.name for operation in seen.operations] == list(names)
    assert {proof.access_key_id for proof in seen.proofs} == {"ALICE"}


@pytest.mark.parametrize("unsigned", [False, True])
@pytest.mark.parametrize("checksum", ["", "sha256"])
def test_obstore(unsigned: bool, checksum: str) -> None:
    obstore = pytest.importorskip("obstore")
    from obstore.store import S3Store

    seen = Seen()
    with listening(seen) as where:
        more = {"checksum_algorithm": checksum} if checksum else {}
        store = S3Store(
            "bucket",
            endpoint=f"http://{where}",
            region="eu-west-1",
            access_key_id=ALICE.access_key_id,
            secret_access_key=ALICE.secret_access_key,
            unsigned_payload=unsigned,
            client_options={"allow_http": True},
            **more,
        )
        obstore.put(store, KEY, b"data" * 100, use_multipart=False)
        obstore.head(store, KEY)
        obstore.delete(store, KEY)
    check(seen, "PutObject", "HeadObject", "DeleteObjects")
    assert {proof.payload.mode is PayloadMode.UNSIGNED for proof in seen.proofs[:1]} == {unsigned}
    assert seen.operations[0].key == seen.operations[1].key == KEY
    assert seen.data[0] == b"data" * 100
    assert list(seen.checksums[0]) == (["x-amz-checksum-sha256"] if checksum else [])


def test_obstore_in_parts_and_lists() -> None:
    obstore = pytest.importorskip("obstore")
    from obstore.store import S3Store

    seen = Seen()
    data = bytes(range(256)) * 50_000
    with listening(seen) as where:
        store = S3Store(
            "bucket",
            endpoint=f"http://{where}",
            region="eu-west-1",
            access_key_id=ALICE.access_key_id,
            secret_access_key=ALICE.secret_access_key,
            client_options={"allow_http": True},
        )
        obstore.put(store, KEY, data, use_multipart=True, chunk_size=6 << 20, max_concurrency=1)
        found = [one["path"] for page in obstore.list(store, "p", chunk_size=700) for one in page]
        tree = obstore.list_with_delimiter(store)
    parts = ["CreateMultipartUpload", "UploadPart", "UploadPart", "UploadPart", "CompleteMultipartUpload"]
    check(seen, *parts, "ListObjectsV2", "ListObjectsV2", "ListObjectsV2")
    assert b"".join(seen.data[1:4]) == data
    assert {operation.upload_id for operation in seen.operations[1:5]} == {"upload+/=1"}
    assert found == [key for key in LISTED if key.startswith("p/")]
    assert sorted(tree["common_prefixes"]) == [KEY.partition("/")[0], "p"]


def test_pyarrow() -> None:
    fs = pytest.importorskip("pyarrow.fs")
    seen = Seen()
    with listening(seen) as where:
        store = fs.S3FileSystem(
            access_key=ALICE.access_key_id,
            secret_key=ALICE.secret_access_key,
            endpoint_override=where,
            scheme="http",
            region="eu-west-1",
            background_writes=False,
            allow_delayed_open=True,
        )
        with store.open_output_stream(f"bucket/{KEY}", metadata={"Content-Type": "a/b"}) as out:
            out.write(b"data" * 100)
        assert store.get_file_info(f"bucket/{KEY}").size == 0
    check(seen, "PutObject", "HeadObject")
    # The SDK for C++ sends aws-chunked within HTTP's own chunks, and its own checksum behind the data.
    assert seen.proofs[0].payload.mode is PayloadMode.UNSIGNED_CHUNKS_TRAILER
    assert list(seen.checksums[0])
    assert seen.operations[0].key == seen.operations[1].key == KEY
    assert seen.data[0] == b"data" * 100
