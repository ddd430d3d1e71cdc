"""`ElasticTrainer`: Hugging Face's Trainer in Stoker's worlds."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from stoker.compat.accelerate import follow_world
from stoker.compat.transformers.arguments import ElasticTrainingArguments
from stoker.compat.transformers.progress import TrainProgress
from stoker.compat.transformers.token_losses import heeds_count
from stoker.data.loader import Loader
from stoker.data.session import session
from stoker.errors import ConfigError
from stoker.train.elastic import elastic
from stoker.train.runtime import runtime
from stoker.train.state import State

POSITION = "stoker-loader.json"
"""In Trainer's checkpoints: where the loader was."""


class ElasticTrainer(Trainer):
    """`train` goes on in the same processes when workers die, join or leave, at the last committed step.

    `train_dataset` is a `stoker.Loader`: `global_batch_size` says how many records a step has, not
    `per_device_train_batch_size`. Trainer's own checkpoints hold the loader's position, too. `ddp_options`: keywords
    for torch's DistributedDataParallel.

    Raises ConfigError for arguments that are no ElasticTrainingArguments, for training data that is no `stoker.Loader`,
    for exact mode, gradient accumulation, FSDP, DeepSpeed, `auto_find_batch_size`, an order of records that the loader
    does not have, evaluation data that is a loader, and for a second `train`.
    """

    def __init__(self, *arguments: Any, ddp_options: dict[str, Any] | None = None, **options: Any) -> None:
        if not hasattr(Trainer, "_run_epoch"):
            raise ConfigError(
                "ElasticTrainer is made for transformers 5, and this version has other loops: install it"
            )
        super().__init__(*arguments, **options)
        if not isinstance(self.args, ElasticTrainingArguments):
            raise ConfigError(
                "ElasticTrainer takes ElasticTrainingArguments: Trainer's own have made a process group already"
            )
        self._ddp_options = ddp_options
        self._progress = TrainProgress(self)
        self._state: State | None = None
        """Once there is a world."""
        self._prepared: Any = None
        self._is_resumed = False
        """The epoch that is begun now has been begun before the world changed."""
        self._heeds_count: bool | None = None
        """Whether the model's loss depends on Trainer's number of tokens; None: not known yet."""
        self._finish: Callable[[], Any] = lambda: None
        self.callback_handler.callbacks.insert(0, _EpochAndPosition(self))

    @property
    def loader(self) -> Loader:
        """Of the training data. Raises ConfigError."""
        if not isinstance(self.train_dataset, Loader):
            raise ConfigError(
                "ElasticTrainer trains on a stoker.Loader, whose position belongs to each step, not on a "
                f"{type(self.train_dataset).__name__}: train_dataset=stoker.Loader(dataset, global_batch_size=…)"
            )
        return self.train_dataset

    def get_train_dataloader(self) -> Any:
        return self.loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Trainer's own. Raises ConfigError where it is to be made of a loader."""
        known: Any = self.eval_dataset
        chosen = known if eval_dataset is None else eval_dataset
        if isinstance(chosen, str):
            chosen = known[chosen]
        if isinstance(chosen, Loader):
            raise ConfigError(
                "ElasticTrainer makes the loader of eval_dataset itself, and divides it over the world: give it the "
                "dataset, not a stoker.Loader"
            )
        return super().get_eval_dataloader(eval_dataset)

    # -- the training -------------------------------------------------------------------------------------

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        self._check()
        loader: Any = self.loader
        max_steps = self.set_initial_training_values(self.args, loader)[-1]
        theirs: Any = super()
        self._prepared, _ = theirs._prepare_for_training(max_steps, loader, resume_from_checkpoint)
        self.model_wrapped: Any = self.model  # never the wrapper: with it the sockets of its group would stay
        if resume_from_checkpoint is not None:
            self._go_to_position_of(Path(resume_from_checkpoint))

        @elastic
        def run(state: State) -> None:
            self._state = state
            self._is_resumed = self._progress.has_commits
            follow_world()
            self.__dict__.pop("_eval_dataloaders", None)  # divided for a world that is over
            try:
                theirs._inner_training_loop(
                    batch_size=batch_size,
                    args=args,
                    resume_from_checkpoint=None if self._is_resumed else resume_from_checkpoint,
                    trial=trial,
                    ignore_keys_for_eval=ignore_keys_for_eval,
                )
            finally:
                self._state = None

        run(self._new_state())
        follow_world(is_over=True)
        try:
            return self._finish()
        finally:
            follow_world()

    def _new_state(self) -> State:
        optimizer: Any = self.optimizer
        items: dict[str, Any] = {
            "model": self.model,
            "optimizer": getattr(optimizer, "optimizer", optimizer),
            "scheduler": self.lr_scheduler,
            "train": self._progress,
        }
        if self.accelerator.scaler is not None:
            items["scaler"] = self.accelerator.scaler
        return State(ddp_options=self._ddp_options, **items)

    def _prepare_for_training(
        self, max_steps: Any, train_dataloader: Any, resume_from_checkpoint: Any
    ) -> Any:
        """In each world: all but the wrapper was made before the first."""
        assert self._state is not None
        self.accelerator._models, self.accelerator._optimizers = [self._prepared], [self.optimizer]
        return self._state.wrap(self._prepared), train_dataloader

    def _init_training_state(
        self, max_steps: Any, num_update_steps_per_epoch: Any, num_train_epochs: Any, resume: Any, trial: Any
    ) -> tuple[int, int]:
        begun = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume, trial
        )
        if not self._is_resumed:
            return begun
        self._progress.put_back_state()
        state: Any = self.state
        state.init_training_references(self, max_steps, num_train_epochs, trial)
        return self.loader.epoch, 0

    def _run_epoch(self, **options: Any) -> None:  # type: ignore[override]
        is_resumed, self._is_resumed = self._is_resumed, False
        theirs: Any = super()
        if not is_resumed:
            theirs._run_epoch(**options)
            return
        self._progress.put_back_step()
        after_step = functools.partial(
            self._maybe_log_save_evaluate,
            model=options["model"],
            trial=options["trial"],
            epoch=options["epoch"],
            ignore_keys_for_eval=options["ignore_keys_for_eval"],
            start_time=options["start_time"],
        )
        after_step(self._tr_loss, None)
        ends = self.control.should_epoch_stop or self.control.should_training_stop
        if not ends and self.loader.cursor < len(self.loader.dataset):
            theirs._run_epoch(**options)
            return
        self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
        after_step(self._tr_loss, None)

    def _maybe_log_save_evaluate(self, *arguments: Any, **options: Any) -> None:
        """After each step, before what may take long, and at the end of each epoch."""
        assert self._state is not None
        if not self._state.stands_at_commit:
            self._progress.note_commit()
            self._state.commit()
        super()._maybe_log_save_evaluate(*arguments, **options)

    def _evaluate(self, *arguments: Any, **options: Any) -> dict[str, float]:
        """Not again in each world where it was asked for before the first step (`eval_on_start`)."""
        return {} if self._is_resumed else super()._evaluate(*arguments, **options)

    def _finalize_training(self, *arguments: Any) -> None:
        """Not before all ranks are through, when some may be gone; but for the one sum over them."""
        self.store_flos()
        self._finish = functools.partial(super()._finalize_training, *arguments)

    # -- losses that are means over tokens ----------------------------------------------------------------

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        share = session().share
        if share is not None and share.records == 0:  # a record that only keeps in step
            names = [n for n in ("labels", "shift_labels") if batch_samples and n in batch_samples[0]]
            batch_samples = [
                {**batch, **{name: torch.full_like(batch[name], -100) for name in names}}
                for batch in batch_samples
            ]
        return super()._get_num_items_in_batch(batch_samples, device)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Of all tokens of the global batch, if Trainer counts them and the model heeds that: then each rank weighs by
        its tokens already, and not by its records as well."""
        is_mean_of_own = self._is_mean_of_own(inputs, num_items_in_batch)
        loss, outputs = super().compute_loss(
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        share = session().share
        if is_mean_of_own:
            loss = loss / self.args.world_size  # by which Trainer has multiplied it
        elif (
            self._counts_items(num_items_in_batch)
            and model.training
            and share is not None
            and share.records > 0
        ):
            loss = loss * (share.batch_records / (share.records * self.args.world_size))
        return (loss, outputs) if return_outputs else loss

    def _counts_items(self, num_items_in_batch: Any) -> bool:
        counted = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        return bool(self.args.average_tokens_across_devices and counted and num_items_in_batch is not None)

    def _is_mean_of_own(self, inputs: dict[str, Any], num_items_in_batch: Any) -> bool:
        """Whether the model computes the mean of its own records whatever it is told. Looked at once."""
        if self.args.world_size == 1 or not self._counts_items(num_items_in_batch):
            return False
        if self.compute_loss_func is not None or self.label_smoother is not None:
            return False
        if self._heeds_count is None:
            module: Any = self.model
            self._heeds_count = heeds_count(module, inputs, num_items_in_batch)
        return self._heeds_count is False

    # -- helpers ------------------------------------------------------------------------------------------

    def _go_to_position_of(self, checkpoint: Path) -> None:
        try:
            position = json.loads((checkpoint / POSITION).read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the checkpoint {checkpoint} holds no position of a stoker.Loader ({error}): it is not one of "
                "ElasticTrainer's, or is damaged; name another one"
            ) from None
        self.args.ignore_data_skip = True
        self.loader.load_state_dict(position)

    def _check(self) -> None:
        args = self.args
        if runtime().core.phase != "starting":
            raise ConfigError(
                "ElasticTrainer trains once in a process: workers that join could not know of an earlier training"
            )
        if self.loader.virtual_ranks:
            raise ConfigError(
                "ElasticTrainer has no exact mode: Trainer steps the optimizer itself, once a batch, and not once a "
                "global batch of virtual ranks. Leave virtual_ranks out, or use @stoker.elastic itself"
            )
        if args.train_sampling_strategy != "random" or args.dataloader_drop_last:
            what = "dataloader_drop_last" if args.dataloader_drop_last else "train_sampling_strategy"
            raise ConfigError(
                f"ElasticTrainer takes the records in the loader's order, all of them: leave out {what}, and make a "
                "dataset that has the records so"
            )
        if args.gradient_accumulation_steps != 1:
            raise ConfigError(
                "ElasticTrainer accumulates no gradients over batches, whose shares and weights differ: make the "
                "loader's global_batch_size the whole, and leave out gradient_accumulation_steps"
            )
        if self.is_deepspeed_enabled or self.is_fsdp_enabled or args.auto_find_batch_size:
            what = "auto_find_batch_size" if args.auto_find_batch_size else "FSDP or DeepSpeed"
            raise ConfigError(
                f"ElasticTrainer cannot go on with {what}: each process must hold the whole model, and a global batch "
                "be the same at every size of the world"
            )


class _EpochAndPosition(TrainerCallback):
    """Comes before the others: the epoch is counted from where the loader is, and the position goes to checkpoints."""

    def __init__(self, trainer: ElasticTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        loader = self._trainer.loader
        state.epoch = loader.epoch + math.ceil(loader.cursor / loader.global_batch_size) / len(loader)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            (folder / POSITION).write_text(json.dumps(self._trainer.loader.state_dict()))
