"""Lightning and Hugging Face go on in the same processes when a worker dies and another one joins."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.framework_helpers import RECORDS
from tests.e2e.run_helpers import Finished, ledger, run

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
HERE = Path(__file__).parent
STEPS_AN_EPOCH = 6
LAST_STEP = 8
"""Of the first world."""


def with_tests(folder: Path) -> dict[str, str]:
    return {
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",
    }


def alone(folder: Path, script: str, *arguments: str) -> Any:
    """Run a script without Stoker's agent, to its end; what it said."""
    done = subprocess.run(
        [sys.executable, str(HERE / script), *arguments],
        cwd=folder,
        env={**os.environ, **with_tests(folder), "STOKER_REPORT": "0"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "said-0.json").read_text())


def run_and_lose_one(folder: Path, script: str) -> tuple[Finished, list[dict[str, Any]]]:
    """Three workers, of which the script kills one; what each said at its end, by rank."""
    done = run(folder, "run", "--nproc-per-node", "3", "--no-cache", "--audit", str(HERE / script),
               timeout_s=250, **with_tests(folder))  # fmt: skip
    assert done.code == 0, done.text
    said = [json.loads(path.read_text()) for path in sorted(folder.glob("said-*.json"))]
    assert [one["rank"] for one in said] == [0, 1, 2], done.text
    return done, said


def assert_went_on(folder: Path, done: Finished, said: list[dict[str, Any]], *, lost: int) -> None:
    """In the same processes but for the lost one's, with one state, and with every record read once an epoch."""
    first, *_, last = ledger(folder, "world")
    assert (first["world_size"], last["world_size"]) == (3, 3)
    assert {entry["world_size"] for entry in ledger(folder, "world")} == {3, 2}
    began = {int(path.name.removeprefix("began-")) for path in folder.glob("began-*")}
    assert len(began) == 3
    assert len(began & {one["pid"] for one in said}) == 2, "survivors keep their processes"
    for name in set(said[0]) - {"pid", "rank"}:
        assert all(one[name] == said[0][name] for one in said), name
    assert said[0]["global_step"] == said[0]["epochs"] * STEPS_AN_EPOCH
    assert "records missed 0, repeated 0" in done.err
    reads = [entry for entry in ledger(folder, "read") if entry["dataset"] == "train"]
    committed = {(entry["step"], entry["generation"]) for entry in ledger(folder, "commit")}
    counted = [
        r for entry in reads if (entry["step"], entry["generation"]) in committed for r in entry["records"]
    ]
    assert Counter(counted) == Counter(dict.fromkeys(range(RECORDS), said[0]["epochs"]))
    assert min(entry["commits"] for entry in ledger(folder, "world") if entry["generation"] > 1) >= lost


def test_lightning_goes_on_when_rank_0_dies_and_another_joins(tmp_path: Path) -> None:
    done, said = run_and_lose_one(tmp_path, "elastic_lightning.py")
    assert_went_on(tmp_path, done, said, lost=LAST_STEP)
    epochs = said[0]["epochs"]
    assert said[0]["learning_rate"] == pytest.approx(0.01 * 0.99 ** (epochs // 5))
    expected = newest_checkpoint(said[0]["global_step"], {e["commits"] for e in ledger(tmp_path, "world")})
    assert said[0]["checkpoint_step"] == expected, "the newest rank 0 writes checkpoints"


def newest_checkpoint(steps: int, changes: set[int]) -> int:
    """Every 7 steps there is one, but where the world changes at the commit before it. Each is a commit more."""
    made = newest = 0
    for step in range(7, steps + 1, 7):
        if step + made not in changes:
            made, newest = made + 1, step
    return newest


def test_lightning_alone_trains_as_lightning_does_and_resumes_in_the_middle_of_an_epoch(
    tmp_path: Path,
) -> None:
    own = alone(tmp_path, "elastic_lightning.py", "2", "auto")
    shutil.rmtree(tmp_path / "saved")
    elastic = alone(tmp_path, "elastic_lightning.py", "2")
    assert {**elastic, "pid": 0} == {**own, "pid": 0}
    assert elastic["checkpoint_step"] == 7
    resumed = alone(tmp_path, "elastic_lightning.py", "2", "resume")
    theirs = {
        "pid": 0,
        "checkpoint_step": 12,
    }  # Lightning writes one at the end where a process has written none
    assert {**resumed, "pid": 0} == {**own, **theirs}


def test_trainer_goes_on_when_a_worker_dies_and_another_joins(tmp_path: Path) -> None:
    done, said = run_and_lose_one(tmp_path, "elastic_trainer.py")
    assert_went_on(tmp_path, done, said, lost=LAST_STEP)
    steps = said[0]["global_step"]
    assert len(said[0]["losses"]) == steps // 5
    assert said[0]["evaluations"] == said[0]["epochs"]
    assert said[0]["learning_rate"] == pytest.approx(0.01 * (1 - steps / (500 * STEPS_AN_EPOCH)))
    assert said[0]["newest_checkpoint"] == steps // 7 * 7


def test_trainer_alone_trains_as_trainer_does_and_resumes_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    own = alone(tmp_path, "elastic_trainer.py", "2", "plain")
    shutil.rmtree(tmp_path / "saved")
    elastic = alone(tmp_path, "elastic_trainer.py", "2")
    assert {**elastic, "pid": 0} == {**own, "pid": 0}
    shutil.rmtree(tmp_path / "saved" / "checkpoint-12")
    resumed = alone(tmp_path, "elastic_trainer.py", "2", "resume")
    for name in ("global_step", "epochs", "weights", "learning_rate"):
        assert resumed[name] == own[name], name


def test_trainer_weighs_tokens_alike_at_every_size_of_the_world(tmp_path: Path) -> None:
    """Of batches of 17 and 16 records, three ranks have unequal shares, with unequal numbers of tokens."""
    own = alone(tmp_path, "elastic_trainer.py", "2", "tokens")
    done = run(tmp_path, "run", "--nproc-per-node", "3", "--no-cache", str(HERE / "elastic_trainer.py"), "2", "tokens",
               timeout_s=200, **with_tests(tmp_path))  # fmt: skip
    assert done.code == 0, done.text
    together = json.loads((tmp_path / "said-2.json").read_text())
    assert together["world_size"] == 3
    assert together["weights"] == pytest.approx(own["weights"], rel=1e-4)


def test_trainer_trains_alike_at_every_size_where_a_model_means_its_own_records(tmp_path: Path) -> None:
    own = alone(tmp_path, "elastic_trainer.py", "2", "mean")
    done = run(tmp_path, "run", "--nproc-per-node", "3", "--no-cache", str(HERE / "elastic_trainer.py"), "2", "mean",
               timeout_s=200, **with_tests(tmp_path))  # fmt: skip
    assert done.code == 0, done.text
    together = json.loads((tmp_path / "said-2.json").read_text())
    assert together["world_size"] == 3
    assert together["weights"] == pytest.approx(own["weights"], rel=1e-4)
    for name in ("losses", "eval_losses"):  # means of ranks' means, whose shares differ by a record
        assert together[name] == pytest.approx(own[name], rel=0.1), name


def test_trainer_loses_a_rank_in_an_evaluation(tmp_path: Path) -> None:
    """It is done again, and no step."""
    done = run(tmp_path, "run", "--nproc-per-node", "2", "--no-cache", "--max-restarts", "0", "--audit",
               str(HERE / "elastic_trainer.py"), "2", "evaluation", timeout_s=200, **with_tests(tmp_path))  # fmt: skip
    assert done.code == 0, done.text
    assert "12 steps in" in done.err
    assert "0 done again; records missed 0, repeated 0" in done.err
    said = json.loads((tmp_path / "said-0.json").read_text())
    assert (said["world_size"], said["global_step"], said["epochs"], said["evaluations"]) == (1, 12, 2, 3)


def test_accelerate_knows_the_world_and_its_end(tmp_path: Path) -> None:
    done = run(tmp_path, "run", "--nproc-per-node", "2", "--no-cache", "--max-restarts", "0", "--audit",
               str(HERE / "elastic_accelerate.py"), timeout_s=200, **with_tests(tmp_path))  # fmt: skip
    assert done.code == 0, done.text
    assert "records missed 0, repeated 0" in done.err
    said = json.loads((tmp_path / "said.json").read_text())
    read = said.pop("read")
    assert said == {
        "worlds": [[2, 0, [0, 1]], [1, 0, [0]]],
        "steps": 12,
        "learning_rate": pytest.approx(0.1 * 0.9**12),
    }
    assert Counter(read) == Counter(dict.fromkeys(range(RECORDS), 2)), "though ranks have 9 and 8 of a batch"


@pytest.mark.parametrize("where", ["validation", "hook", "epoch-end"])
def test_lightning_loses_a_rank_beside_its_steps(tmp_path: Path, where: str) -> None:
    """What follows the last committed batch is done again, and no step."""
    done = run(tmp_path, "run", "--nproc-per-node", "2", "--no-cache", "--max-restarts", "0", "--audit",
               str(HERE / "elastic_lightning_ends.py"), where, timeout_s=200, **with_tests(tmp_path))  # fmt: skip
    assert done.code == 0, done.text
    assert "0 done again; records missed 0, repeated 0" in done.err
    said = json.loads((tmp_path / "said.json").read_text())
    assert (said["global_step"], said["epochs"]) == (12, 2)
    first = [["train start", 2, 0], ["epoch start", 2, 0]]
    both = [["validation", 2, 6], ["epoch end", 2, 6], ["epoch start", 2, 6], ["validation", 2, 12]]
    alone = [["validation", 1, 6], ["epoch end", 1, 6], ["epoch start", 1, 6], ["validation", 1, 12]]
    last = [["epoch end", 1, 12], ["train end", 1, 12]]
    assert (
        said["hooks"]
        == {
            "validation": [*first, both[0], *alone, *last],
            "hook": [*first, *alone, *last],
            "epoch-end": [*first, *both, ["epoch end", 2, 12], ["train end", 2, 12]],
        }[where]
    )


@pytest.mark.parametrize("where", ["terminated", "before-step"])
def test_lightning_loses_a_rank_in_a_step(tmp_path: Path, where: str) -> None:
    """By SIGTERM, which is for this one alone; or where hooks look at gradients, before the optimizer has stepped."""
    done = run(tmp_path, "run", "--nproc-per-node", "2", "--no-cache", "--max-restarts", "0", "--audit",
               str(HERE / "elastic_lightning_ends.py"), where, timeout_s=200, **with_tests(tmp_path))  # fmt: skip
    assert done.code == 0, done.text
    assert "0 done again; records missed 0, repeated 0" in done.err
    said = json.loads((tmp_path / "said.json").read_text())
    assert (said["global_step"], said["epochs"]) == (12, 2)
    assert said["hooks"][2] == ["validation", 1, 6]


def test_lightning_starts_again_from_stokers_checkpoint_when_all_are_lost(tmp_path: Path) -> None:
    done = run(tmp_path, "run", "--nproc-per-node", "2", "--no-cache", "--audit", "--checkpoint-dir", "ckpt",
               "--checkpoint-every", "5", str(HERE / "elastic_lightning_ends.py"), "all",
               timeout_s=250, **with_tests(tmp_path))  # fmt: skip
    assert done.code == 0, done.text
    assert "records missed 0, repeated 0" in done.err
    said = json.loads((tmp_path / "said.json").read_text())
    assert (said["global_step"], said["epochs"]) == (12, 2)
    assert [hook[0] for hook in said["hooks"]][:2] == ["train start", "validation"], (
        "in the middle of the first epoch"
    )
    assert 5 in {entry["commits"] for entry in ledger(tmp_path, "world")}


def test_what_cannot_be_elastic_is_refused(tmp_path: Path) -> None:
    said = alone(tmp_path, "elastic_refusals.py")
    words = {
        "manual": "needs automatic optimization",
        "lbfgs": "cannot undo a broken step of LBFGS",
        "dataloader": "not on DataLoader",
        "reloaded": "reload_dataloaders_every_n_epochs",
        "averaged": "cannot go on with StochasticWeightAveraging",
        "synchronized": "convert_sync_batchnorm",
        "exact": "no exact mode",
        "trainer exact": "no exact mode",
        "trainer orders": "leave out train_sampling_strategy",
        "trainer drops": "leave out dataloader_drop_last",
        "trainer evaluates": "give it the dataset",
        "trainer accumulates": "leave out gradient_accumulation_steps",
        "trainer finds": "auto_find_batch_size",
        "trainer dataset": "not on a Rows",
        "trainer arguments": "takes ElasticTrainingArguments",
        "accelerate accumulates": "global_batch_size the whole",
        "accelerate divides": "fsdp_plugin",
        "first": "done",
        "second": "fits once in a process",
        "trainer second": "trains once in a process",
    }
    assert set(said) == set(words)
    assert not {name: said[name] for name in words if words[name] not in said[name]}
