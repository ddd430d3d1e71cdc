"""What a commit puts aside of a State, and how a broken step is undone by it."""

from __future__ import annotations

from typing import Any

import torch

from stoker.data.session import session
from stoker.train.grad_scaling import forget_scaling
from stoker.train.module_state import hyperparameters_of
from stoker.train.packing import copied
from stoker.train.random_states import RandomStates
from stoker.train.state_buffers import BufferCopies
from stoker.train.state_contents import Contents
from stoker.train.state_modes import Modes
from stoker.train.step_copies import StepCopies

_NO_EXTRA_STATE = torch.nn.Module.get_extra_state


class Seal:
    """Of one State, as of its last commit: buffers, extra state of modules, values, objects, hyperparameters, loaders'
    positions, random generators, train or eval mode; with `undo_steps` also parameters and optimizers' slots."""

    def __init__(self, contents: Contents, device: torch.device, *, undo_steps: bool) -> None:
        self._contents = contents
        self._buffers = BufferCopies()
        self._random = RandomStates(device)
        self._steps = StepCopies(contents) if undo_steps else None
        self._modes: Modes | None = None
        """Of the first seal, with which the training function is called first, on every worker: it is called anew from
        its top, so that those of the last commit, which may have been one between `eval()` and `train()`, would mislead
        it."""
        self._values: dict[str, Any] = {}
        self._objects: dict[str, Any] = {}
        self._groups: dict[str, list[dict[str, Any]]] = {}
        self._extra: list[tuple[torch.nn.Module, Any]] = []
        self.positions: dict[str, dict[str, Any]] = {}

    @property
    def is_there(self) -> bool:
        return self._modes is not None

    @property
    def undoes_steps(self) -> bool:
        """Whether parameters and optimizers' slots are kept as well."""
        return self._steps is not None and self.is_there

    def renew(self) -> None:
        """Put aside what a broken step could change."""
        held = self._contents
        modules = held.modules.values()
        if self._modes is None:
            self._modes = Modes(modules)
        self._buffers.renew(modules)
        self._extra = [(one, copied(one.get_extra_state())) for one in self._with_extra_state()]
        self._values = copied(held.values)
        self._objects = {k: copied(v.state_dict()) for k, v in held.objects.items()}
        self._groups = {k: hyperparameters_of(o) for k, o in held.optimizers.items()}
        self.positions = session().positions()
        self._random.keep()
        if self._steps is not None:
            self._steps.renew()

    def put_aside(self) -> dict[str, Any]:
        """Values, objects and positions of the last commit, as `State.export` names them."""
        return {"values": self._values, "objects": self._objects, "positions": self.positions}

    def put_back(self, *, undo_step: bool) -> None:
        """Undo what happened since; gradients are dropped. Parameters stay, unless they are kept as well and are to be
        undone."""
        if self._modes is None:
            return
        held = self._contents
        self._modes.put_back()
        self._buffers.put_back()
        for module, extra in self._extra:
            module.set_extra_state(copied(extra))
        for module in held.modules.values():
            for parameter in module.parameters():
                parameter.grad = None
        held.values.update(copied(self._values))
        for name, one in held.objects.items():
            one.load_state_dict(copied(self._objects[name]))
        for name, optimizer in held.optimizers.items():
            groups = self._groups[name]
            del optimizer.param_groups[len(groups) :]  # who has added them does so again
            for group, kept in zip(optimizer.param_groups, groups, strict=True):
                group.update(copied(kept))
        if self._steps is not None and undo_step:
            self._steps.put_back()
        forget_scaling(held.objects.values(), held.optimizers.values())
        session().restore(self.positions)
        self._random.put_back()

    def _with_extra_state(self) -> list[torch.nn.Module]:
        modules = dict.fromkeys(one for top in self._contents.modules.values() for one in top.modules())
        return [one for one in modules if type(one).get_extra_state is not _NO_EXTRA_STATE]
