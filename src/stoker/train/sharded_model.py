"""`stoker.Sharded`: a model and its optimizer that are divided over the workers, made anew in each world."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stoker.data.session import Session
from stoker.errors import ConfigError
from stoker.train.checkpoints.image import Image, image_of
from stoker.train.dtensors import Target, is_dtensor
from stoker.train.packing import pack, unpack
from stoker.train.runtime import runtime
from stoker.train.sharded_wire import Part

Build = Callable[[], tuple[torch.nn.Module, torch.optim.Optimizer]]


class Sharded:
    """A model that no worker has the whole of, such as FSDP2 makes it, and its optimizer.

        def build():
            model = Net()
            fully_shard(model)
            return model, torch.optim.AdamW(model.parameters())

        state = stoker.State(net=stoker.Sharded(build), epoch=0)

    `build()` is called in each world, with the world's group in place, and what it returns is filled with the state
    of the last commit. At each commit every worker keeps a copy of its pieces in host memory and gives one to a worker
    of another node, so that any one node may be lost; on a single node to the next worker, so that any one may be lost.

    `seed`: of torch's generator while `build` runs, so that all workers draw the same weights.

    Raises ConfigError for a `build` that cannot be called.
    """

    def __init__(self, build: Build, *, seed: int = 0) -> None:
        if not callable(build):
            raise ConfigError(
                f"stoker.Sharded takes a function that makes the model and its optimizer, not a {type(build).__name__}"
            )
        self._build = build
        self._seed = seed
        self._made: tuple[torch.nn.Module, torch.optim.Optimizer] | None = None
        self._rehearses_on: torch.device | None = None
        owner = runtime()
        self._live: Session = owner.session
        owner.steps.sharded.add(self)

    @property
    def model(self) -> torch.nn.Module:
        """Of this world. Raises ConfigError where there is none yet."""
        return self._pair()[0]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Of this world. Raises ConfigError where there is none yet."""
        return self._pair()[1]

    @property
    def weight(self) -> float:
        """What the loss, a mean over this rank's share of the batch, is to be multiplied by.

        Gradients are means over the ranks, whose shares of a batch differ: so they become the mean over the batch.
        """
        share = self._live.share
        if share is None or share.batch_records == 0:
            return 1.0
        return share.records * self._live.world_size / share.batch_records

    def state_dict(self) -> dict[str, Any]:
        """Nothing: pieces go ways of their own."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Does nothing."""

    # -- for the runtime ----------------------------------------------------------------------------------

    def make(self, device: torch.device) -> None:
        """Have the script make both, in the group of a world. Raises ConfigError."""
        if self._live.virtual_ranks > 0:
            raise ConfigError(
                "exact mode (virtual_ranks) is not for a stoker.Sharded: leave virtual_ranks out"
            )
        devices = [] if device.type == "cpu" else [device]
        with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
            torch.manual_seed(self._seed)
            made = self._build()
        if not (
            isinstance(made, tuple)
            and len(made) == 2
            and isinstance(made[0], torch.nn.Module)
            and isinstance(made[1], torch.optim.Optimizer)
        ):
            raise ConfigError(
                "the function of a stoker.Sharded returns a model and its optimizer, as a tuple"
            )
        self._made = made

    def rehearse(self, device: torch.device) -> None:
        """Until `forget`, have the script make both if it asks for them, in a group of one. Nothing is filled in."""
        self._rehearses_on = device

    def forget(self) -> None:
        """The group that they belong to goes away."""
        self._made = self._rehearses_on = None

    def drop_gradients(self) -> None:
        """Of a step that is undone."""
        for parameter in self.model.parameters():
            parameter.grad = None

    @property
    def is_made(self) -> bool:
        return self._made is not None

    def whole_tensors(self) -> list[torch.Tensor]:
        """What is not divided: every rank has one of its own."""
        return [tensor for tensor in self.tensors() if not is_dtensor(tensor)]

    def image(self, commits: int) -> Image:
        """The pieces that are here."""
        return image_of(commits, self._state())

    def tensors(self) -> list[torch.Tensor]:
        """Of all that `image` has pieces of, in its order, as they are divided."""
        tensors: list[torch.Tensor] = []
        pack(self._state(), tensors)
        return tensors

    def targets(self, plain: Any, parts: list[Part], device: torch.device) -> list[Target]:
        """For each tensor of a state, what is to be filled with it here."""
        model, optimizer = self._pair()
        models: dict[int, torch.Tensor] = {}
        numbers = unpack(plain, list(range(len(parts))))  # type: ignore[arg-type]
        own = model.state_dict()
        models.update({number: own[name] for name, number in numbers["model"].items() if name in own})
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for index, slots in numbers["optimizer"]["state"].items():
            for slot in slots.values():
                if type(slot) is int:
                    models[slot] = parameters[index]
        return [
            Target.like(part.whole.shape, part.whole.dtype, models.get(number), torch.device("cpu"))
            for number, part in enumerate(parts)
        ]

    def load(self, plain: Any, targets: list[Target]) -> None:
        """Take over what has been filled. Raises ConfigError where it is another model's."""
        model, optimizer = self._pair()
        state = unpack(plain, [target.tensor for target in targets])
        try:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                f"the state of the last commit does not fit what build() has made: does it make another model in "
                f"another world? {error}"
            ) from error

    def _state(self) -> dict[str, Any]:
        model, optimizer = self._pair()
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def _pair(self) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        if self._made is None and self._rehearses_on is not None:
            self.make(self._rehearses_on)
        if self._made is None:
            raise ConfigError(
                "a stoker.Sharded has its model and optimizer inside the @stoker.elastic function, where there is a "
                "world to divide them over: use state.NAME.model there, not before"
            )
        return self._made
