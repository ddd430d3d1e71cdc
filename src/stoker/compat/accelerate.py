"""Hugging Face Accelerate in Stoker's worlds.

    from stoker.compat.accelerate import ElasticAccelerator

    accelerator = ElasticAccelerator()
    model, optimizer = accelerator.prepare(model, optimizer)

    @stoker.elastic
    def train(state):
        accelerator.enter_world()
        for batch in loader:
            loss = loss_fn(state.ddp(batch["x"]), batch["y"])
            accelerator.backward(loss)
            ...

`num_processes`, `process_index`, `is_main_process`, `gather`, `reduce` and `wait_for_everyone` are those of the world.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, recursively_apply

from stoker.data.session import session
from stoker.errors import ConfigError
from stoker.train.accelerator import backend_of
from stoker.train.context import Context, init

_OF_DEVICE = {
    "cpu": DistributedType.MULTI_CPU,
    "cuda": DistributedType.MULTI_GPU,
    "npu": DistributedType.MULTI_NPU,
    "xpu": DistributedType.MULTI_XPU,
}


class ElasticAccelerator(Accelerator):  # type: ignore[misc]
    """An Accelerator whose world is Stoker's. It wraps no model for gradients: `state.ddp` does, anew in each world.

    Takes Accelerator's arguments. Raises ConfigError for gradient accumulation, FSDP, DeepSpeed and Megatron.
    """

    def __init__(self, **options: Any) -> None:
        known = (
            "fsdp_plugin",
            "deepspeed_plugin",
            "deepspeed_plugins",
            "megatron_lm_plugin",
            "parallelism_config",
        )
        refused = [name for name in known if options.get(name) is not None]
        if refused:
            raise ConfigError(
                f"ElasticAccelerator cannot rebuild what {refused[0]} divides over processes: each must hold the model"
            )
        if (
            options.get("gradient_accumulation_steps", 1) != 1
            or options.get("gradient_accumulation_plugin") is not None
        ):
            raise ConfigError(
                "ElasticAccelerator accumulates no gradients over batches, whose shares and weights differ: make the "
                "loader's global_batch_size the whole"
            )
        stand_alone()
        super().__init__(**options)

    def prepare_model(
        self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """To the device, with mixed precision, but not wrapped for a group that will not last."""
        return super().prepare_model(model, device_placement=device_placement, evaluation_mode=True)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Steps once where the optimizer does: a global batch is the same at every size of the world."""
        prepared = super().prepare_scheduler(scheduler)
        if isinstance(prepared, AcceleratedScheduler):
            prepared.split_batches = True
        return prepared

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Each row of all ranks once, in their order, for the newest batch of a `stoker.Loader`, of which ranks may
        have unequal shares; in a loop over a DataLoader that was prepared, Accelerate's own."""
        if self.gradient_state.in_dataloader:
            return super().gather_for_metrics(input_data, use_gather_object)
        share = session().share
        if share is not None and share.records == 0:  # a record that only keeps in step
            input_data = recursively_apply(lambda tensor: tensor[:0] if tensor.dim() else tensor, input_data)
        if self.num_processes == 1 or use_gather_object:
            return super().gather_for_metrics(input_data, use_gather_object)
        return recursively_apply(self._gather_rows, input_data, error_on_other_type=True)

    def _gather_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        rows = tensor if tensor.dim() else tensor[None]
        sizes = self.gather(torch.tensor([len(rows)], device=rows.device)).tolist()
        padded = self.gather(self.pad_across_processes(rows, dim=0)).split(max(sizes))
        return torch.cat([part[:size] for part, size in zip(padded, sizes, strict=True)])

    def enter_world(self) -> None:
        """Take over the present world: first thing in the `@stoker.elastic` function."""
        follow_world()


def stand_alone() -> Context:
    """Have Accelerate know Stoker's device and no other process. It would make a process group of its own, by the
    environment that Stoker's agent, too, sets as torchrun does."""
    context = init()
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._shared_state.update(
        _cpu=context.device.type == "cpu",
        backend=None,
        debug=False,
        device=context.device,
        fork_launched=False,
        distributed_type=DistributedType.NO,
        num_processes=1,
        process_index=context.rank,
        local_process_index=context.local_rank,
    )
    return context


def follow_world(*, is_over: bool = False) -> None:
    """Tell Accelerate of the world that this process is in now; `is_over`: nobody may be there any more, to meet."""
    context = init()
    several = context.world_size > 1 and not is_over
    if GradientState._shared_state:
        GradientState().dataloader_references = [None]  # of a loop that the change of the world has left
    kind = _OF_DEVICE.get(context.device.type, DistributedType.MULTI_GPU)
    for shared in (PartialState._shared_state, AcceleratorState._shared_state):
        if shared:
            shared.update(
                distributed_type=kind if several else DistributedType.NO,
                backend=backend_of(context.device) if several else None,
                num_processes=context.world_size if several else 1,
                process_index=context.rank,
                local_process_index=context.local_rank,
            )
