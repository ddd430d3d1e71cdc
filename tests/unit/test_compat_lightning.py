"""What a commit holds of Lightning's trainer."""

from __future__ import annotations

import csv
from pathlib import Path

import lightning
from lightning.pytorch.loggers import CSVLogger

from stoker.compat.lightning.csv_log import continue_csv_logs
from stoker.compat.lightning.progress import FitProgress


def test_a_commit_holds_how_many_batches_a_step_has_which_a_callback_may_change_by_epochs() -> None:
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, accumulate_grad_batches=3
    )
    progress = FitProgress(trainer)
    committed = progress.state_dict()
    trainer.accumulate_grad_batches = 1
    progress.load_state_dict(committed)
    assert trainer.accumulate_grad_batches == 3


def test_a_csv_log_goes_on_where_another_process_writes_with_other_columns(tmp_path: Path) -> None:
    before, after = (CSVLogger(tmp_path, version=0) for _ in range(2))
    continue_csv_logs([before])
    before.log_metrics({"loss": 0.5, "rate": 0.1}, step=1)
    before.save()
    continue_csv_logs([after])  # a process that joins
    after.log_metrics({"validation": 0.25}, step=2)
    after.save()
    before.log_metrics({"loss": 0.125}, step=3)
    before.save()
    with Path(before.log_dir, "metrics.csv").open() as file:
        rows = [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]
    assert rows == [
        {"step": "1", "loss": "0.5", "rate": "0.1"},
        {"step": "2", "validation": "0.25"},
        {"step": "3", "loss": "0.125"},
    ]
