"""MinIO's own client at a cache server, as it is."""

from __future__ import annotations

import io
import os
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import urllib3

from tests.e2e.cache_helpers import served

minio = pytest.importorskip("minio")
commonconfig = pytest.importorskip("minio.commonconfig")
deleteobjects = pytest.importorskip("minio.deleteobjects")

pytestmark = pytest.mark.real
KEY = ("AKIDWRITER", "secret-of-writer")


def test_minios_client_does_what_it_does_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "o").mkdir()
    options = ("--key", ":".join(KEY), "--s3-buckets-at", str(tmp_path / "made"))
    pool = urllib3.PoolManager()
    with served(tmp_path / "d", {"data": str(tmp_path / "o")}, *options) as server:
        client = minio.Minio(urlsplit(server.url).netloc, *KEY, secure=False, http_client=pool)
        client.make_bucket("made-here")
        assert client.bucket_exists("made-here")
        assert not client.bucket_exists("not-there")

        big = os.urandom(11_000_000)
        client.put_object("made-here", "big", io.BytesIO(big), -1, part_size=5 * 1024 * 1024)
        client.put_object(
            "made-here", "a b/é", io.BytesIO(b"hello"), 5, content_type="text/x", metadata={"who": "me"}
        )
        found = client.stat_object("made-here", "a b/é")
        assert (found.size, found.content_type, found.metadata["x-amz-meta-who"]) == (5, "text/x", "me")
        for arguments, wanted in (({}, big), ({"offset": 5, "length": 10}, big[5:15])):
            answer = client.get_object("made-here", "big", **arguments)
            assert answer.read() == wanted
            answer.close()
            answer.release_conn()
        names = [one.object_name for one in client.list_objects("made-here")]
        assert sorted(names) == ["a b/", "big"]
        names = [one.object_name for one in client.list_objects("made-here", recursive=True)]
        assert names == ["a b/é", "big"]

        client.copy_object("made-here", "copy", commonconfig.CopySource("made-here", "a b/é"))
        sources = [commonconfig.ComposeSource("made-here", name) for name in ("big", "copy")]
        client.compose_object("made-here", "composed", sources)
        assert client.stat_object("made-here", "composed").size == len(big) + 5
        link = client.presigned_get_object("made-here", "copy", timedelta(hours=1))
        assert pool.request("GET", link).data == b"hello"
        link = client.presigned_put_object("made-here", "put", timedelta(hours=1))
        assert pool.request("PUT", link, body=b"put").status == 200

        names = [one.object_name for one in client.list_objects("made-here", recursive=True)]
        assert sorted(names) == ["a b/é", "big", "composed", "copy", "put"]
        gone = [deleteobjects.DeleteObject(name) for name in names]
        assert list(client.remove_objects("made-here", gone)) == []
        client.remove_bucket("made-here")
        assert [bucket.name for bucket in client.list_buckets()] == ["data"]
    pool.clear()
