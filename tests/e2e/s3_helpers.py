"""S3 servers: requests to a real one that are counted on their way, and one that lists a million keys."""

from __future__ import annotations

import contextlib
import http.client
import re
import threading
import uuid
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import boto3
import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials
from botocore.exceptions import ClientError

from tests.e2e.cache_helpers import served
from tests.http_servers import QuietHandler, QuietServer
from tests.s3_server import BUCKET, KEYS, s3_server


def boto3_at(url: str, key: tuple[str, str], **config: Any) -> Any:
    """A client of S3 at a cache server, which asks each thing once."""
    return boto3.client(
        "s3",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id=key[0],
        aws_secret_access_key=key[1],
        config=Config(retries={"total_max_attempts": 1}, **config),
    )


class Asked(NamedTuple):
    """What a request was: `HEAD`, `GET`, or `LIST`, and of which key or prefix."""

    what: str
    name: str


class CountingProxy(QuietServer):
    """Hands requests on as they are, headers and all, so that what is signed stays signed. `sent_bytes`: of bodies, by
    key."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(_Relay)
        self.endpoint = urlsplit(endpoint)
        self.asked: list[Asked] = []
        self.lock = threading.Lock()
        self.sent_bytes: Counter[str] = Counter()

    @property
    def counted(self) -> Counter[str]:
        return Counter(asked.what for asked in self.asked)


class _Relay(QuietHandler):
    server: CountingProxy

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        key = unquote(parts.path).removeprefix(f"/{BUCKET}").lstrip("/")
        if "list-type" in parts.query:
            self.server.asked.append(Asked("LIST", parse_qs(parts.query).get("prefix", [""])[0]))
        else:
            self.server.asked.append(Asked(self.command, key))
        link = http.client.HTTPConnection(self.server.endpoint.hostname or "", self.server.endpoint.port)
        with contextlib.closing(link):
            link.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                link.putheader(name, value)
            link.endheaders()
            answer = link.getresponse()
            body = answer.read()
            self.send_response_only(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                    self.send_header(name, value)
            length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(body))
            self.send_header("Content-Length", length or "0")
            if "list-type" not in parts.query and answer.status < 300:
                # Before it is sent: who has all of it may be asked at once what it was.
                with self.server.lock:
                    self.server.sent_bytes[key] += len(body)
            self.end_headers()
            self.wfile.write(body)


class ManyKeys(QuietServer):
    """An S3 server of `k/0000000` and so on, each with ten bytes, which are its number; lists as S3 does."""

    def __init__(self, count: int) -> None:
        super().__init__(_Million)
        self.count = count
        self.asked: Counter[str] = Counter()


class _Million(QuietHandler):
    server: ManyKeys

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        if "list-type" in parts.query:
            self.server.asked["LIST"] += 1
            self._list({name: values[0] for name, values in parse_qs(parts.query).items()})
            return
        self.server.asked[self.command] += 1
        number = unquote(parts.path).removeprefix(f"/{BUCKET}/k/")
        if len(number) != 7 or not number.isdigit() or int(number) >= self.server.count:
            self._say(404, b"<Error><Code>NoSuchKey</Code></Error>")
        else:
            self._say(200, int(number).to_bytes(10, "big"), f'"{number}"')

    def _list(self, query: dict[str, str]) -> None:
        prefix, limit = query.get("prefix", ""), int(query.get("max-keys", "1000"))
        after = query.get("continuation-token") or query.get("start-after", "")
        # Keys sort as their numbers do: the first that counts is found, not looked for.
        numbers = range(self.server.count)
        first = max(bisect_left(numbers, prefix, key=_key_of), bisect_right(numbers, after, key=_key_of))
        following = (_key_of(number) for number in numbers[first : first + limit + 1])
        keys = [key for key in following if key.startswith(prefix)]
        entries = "".join(
            f"<Contents><Key>{key}</Key><Size>10</Size><ETag>&quot;{key[2:]}&quot;</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for key in keys[:limit]
        )
        more = ""
        if len(keys) > limit:
            more = f"<NextContinuationToken>{keys[limit - 1]}</NextContinuationToken>"
        is_cut = str(bool(more)).lower()
        listing = f"<ListBucketResult><IsTruncated>{is_cut}</IsTruncated>{entries}{more}</ListBucketResult>"
        self._say(200, listing.encode())

    def _say(self, status: int, body: bytes, tag: str = "") -> None:
        asked = self.headers.get("Range") if tag else None
        self.send_response(206 if asked else status)
        if asked:
            first, last = (int(n) for n in asked.removeprefix("bytes=").split("-"))
            last = min(last, len(body) - 1)
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(body)}")
            body = body[first : last + 1]
        self.send_header("Content-Length", str(len(body)))
        if tag:
            self.send_header("ETag", tag)
            self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _key_of(number: int) -> str:
    return f"k/{number:07}"


class BucketMaker(NamedTuple):
    """A server at which clients may make buckets. `kind`: of the origin behind it, `folder` or `s3`; `place`: the
    folder below which they are, or the URL of the server of S3."""

    url: str
    kind: str
    place: str
    admin: tuple[str, str] = ("AKIDADMIN", "secret-of-admin")

    def client(self, **config: Any) -> Any:
        return boto3_at(self.url, self.admin, **config)

    def bucket(self, client: Any) -> str:
        """A new one."""
        name = f"b-{uuid.uuid4().hex}"
        client.create_bucket(Bucket=name)
        return name

    def ask(
        self, method: str, target: str, body: bytes = b"", headers: Mapping[str, str | bytes] | None = None
    ) -> tuple[int, str, http.client.HTTPMessage]:
        """A signed request, as it is: status, S3's code, headers."""
        request = AWSRequest(method, f"{self.url}{target}", data=body, headers=dict(headers or {}))
        S3SigV4Auth(Credentials(*self.admin), "s3", "us-east-1").add_auth(request)
        return self.send(method, target, body, dict(request.headers.items()))

    def send(
        self, method: str, target: str, body: bytes, headers: Mapping[str, str | bytes]
    ) -> tuple[int, str, http.client.HTTPMessage]:
        parts = urlsplit(self.url)
        with contextlib.closing(
            http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
        ) as link:
            link.request(method, target, body, {**headers, "Host": parts.netloc})
            answer = link.getresponse()
            found = re.search(b"<Code>(.*?)</Code>", answer.read())
            return answer.status, found[1].decode() if found else "", answer.headers


@contextlib.contextmanager
def bucket_maker(kind: str, folder: Path) -> Iterator[BucketMaker]:
    """One of its own."""
    made = BucketMaker("", kind, str(folder / "made"))
    with contextlib.ExitStack() as stack:
        at, environment = made.place, {}
        if kind == "s3":
            (folder / "weed").mkdir()
            made = made._replace(place=stack.enter_context(s3_server(folder / "weed")))
            at, environment = f"s3://{BUCKET}/made?endpoint={made.place}", KEYS
        options = ("--s3-buckets-at", at, "--key", ":".join(made.admin))
        server = stack.enter_context(served(folder / "d", {}, *options, environment=environment))
        yield made._replace(url=server.url)


def refusal(call: Callable[..., Any], **arguments: Any) -> tuple[int, str]:
    """The status and code with which a call is refused."""
    with pytest.raises(ClientError) as caught:
        call(**arguments)
    answer = caught.value.response
    return answer["ResponseMetadata"]["HTTPStatusCode"], answer["Error"]["Code"]
