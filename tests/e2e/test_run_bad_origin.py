"""An S3 origin that misbehaves over real HTTP: the run ends with one message, or goes on where a retry helps."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.e2e.run_helpers import SCRIPTS, run
from tests.http_servers import QuietHandler, QuietServer, running

pytestmark = pytest.mark.real
SCRIPT = str(SCRIPTS / "read_dataset.py")
OBJECTS = {f"train/{i:03d}": json.dumps([i % 2, i, 1.0, -i / 7, 0.5]).encode() for i in range(40)}


class Origin(QuietServer):
    """Serves OBJECTS; `mischief` says what happens to reads of train/007."""

    def __init__(self, mischief: str) -> None:
        super().__init__(Handler)
        self.mischief = mischief
        self.reads: Counter[str] = Counter()
        self.failed_at = 0.0
        """When it has first failed."""


class Handler(QuietHandler):
    server: Origin

    def do_GET(self) -> None:
        key = urlsplit(self.path).path.removeprefix("/bucket").lstrip("/")
        if key == "":
            entries = "".join(
                f"<Contents><Key>{k}</Key><Size>{len(v)}</Size><ETag>&quot;{k}&quot;</ETag>"
                "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
                for k, v in OBJECTS.items()
            )
            listing = f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"
            self.answer(200, listing.encode())
            return
        self.server.reads[key] += 1
        body = OBJECTS[key]
        if key != "train/007" or (self.server.mischief == "once" and self.server.reads[key] > 1):
            self.answer(200, body, key)
            return
        self.server.failed_at = self.server.failed_at or time.monotonic()
        if self.server.mischief == "short":
            self.answer(200, body, key, cut=5)
            self.close_connection = True
        else:
            self.answer(503, b"<Error><Code>SlowDown</Code></Error>")

    def answer(self, status: int, body: bytes, key: str = "", cut: int = 0) -> None:
        first = 0
        asked = self.headers.get("Range")
        if asked and status == 200:
            first, last = (int(n) for n in asked.removeprefix("bytes=").split("-"))
            status, total, body = 206, len(body), body[first : last + 1]
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{first + len(body) - 1}/{total}")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{key}"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) - cut])


@pytest.fixture
def origin(request: pytest.FixtureRequest) -> Iterator[Origin]:
    server = Origin(request.param)
    with running(server):
        yield server


def train(folder: Path, origin: Origin) -> tuple[int, str]:
    done = run(
        folder, "run", "--nproc-per-node", "2", "--timeout", "60s", "--bucket", "numbers=s3://bucket/", SCRIPT,
        "stoker://numbers/train/", timeout_s=150,
        AWS_ENDPOINT_URL=origin.url, AWS_ACCESS_KEY_ID="a",
        AWS_SECRET_ACCESS_KEY="b", AWS_REGION="us-east-1",
    )  # fmt: skip
    assert time.monotonic() - origin.failed_at < 60, "no longer than the one timeout"
    return done.code, done.text


@pytest.mark.parametrize("origin", ["short", "down"], indirect=True)
def test_an_object_that_cannot_be_had_ends_the_run(tmp_path: Path, origin: Origin) -> None:
    code, text = train(tmp_path, origin)
    assert code == 4, text
    assert "train/007" in text
    assert "the run failed" in text


@pytest.mark.parametrize("origin", ["once"], indirect=True)
def test_an_error_that_a_retry_cures_is_not_noticed(tmp_path: Path, origin: Origin) -> None:
    code, text = train(tmp_path, origin)
    assert code == 0, text
    assert "in a world of 2" in text
    assert origin.reads["train/007"] == 2
