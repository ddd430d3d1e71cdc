"""A mount of a real S3: its own keys, its own faults."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e import mount_readers as readers
from tests.e2e.mounting import MOUNT_MARKS, Mount, mounted, stop, wait_until_all_held
from tests.e2e.run_helpers import wait_for
from tests.s3_server import BUCKET, KEYS, s3_client, s3_server

pytestmark = MOUNT_MARKS
OBJECTS = {
    "set/a/one": os.urandom(1000),
    "set/a/two words +%41": os.urandom(70_000),
    "set/b/ü": b"",
    "set/large": os.urandom(9_000_000),
    "set/left alone": os.urandom(10),
    "other/x": b"x",
}


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Any]]:
    """The URL of a folder in a bucket, and a client."""
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "weed").mkdir()
    with s3_server(tmp_path / "weed") as endpoint:
        client = s3_client(endpoint)
        for key, data in OBJECTS.items():
            client.put_object(Bucket=BUCKET, Key=key, Body=data)
        yield f"s3://{BUCKET}/set?endpoint={endpoint}", client
        client.close()


def test_an_object_is_no_folder(s3: tuple[str, Any], tmp_path: Path) -> None:
    url, _ = s3
    with pytest.raises(AssertionError, match="is an object: mount the folder that it lies in"):
        Mount(tmp_path / "m", url.replace("/set?", "/set/large?")).wait()
    with mounted(tmp_path / "other", url.replace("/set?", "/set/b/ü?")) as mount:
        assert "there is nothing below" in mount.log, "it has no bytes, as markers of folders have none"


def test_a_folder_of_a_bucket_is_shown_and_outlives_its_server(s3: tuple[str, Any], tmp_path: Path) -> None:
    url, client = s3
    there = {key.removeprefix("set/"): readers.sha256(data) for key, data in OBJECTS.items() if "set/" in key}
    names = [name for name in there if name != "left alone"]
    sums = [there[name] for name in names]
    with mounted(tmp_path / "m", url, "--timeout=3s", "--kernel-ttl=1s", "--ttl=1s") as mount:
        assert mount.sh("cd $0; find . -type f | sort").splitlines() == sorted(f"./{name}" for name in there)
        assert mount.call(readers.outcomes, mount.folder, names) == sums
        client.put_object(Bucket=BUCKET, Key="set/a/one", Body=b"new")
        client.delete_object(Bucket=BUCKET, Key="set/b/ü")
        mount.sh("stat $0/.stoker-refresh > /dev/null")
        sums = [readers.sha256(b"new") if name == "a/one" else sums[at] for at, name in enumerate(names)]
        sums[names.index("b/ü")] = "ENOENT"
        assert mount.call(readers.outcomes, mount.folder, names) == sums
        names.remove("b/ü")
        sums.remove("ENOENT")
        sizes = {name: len(OBJECTS[f"set/{name}"]) for name in names} | {"a/one": len(b"new")}
        wait_until_all_held(mount, sizes)
        (weed,) = (child for child in psutil.Process().children() if child.name().startswith("weed"))
        stop(weed)
        try:
            mount.sh("echo 3 > /proc/sys/vm/drop_caches")
            assert mount.call(readers.outcomes, mount.folder, names) == sums
            assert mount.call(readers.outcome, mount.folder / "left alone")[0] in ("EIO", "ETIMEDOUT")
        finally:
            weed.resume()
        wait_for(
            lambda: mount.call(readers.outcomes, mount.folder, ["left alone"]) == [there["left alone"]],
            why="server that goes on",
        )
        wait_until_all_held(mount, {"left alone": 10})
        weed.kill()
        weed.wait()
        mount.sh("echo 3 > /proc/sys/vm/drop_caches")
        assert mount.call(readers.outcomes, mount.folder, [*names, "left alone"]) == [
            *sums,
            there["left alone"],
        ]
