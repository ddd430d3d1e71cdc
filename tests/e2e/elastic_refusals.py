"""What Stoker's strategy for Lightning and its Trainer refuse, and in which words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch.utils.data import DataLoader
from transformers import TrainingArguments

import stoker
from stoker.compat.accelerate import ElasticAccelerator
from stoker.compat.lightning import ElasticStrategy
from stoker.compat.transformers import ElasticTrainer, ElasticTrainingArguments
from stoker.data.session import session
from stoker.errors import ConfigError
from tests.e2e.framework_helpers import Rows


class Model(lightning.LightningModule):
    def __init__(self, kind: Any = torch.optim.SGD, *, automatic: bool = True) -> None:
        super().__init__()
        self.layers = torch.nn.Linear(16, 2)
        self.kind = kind
        self.automatic_optimization = automatic

    def training_step(self, batch: Any, step: int) -> Any:
        return F.cross_entropy(self.layers(batch["x"]), batch["labels"])

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), lr=0.01)


def fit(model: Model, loader: Any, **options: Any) -> None:
    lightning.Trainer(
        strategy=ElasticStrategy(),
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    ).fit(model, loader)


def train(data: Any, kind: Any = ElasticTrainingArguments, evaluation: Any = None, **options: Any) -> None:
    arguments = kind("saved", report_to="none", disable_tqdm=True, dataloader_pin_memory=False, **options)
    trainer = ElasticTrainer(torch.nn.Linear(16, 2), arguments, train_dataset=data, eval_dataset=evaluation)
    trainer.evaluate() if evaluation is not None else trainer.train()


def exactly(train: Callable[[Any], object]) -> None:
    """In exact mode, which is a script's as a whole."""
    try:
        train(stoker.Loader(Rows(), global_batch_size=20, virtual_ranks=2))
    finally:
        session().virtual_ranks = 0


def main() -> None:
    torch.set_num_threads(1)
    loader = stoker.Loader(Rows(), global_batch_size=20)
    cases: dict[str, Callable[[], object]] = {
        "manual": lambda: fit(Model(automatic=False), loader),
        "lbfgs": lambda: fit(Model(torch.optim.LBFGS), loader),
        "dataloader": lambda: fit(Model(), DataLoader(Rows(), batch_size=4)),  # type: ignore[arg-type]
        "reloaded": lambda: fit(Model(), loader, reload_dataloaders_every_n_epochs=1),
        "averaged": lambda: fit(Model(), loader, callbacks=[StochasticWeightAveraging(0.01)]),
        "synchronized": lambda: fit(Model(), loader, sync_batchnorm=True),
        "exact": lambda: exactly(lambda divided: fit(Model(), divided)),
        "trainer exact": lambda: exactly(train),
        "trainer orders": lambda: train(loader, train_sampling_strategy="group_by_length"),
        "trainer drops": lambda: train(loader, dataloader_drop_last=True),
        "trainer evaluates": lambda: train(loader, evaluation=loader),
        "trainer accumulates": lambda: train(loader, gradient_accumulation_steps=2),
        "trainer finds": lambda: train(loader, auto_find_batch_size=True),
        "trainer dataset": lambda: train(Rows()),
        "trainer arguments": lambda: train(loader, TrainingArguments, use_cpu=True),
        "accelerate accumulates": lambda: ElasticAccelerator(gradient_accumulation_steps=2),
        "accelerate divides": lambda: ElasticAccelerator(fsdp_plugin=object()),
        "first": lambda: fit(Model(), loader, accumulate_grad_batches=2),
        "second": lambda: fit(Model(), loader),
        "trainer second": lambda: train(loader),
    }
    said = {}
    for name, case in cases.items():
        try:
            case()
            said[name] = "done"
        except ConfigError as error:
            said[name] = str(error)
    Path("said-0.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
