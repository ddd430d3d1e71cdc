"""`hvd.DistributedOptimizer`: an optimizer that steps with the gradients of all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch

from stoker.compat.horovod.basics import horovod_world
from stoker.compat.horovod.compression import Compression
from stoker.compat.horovod.reducer import How, Reducer
from stoker.compat.horovod.reductions import Average, Compressor, Op, Sum, check_op
from stoker.errors import ConfigError


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: Op = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = None,
) -> torch.optim.Optimizer:
    """Have this optimizer step with gradients that are reduced over all ranks.

    It is the same object, so that its state and whatever refers to it stay as they are. Gradients travel in buckets by
    themselves: `num_groups` and `groups` have no effect. Raises ConfigError for what cannot be.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError("LBFGS chooses its steps by each rank's own loss: ranks would not stay together")
    if isinstance(optimizer, _Distributed):
        raise ConfigError("this optimizer is an hvd.DistributedOptimizer already")
    chosen = check_op(op)
    if chosen not in (Average, Sum):
        raise ConfigError(f"DistributedOptimizer(op={op}): give hvd.Average or hvd.Sum")
    if gradient_predivide_factor != 1.0 and chosen != Average:
        raise ConfigError("gradient_predivide_factor is for op=hvd.Average")
    if gradient_predivide_factor <= 0.0:
        raise ConfigError(f"gradient_predivide_factor={gradient_predivide_factor} must be above 0")
    if backward_passes_per_step < 1:
        raise ConfigError(f"backward_passes_per_step={backward_passes_per_step} must be at least 1")
    how = How(compression, chosen, gradient_predivide_factor, sparse_as_dense, process_set)
    named = _named(optimizer, named_parameters)
    world = horovod_world()
    _ = world.place  # initialized, or it says so
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (_Distributed, kind), {})
    distributed = cast(_Distributed, optimizer)
    distributed._reducer = Reducer(world, named, backward_passes_per_step, how)
    distributed._is_synchronized, distributed._skips = False, False
    optimizer.register_step_pre_hook(_before_step)
    optimizer.register_step_post_hook(_after_step)
    return optimizer


class _Distributed(torch.optim.Optimizer):
    """What is added to an optimizer's class. Its step comes through hooks: schedulers replace the method."""

    _reducer: Reducer
    _is_synchronized: bool
    _skips: bool

    def synchronize(self) -> None:
        """Wait for the reduced gradients, to look at or clip them before `step`."""
        self._reducer.synchronize()
        self._is_synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A step within does not reduce gradients: `synchronize` was called before."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From the next step on. Raises ConfigError below 1."""
        if passes < 1:
            raise ConfigError(f"backward_passes_per_step={passes} must be at least 1")
        self._reducer.passes = passes
        self._reducer.forget()

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Raises ConfigError while gradients are being reduced."""
        if self._reducer.is_under_way:
            raise ConfigError(
                "optimizer.zero_grad() came after loss.backward() and before optimizer.step() or "
                "optimizer.synchronize(): the gradients are being reduced"
            )
        super().zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Its gradients are reduced as well."""
        super().add_param_group(param_group)
        self._reducer.rebuild(_named(self, None))


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Gradients are reduced before a step, or where a closure makes them, in it."""
    one = cast(_Distributed, optimizer)
    if one._skips:
        return None
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        if not one._is_synchronized or one._reducer.has_new:
            one.synchronize()
        return None

    def reducing() -> Any:
        loss = closure()
        if not one._is_synchronized or one._reducer.has_new:
            one.synchronize()
        return loss

    return (args[0], reducing, *args[2:]), {k: value for k, value in kwargs.items() if k != "closure"}


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    cast(_Distributed, optimizer)._is_synchronized = False


def _named(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> list[tuple[str, torch.nn.Parameter]]:
    """The optimizer's parameters with their names. Raises ConfigError where names do not fit."""
    own = [p for group in optimizer.param_groups for p in group["params"]]
    if named is None:
        return [(f"parameter.{number}", parameter) for number, parameter in enumerate(own)]
    pairs = list(named)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise ConfigError("named_parameters takes pairs of name and parameter: give model.named_parameters()")
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"named_parameters has names more than once: {', '.join(twice)}")
    name_of = {parameter: name for name, parameter in pairs}
    unnamed = sum(parameter not in name_of for parameter in own)
    if unnamed:
        raise ConfigError(
            f"named_parameters does not name {unnamed} of the optimizer's {len(own)} parameters: give those of all "
            "models that it steps"
        )
    return [(name_of[parameter], parameter) for parameter in own]
