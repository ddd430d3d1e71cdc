"""Lightning's DDP with two processes, trained and validated by Stoker's loader: `framework_lightning.py [resume]`."""

from __future__ import annotations

import sys
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint

import stoker
from tests.e2e.framework_helpers import BATCH, Rows, note


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Linear(16, 2)

    def training_step(self, batch: Any, step: int) -> Any:
        note("train", self.trainer.global_rank, batch["number"])
        return F.cross_entropy(self.layers(batch["x"]), batch["labels"])

    def validation_step(self, batch: Any, step: int) -> None:
        what = "sanity" if self.trainer.sanity_checking else f"validate {self.current_epoch}"
        note(what, self.trainer.global_rank, batch["number"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main() -> None:
    resume = "resume" in sys.argv
    until: dict[str, int] = {"max_epochs": 3} if resume else {"max_steps": 15}
    torch.set_num_threads(1)
    trainer = lightning.Trainer(
        default_root_dir=".",
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(dirpath="saved", every_n_train_steps=5, save_last=True)],
        **until,
    )
    trainer.fit(
        Model(),
        stoker.Loader(Rows(), global_batch_size=BATCH, shuffle=True, num_workers=2),
        stoker.Loader(Rows(), global_batch_size=BATCH, num_workers=1, keep_position=False),
        ckpt_path="saved/last.ckpt" if resume else None,
    )


if __name__ == "__main__":
    main()
