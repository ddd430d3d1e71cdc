"""Lightning that goes on when workers die, join or leave:

    stoker run --nproc-per-node 3 examples/08-lightning-elastic.py

Two lines differ from any other script for Lightning: the strategy, and the loader. With `--lose-one` a worker is killed
in the middle of the second epoch; the others go on in their processes, and another one takes its place. Alone it trains
as well: `python examples/08-lightning-elastic.py`.
"""

import logging
import os
import signal
import sys
import time
from pathlib import Path

import lightning
import numpy as np
import torch
import torch.nn.functional as F

import stoker
from stoker.compat.lightning import ElasticStrategy

RECORDS, BATCH, EPOCHS = 256, 16, 3


class Records:
    def __len__(self):
        return RECORDS

    def __getitem__(self, record):
        x = np.random.default_rng(record).normal(size=16).astype("float32")
        return {"x": x, "y": int(x.sum() > 0)}


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Linear(16, 2)

    def training_step(self, batch, step):
        return F.cross_entropy(self.layers(batch["x"]), batch["y"])

    def on_train_epoch_end(self):
        if self.trainer.is_global_zero:
            print(
                f"epoch {self.current_epoch + 1}: step {self.global_step}, world of {self.trainer.world_size}"
            )

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class LoseOne(lightning.Callback):
    def on_train_batch_start(self, trainer, module, batch, step):
        time.sleep(0.02)
        killed = Path("08-killed")
        if trainer.global_step == 20 and trainer.global_rank == 1 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def main():
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    loader = stoker.Loader(Records(), global_batch_size=BATCH, shuffle=True)  # one of the two lines
    trainer = lightning.Trainer(
        strategy=ElasticStrategy(),  # and this is the other
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[LoseOne()] if "--lose-one" in sys.argv else [],
    )
    trainer.fit(Model(), loader)


if __name__ == "__main__":
    main()
