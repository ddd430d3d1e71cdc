"""A run that cannot begin says why, once, and starts nothing again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.run_helpers import TOY, own_environment, run

pytestmark = pytest.mark.real


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--target-efficiency", "3"), "--target-efficiency 3"),
        (("--journal", "redis://host"), "no journal can be kept in 'redis://host'"),
        (("--master-port", "99999"), "--master-port 99999"),
    ],
)
def test_a_flag_that_cannot_be_is_said_before_anything_starts(
    tmp_path: Path, flags: tuple[str, ...], words: str
) -> None:
    done = run(tmp_path, "run", "--no-cache", *flags, TOY)
    assert done.code == 2, done.text
    assert done.err.startswith("stoker: ")
    assert words in done.err
    assert not (tmp_path / "stoker-logs").exists()


def test_a_master_that_refuses_to_begin_is_not_started_again(tmp_path: Path) -> None:
    (tmp_path / "journal").write_text("this is no journal\n" * 100)
    done = run(tmp_path, "run", "--no-cache", "--journal", "journal", TOY)
    assert done.code == 5, done.text
    assert "again" not in done.err
    assert done.err.count("journal") >= 1
    said = [line for line in done.err.splitlines() if not line.startswith("stoker: removing ")]
    assert len(said) == 1, done.text


def test_a_users_files_with_the_names_of_pythons_own_do_not_matter(tmp_path: Path) -> None:
    for name in ("queue", "http", "sqlite3"):
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('this is the user\\'s {name}')\n")
    (tmp_path / "work").mkdir()
    script = tmp_path / "work" / "train.py"  # Python gives a script the files beside it, and no others
    script.write_text("print('trained')\n")
    command = [
        sys.executable,
        "-P",
        "-m",
        "stoker.cli.main",
        "run",
        str(script),
    ]  # as the command `stoker` does
    done = subprocess.run(
        command,
        check=False,
        cwd=tmp_path,
        env=own_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "trained" in done.stdout
