"""Exact mode, as `stoker.State` uses it: on where a loader has virtual ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from stoker.base.rng import mix64
from stoker.data.seeding import seed_everything
from stoker.data.session import Session
from stoker.errors import ConfigError
from stoker.train.exact import numerics
from stoker.train.exact.engine import Engine
from stoker.train.exact.faces import ExactModule, ExactOptimizer, ExactScheduler
from stoker.train.module_state import hyperparameters_of
from stoker.train.state_contents import Contents


class ExactMode:
    """Of one State, which holds these. `threads`: for each operation, on every worker."""

    def __init__(
        self,
        live: Session,
        device: torch.device,
        threads: int,
        contents: Contents,
    ) -> None:
        self._live = live
        self._device = device
        self._threads = threads
        self._modules = contents.modules
        self._objects = contents.objects
        self._values = contents.values
        self._optimizers = contents.optimizers
        self._kept: dict[str, Any] = {}
        self._kept_objects: dict[str, Any] = {}
        self._kept_groups: dict[str, list[dict[str, Any]]] = {}
        self._moves: list[Any] = []
        self._engine: Engine | None = None
        self._faces: dict[int, Any] = {}

    @property
    def is_on(self) -> bool:
        """Whether a loader of this script has virtual ranks."""
        return self._live.virtual_ranks > 0

    def enter(self, commits: int, *, auto_tune: bool) -> None:
        """Steps are about to begin in a new world, after so many. Raises ConfigError for what cannot be exact."""
        if not self.is_on:
            return
        numerics.refuse(self._modules.values(), self._objects.values(), auto_tune=auto_tune)
        numerics.fix(self._threads)
        self._made().forget()
        self._live.begin_micro_batch = self._made().begin
        self._live.end_micro_batches = self._made().left
        seed_everything(
            mix64(commits)
        )  # who has been there and who has come draw the same before the first batch

    def leave(self) -> None:
        """The world is over, and the step under way with it."""
        if self._engine is not None:
            self._engine.forget()

    def wrap(self, module: torch.nn.Module) -> ExactModule:
        """The module as the script calls it. Raises ConfigError for one whose gradients would not be summed."""
        held = {id(parameter) for one in self._modules.values() for parameter in one.parameters()}
        if any(id(parameter) not in held for parameter in module.parameters()):
            raise ConfigError(
                "exact mode sums the gradients of modules that the State holds: name this one, too"
            )
        face: ExactModule = self._face(module, ExactModule)
        return face

    def face(self, held: Any) -> Any:
        """What the script sees of something that the State holds."""
        if not self.is_on or self._engine is None:
            return held
        if isinstance(held, torch.optim.Optimizer):
            return self._face(held, lambda one: ExactOptimizer(one, self._made()))
        if isinstance(held, LRScheduler):
            return self._face(held, lambda one: ExactScheduler(one, self._made()))
        return held

    def check_optimizer_step(self) -> None:
        """Raises ConfigError where an optimizer steps by another way than `state`, or too early."""
        if not self.is_on or self._engine is None:
            return
        if self._engine.is_between:
            raise ConfigError(
                "an optimizer steps within a global batch of exact mode: call it as the State names it, "
                "state.optimizer.step(), which steps once a global batch"
            )
        self._engine.check_complete()

    def check_between(self, what: str) -> None:
        """Raises ConfigError within a global batch."""
        if self._engine is not None and self._engine.is_between:
            raise ConfigError(f"{what} within a global batch of exact mode: do so after a commit")

    def commits_now(self) -> bool:
        """Whether a commit is due here, once a global batch; random generators are then the same on every rank.

        Raises ConfigError where a scheduler was stepped by another way than `state`.
        """
        if not self.is_on or self._engine is None:
            return True
        if self._engine.is_between:
            if self._moves != self._schedules():
                raise ConfigError(
                    "a scheduler steps within a global batch of exact mode: call it as the State names it, such as "
                    "state.scheduler.step(), which steps once a global batch"
                )
            return False
        if self._engine.micro_batch is not None:
            seed_everything(self._engine.micro_batch.batch_seed)
        return True

    def export(self) -> dict[str, Any]:
        """What others must have alike."""
        if not self.is_on:
            return {}
        return {
            "virtual_ranks": self._live.virtual_ranks,
            "threads": self._threads,
            "signature": numerics.signature(self._device),
        }

    def adopt(self, theirs: dict[str, Any], *, is_peer: bool) -> None:
        """Compute as who made this state. Raises ConfigError, EnvironmentProblem where that cannot be."""
        if not self.is_on or not theirs:
            return
        if theirs["virtual_ranks"] != self._live.virtual_ranks:
            raise ConfigError(
                f"the state was trained with virtual_ranks={theirs['virtual_ranks']}, this script's loader has "
                f"{self._live.virtual_ranks}: go on with as many, or begin anew"
            )
        numerics.check_same(theirs["signature"], numerics.signature(self._device), is_peer=is_peer)
        self._threads = theirs["threads"]
        numerics.fix(self._threads)

    def _made(self) -> Engine:
        if self._engine is None:
            self._engine = Engine(
                list(self._modules.values()), self._live, keep=self._keep, put_back=self._put_back
            )
        return self._engine

    def _face(self, held: Any, make: Any) -> Any:
        face = self._faces.get(id(held))
        if face is None:
            face = self._faces[id(held)] = make(held)
        return face

    def _keep(self) -> None:
        self._kept = copy.deepcopy(self._values)
        self._kept_objects = {k: copy.deepcopy(held.state_dict()) for k, held in self._others()}
        self._kept_groups = {k: hyperparameters_of(held) for k, held in self._optimizers.items()}
        self._moves = self._schedules()

    def _put_back(self) -> None:
        self._values.update(copy.deepcopy(self._kept))
        for name, held in self._others():
            held.load_state_dict(copy.deepcopy(self._kept_objects[name]))
        for name, optimizer in self._optimizers.items():
            for group, kept in zip(optimizer.param_groups, self._kept_groups[name], strict=True):
                group.update(copy.deepcopy(kept))

    def _others(self) -> list[tuple[str, Any]]:
        """Objects that a loop may change once a micro-batch."""
        return [(k, held) for k, held in self._objects.items() if not isinstance(held, LRScheduler)]

    def _schedules(self) -> list[Any]:
        """How often each scheduler has stepped; a chained one counts with those that it is made of."""
        held = [held for held in self._objects.values() if isinstance(held, LRScheduler)]
        return [
            getattr(one, "last_epoch", None) for top in held for one in getattr(top, "_schedulers", [top])
        ]
