"""How far `Trainer.fit` is: what a commit holds of Lightning beside model, optimizers and schedulers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops.loop import _Loop

_NOT_IN_CHECKPOINTS = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")
"""By what else a ModelCheckpoint decides to write, which is a collective: newcomers have to decide as the others do."""


class FitProgress:
    """Progress of the loops, states of the callbacks and of the data module, for `stoker.State`.

    Sealed where a batch is done and what follows it (validation, the end of an epoch) is still to come.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.has_commits = False
        """Whether a step was ever committed; before, the fit begins at its beginning."""

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "has_commits": self.has_commits,
            "loops": _settled(trainer.fit_loop.state_dict()),
            "callbacks": {c.state_key: s for c in callbacks_of(trainer) if (s := _state_of(c))},
            "datamodule": _datamodule_of(trainer).state_dict() if _datamodule_of(trainer) is not None else {},
            "should_stop": trainer.should_stop,
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "metrics": dict(trainer._logger_connector._callback_metrics),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        self.has_commits = state["has_commits"]
        fit_loop = trainer.fit_loop
        fit_loop.load_state_dict(state["loops"])
        fit_loop._combined_loader_states_to_load = []  # loaders' positions belong to the commit by themselves
        for loop in loops_in(fit_loop):
            loop.on_iteration_done()  # Lightning's own way to go on is for its own checkpoints
        for callback in callbacks_of(trainer):
            if callback.state_key in state["callbacks"]:
                _put_back(callback, state["callbacks"][callback.state_key])
        datamodule = _datamodule_of(trainer)
        if datamodule is not None and state["datamodule"]:
            datamodule.load_state_dict(state["datamodule"])
        trainer.should_stop = state["should_stop"]
        trainer.accumulate_grad_batches = state[
            "accumulate_grad_batches"
        ]  # a callback may change it by epochs
        metrics = trainer._logger_connector._callback_metrics
        metrics.clear()
        metrics.update(state["metrics"])


def loops_in(loop: _Loop) -> Iterator[_Loop]:
    """This loop and all within it."""
    yield loop
    for inner in vars(loop).values():
        if isinstance(inner, _Loop):
            yield from loops_in(inner)


def callbacks_of(trainer: Trainer) -> list[Any]:
    """Lightning gives this attribute to a trainer without declaring it."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def _state_of(callback: Any) -> dict[str, Any]:
    state: dict[str, Any] = callback.state_dict()
    if isinstance(callback, ModelCheckpoint):
        held = vars(callback)
        state = {**state, **{name: held[name] for name in _NOT_IN_CHECKPOINTS if name in held}}
    return state


def _put_back(callback: Any, state: dict[str, Any]) -> None:
    callback.load_state_dict({k: v for k, v in state.items() if k not in _NOT_IN_CHECKPOINTS})
    callback.__dict__.update({k: v for k, v in state.items() if k in _NOT_IN_CHECKPOINTS})


def _datamodule_of(trainer: Trainer) -> Any:
    return trainer.datamodule  # type: ignore[attr-defined]


def _settled(loops: dict[str, Any]) -> dict[str, Any]:
    """As it is when the batch under way, which has been processed, is over. Lightning counts that last of all, after
    hooks in which a commit may come early."""
    progress = loops["epoch_loop.batch_progress"]
    for kind in ("total", "current"):
        progress[kind]["completed"] = progress[kind]["processed"]
    loops["state_dict"].pop("combined_loader", None)
    return loops
