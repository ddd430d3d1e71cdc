"""`stoker checkpoint ls, verify, export` as a person runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stoker.cli.main import main
from stoker.errors import EnvironmentProblem
from stoker.train.checkpoints.manifest import MANIFEST
from stoker.train.checkpoints.storage import CheckpointStorage
from tests.unit.checkpoint_states import flip, image_at, same, state_of

Run = Callable[..., tuple[int, str, str]]
DATA = "__0_0.distcp"


@pytest.fixture
def stoker(capsys: pytest.CaptureFixture[str]) -> Run:
    """`stoker checkpoint ARGUMENTS` in this process: exit code, output, errors."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = main(["checkpoint", *map(str, arguments)])
        except SystemExit as left:
            code = int(left.code or 0)
        return (code, *capsys.readouterr())

    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Commit 100 is whole, 200 damaged, 300 torn."""
    storage = CheckpointStorage(str(tmp_path / "run"), keep=3)
    for commits in (100, 200, 300):
        storage.write(image_at(commits))
    (tmp_path / "run" / "step-000000000300" / MANIFEST).unlink()
    path = tmp_path / "run" / "step-000000000200" / DATA
    flip(path, path.stat().st_size // 2)
    return tmp_path / "run"


def test_ls(stoker: Run, folder: Path) -> None:
    code, out, err = stoker("ls", folder)
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == ["100", "200", "300"]
    assert ["whole" in out.splitlines()[0], "torn: its writer" in out.splitlines()[2]] == [True, True]
    (folder / "step-000000000200" / DATA).unlink()
    code, out, _ = stoker("ls", folder, "--json")
    found = json.loads(out)
    assert [one["state"] for one in found["checkpoints"]] == ["whole", "damaged", "torn"]
    assert found["checkpoints"][1]["problem"] == f"step-000000000200/{DATA} is missing"
    assert found["checkpoints"][0]["size_bytes"] > 0
    assert stoker("ls", folder.parent / "nothing")[1].endswith("no checkpoints\n")


def test_verify(stoker: Run, folder: Path) -> None:
    code, out, err = stoker("verify", folder)
    assert code == 1
    assert [line.split()[-1] for line in out.splitlines()] == ["whole", "broken", "torn"]
    assert f"step-000000000200/{DATA} does not match its checksum" in err
    assert stoker("verify", folder, "--commits", 100)[0] == 0
    assert stoker("verify", folder, "--commits", 200)[0] == 1
    assert stoker("verify", folder, "--commits", 300)[0] == 1
    code, _, err = stoker("verify", folder, "--commits", 400)
    assert code == 5
    assert "no checkpoint at commit 400" in err
    code, out, _ = stoker("verify", folder, "--json")
    assert [json.loads(line)["is_broken"] for line in out.splitlines()] == [False, True, False]


def test_export_of_all_and_of_a_part(stoker: Run, folder: Path, tmp_path: Path) -> None:
    code, out, _ = stoker("export", folder, tmp_path / "all.pt", "--commits", 100)
    assert code == 0
    assert "the state at commit 100" in out
    assert same(torch.load(tmp_path / "all.pt", weights_only=True), state_of(100))
    assert stoker("export", folder, tmp_path / "m.pt", "--only", "modules.model", "--commits", 100)[0] == 0
    model = torch.load(tmp_path / "m.pt", weights_only=True)
    assert same(model, state_of(100)["modules"]["model"])
    assert stoker("export", folder, tmp_path / "m.safetensors", "--only", "modules", "--commits", 100)[0] == 0
    assert torch.equal(load_file(tmp_path / "m.safetensors")["model.weight"], model["weight"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.pt", "m.pt", "m.safetensors", "run"]


def test_export_says_what_it_cannot(stoker: Run, folder: Path, tmp_path: Path) -> None:
    code, _, err = stoker("export", folder, tmp_path / "a.pt")  # the newest, 200
    assert code == 5
    assert f"in step-000000000200/{DATA}" in err
    assert "its writer did not come" in stoker("export", folder, tmp_path / "a.pt", "--commits", 300)[2]
    code, _, err = stoker("export", folder, tmp_path / "a.pt", "--commits", 100, "--only", "modules.other")
    assert code == 2
    assert "holds nothing at 'modules.other'; at that place there are model" in err
    assert not (tmp_path / "a.pt").exists()
    (tmp_path / "a.pt").write_text("mine")
    assert "is there already" in stoker("export", folder, tmp_path / "a.pt", "--commits", 100)[2]
    assert stoker("export", folder, tmp_path / "a.pt", "--commits", 100, "--force")[0] == 0


@pytest.mark.parametrize("command", [("ls",), ("verify",), ("export", "m.pt")])
def test_a_folder_of_an_older_kind_is_not_taken_for_an_empty_one(
    stoker: Run, tmp_path: Path, command: tuple[str, ...]
) -> None:
    torch.save({}, tmp_path / "commit-000000000007.pt")
    code, _, err = stoker(command[0], tmp_path, *command[1:])
    assert code == 5
    assert "holds checkpoints of an older kind (commit-….pt), which this Stoker does not read" in err
    with pytest.raises(EnvironmentProblem, match="of an older kind"):
        CheckpointStorage(str(tmp_path)).read_newest()
    CheckpointStorage(str(tmp_path)).write(image_at(9))
    assert CheckpointStorage(str(tmp_path)).read_newest() is not None


def test_a_part_may_have_dots_in_its_keys(stoker: Run, tmp_path: Path) -> None:
    from stoker.train.checkpoints.image import image_of

    state = {"modules": {"a.b": {"c": torch.ones(1)}, "a": {"b": {"c": torch.zeros(1)}}}}
    CheckpointStorage(str(tmp_path / "run")).write(image_of(1, state))
    assert stoker("export", tmp_path / "run", tmp_path / "m.pt", "--only", "modules.a.b")[0] == 0
    assert torch.equal(torch.load(tmp_path / "m.pt", weights_only=True)["c"], torch.ones(1))


@pytest.mark.parametrize("command", ["", "ls", "verify", "export"])
def test_help_has_examples_and_needs_no_torch(command: str) -> None:
    words = ["checkpoint", *([command] if command else []), "--help"]
    script = (
        "import sys; from stoker.cli.main import main\n"
        f"try: main({words})\n"
        "finally: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "examples:" in done.stdout
    assert done.stdout.rstrip().endswith("False")
