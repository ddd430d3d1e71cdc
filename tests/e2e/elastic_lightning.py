"""Lightning under `stoker run`: rank 0 kills itself in the second epoch, another process takes its place.

Trains until that one has taken part, to the end of the epoch, and writes what came of it. `EPOCHS [auto]
[resume]`: trains for so many epochs, with Lightning's own strategy or from its checkpoint, and nobody dies.
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
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

import stoker
from stoker.compat.lightning import ElasticStrategy
from tests.e2e.framework_helpers import Rows

BATCH = 17
"""6 steps an epoch, the last of 16 records."""
LAST_STEP = 8
"""Of the first world, in the middle of the second epoch."""
EPOCHS_MAX = 500


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(16, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)
        )

    def training_step(self, batch: Any, step: int) -> Any:
        if len(sys.argv) == 1:
            self.die_and_be_replaced()
        loss = F.cross_entropy(self.layers(batch["x"]), batch["labels"])
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def die_and_be_replaced(self) -> None:
        began = Path(f"began-{os.getpid()}")
        if self.global_step == 0:
            began.touch()
        if self.global_step == LAST_STEP and not Path("killed").exists():
            self.trainer.strategy.barrier()  # nobody looks for the file any more
            if self.trainer.is_global_zero:
                Path("killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        if not began.exists():
            Path("joined").touch()

    def validation_step(self, batch: Any, step: int) -> None:
        self.log("validation", F.cross_entropy(self.layers(batch["x"]), batch["labels"]), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        if len(sys.argv) == 1:
            self.trainer.should_stop = self.trainer.strategy.reduce_boolean_decision(
                Path("joined").exists(), all=True
            )

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.99)]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = Model()
    trainer = lightning.Trainer(
        default_root_dir=".",
        accelerator="cpu",
        strategy="auto" if "auto" in sys.argv else ElasticStrategy(),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=int(sys.argv[1]) if len(sys.argv) > 1 else EPOCHS_MAX,
        callbacks=[
            ModelCheckpoint(dirpath="saved", every_n_train_steps=7, save_last=True),
            EarlyStopping("validation", patience=EPOCHS_MAX),
        ],
    )
    trainer.fit(
        model,
        stoker.Loader(Rows(), global_batch_size=BATCH, shuffle=True, name="train"),
        stoker.Loader(Rows(), global_batch_size=BATCH, keep_position=False, name="validation"),
        ckpt_path="saved/last.ckpt" if "resume" in sys.argv else None,
    )
    said = {
        "pid": os.getpid(),
        "rank": trainer.global_rank,
        "world_size": trainer.world_size,
        "global_step": trainer.global_step,
        "epochs": trainer.current_epoch,
        "weights": [float(p.double().norm()) for p in model.state_dict().values()],
        "learning_rate": trainer.optimizers[0].param_groups[0]["lr"],
        "validation": float(trainer.callback_metrics["validation"]),
        "early_stopping": trainer.early_stopping_callback.wait_count,
        "checkpoint_step": torch.load("saved/last.ckpt", weights_only=False)["global_step"],
    }
    Path(f"said-{trainer.global_rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
