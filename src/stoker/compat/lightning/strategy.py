"""`ElasticStrategy`: Lightning in Stoker's worlds."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _all_gather_ddp_if_available, _sync_ddp_if_available
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only

from stoker.compat.lightning.csv_log import continue_csv_logs
from stoker.compat.lightning.loops import make_elastic
from stoker.compat.lightning.progress import FitProgress, callbacks_of
from stoker.errors import ConfigError
from stoker.train.context import init
from stoker.train.elastic import elastic
from stoker.train.failures import is_collective_failure
from stoker.train.packing import pack, unpack
from stoker.train.runtime import runtime
from stoker.train.state import State

log = logging.getLogger("stoker.train")
R = TypeVar("R")
_CHANGE_THE_MODEL = (BaseFinetuning, ModelPruning, StochasticWeightAveraging, WeightAveraging)
"""Callbacks that keep a second model, or change which parameters there are to train, as no commit tells a newcomer."""


class ElasticStrategy(Strategy):
    """One device in each process; the world is that of `stoker run`, else this process alone.

    `Trainer.fit` goes on in the same processes when workers die, join or leave, at the last committed step: model,
    optimizers, schedulers, loops, callbacks that have a `state_dict`, data module, loaders, random generators.
    The rest of the keywords are torch's DistributedDataParallel's.

    Raises ConfigError, when the fit begins, for what cannot be undone or divided: manual optimization, LBFGS, training
    data that is not one `stoker.Loader`, exact mode, loaders that are made anew during the fit, callbacks that average,
    prune or unfreeze the model, `sync_batchnorm`, a second fit.
    """

    def __init__(
        self,
        *,
        accelerator: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        **ddp_options: Any,
    ) -> None:
        super().__init__(accelerator, checkpoint_io, precision_plugin)
        self._ddp_options = ddp_options
        self._trainer: Trainer | None = None
        """Of the fit under way."""
        self._state: State | None = None
        """Once there is a world."""
        self._progress: FitProgress | None = None

    # -- the world ----------------------------------------------------------------------------------------

    @property
    def global_rank(self) -> int:
        return runtime().session.rank

    @property
    def local_rank(self) -> int:
        return init().local_rank

    @property
    def world_size(self) -> int:
        return runtime().session.world_size

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    @property
    def is_distributed(self) -> bool:
        """Asked for by Lightning where a module logs with `sync_dist`."""
        return init().is_elastic

    @property
    def root_device(self) -> torch.device:
        return runtime().device

    def setup_environment(self) -> None:
        context = init()
        self.set_world_ranks()
        super().setup_environment()
        assert self._lightning_module is not None
        if context.is_elastic:
            continue_csv_logs(self._lightning_module.trainer.loggers)

    def set_world_ranks(self) -> None:
        """Tell Lightning's global "is this rank 0"."""
        for function in (rank_zero_only, utilities_rank_zero_only):
            setattr(function, "rank", self.global_rank)  # noqa: B010 - an attribute that they do not declare

    # -- the fit ------------------------------------------------------------------------------------------

    @property
    def model(self) -> torch.nn.Module | None:
        """In a world wrapped for it. Kept nowhere else: with the wrapper the sockets of its group would stay."""
        module = self._model if self._model is not None else self._lightning_module
        return self._state.wrap(module) if self._state is not None and module is not None else module

    @model.setter
    def model(self, new_model: torch.nn.Module | None) -> None:
        self._model = new_model

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def setup(self, trainer: Trainer) -> None:
        # Validation data of other loaders is read as a whole by every rank: a sampler's world would not change.
        trainer._accelerator_connector.use_distributed_sampler = False
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self._check(trainer)
            self._trainer = trainer
            self._progress = FitProgress(trainer)
            make_elastic(trainer, self, self._progress)

    def run_elastic(self, attempt: Callable[[], None]) -> None:
        """Call `attempt` in each world, until one call comes to its end in all ranks."""
        module = self._lightning_module
        assert module is not None
        assert self._trainer is not None
        _leave_sigterm_alone(self._trainer)
        items: dict[str, Any] = {"model": module, "fit": self._progress}
        items |= {f"optimizer_{i}": one for i, one in enumerate(self.optimizers)}
        items |= {f"scheduler_{i}": one.scheduler for i, one in enumerate(self.lr_scheduler_configs)}
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is not None:
            items["scaler"] = scaler

        @elastic
        def run(state: State) -> None:
            self._state = state
            self.set_world_ranks()
            try:
                attempt()
            finally:
                self._state = None

        run(State(ddp_options=self._ddp_options, **items))

    def commit(self) -> None:
        """Seal the step. Raises WorldChanged where the world ends here."""
        assert self._state is not None
        assert self._progress is not None
        self._progress.has_commits = True
        self._state.commit()

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        # Lightning would call the closure, and the hooks after it, from inside the optimizer, which counts as a step
        # as soon as it is called: a peer lost there would leave this rank with parameters that nobody can vouch for.
        plugin, module = self.precision_plugin, self._lightning_module
        assert module is not None
        result = closure()
        if type(plugin).optimizer_step is Precision.optimizer_step or getattr(plugin, "scaler", self) is None:
            plugin._after_closure(module, optimizer)
            return optimizer.step(closure=lambda: result, **kwargs)
        return super().optimizer_step(optimizer, lambda: result, model, **kwargs)

    def teardown(self) -> None:
        self._trainer = None
        super().teardown()

    # -- collectives --------------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        self._meet(lambda: dist.all_reduce(torch.zeros(1, device=self.root_device)), None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self._meet(lambda: _broadcast(obj, src, self.root_device), obj)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        return self._meet(lambda: _sync_ddp_if_available(tensor.clone(), group, reduce_op=reduce_op), tensor)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        return self._meet(
            lambda: _all_gather_ddp_if_available(tensor, group=group, sync_grads=sync_grads), tensor
        )

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        wanted = self.world_size if all else 1

        def count() -> bool:
            decisions = torch.tensor(int(decision), device=self.root_device)
            dist.all_reduce(decisions)
            return bool(decisions >= wanted)

        return self._meet(count, decision)

    def _meet(self, collective: Callable[[], R], alone: R) -> R:
        """What a collective brings; `alone`: where there is nobody to meet.

        A rank may be lost after the training has ended in all of them. Then this one brings its own to an end.
        """
        if not self._settle():
            return alone
        try:
            return collective()
        except RuntimeError as error:
            if runtime().core.phase != "finished" or not is_collective_failure(error):
                raise
            log.warning("a rank was lost after the training had ended, this one ends without it: %s", error)
            return alone

    def _settle(self) -> bool:
        """Whether there are others to meet. If the optimizer has stepped, that is committed before: a peer that is lost
        in the meeting, which hooks at the end of a batch may call for, must not cost the step."""
        if not dist.is_available() or not dist.is_initialized() or self.world_size == 1:
            return False
        if self._state is not None and self._trainer is not None and not self._state.stands_at_commit:
            batches: Any = self._trainer.fit_loop.epoch_loop.batch_progress.current
            if batches.processed == batches.ready:
                self.commit()
        return True

    # -- refusals -----------------------------------------------------------------------------------------

    def _check(self, trainer: Trainer) -> None:
        module = self._lightning_module
        assert module is not None
        if not module.automatic_optimization:
            raise ConfigError(
                "ElasticStrategy needs automatic optimization: between two optimizers' steps within one batch a lost "
                "peer would leave a state that nobody can undo. Use @stoker.elastic itself for such a loop"
            )
        if any(isinstance(one, torch.optim.LBFGS) for one in self.optimizers):
            raise ConfigError(
                "ElasticStrategy cannot undo a broken step of LBFGS, which changes parameters many times"
            )
        if getattr(trainer, "reload_dataloaders_every_n_epochs", 0):
            raise ConfigError(
                "ElasticStrategy cannot keep the position of loaders that are made anew: leave out "
                "reload_dataloaders_every_n_epochs"
            )
        changing = [type(one).__name__ for one in callbacks_of(trainer) if isinstance(one, _CHANGE_THE_MODEL)]
        if changing:
            raise ConfigError(
                f"ElasticStrategy cannot go on with {changing[0]}: it keeps a second model, or changes what is "
                "trained, outside the commit, so that a worker that joins would train another model. Leave it out, or "
                "write it into the module, with buffers for what must last"
            )
        if trainer._accelerator_connector._layer_sync is not None:
            raise ConfigError(
                "ElasticStrategy does not convert the model for sync_batchnorm=True: give trainer.fit "
                "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), and leave the argument out"
            )
        if runtime().core.phase != "starting":
            raise ConfigError(
                "ElasticStrategy fits once in a process: workers that join could not know of an earlier fit"
            )


def _leave_sigterm_alone(trainer: Trainer) -> None:
    """Who is told to end, ends; the others go on. Lightning answers by a collective that no other rank comes to, and
    has all ranks end."""
    connector = trainer._signal_connector
    before = connector._original_handlers.get(signal.SIGTERM)
    if before is not None:
        connector._register_signal(signal.SIGTERM, before)


def _broadcast(value: Any, source: int, device: torch.device) -> Any:
    """The source's plain value, in all ranks. torch's own way unpickles what comes."""
    tensors: list[torch.Tensor] = []
    raw = (
        msgspec.msgpack.encode(pack(value, tensors, "what is broadcast"))
        if dist.get_rank() == source
        else b""
    )
    if tensors:
        raise ConfigError(
            "ElasticStrategy broadcasts plain values: for tensors use torch.distributed.broadcast"
        )
    size = torch.tensor([len(raw)], device=device)
    dist.broadcast(size, source)
    data = torch.zeros(int(size), dtype=torch.uint8, device=device)
    if raw:
        data.copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
    dist.broadcast(data, source)
    return unpack(msgspec.msgpack.decode(bytes(data.tolist())), [])
