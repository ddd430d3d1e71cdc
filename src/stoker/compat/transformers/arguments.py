"""`ElasticTrainingArguments`: TrainingArguments that ask Stoker for device and world."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from accelerate.state import PartialState
from transformers import TrainingArguments

from stoker.compat.accelerate import stand_alone
from stoker.train.context import init


@dataclass
class ElasticTrainingArguments(TrainingArguments):
    """The device is Stoker's, and `world_size` and `process_index` follow the world.

    `use_cpu` is set by it: `stoker run --accelerator` says what is trained on.
    """

    def __post_init__(self) -> None:
        self.use_cpu = init().device.type == "cpu"  # by which Trainer knows that bf16 is not the GPU's
        theirs: Any = super()
        theirs.__post_init__()

    @cached_property
    def _setup_devices(self) -> torch.device:
        context = stand_alone()
        self.distributed_state = PartialState()
        self._n_gpu = 0 if context.device.type == "cpu" else 1
        return context.device
