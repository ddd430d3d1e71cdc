"""Lightning under `stoker run` with two ranks, of which rank 1 kills itself, in one of these places.

`validation`: in the middle of it; `hook`: at the end of a batch, before a checkpoint is written there; `epoch-end`:
when the last epoch ends; `before-step`: with all gradients there. `terminated`: rank 0, by SIGTERM in a step. `all`: in
the last step of the first epoch, every process that began with the first.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint

import stoker
from stoker.compat.lightning import ElasticStrategy
from tests.e2e.framework_helpers import Rows

BATCH, EPOCHS, SAVED_STEP = 17, 2, 4


def die(trainer: lightning.Trainer, where: str, by: signal.Signals = signal.SIGKILL) -> None:
    if sys.argv[1] == where and trainer.world_size == 2 and trainer.global_rank == (where != "terminated"):
        os.kill(os.getpid(), by)


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Linear(16, 2)
        self.hooks: list[list[object]] = []
        self.is_first = False

    def note(self, hook: str) -> None:
        if not self.trainer.sanity_checking:
            self.hooks.append([hook, self.trainer.world_size, self.global_step])

    def training_step(self, batch: Any, step: int) -> Any:
        self.is_first |= self.global_step == 0
        if self.is_first and self.global_step == 5 and sys.argv[1] == "all":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.global_step == SAVED_STEP:
            die(self.trainer, "terminated", signal.SIGTERM)
        return F.cross_entropy(self.layers(batch["x"]), batch["labels"])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if sys.argv[1] == "before-step" and self.global_step == SAVED_STEP:
            die(self.trainer, "before-step")
            self.trainer.strategy.barrier()

    def validation_step(self, batch: Any, step: int) -> None:
        if step == 2 and not self.trainer.sanity_checking:
            die(self.trainer, "validation")
        loss = F.cross_entropy(self.layers(batch["x"]), batch["labels"])
        self.log("validation", loss, sync_dist=True)

    def on_validation_epoch_start(self) -> None:
        self.note("validation")

    def on_train_start(self) -> None:
        self.note("train start")

    def on_train_epoch_start(self) -> None:
        self.note("epoch start")
        said = {"rank": self.trainer.global_rank, "words": ["é", None, (1, 2.5)]}
        assert self.trainer.strategy.broadcast(said) == {**said, "rank": 0}

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == EPOCHS - 1:
            die(self.trainer, "epoch-end")
        self.note("epoch end")

    def on_train_end(self) -> None:
        self.trainer.strategy.barrier()
        self.note("train end")

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class DieInHook(lightning.Callback):
    """Callbacks that write checkpoints come after all others."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == SAVED_STEP:
            die(trainer, "hook")


def main() -> None:
    torch.set_num_threads(1)
    model = Model()
    trainer = lightning.Trainer(
        strategy=ElasticStrategy(),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=EPOCHS,
        callbacks=[DieInHook(), ModelCheckpoint(dirpath="saved", every_n_train_steps=SAVED_STEP)],
    )
    trainer.fit(
        model,
        stoker.Loader(Rows(), global_batch_size=BATCH, shuffle=True, name="train"),
        stoker.Loader(Rows(), global_batch_size=BATCH, keep_position=False),
    )
    said = {"hooks": model.hooks, "global_step": trainer.global_step, "epochs": trainer.current_epoch}
    Path("said.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
