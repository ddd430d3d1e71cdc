"""How far `Trainer.train` is: what a commit holds of it beside model, optimizer and scheduler."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from transformers import Trainer, TrainerState
from transformers.trainer_callback import ExportableState

_FIGURES = (
    "_total_loss_scalar",
    "_globalstep_last_logged",
    "_initial_global_step",
    "_initial_num_input_tokens_seen",
    "current_flos",
)
"""Of the trainer: what it logs next, and at its end."""


class TrainProgress:
    """TrainerState, what is to be done after the step (TrainerControl), callbacks that can be exported.

    Sealed where a step is done and what follows it (logs, evaluation, a checkpoint) is still to come.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.has_commits = False
        """Whether a step was ever committed; before, the training begins at its beginning."""
        self._held: dict[str, Any] = {}
        """What the state was put back to, as long as the trainer has not taken it over."""
        self._history = (0, "[]")

    def note_commit(self) -> None:
        """A step is about to be committed."""
        self.has_commits, self._held = True, {}

    def state_dict(self) -> dict[str, Any]:
        if not self.has_commits:
            return {"has_commits": False}
        if self._held:
            return self._held
        trainer = self._trainer
        plain = {f.name: getattr(trainer.state, f.name) for f in dataclasses.fields(TrainerState)}
        history = plain.pop("log_history")
        if len(history) != self._history[0]:
            self._history = (len(history), json.dumps(history))
        return {
            "has_commits": True,
            "trainer": json.dumps(plain),
            "history": self._history[1],
            "control": vars(trainer.control).copy(),
            "callbacks": [c.state()["attributes"] for c in _exportable(trainer)],
            "loss": trainer._tr_loss,
            "figures": {name: getattr(trainer, name) for name in _FIGURES},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.has_commits = state["has_commits"]
        self._held = state

    def put_back_state(self) -> None:
        """TrainerState and callbacks. Raises KeyError before anything was committed."""
        held, trainer = self._held, self._trainer
        trainer.state = TrainerState(**json.loads(held["trainer"]), log_history=json.loads(held["history"]))
        for callback, attributes in zip(_exportable(trainer), held["callbacks"], strict=True):
            for name, value in attributes.items():
                setattr(callback, name, value)

    def put_back_step(self) -> None:
        """What is to be done after the step, and what is to be logged."""
        trainer = self._trainer
        held, self._held = self._held, {}
        for name, flag in held["control"].items():
            setattr(trainer.control, name, flag)
        trainer._tr_loss = held["loss"].clone()
        for name, value in held["figures"].items():
            setattr(trainer, name, value)


def _exportable(trainer: Trainer) -> list[Any]:
    return [c for c in trainer.callback_handler.callbacks if isinstance(c, ExportableState)]
