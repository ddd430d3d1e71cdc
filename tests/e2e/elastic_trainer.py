"""Hugging Face's Trainer under `stoker run`: rank 1 kills itself in the second epoch, another process takes its place.

Trains until that one has taken part, to the end of the epoch, and writes what came of it. `2 [resume]`: trains for two
epochs, and nobody dies. `2 plain`: the same by Trainer itself. `2 tokens`: with a loss that is a mean over tokens, of
which records have different numbers. `2 mean`: the model takes any keyword, and means its own records. `2 evaluation`:
rank 1 kills itself in the one after the first epoch, in bf16.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import Trainer, TrainerCallback, TrainingArguments

import stoker
from stoker.compat.transformers import ElasticTrainer, ElasticTrainingArguments
from tests.e2e.framework_helpers import Rows

BATCH = 17
"""6 steps an epoch, the last of 16 records."""
LAST_STEP = 8
"""Of the first world, in the middle of the second epoch."""
EPOCHS_MAX = 500
TOKENS = 5


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(16, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)
        )

    def forward(self, x: Any, labels: Any) -> Any:
        logits = self.layers(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Tagger(torch.nn.Module):
    """Is told how many tokens count in the global batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Linear(16, 2 * TOKENS)

    def forward(self, x: Any, labels: Any, num_items_in_batch: Any = None, **_: Any) -> Any:
        logits = self.layers(x).view(-1, 2)
        total = F.cross_entropy(logits, labels.view(-1), reduction="sum")
        count = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
        return {"loss": total / count, "logits": logits}


class Mean(torch.nn.Module):
    """Is told the same, and leaves it aside, as many models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Linear(16, 2)

    def forward(self, x: Any, labels: Any, **_: Any) -> Any:
        logits = self.layers(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Data(Rows):
    def __getitem__(self, record: int) -> Any:
        row = super().__getitem__(record)
        if "tokens" not in sys.argv:
            return {"x": row["x"], "labels": row["labels"]}
        counts = [record % 2 if token <= record % TOKENS else -100 for token in range(TOKENS)]
        return {"x": row["x"], "labels": torch.tensor(counts)}


class DieAndBeReplaced(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        began = Path(f"began-{os.getpid()}")
        if state.global_step == 0:
            began.touch()
        if state.global_step == LAST_STEP and not Path("killed").exists():
            torch.distributed.barrier()  # nobody looks for the file any more
            if args.process_index == 1:
                Path("killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        if not began.exists():
            Path("joined").touch()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        joined = torch.tensor(float(Path("joined").exists()))
        torch.distributed.all_reduce(joined, torch.distributed.ReduceOp.MIN)
        control.should_training_stop = bool(joined)


class Twin(Trainer):
    def get_train_dataloader(self) -> Any:
        return self.train_dataset


class DieInEvaluation(TrainerCallback):
    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 6 and args.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    torch.set_num_threads(1)
    plain, dies = "plain" in sys.argv, len(sys.argv) == 1
    torch.manual_seed(1)
    model = Tagger() if "tokens" in sys.argv else Mean() if "mean" in sys.argv else Model()
    options: dict[str, Any] = {
        "num_train_epochs": EPOCHS_MAX if dies else int(sys.argv[1]),
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH,
        "learning_rate": 0.01,
        "max_grad_norm": 1.0,
        "bf16": "evaluation" in sys.argv,
        "logging_steps": 5,
        "eval_strategy": "no" if "tokens" in sys.argv else "epoch",
        "eval_on_start": "evaluation" in sys.argv,
        "save_steps": 7,
        "optim": "sgd" if "mean" in sys.argv else "adamw_torch",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "remove_unused_columns": False,
    }
    settings: Any = functools.partial(TrainingArguments, use_cpu=True) if plain else ElasticTrainingArguments
    loader = stoker.Loader(Data(), global_batch_size=BATCH, shuffle=True, name="train")
    kind: Any = Twin if plain else ElasticTrainer
    trainer = kind(
        model,
        settings("saved", **options),
        train_dataset=loader,
        eval_dataset=Data(),
        callbacks=[DieAndBeReplaced()] if dies else [DieInEvaluation()] if "evaluation" in sys.argv else [],
    )
    trainer.train(resume_from_checkpoint="resume" in sys.argv)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    said = {
        "pid": os.getpid(),
        "rank": trainer.args.process_index,
        "world_size": trainer.args.world_size,
        "global_step": trainer.state.global_step,
        "epochs": round(trainer.state.epoch, 6),
        "weights": [float(p.double().norm()) for p in model.parameters()],
        "learning_rate": trainer.lr_scheduler.get_last_lr()[0],
        "losses": losses,
        "eval_losses": [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry],
        "evaluations": sum("eval_loss" in entry for entry in trainer.state.log_history),
        "newest_checkpoint": max(int(p.name.partition("-")[2]) for p in Path("saved").glob("checkpoint-*")),
    }
    Path(f"said-{trainer.args.process_index}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
