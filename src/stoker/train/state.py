"""`stoker.State`: everything that a commit seals and a newcomer copies."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from stoker.data.session import session
from stoker.errors import ConfigError
from stoker.train.packing import pack
from stoker.train.runtime import Runtime, runtime


@dataclass
class _Seal:
    """What the last commit put aside, beside the parameters, which only an optimizer's step changes."""

    buffers: list[torch.Tensor]
    values: dict[str, Any]
    objects: dict[str, Any]
    groups: dict[str, list[dict[str, Any]]]
    positions: dict[str, dict[str, Any]]
    random: Any
    numpy: Any
    cpu: torch.Tensor
    cuda: list[torch.Tensor]


class State:
    """The training state: modules, optimizers, objects with `state_dict()`, tensors and plain values.

    Every keyword becomes an attribute: `State(model=model, optimizer=opt, epoch=0).epoch`. Plain values may be
    assigned (`state.epoch += 1`) and belong to the next commit.

    `checkpoint_dir`, `checkpoint_every`: write a checkpoint every so many commits (rank 0 does), and start from
    the newest one; by default what `stoker run --checkpoint-dir` says. `ddp_options`: keyword arguments for
    torch's DistributedDataParallel.

    Raises ConfigError for anything else than the kinds above.
    """

    def __init__(
        self,
        *,
        checkpoint_dir: str | None = None,
        checkpoint_every: int | None = None,
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
        put("_seal", None)
        for optimizer in optimizers.values():
            optimizer.register_step_pre_hook(self._on_optimizer_step)
        self._runtime.connect()
        self._runtime.checkpoint_to(checkpoint_dir, checkpoint_every)

    _modules: dict[str, torch.nn.Module]
    _optimizers: dict[str, torch.optim.Optimizer]
    _objects: dict[str, Any]
    _values: dict[str, Any]
    _ddp_options: dict[str, Any]
    _wrapped: dict[int, DistributedDataParallel]
    _runtime: Runtime
    _stepped: bool
    _seal: _Seal | None

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
        if len(self._modules) > 1 and "model" not in self._modules:
            names = ", ".join(self._modules)
            raise ConfigError(
                f"state.ddp needs one module or one named `model`, not {names}: use state.wrap(module)"
            )
        if not self._modules:
            raise ConfigError("state.ddp needs a module: State(model=…)")
        return self.wrap(self._modules["model" if "model" in self._modules else next(iter(self._modules))])

    def wrap(self, module: torch.nn.Module) -> DistributedDataParallel:
        """`module` in DistributedDataParallel over the current group; made once in a generation."""
        wrapped = self._wrapped.get(id(module))
        if wrapped is None:
            wrapped = self._runtime.wrap(module, self._ddp_options)
            self._wrapped[id(module)] = wrapped
        return wrapped

    def commit(self) -> None:
        """Seal this step: model, optimizer, loader positions, RNG and values together.

        Local: it issues no collective and cannot fail because a peer died. The world may change here.
        """
        self._runtime.commit(self)

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
        old = self._seal
        buffers = [b for m in self._modules.values() for b in m.buffers()]
        if old is not None and len(old.buffers) == len(buffers):
            for kept, buffer in zip(old.buffers, buffers, strict=True):
                kept.copy_(buffer.detach())
            copies = old.buffers
        else:
            copies = [b.detach().clone() for b in buffers]
        self._seal = _Seal(
            buffers=copies,
            values=copy.deepcopy(self._values),
            objects={k: copy.deepcopy(v.state_dict()) for k, v in self._objects.items()},
            groups={k: _hyperparameters(o) for k, o in self._optimizers.items()},
            positions=session().positions(),
            random=random.getstate(),
            numpy=np.random.get_state(),
            cpu=torch.get_rng_state(),
            cuda=torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        )
        self._stepped = False

    def roll_back(self) -> None:
        """Undo what happened since the last commit, parameters excepted."""
        seal = self._seal
        if seal is None:
            return
        with torch.no_grad():
            buffers = [b for m in self._modules.values() for b in m.buffers()]
            for kept, buffer in zip(seal.buffers, buffers, strict=True):
                buffer.copy_(kept)
            for module in self._modules.values():
                for parameter in module.parameters():
                    parameter.grad = None
        self._values.update(copy.deepcopy(seal.values))
        for name, held in self._objects.items():
            held.load_state_dict(copy.deepcopy(seal.objects[name]))
        for name, optimizer in self._optimizers.items():
            for group, kept_group in zip(optimizer.param_groups, seal.groups[name], strict=True):
                group.update(copy.deepcopy(kept_group))
        session().restore(seal.positions)
        random.setstate(seal.random)
        np.random.set_state(seal.numpy)
        torch.set_rng_state(seal.cpu)
        if seal.cuda:
            torch.cuda.set_rng_state_all(seal.cuda)

    def export(self) -> dict[str, Any]:
        """All of it, as nested plain values and tensors."""
        return {
            "modules": {k: dict(m.state_dict()) for k, m in self._modules.items()},
            "optimizers": {k: o.state_dict() for k, o in self._optimizers.items()},
            "objects": {k: o.state_dict() for k, o in self._objects.items()},
            "values": dict(self._values),
            "positions": session().positions(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take over an exported state. Raises ConfigError when it is another script's."""
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
            held.load_state_dict(state["objects"][name])
        self._values.update(state["values"])
        session().restore(state["positions"])
        self._stepped = False

    def forget_group(self) -> None:
        """Drop every wrapper of the group that is going away."""
        self._wrapped.clear()

    def _on_optimizer_step(self, *_: Any) -> None:
        self._stepped = True

    def _names(self) -> list[str]:
        return [*self._modules, *self._optimizers, *self._objects, *self._values]


def _hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{k: copy.deepcopy(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
