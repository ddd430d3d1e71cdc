"""Training through the cache: where data comes from, and what happens when it does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.disks import small_disk
from tests.e2e.run_helpers import SCRIPTS, Finished, run

pytestmark = pytest.mark.real
SCRIPT = str(SCRIPTS / "read_dataset.py")


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    folder = tmp_path / "origin" / "train"
    folder.mkdir(parents=True)
    for i in range(100):
        (folder / f"{i:04d}").write_text(json.dumps([i % 2, i, 1.0, -i / 7, 0.5]))
    return tmp_path / "origin"


def alone(folder: Path, url: str, **environment: str) -> Finished:
    env = {k: v for k, v in os.environ.items() if not k.startswith("STOKER_")}
    done = subprocess.run(
        [sys.executable, SCRIPT, url],
        cwd=folder,
        env={**env, "STOKER_CACHE_DIR": str(folder / "cache"), "STOKER_REPORT": "0", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Finished(done.returncode, done.stdout, done.stderr)


def test_a_served_bucket(tmp_path: Path, origin: Path) -> None:
    done = run(tmp_path, "run", "--nproc-per-node", "2", "--audit", "--bucket", f"numbers=file://{origin}", SCRIPT,
               "stoker://numbers/train/")  # fmt: skip
    assert done.code == 0, done.text
    assert "[rank 0] trained 21 steps in a world of 2" in done.out
    assert "records missed 0, repeated 0" in done.err


def test_an_origins_own_url_is_read_through_the_embedded_cache(tmp_path: Path, origin: Path) -> None:
    done = run(tmp_path, "run", "--nproc-per-node", "2", SCRIPT, f"file://{origin}/train/")
    assert done.code == 0, done.text
    assert "trained 21 steps" in done.out
    assert any((tmp_path / "cache").rglob("*")), "the cache folder was used"


@pytest.mark.parametrize("workers", ["0", "2"])
def test_the_script_alone_starts_a_cache_of_its_own(tmp_path: Path, origin: Path, workers: str) -> None:
    done = alone(tmp_path, f"file://{origin}/train/", NW=workers)
    assert done.code == 0, done.text
    assert "trained 21 steps in a world of 1" in done.out
    assert done.err == "", "nothing is left to complain about"


@pytest.mark.parametrize(
    ("url", "code", "words"),
    [
        ("stoker://numbers/absent/", 4, "there are no objects under 'stoker://numbers/absent/'"),
        ("stoker://other/train/", 4, "other"),
        ("stoker:///train/", 2, "names no bucket"),
        ("nosuch://x/y", 2, "nosuch"),
        ("file:///no/such/folder/", 2, "/no/such/folder"),
    ],
)
def test_a_url_without_data_ends_the_run_with_one_message(
    tmp_path: Path, origin: Path, url: str, code: int, words: str
) -> None:
    done = run(tmp_path, "run", "--nproc-per-node", "2", "--bucket", f"numbers=file://{origin}", SCRIPT, url)
    last = done.err.strip().splitlines()[-4:]
    assert words in "\n".join(last), done.text
    assert done.code == code, done.text
    assert "stoker/cache/client" not in done.err, "the script's own lines are shown, not ours"


def test_a_stoker_url_without_a_server(tmp_path: Path) -> None:
    done = alone(tmp_path, "stoker://numbers/train/")
    assert done.code == 1
    assert "needs a cache server and none is known" in done.err.splitlines()[-1]


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_record_that_decode_rejects(tmp_path: Path, origin: Path, workers: str) -> None:
    (origin / "train" / "0042").write_text("not json")
    done = run(tmp_path, "run", "--nproc-per-node", "2", SCRIPT, f"file://{origin}/train/", NW=workers)
    assert done.code == 4, done.text
    assert "BadRecord: record '" in done.err
    assert "0042' of" in done.err
    assert "(8 bytes): decode raised JSONDecodeError" in done.err


def test_a_link_that_leads_nowhere_is_no_record(tmp_path: Path, origin: Path) -> None:
    (origin / "train" / "gone").symlink_to(tmp_path / "nowhere")
    done = run(tmp_path, "run", "--nproc-per-node", "1", SCRIPT, f"file://{origin}/train/")
    assert done.code == 0, done.text
    assert "trained 21 steps" in done.out


def test_a_cache_disk_that_is_full_does_not_stop_the_run(tmp_path: Path, origin: Path) -> None:
    with small_disk(tmp_path / "disk", "400k") as disk:
        done = run(tmp_path, "run", "--nproc-per-node", "2", "--cache-dir", str(disk / "cache"), SCRIPT,
                   f"file://{origin}/train/")  # fmt: skip
        assert done.code == 0, done.text
        assert "trained 21 steps" in done.out
