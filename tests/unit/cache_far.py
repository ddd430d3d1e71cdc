"""Servers of another fleet that say what they are told to, and a certificate for them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from stoker.cache.origin.fleet_origin import FleetOrigin
from stoker.cache.origin.open import open_fleet
from stoker.wire.cache_api import ObjectStat, Sites
from tests.http_servers import QuietHandler, QuietServer, running

T = TypeVar("T")
Said = tuple[int, dict[str, str], bytes]
DATA = bytes(range(256)) * 100


class FarServer(QuietServer):
    """`answers` by the beginning of the path; what is in none is a bucket of one object, `k` of version `v1`."""

    def __init__(self) -> None:
        super().__init__(FarHandler)
        self.answers: dict[str, Callable[[dict[str, str]], Said]] = {}
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.after: Callable[[], object] = lambda: None
        """Called once what an answer has of its body is out."""
        self.closes = False
        """Each connection after its answer."""


def packed(value: object) -> Said:
    return 200, {}, msgspec.msgpack.encode(value)


def failed(status: int, code: str) -> Said:
    return status, {}, json.dumps({"code": code, "message": "so it is"}).encode()


class FarHandler(QuietHandler):
    server: FarServer

    def do_GET(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.asked.append((self.path, headers))
        found = [answer for begin, answer in self.server.answers.items() if self.path.startswith(begin)]
        status, fields, body = found[0](headers) if found else self._usual(headers)
        self.send_response(status)
        for name, value in fields.items():
            self.send_header(name, value)
        if "Content-Length" not in fields:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        if "Content-Length" in fields:
            self.server.after()
        self.close_connection = self.close_connection or self.server.closes or "Content-Length" in fields

    def _usual(self, headers: dict[str, str]) -> Said:
        if self.path == "/-/health":
            return 200, {}, b""
        if self.path.startswith("/-/sites/"):
            return packed(Sites(0))
        if self.path.startswith("/-/stat/b/k"):
            lines = "Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\ncontent-type: text/plain\r\n"
            return packed(ObjectStat("k", len(DATA), "v1", 0, attributes=lines))
        if self.path.startswith("/-/stat/"):
            return packed(ObjectStat("other", 0, "", 0, is_absent=True))
        first, last = (int(n) for n in headers["range"].removeprefix("bytes=").split("-"))
        return answered(first, min(last + 1, len(DATA)))


def answered(start: int, stop: int, tag: str = "v1", **more: str) -> Said:
    span = f"bytes {start}-{stop - 1}/{len(DATA)}"
    kind = {"Content-Type": "text/plain", "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
    return 206, {"Content-Range": span, "ETag": f'"{tag}"', **kind, **more}, DATA[start:stop]


@contextmanager
def far(count: int = 1) -> Iterator[list[FarServer]]:
    servers = [FarServer() for _ in range(count)]
    with ExitStack() as stack:
        for server in servers:
            stack.enter_context(running(server))
        yield servers


def asking(url: str, story: Callable[[FleetOrigin], Awaitable[T]], *, is_sure: bool = False) -> T:
    async def whole() -> T:
        origin = open_fleet(url, is_sure=is_sure)
        try:
            return await asyncio.wait_for(story(origin), 100)
        finally:
            await origin.close()

    return asyncio.run(whole())


def url_of(*servers: FarServer) -> str:
    return f"stoker+http://{','.join(server.url.removeprefix('http://') for server in servers)}/b"


def write_certificate(folder: Path) -> tuple[Path, Path]:
    """Of localhost, signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name, now = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")]), datetime.now(UTC)
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(1).not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return folder / "cert.pem", folder / "key.pem"
