"""`stoker.State`: everything that a commit seals and a newcomer copies."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from stoker.data.session import session
from stoker.errors import ConfigError
from stoker.train.accelerator import device_rng_states, restore_rng_states
from stoker.train.checkpoints.checkpointer import Checkpointer
from stoker.train.grad_scaling import forget_scaling
from stoker.train.numpy_random import NumpyRandomCopy
from stoker.train.packing import normalised, pack, placed_as
from stoker.train.random_states import random_states, restore_random_states
from stoker.train.runtime import Runtime, runtime
from stoker.train.state_buffers import BufferCopies
from stoker.train.state_modes import Modes
from stoker.train.tuning_batches import micro_batches


@dataclass
class _Seal:
    """What the last commit put aside beside the buffers. Parameters are not: only an optimizer's step changes them."""

    values: dict[str, Any]
    objects: dict[str, Any]
    groups: dict[str, list[dict[str, Any]]]
    positions: dict[str, dict[str, Any]]
    random: Any
    numpy: Any
    cpu: torch.Tensor
    device: list[torch.Tensor]


class State:
    """The training state: modules, optimizers, objects with `state_dict()`, tensors and plain values.

    Every keyword becomes an attribute: `State(model=model, optimizer=opt, epoch=0).epoch`. Plain values may be
    assigned (`state.epoch += 1`) and belong to the next commit.

    `checkpointer`: a `stoker.Checkpointer`, which keeps copies of it in memory and in a storage, and starts from the
    newest. `checkpoint_dir`, `checkpoint_every`: the same as `Checkpointer(checkpoint_dir, every_s=None,
    every_commits=checkpoint_every)`; by default what `stoker run --checkpoint-dir` says. `ddp_options`: keyword
    arguments for torch's DistributedDataParallel.

    Raises ConfigError for anything else than the kinds above, and for `checkpoint_every` below 1.
    """

    def __init__(
        self,
        *,
        checkpoint_dir: str | None = None,
        checkpoint_every: int | None = None,
        checkpointer: Checkpointer | None = None,
        ddp_options: dict[str, Any] | None = None,
        **items: Any,
    ) -> None:
        put = super().__setattr__
        modules = {k: v for k, v in items.items() if isinstance(v, torch.nn.Module)}
        optimizers = {k: v for k, v in items.items() if isinstance(v, torch.optim.Optimizer)}
        rest = {k: v for k, v in items.items() if k not in modules and k not in optimizers}
        objects = {
            k: v for k, v in rest.items() if hasattr(v, "state_dict") and hasattr(v, "load_state_dict")
        }
        values = {k: v for k, v in rest.items() if k not in objects}
        for name in items:
            if name.startswith("_") or hasattr(type(self), name):
                raise ConfigError(f"State cannot hold {name!r}: the name is taken")
        pack(values, [])
        pack({k: v.state_dict() for k, v in objects.items()}, [])
        put("_modules", modules)
        put("_optimizers", optimizers)
        put("_objects", objects)
        put("_values", values)
        put("_ddp_options", dict(ddp_options or {}))
        put("_wrapped", {})
        put("_runtime", runtime())
        put("_stepped", False)
        put("_rehearses", False)
        put("_seal", None)
        put("_buffers", BufferCopies())
        put("_numpy", NumpyRandomCopy())
        put("_modes", None)
        for optimizer in optimizers.values():
            optimizer.register_step_pre_hook(self._on_optimizer_step)
        self._runtime.connect()
        self._runtime.steps.checkpoint_to(checkpoint_dir, checkpoint_every, checkpointer)

    _modules: dict[str, torch.nn.Module]
    _optimizers: dict[str, torch.optim.Optimizer]
    _objects: dict[str, Any]
    _values: dict[str, Any]
    _ddp_options: dict[str, Any]
    _wrapped: dict[int, DistributedDataParallel]
    _runtime: Runtime
    _stepped: bool
    _rehearses: bool
    _seal: _Seal | None
    _buffers: BufferCopies
    _numpy: NumpyRandomCopy
    _modes: Modes | None
    """Of the first seal, with which the training function is called first, on every worker: it is called anew from its
    top, so that those of the last commit, which may have been one between `eval()` and `train()`, would mislead it."""

    def __getattr__(self, name: str) -> Any:
        for kind in ("_values", "_modules", "_optimizers", "_objects"):
            held = self.__dict__.get(kind, {})
            if name in held:
                return held[name]
        raise AttributeError(f"State has no {name!r}; it holds {', '.join(self._names()) or 'nothing'}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        elif name in self._values:
            pack(value, [], f"state.{name}")
            self._values[name] = value
        else:
            raise ConfigError(
                f"state.{name} cannot be assigned: name values when the State is made, State({name}=…); modules "
                "and optimizers are not replaced"
            )

    # -- training ---------------------------------------------------------------------------------------

    @property
    def ddp(self) -> DistributedDataParallel:
        """The model in torch's DistributedDataParallel over the current generation's group.

        Gradients are weighted by each rank's share of the global batch, so that every step's gradient is the
        mean over the global batch whatever the shares (the loss being a mean over the local batch).
        """
        if not self._modules:
            raise ConfigError("state.ddp needs a module: State(model=…)")
        module = self._main_module()
        if module is None:
            names = ", ".join(self._modules)
            raise ConfigError(
                f"state.ddp needs one module or one named `model`, not {names}: use state.wrap(module)"
            )
        return self.wrap(module)

    def wrap(self, module: torch.nn.Module) -> DistributedDataParallel:
        """`module` in DistributedDataParallel over the current group; made once in a generation."""
        wrapped = self._wrapped.get(id(module))
        if wrapped is None:
            wrapped = self._runtime.worlds.wrap(module, self._ddp_options)
            self._wrapped[id(module)] = wrapped
        return wrapped

    def micro_batches(self, batch: Any, records: int) -> Iterator[tuple[Any, float]]:
        """The pieces of this rank's share of a global batch, of so many records each, and the weight of each.

            for (x, y), weight in state.micro_batches(batch, 8):
                (loss_fn(state.ddp(x), y) * weight).backward()

        leaves the gradient of the whole share, the loss being a mean over its records; gradients are reduced in the
        last piece only. Pieces are of the same size at every world size; auto-tune may choose a larger one.

        Raises ConfigError for a batch that cannot be cut, and for a number below 1.
        """
        if records < 1:
            raise ConfigError(f"state.micro_batches takes pieces of at least 1 record, not {records}")
        tuning = self._runtime.steps.tuning
        if tuning is not None:
            tuning.begin_with(records)
            records = tuning.setting.micro_batch
        main = self._main_module()
        if main is not None:
            self.wrap(main)  # before the first piece, which is not to reduce either
        return micro_batches(batch, records, *self._wrapped.values())

    def commit(self) -> None:
        """Seal this step: model, optimizer, loader positions, RNG and values together.

        Local: it issues no collective and cannot fail because a peer died (but that auto-tune brings the ranks
        together now and then). The world may change here.
        """
        if self._rehearses:
            raise ConfigError("warm_up must not commit: what it does is undone, and no step of the training")
        self._runtime.steps.commit(self)

    @property
    def commits(self) -> int:
        """Steps committed since the run began."""
        return self._runtime.core.commits

    # -- for the runtime ----------------------------------------------------------------------------------

    @property
    def stands_at_commit(self) -> bool:
        """Whether no optimizer has stepped since the last commit."""
        return not self._stepped

    def seal(self) -> None:
        """Put aside what a broken step could have changed."""
        if self._modes is None:
            self._modes = Modes(self._modules.values())
        self._buffers.renew(self._modules.values())
        self._seal = _Seal(
            values=copy.deepcopy(self._values),
            objects={k: copy.deepcopy(v.state_dict()) for k, v in self._objects.items()},
            groups={k: _hyperparameters(o) for k, o in self._optimizers.items()},
            positions=session().positions(),
            random=random.getstate(),
            numpy=self._numpy.renew(),
            cpu=torch.get_rng_state(),
            device=device_rng_states(self._runtime.device),
        )
        self._stepped = False

    def roll_back(self) -> None:
        """Undo what happened since the last commit, parameters excepted; train or eval mode is as it was at first."""
        seal = self._seal
        if seal is None or self._modes is None:
            return
        self._modes.put_back()
        self._buffers.put_back()
        for module in self._modules.values():
            for parameter in module.parameters():
                parameter.grad = None
        self._values.update(copy.deepcopy(seal.values))
        for name, held in self._objects.items():
            held.load_state_dict(copy.deepcopy(seal.objects[name]))
        for name, optimizer in self._optimizers.items():
            for group, kept_group in zip(optimizer.param_groups, seal.groups[name], strict=True):
                group.update(copy.deepcopy(kept_group))
        forget_scaling(self._objects.values(), self._optimizers.values())
        session().restore(seal.positions)
        random.setstate(seal.random)
        np.random.set_state(seal.numpy)
        torch.set_rng_state(seal.cpu)
        restore_rng_states(self._runtime.device, seal.device)

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Undo what happens within: buffers, gradients, values, RNG, positions, train or eval mode.

        Parameters cannot be put back, for no copy of them is kept: an optimizer's step is refused, and so is any other
        change of them. Raises ConfigError.
        """
        self.seal()
        versions = [(p, p._version) for top in self._modules.values() for p in top.parameters()]
        self._rehearses = True
        try:
            yield
        finally:
            self._rehearses = False
        if any(parameter._version != version for parameter, version in versions):
            raise ConfigError(
                "warm_up has changed parameters of the model, which is not undone: a forward and backward pass is "
                "enough; leave steps of optimizers and the loading of weights to the training"
            )
        self.roll_back()

    def export(self) -> dict[str, Any]:
        """All of it, as nested plain values and tensors, such as a copy or a checkpoint holds. Raises ConfigError."""
        every = {
            "modules": {k: m.state_dict() for k, m in self._modules.items()},
            "optimizers": {k: o.state_dict() for k, o in self._optimizers.items()},
            "objects": {k: o.state_dict() for k, o in self._objects.items()},
            "values": self._values,
            "positions": session().positions(),
            "random": random_states(session().rank, self._runtime.device),
        }
        return {kind: normalised(held, f"state[{kind!r}]") for kind, held in every.items()}

    def load(self, state: dict[str, Any]) -> None:
        """Take over an exported state, each tensor on the device of its own. The random generators stay this rank's
        own; see `restore_random`. Raises ConfigError when it is another script's."""
        self._runtime.steps.settle()
        for kind, mine in (
            ("modules", self._modules),
            ("optimizers", self._optimizers),
            ("objects", self._objects),
        ):
            if set(state[kind]) != set(mine):
                raise ConfigError(
                    f"the state to load has {kind} {sorted(state[kind])}, this script's State has {sorted(mine)}: is "
                    "it from another script?"
                )
        try:
            for name, module in self._modules.items():
                module.load_state_dict(state["modules"][name])
            for name, optimizer in self._optimizers.items():
                optimizer.load_state_dict(state["optimizers"][name])
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                f"the state to load does not fit {name!r}: is it from another version of this script? {error}"
            ) from error
        for name, held in self._objects.items():
            held.load_state_dict(placed_as(state["objects"][name], held.state_dict()))
        self._values.update(placed_as(state["values"], self._values))
        session().restore(state["positions"])
        self._stepped = False

    def restore_random(self, state: dict[str, Any]) -> None:
        """Go on with the random generators of an exported state, if it is of this very rank."""
        restore_random_states(state.get("random"), session().rank, self._runtime.device)

    def stable_tensors(self) -> Iterator[torch.Tensor]:
        """Tensors that only an optimizer's step changes, beside what optimizers keep."""
        return (parameter for module in self._modules.values() for parameter in module.parameters())

    def forget_group(self) -> None:
        """Drop every wrapper of the group that is going away."""
        self._wrapped.clear()

    def _on_optimizer_step(self, *_: Any) -> None:
        if self._rehearses:
            raise ConfigError(
                "warm_up must not step an optimizer: it would change parameters, which is not undone; leave it out, a "
                "forward and backward pass is enough"
            )
        self._stepped = True
        self._runtime.steps.settle()
        self._runtime.steps.accumulation.forget()

    def _main_module(self) -> torch.nn.Module | None:
        """The only module, or the one named `model`."""
        only = next(iter(self._modules.values())) if len(self._modules) == 1 else None
        return self._modules.get("model", only)

    def _names(self) -> list[str]:
        return [*self._modules, *self._optimizers, *self._objects, *self._values]


def _hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{k: copy.deepcopy(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
