"""A real cache server under S3 requests that no client would send, signed and not.

    python -m tests.chaos.s3_fuzz --seconds 600 --seed 1

It ends with 1 if the server dies, hangs, says an error of its own (500), answers with a code that is none of S3's or
has another status, or if what must stay as it is did not. `--only N` sends the one request of that number.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urlsplit
from xml.etree import ElementTree

from stoker.cache.auth.sigv4_canonical import Head
from stoker.cache.auth.sigv4_sign import presign, sign_header
from stoker.cache.origin.s3_signing import Credentials
from stoker.cache.server.s3.errors import STATUSES
from tests.e2e.cache_helpers import ServerProcess

WRITER, READER = Credentials("AKIDWRITER", "secret-of-writer"), Credentials("AKIDREADER", "secret-of-reader")
NOBODY = Credentials("AKIDNOBODY", "secret-of-nobody")
TOKEN = "a-token-of-the-fuzzer"
CANARY = b"what nobody may overwrite"
PATIENCE_S = 60.0
_METHODS = ("GET", "HEAD", "PUT", "POST", "DELETE", "OPTIONS", "PATCH", "BREW")
_BUCKETS = ("w", "fixed", "none", "a..b", "-", "blob", "%2e%2e", "é", "x" * 70, "")
_KEYS = (
    "k",
    "a/b",
    "",
    "/",
    "..",
    "../canary",
    "%00",
    "%ff",
    "a%2Fb",
    "x" * 1025,
    ".stoker-writes/x",
    "雪",
    "a//b",
    "+ +",
)
_FIELDS = (
    "list-type", "prefix", "delimiter", "max-keys", "marker", "start-after", "continuation-token", "encoding-type",
    "uploads", "uploadId", "partNumber", "delete", "versions", "versionId", "key-marker", "acl", "policy", "tagging",
    "location", "versioning", "response-content-type", "x-id", "attributes", "X-Amz-Expires", "max-parts", "nonsense",
)  # fmt: skip
_VALUES = (
    "",
    "1",
    "2",
    "0",
    "-1",
    "10001",
    "99999999999999999999",
    "/",
    "a",
    "%00",
    "%ff",
    "url",
    "null",
    "é",
    "a" * 2000,
)
_HEADERS = (
    ("range", ("bytes=0-0", "bytes=-1", "bytes=9-", "bytes=5-1", "bytes=0-1,3-4", "x", "bytes=" + "9" * 40 + "-")),
    ("if-match", ("*", '"x"', "W/", '"', "a,b")), ("if-none-match", ("*", '"x"', "")),
    ("if-modified-since", ("x", "Thu, 01 Jan 1970 00:00:00 GMT")),
    ("content-md5", ("x", "AAAA", "1B2M2Y8AsgTpgAmY7PhCfg==")),
    ("x-amz-copy-source", ("/w/k", "w/a/b", "/none/k", "fixed/canary", "", "/", "%", "/w/%00", "w/k?versionId=2")),
    ("x-amz-copy-source-range", ("bytes=0-0", "bytes=0-99999999999", "x")), ("x-amz-checksum-crc32", ("AAAAAA==", "x")),
    ("x-amz-metadata-directive", ("COPY", "REPLACE", "x")), ("x-amz-meta-a", ("b", "\xe9", "x" * 3000)),
    ("x-amz-decoded-content-length", ("1", "-1", "x")), ("x-amz-trailer", ("x-amz-checksum-crc32", "host")),
    ("content-encoding", ("gzip", "aws-chunked")), ("x-amz-security-token", ("t",)), ("x-amz-object-lock-mode", ("x",)),
    ("stoker-hops", ("9", "x")), ("expect", ("100-continue",)), ("content-type", ("text/x", "x\x7f")),
)  # fmt: skip
_BODIES = (
    b"", b"x", b"data" * 500, b"<Delete><Object><Key>k</Key></Object></Delete>", b"<Delete>", b"<a/>" * 1000,
    b"<CompleteMultipartUpload><Part><PartNumber>1</PartNumber><ETag>e</ETag></Part></CompleteMultipartUpload>",
    b'<!DOCTYPE a [<!ENTITY b "c">]><Delete>&b;</Delete>', b"<Delete>" + b"<a>" * 5000, b"\xff\xfe<\x00a\x00>\x00",
    b"1\r\nx\r\n0\r\n\r\n", b"5;chunk-signature=" + b"0" * 64 + b"\r\nhello\r\n",
    b"<Delete xmlns='%s'/>" % (b"x" * 5000),
)  # fmt: skip
_PAYLOADS = (
    "UNSIGNED-PAYLOAD", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD", "STREAMING-UNSIGNED-PAYLOAD-TRAILER",
    "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER", "0" * 64, "nonsense",
)  # fmt: skip


class Shot(NamedTuple):
    """One request."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


def draw(rng: random.Random, host: str, now_s: float) -> Shot:
    """A request, of which each part is drawn by chance, and some are then signed by somebody."""
    method = rng.choice(_METHODS[:5]) if rng.random() < 0.95 else rng.choice(_METHODS)
    bucket = rng.choice(_BUCKETS[:3]) if rng.random() < 0.8 else rng.choice(_BUCKETS)
    target = f"/{quote(bucket, safe='%')}"
    if rng.random() < 0.8:
        target += "/" + quote(rng.choice(_KEYS), safe="%/")
    fields = rng.sample(_FIELDS, rng.choice((0, 0, 0, 1, 1, 2, 3)))
    if fields:
        target += "?" + "&".join(f"{name}={quote(rng.choice(_VALUES), safe='%')}" for name in fields)
    headers = {"host": host}
    for name, values in rng.sample(_HEADERS, rng.choice((0, 0, 1, 1, 2, 4))):
        headers[name] = rng.choice(values)
    body = rng.choice(_BODIES) if method in ("PUT", "POST") or rng.random() < 0.05 else b""
    how = rng.random()
    raw = {name.encode(): value.encode("latin-1") for name, value in headers.items()}
    if how < 0.75:
        who = rng.choice((WRITER, WRITER, WRITER, READER, NOBODY))
        payload = hashlib.sha256(body).hexdigest() if rng.random() < 0.8 else rng.choice(_PAYLOADS)
        head = Head(method, target.encode(), raw)
        raw = sign_header(head, who, rng.choice(("us-east-1", "x")), now_s, payload)
    elif how < 0.85:
        target = presign(method, target.encode(), host, WRITER, "us-east-1", now_s, 60, raw).decode("latin-1")
    elif how < 0.9:
        raw[b"authorization"] = rng.choice(
            (b"AWS4-HMAC-SHA256 ", b"AWS x:y", b"AWS4-HMAC-SHA256 Credential=a/b/c/d/e")
        )
    if how < 0.85 and rng.random() < 0.15:
        name = rng.choice(list(raw))
        raw[name] = raw[name][:-1] + b"0"
    sent = {name.decode(): value.decode("latin-1") for name, value in raw.items()}
    return Shot(method, target, sent, body)


class WrongAnswerError(Exception):
    """The server said what it must not."""


class Fuzz:
    """One server, and who asks it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.seed = seed
        self.seen: Counter[int] = Counter()
        for name in ("w", "fixed"):
            (folder / name).mkdir()
            (folder / name / "k").write_bytes(b"some data")
        self._canary = folder / "fixed" / "canary"
        self._canary.write_bytes(CANARY)
        (folder / "canary").write_bytes(CANARY)
        self._above = folder / "canary"
        keys = (f"{WRITER.access_key_id}:{WRITER.secret_access_key}:w=rw,fixed=rw",)
        keys += (f"{READER.access_key_id}:{READER.secret_access_key}:w,fixed",)
        options = [part for key in keys for part in ("--key", key)]
        self.server = ServerProcess(
            *(
                "--dir",
                str(folder / "d"),
                "--capacity",
                "100MB",
                "--token",
                TOKEN,
                "--writable",
                "w",
                *options,
            ),
            *("--bucket", f"w={folder / 'w'}", "--bucket", f"fixed={folder / 'fixed'}"),
        )
        self._host = urlsplit(self.server.url).netloc

    def shoot(self, number: int) -> None:
        """Send the request of that number. Raises WrongAnswerError."""
        shot = draw(random.Random(f"{self.seed} {number}"), self._host, time.time())
        link = http.client.HTTPConnection(self._host, timeout=PATIENCE_S)
        try:
            link.putrequest(shot.method, shot.target, skip_host=True, skip_accept_encoding=True)
            for name, value in shot.headers.items():
                link.putheader(name, value.encode("latin-1"))
            if shot.body or shot.method in ("PUT", "POST"):
                link.putheader("content-length", str(len(shot.body)))
            link.endheaders(shot.body or None)
            answer = link.getresponse()
            self.judge(shot, answer.status, answer.getheader("Content-Type") or "", answer.read())
        except (OSError, http.client.HTTPException) as error:
            raise WrongAnswerError(f"{number}: {shot}: {type(error).__name__}: {error}") from error
        except (WrongAnswerError, ElementTree.ParseError) as error:
            raise WrongAnswerError(f"{number}: {shot}: {error}") from error
        finally:
            link.close()

    def judge(self, shot: Shot, status: int, kind: str, body: bytes) -> None:
        """Raises WrongAnswerError."""
        self.seen[status] += 1
        if self._canary.read_bytes() != CANARY or self._above.read_bytes() != CANARY:
            raise WrongAnswerError("it has written where it must not")
        if status < 400:
            return
        if status == 500 or (status in (502, 504) and kind == "application/xml"):
            raise WrongAnswerError(f"{status}: {body[:300]!r}")
        if shot.method == "HEAD" or kind != "application/xml":
            return
        error = ElementTree.fromstring(body)
        code = error.findtext("Code") or ""
        if error.tag != "Error" or STATUSES.get(code) != status:
            raise WrongAnswerError(f"{status} with {code!r}")

    def check_alive(self) -> None:
        """Raises WrongAnswerError."""
        if self.server.child.poll() is not None:
            raise WrongAnswerError(f"the server has ended with {self.server.child.returncode}")


def main() -> int:
    """Send until the time is over."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--seconds", type=float, default=60.0)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--only", type=int, default=None)
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        fuzz = Fuzz(Path(folder), arguments.seed)
        try:
            deadline, number = time.monotonic() + arguments.seconds, 0
            while time.monotonic() < deadline:
                fuzz.shoot(number if arguments.only is None else arguments.only)
                fuzz.check_alive()
                number += 1
                if arguments.only is not None:
                    break
        except WrongAnswerError as error:
            print(f"seed {arguments.seed}: {error}", file=sys.stderr)
            return 1
        finally:
            fuzz.server.stop()
        print(f"{number} requests, answered {dict(sorted(fuzz.seen.items()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
