"""Folders in shared memory go with their owners, and nobody else's is touched."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.errors import EnvironmentProblem
from stoker.platform import shared_folders
from stoker.platform.shared_folders import make_owned_folder, remove_folder, shared_base, sweep_folders

OWNER = """
import sys, time
from pathlib import Path
from stoker.platform.shared_folders import make_owned_folder
folder = make_owned_folder(Path(sys.argv[1]), "job")
(folder / "0-0.snapshot").write_text("a snapshot")
print(folder, flush=True)
time.sleep(600)
"""


def owner_of_a_folder(base: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(base)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def end(process: subprocess.Popen[str], number: int) -> None:
    process.send_signal(number)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


@pytest.mark.real
def test_a_dead_owners_folder_is_swept_and_a_live_ones_stays(tmp_path: Path) -> None:
    first, one = owner_of_a_folder(tmp_path)
    second, other = owner_of_a_folder(tmp_path)
    try:
        assert one != other
        assert sweep_folders(tmp_path) == []
        end(first, signal.SIGKILL)
        assert sweep_folders(tmp_path) == [one]
        assert not one.exists()
        assert (other / "0-0.snapshot").exists()
    finally:
        end(first, signal.SIGKILL)
        end(second, signal.SIGKILL)


@pytest.mark.real
def test_making_a_folder_sweeps_before(tmp_path: Path) -> None:
    owner, folder = owner_of_a_folder(tmp_path)
    end(owner, signal.SIGKILL)
    mine = make_owned_folder(tmp_path, "job")
    assert [path.name for path in tmp_path.iterdir()] == [mine.name]
    assert folder != mine


def test_a_folder_is_its_users_own_and_can_be_removed(tmp_path: Path) -> None:
    folder = make_owned_folder(tmp_path / "base", "a job/with ../odd name" + "x" * 100)
    assert folder.parent == tmp_path / "base"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(folder.name) < 80
    (folder / "0-0.snapshot").write_text("x")
    remove_folder(folder)
    assert not folder.exists()
    remove_folder(folder)


@pytest.mark.parametrize(
    "record",
    ["", "12", "nonsense", "{pid}", "{pid} {start} pid:[1]", "999999999 5 pid:[1]", "999999999 5 ?"],
)
def test_what_is_not_known_to_be_dead_stays(tmp_path: Path, record: str) -> None:
    """Such as the folder of a process in another container, whose ids mean nothing here."""
    folder = make_owned_folder(tmp_path, "job")
    pid, start, _ = (folder / "owner").read_text().split(" ")
    (folder / "owner").write_text(record.format(pid=pid, start=start))
    assert sweep_folders(tmp_path) == []
    (folder / "owner").unlink()
    assert sweep_folders(tmp_path) == []


def test_a_reused_process_id_does_not_keep_a_folder(tmp_path: Path) -> None:
    folder = make_owned_folder(tmp_path, "job")
    pid, start, namespace = (folder / "owner").read_text().split(" ")
    (folder / "owner").write_text(f"{pid} {int(start) - 1} {namespace}")
    assert sweep_folders(tmp_path) == [folder]


def test_links_files_and_other_names_are_left_alone(tmp_path: Path) -> None:
    folder = make_owned_folder(tmp_path / "elsewhere", "job")
    pid, start, namespace = (folder / "owner").read_text().split(" ")
    (folder / "owner").write_text(f"{pid} {int(start) - 1} {namespace}")
    base = tmp_path / "base"
    base.mkdir()
    (base / "stoker-link").symlink_to(folder)
    (base / "stoker-file").write_text("")
    folder.rename(base / "others-folder")
    assert sweep_folders(base) == []
    assert sweep_folders(tmp_path / "nothing") == []


def test_without_shared_memory_there_is_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_folders, "SHARED_MEMORY", tmp_path / "none")
    assert shared_base().is_dir()
    monkeypatch.setattr(shared_folders, "SHARED_MEMORY", tmp_path)
    assert shared_base() == tmp_path
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match="cannot make a folder for snapshots"):
        make_owned_folder(tmp_path / "file", "job")
