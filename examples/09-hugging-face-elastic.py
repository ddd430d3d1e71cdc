"""Hugging Face `Trainer` that goes on when workers die, join or leave:

    stoker run --nproc-per-node 3 examples/09-hugging-face-elastic.py

Two lines differ from any other script for `Trainer`: the import, and the loader. With `--lose-one` a worker is killed
in the middle of the second epoch; the others go on in their processes, and another one takes its place. Alone it trains
as well: `python examples/09-hugging-face-elastic.py`.
"""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
from transformers import BertConfig, BertForSequenceClassification, TrainerCallback

import stoker
from stoker.compat.transformers import ElasticTrainer as Trainer  # one of the two lines
from stoker.compat.transformers import ElasticTrainingArguments as TrainingArguments

RECORDS, BATCH, EPOCHS, WORDS = 128, 8, 3, 50


class Records:
    def __len__(self):
        return RECORDS

    def __getitem__(self, record):
        words = np.random.default_rng(record).integers(WORDS, size=12)
        return {"input_ids": words, "labels": words[0] % 2}


class Tell(TrainerCallback):
    def on_epoch_end(self, args, state, control, **_):
        if state.is_world_process_zero:
            print(f"epoch {state.epoch:.0f}: step {state.global_step}, world of {args.world_size}")


class LoseOne(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        time.sleep(0.02)
        killed = Path("09-killed")
        if state.global_step == 20 and args.process_index == 1 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def main():
    torch.set_num_threads(1)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
        )
    )
    loader = stoker.Loader(Records(), global_batch_size=BATCH, shuffle=True)  # and this is the other
    trainer = Trainer(
        model,
        TrainingArguments(
            "09-run",
            num_train_epochs=EPOCHS,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=loader,
        callbacks=[Tell(), LoseOne()] if "--lose-one" in sys.argv else [Tell()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
