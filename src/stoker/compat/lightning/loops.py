"""Lightning's loops of training, which go on at the last commit in each new world."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from lightning.pytorch import Trainer
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

from stoker.compat.lightning.progress import FitProgress, loops_in
from stoker.data.loader import Loader
from stoker.errors import ConfigError

_FLAGS = ("_restarting", "_loaded_from_state_dict", "_resuming_from_checkpoint", "_restart_stage")
"""How a loop knows that it goes on from a checkpoint of Lightning's."""


class Worlds(Protocol):
    """What the loops need of the strategy."""

    def run_elastic(self, attempt: Callable[[], None]) -> None:
        """Call `attempt` in each world, until one call comes to its end in all ranks."""
        ...

    def commit(self) -> None: ...


class ElasticEpochLoop(_TrainingEpochLoop):
    """Commits each step once its batch is done, before what may follow it: validation, the end of the epoch."""

    _worlds: Worlds

    def advance(self, data_fetcher: Any) -> None:
        before = self.batch_progress.total.ready
        super().advance(data_fetcher)
        if self.batch_progress.total.ready != before and not self._should_accumulate():
            self._worlds.commit()

    def _broadcast_sigterm_tensor(self) -> None:
        """Nothing: a rank that is told to end ends alone."""

    def go_on(self, data_fetcher: Any) -> None:
        """The rest of the epoch, from the last commit on: first what was to follow that batch."""
        data_fetcher.fetched += self.batch_progress.current.ready
        data_fetcher.done = data_fetcher.length is not None and data_fetcher.fetched >= data_fetcher.length
        data_fetcher._start_profiler = self._on_before_fetch
        data_fetcher._stop_profiler = self._on_after_fetch
        self.on_advance_end(data_fetcher)
        self.on_iteration_done()
        while not self.done:
            try:
                self.advance(data_fetcher)
                self.on_advance_end(data_fetcher)
            except StopIteration:
                break
            finally:
                self.on_iteration_done()


class ElasticFitLoop(_FitLoop):
    """Enters world after world. What Lightning does around the epochs, it does once."""

    epoch_loop: ElasticEpochLoop
    _worlds: Worlds
    _progress: FitProgress

    def run(self) -> None:
        self.setup_data()
        if self.skip:
            return
        self._check_loader()
        self._set_up_validation()
        self.reset()
        self.on_run_start()
        flags = [(loop, {k: v for k, v in vars(loop).items() if k in _FLAGS}) for loop in loops_in(self)]
        module = self.trainer.lightning_module
        forward = vars(module).get("forward")
        attempts = 0

        def attempt() -> None:
            nonlocal attempts
            attempts += 1
            module.__dict__.pop(
                "forward", None
            )  # a step that broke may have left Lightning's redirection there
            if forward is not None:
                module.__dict__["forward"] = forward
            if attempts > 1 or self._progress.has_commits:
                self._forget_broken_step()
            if self._progress.has_commits:
                self._go_on()
            else:
                for loop, kept in flags:
                    loop.__dict__.update(kept)
            self._epochs()

        self._worlds.run_elastic(attempt)
        self._restarting = False
        self.on_run_end()

    def _go_on(self) -> None:
        self.epoch_loop.go_on(self._data_fetcher)
        self.on_advance_end()
        self.on_iteration_done()

    def _epochs(self) -> None:
        while not self.done:
            try:
                self.on_advance_start()
                self.advance()
                self.on_advance_end()
            except StopIteration:
                break
            finally:
                self.on_iteration_done()

    def _forget_broken_step(self) -> None:
        """What an exception leaves behind in Lightning, and what the ranks would not have alike: newcomers know no
        values that were logged for the mean of the epoch."""
        trainer = self.trainer
        trainer.training = True
        trainer.lightning_module._current_fx_name = None
        self.epoch_loop.val_loop._results.reset()
        trainer._logger_connector.reset_results()
        assert self._data_fetcher is not None
        iter(self._data_fetcher)

    def _set_up_validation(self) -> None:
        """Now, on every rank: later it would be a collective that only newcomers come to."""
        trainer = self.trainer
        if trainer.enable_validation:
            trainer.validating = True
            self.epoch_loop.val_loop.setup_data()
            trainer.training = True

    def _check_loader(self) -> None:
        assert self._combined_loader is not None
        loaders = self._combined_loader.flattened
        if len(loaders) != 1 or not isinstance(loaders[0], Loader):
            names = ", ".join(type(loader).__name__ for loader in loaders)
            raise ConfigError(
                f"ElasticStrategy trains on one stoker.Loader, whose position belongs to each step, not on {names}: "
                "trainer.fit(model, stoker.Loader(dataset, global_batch_size=…))"
            )
        if loaders[0].virtual_ranks:
            raise ConfigError(
                "ElasticStrategy has no exact mode: Lightning steps optimizers itself, once a batch, and not once a "
                "global batch of virtual ranks. Leave virtual_ranks out, or use @stoker.elastic itself"
            )


def make_elastic(trainer: Trainer, worlds: Worlds, progress: FitProgress) -> None:
    """Give a trainer these loops in place of its own, as they stand."""
    old = trainer.fit_loop
    epoch_loop = ElasticEpochLoop.__new__(ElasticEpochLoop)
    epoch_loop.__dict__.update(vars(old.epoch_loop), _worlds=worlds)
    fit_loop = ElasticFitLoop.__new__(ElasticFitLoop)
    fit_loop.__dict__.update(vars(old), epoch_loop=epoch_loop, _worlds=worlds, _progress=progress)
    trainer.fit_loop = fit_loop
