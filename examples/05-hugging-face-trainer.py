"""Hugging Face `Trainer` with `stoker.Loader`: stopped in the middle of an epoch, and taken up again there.

    python examples/05-hugging-face-trainer.py

`Trainer` would wrap a DataLoader so that each process gets a part of it. A loader of Stoker's divides batches itself
and is given as it is, by `get_train_dataloader`. Its position is saved beside the model and put back by a callback;
`ignore_data_skip` keeps `Trainer` from reading again, only to throw it away, what was read before.
"""

import json
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import stoker

RECORDS, BATCH, WORDS = 128, 8, 50


def make_dataset(folder):
    rng = np.random.default_rng(0)
    for i in range(RECORDS):
        (folder / f"{i:05d}").write_bytes(
            np.append(i, rng.integers(WORDS, size=12)).astype("int64").tobytes()
        )


def decode(record):
    values = np.frombuffer(record, dtype="int64")
    return {"number": values[0], "input_ids": values[1:], "labels": values[1] % 2}


class Position(TrainerCallback):
    """Keeps the loader's position with each checkpoint."""

    def __init__(self, loader):
        self.loader = loader

    def on_save(self, args, state, control, **_):
        if state.is_world_process_zero:  # it is the same on all
            self._file(args.output_dir, state.global_step).write_text(json.dumps(self.loader.state_dict()))

    def on_train_begin(self, args, state, control, **_):
        if state.global_step:
            self.loader.load_state_dict(
                json.loads(self._file(args.output_dir, state.global_step).read_text())
            )

    def _file(self, folder, step):
        return Path(folder, f"checkpoint-{step}", "loader.json")


class StokerTrainer(Trainer):
    def __init__(self, *arguments, loader, **options):
        super().__init__(*arguments, callbacks=[Position(loader)], **options)
        self.loader, self.seen = loader, Counter()

    def get_train_dataloader(self):
        return self.loader

    def training_step(self, model, inputs, *arguments):
        self.seen.update(inputs.pop("number").tolist())
        return super().training_step(model, inputs, *arguments)


def train(data, folder, *, resume=False, **until):
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
        )
    )
    with stoker.Loader(data, global_batch_size=BATCH, shuffle=True, num_workers=2) as loader:
        trainer = StokerTrainer(
            model,
            TrainingArguments(
                folder,
                per_device_train_batch_size=BATCH,
                save_steps=5,
                ignore_data_skip=True,
                use_cpu=True,
                report_to="none",
                disable_tqdm=True,
                dataloader_pin_memory=False,
                **until,
            ),
            loader=loader,
        )
        trainer.train(resume_from_checkpoint=resume)
        print(loader.stats)
        return trainer.seen


def main():
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder, "records")
        records.mkdir()
        make_dataset(records)
        data = stoker.Dataset(f"file://{records}/", decode=decode)
        seen = train(data, f"{folder}/run", max_steps=10)  # an epoch has 16 steps
        seen += train(data, f"{folder}/run", resume=True, num_train_epochs=3)
        print(f"{len(seen)} records, each read {set(seen.values())} times in 3 epochs")


if __name__ == "__main__":
    main()
