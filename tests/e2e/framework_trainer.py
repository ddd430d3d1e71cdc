"""Hugging Face `Trainer` with Stoker's loader: `framework_trainer.py [resume] [skip]`, under torchrun.

`skip`: as it is where nothing says otherwise, `Trainer` is to skip what was read before.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

import stoker
from tests.e2e.framework_helpers import BATCH, Rows, note


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Linear(16, 2)

    def forward(self, x: Any, labels: Any) -> Any:
        logits = self.layers(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class Position(TrainerCallback):
    def __init__(self, loader: stoker.Loader) -> None:
        self.loader = loader

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            self._file(args, state).write_text(json.dumps(self.loader.state_dict()))

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step:
            self.loader.load_state_dict(json.loads(self._file(args, state).read_text()))

    def _file(self, args: Any, state: Any) -> Path:
        return Path(args.output_dir, f"checkpoint-{state.global_step}", "loader.json")


class StokerTrainer(Trainer):
    def __init__(self, *arguments: Any, loader: stoker.Loader, **options: Any) -> None:
        super().__init__(*arguments, callbacks=[Position(loader)], **options)
        self.loader = loader

    def get_train_dataloader(self) -> Any:
        return self.accelerator.prepare(self.loader)

    def training_step(self, model: Any, inputs: Any, *arguments: Any) -> Any:
        note("train", self.args.process_index, inputs.pop("number"))
        return super().training_step(model, inputs, *arguments)


def main() -> None:
    resume = "resume" in sys.argv
    until: dict[str, int] = {"num_train_epochs": 3} if resume else {"max_steps": 15}
    torch.set_num_threads(1)
    loader = stoker.Loader(Rows(), global_batch_size=BATCH, shuffle=True, num_workers=2)
    arguments = TrainingArguments(
        "saved",
        per_device_train_batch_size=BATCH // 2,
        save_steps=5,
        ignore_data_skip="skip" not in sys.argv,
        remove_unused_columns=False,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **until,  # type: ignore[arg-type]
    )
    StokerTrainer(Model(), arguments, loader=loader).train(resume_from_checkpoint=resume)


if __name__ == "__main__":
    main()
