"""`stoker.init()` and the live context that it returns."""

from __future__ import annotations

import torch

from stoker.errors import ConfigError
from stoker.train.runtime import Runtime, runtime
from stoker.train.world_changes import WorldChanges

METRICS_MAX = 64


class Context:
    """This worker's place in the world. Live: it changes when the world does."""

    def __init__(self, owner: Runtime, changes: WorldChanges | None = None) -> None:
        self._owner = owner
        self._changes = changes

    @property
    def rank(self) -> int:
        return self._owner.session.rank

    @property
    def world_size(self) -> int:
        return self._owner.session.world_size

    @property
    def previous_world_size(self) -> int:
        """Of the world of the last commit, on whatever worker; 0 before the first commit, and in a context
        that is not that of a `state.on_world_change` rule."""
        return self._changes.committed_size if self._changes is not None else 0

    @property
    def generation(self) -> int:
        """Number of the current world; grows with every change."""
        return self._owner.session.generation

    @property
    def local_rank(self) -> int:
        """Which of its node's workers this is."""
        member = self._owner.worlds.member
        return member.local_rank if member is not None else self._owner.settings.local_rank

    @property
    def device(self) -> torch.device:
        """This worker's device, of the kind that `--accelerator` names; `auto`: of the accelerator that PyTorch sees,
        else the CPU. Worker i of a node has its device i. Does not change during a run."""
        return self._owner.device

    @property
    def is_elastic(self) -> bool:
        """Whether an agent started this worker; False when the script runs alone."""
        return self._owner.channel is not None

    def report(self, **metrics: float) -> None:
        """Tell the job figures of this script, such as `ctx.report(loss=loss.item(), lr=lr)`.

        They are shown by `stoker job status`, the newest of each name and worker. Costs no message of its own. Raises
        ConfigError for what is not a number, or too many of them.
        """
        for name, value in metrics.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ConfigError(
                    f"ctx.report({name}=…) takes a number, not {type(value).__name__}; of a tensor give .item()"
                )
        known = self._owner.core.metrics
        if len({*known, *metrics}) > METRICS_MAX:
            raise ConfigError(f"ctx.report takes at most {METRICS_MAX} names")
        self._owner.report({name: float(value) for name, value in metrics.items()})

    def __repr__(self) -> str:
        return (
            f"Context(rank={self.rank}, world_size={self.world_size}, generation={self.generation}, "
            f"device={self.device})"
        )


def init() -> Context:
    """Connect this process to its agent, or set up a world of one where there is none. May be called again.

    Raises ConfigError when the agent that the environment names does not answer.
    """
    owner = runtime()
    owner.connect()
    return Context(owner)
