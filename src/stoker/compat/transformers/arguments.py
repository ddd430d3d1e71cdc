"""`ElasticTrainingArguments`: TrainingArguments that ask Stoker for device and world."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from accelerate.state import PartialState
from transformers import TrainingArguments

from stoker.compat.accelerate import stand_alone


@dataclass
class ElasticTrainingArguments(TrainingArguments):
    """The device is Stoker's, and `world_size` and `process_index` follow the world.

    `use_cpu` is not looked at: `stoker run --accelerator` says what is trained on.
    """

    @cached_property
    def _setup_devices(self) -> torch.device:
        context = stand_alone()
        self.distributed_state = PartialState()
        self._n_gpu = 0 if context.device.type == "cpu" else 1
        return context.device
