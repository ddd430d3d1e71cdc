"""Hits of blobs in a fleet are the front's, once it is clear that they are the newest."""

from __future__ import annotations

import asyncio
import http.client
from pathlib import Path

import pytest

from stoker.cache.server.blobs.buckets import BlobBucketSpec
from stoker.cache.server.server import CacheServer
from stoker.cache.server.settings import ServerSettings

pytestmark = pytest.mark.real
PATIENCE_S = 60.0


def ask(url: str, method: str, body: bytes | None = None) -> tuple[int, bytes]:
    host, port = url.removeprefix("http://").split(":")
    link = http.client.HTTPConnection(host, int(port), timeout=30)
    try:
        link.request(method, "/blob/p/key", body)
        response = link.getresponse()
        return response.status, response.read()
    finally:
        link.close()


def handed_over(server: CacheServer) -> int:
    assert server._front is not None
    return server._front.figures().handed_over


@pytest.mark.parametrize("count", [1, 3])
def test_owners_answer_hits_without_the_back(tmp_path: Path, count: int) -> None:
    async def run() -> None:
        servers = []
        urls = []
        for number in range(count):
            settings = ServerSettings(
                folder=tmp_path / f"s{number}", capacity_bytes=10**8, name=f"s{number}",
                fleet=f"file://{tmp_path}/members", blob_buckets={"p": BlobBucketSpec(10**7)},
            )  # fmt: skip
            server = CacheServer(settings)
            servers.append(server)
            urls.append((await server.start()).endpoint)
        try:
            async with asyncio.timeout(PATIENCE_S):
                while (await asyncio.to_thread(ask, urls[0], "PUT", b"data"))[0] != 201:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
                is_front = False
                while not is_front:
                    for server, url in zip(servers, urls, strict=True):
                        before = handed_over(server)
                        assert await asyncio.to_thread(ask, url, "GET") == (200, b"data")
                        # The others' questions come in between now and then.
                        is_front = is_front or handed_over(server) == before
        finally:
            for server in servers:
                await server.stop()

    asyncio.run(run())
