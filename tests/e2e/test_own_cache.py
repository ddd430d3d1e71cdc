"""One cache for all processes of a script, where none is known: the first process starts it, the others are told."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stoker.data.attach import Started
from stoker.settings import CacheSettings

pytestmark = pytest.mark.real
SCRIPT = Path(__file__).with_name("own_cache_script.py")
SIZE_BYTES, RECORDS = 10_000, 48


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "origin"
    folder.mkdir()
    for number in range(RECORDS):
        (folder / f"{number:03}").write_bytes(os.urandom(SIZE_BYTES))
    return folder


def ran(tmp_path: Path, *arguments: str) -> Any:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("STOKER_CACHE")}
    environment["STOKER_CACHE_DIR"] = str(tmp_path / "cache")
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments],
        env=environment, capture_output=True, text=True, timeout=270, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "using a cache folder of this process's own" not in done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("how", ["torch", "stoker"])
def test_spawned_loader_processes_read_the_origin_once(tmp_path: Path, folder: Path, how: str) -> None:
    """The process that starts them reads no record: what its cache has from the origin is what they asked it for."""
    said = ran(tmp_path, how, f"file://{folder}/")
    whole = RECORDS * SIZE_BYTES
    assert said == {"records": RECORDS, "size_bytes": whole, "origin_bytes": whole}


def test_processes_are_told_of_a_cache_that_another_dataset_started(tmp_path: Path, folder: Path) -> None:
    said = ran(tmp_path, "grandchildren", f"file://{folder}/")
    assert said["endpoints"] == [said["own"]] * 4


def test_a_cache_that_has_ended_is_not_asked(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path / "another"))
    for name in ("STOKER_CACHE_ENDPOINT", "STOKER_CACHE_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    said = ran(tmp_path, "pickle", f"file://{folder}/")
    dataset = pickle.loads(bytes.fromhex(said["pickle"]))
    assert dataset[1] == (folder / "001").read_bytes()
    assert dataset.served.client.endpoint != said["endpoint"]


def test_tokens_are_not_shown(tmp_path: Path) -> None:
    assert "secret" not in repr(Started("unix:///socket", "secret"))
    assert "secret" not in f"{Started('unix:///socket', 'secret')}"
    assert "secret" not in repr(CacheSettings(None, "secret", tmp_path, 1))
