"""Lightning with `stoker.Loader`: stopped in the middle of an epoch, and taken up again there.

    python examples/04-lightning.py

The loader's position is part of Lightning's checkpoints. Nothing must be told not to shard the loader again: that is
only done to PyTorch's own DataLoader. With several processes the world is that of torch.distributed.
"""

import logging
import tempfile
from collections import Counter
from pathlib import Path

import lightning
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint

import stoker

RECORDS, BATCH = 256, 16


def make_dataset(folder):
    rng = np.random.default_rng(0)
    for i in range(RECORDS):
        values = np.concatenate([[i], rng.normal(size=16)]).astype("float32")
        (folder / f"{i:05d}").write_bytes(values.tobytes())


def decode(record):
    values = np.frombuffer(record, dtype="float32")
    return {"number": int(values[0]), "x": values[1:], "y": int(values[1:].sum() > 0)}


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Linear(16, 2)
        self.seen = Counter()

    def training_step(self, batch, step):
        self.seen.update(batch["number"].tolist())
        return F.cross_entropy(self.layers(batch["x"]), batch["y"])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def fit(data, folder, model, checkpoint=None, **until):
    with stoker.Loader(data, global_batch_size=BATCH, shuffle=True, num_workers=2) as loader:
        trainer = lightning.Trainer(
            default_root_dir=folder,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[ModelCheckpoint(dirpath=folder, every_n_train_steps=5, save_last=True)],
            **until,
        )
        trainer.fit(model, loader, ckpt_path=checkpoint)
        print(loader.stats)


def main():
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder, "records")
        records.mkdir()
        make_dataset(records)
        data = stoker.Dataset(f"file://{records}/", decode=decode)
        model = Model()
        fit(data, folder, model, max_steps=10)  # an epoch has 16 steps
        fit(data, folder, model, checkpoint=f"{folder}/last.ckpt", max_epochs=3)
        times = set(model.seen.values())
        print(f"{len(model.seen)} records, each read {times} times in 3 epochs")


if __name__ == "__main__":
    main()
