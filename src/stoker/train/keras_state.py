"""Models, optimizers and metrics of Keras 3, on its torch backend, as a State holds them.

Keras is not imported here: who gives a State an object of Keras' has done that. By reading Keras 3.15: every variable
of a model, also one that no optimizer changes, is an `nn.Parameter` of it, and named several times in `state_dict()`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from stoker.data.session import Session
from stoker.errors import ConfigError

_PLAIN = (bool, int, float, str, type(None))
_NOT_SETTINGS = ("name", "built")
_IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"


def adapted(items: Mapping[str, Any]) -> dict[str, Any]:
    """`items` with adapters in place of optimizers and metrics of Keras', and its models made ready.

    Raises ConfigError for another backend than torch, and for what is not built.
    """
    keras = _keras()
    if keras is None:
        return dict(items)
    models = {name: layers for name, item in items.items() if (layers := _layers_in(item, keras))}
    for name, layers in models.items():
        _make_ready(name, items[name], layers)
    found = dict(items)
    for name, item in items.items():
        if isinstance(item, (keras.Model, keras.layers.Layer, keras.optimizers.Optimizer, keras.Metric)):
            _check_backend(name, item, keras)
        if isinstance(item, keras.optimizers.Optimizer):
            _build(name, item, [one for layers in models.values() for one in layers])
            found[name] = KerasOptimizer(item)
        elif isinstance(item, keras.Metric):
            found[name] = KerasVariables(item)
    return found


class KerasVariables:
    """A metric of Keras', or whatever else has `variables` that are all of its state."""

    def __init__(self, given: Any) -> None:
        self.given = given

    def state_dict(self) -> dict[str, Any]:
        return {"variables": _values(self.given.variables)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError where it is another's."""
        _assign(self.given.variables, state["variables"])


class KerasOptimizer(KerasVariables):
    """An optimizer of Keras', as far as a State looks at those of torch."""

    def register_step_pre_hook(self, hook: Callable[..., None]) -> None:
        """Call `hook` before `apply`, to which `apply_gradients` and `fit` come as well."""
        apply = self.given.apply

        def hooked(*arguments: Any, **named: Any) -> Any:
            hook(self, arguments, named)
            return apply(*arguments, **named)

        self.given.apply = hooked

    @property
    def param_groups(self) -> list[Any]:
        """What a script may set between steps: one for the optimizer, and one for that which it scales the loss for."""
        inner = getattr(self.given, "inner_optimizer", None)
        return [_Settings(one) for one in (self.given, inner) if one is not None]

    def state_dict(self) -> dict[str, Any]:
        settings = [{k: v for k, v in group.items() if type(v) in _PLAIN} for group in self.param_groups]
        return {**super().state_dict(), "settings": settings}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError where it is another's."""
        super().load_state_dict(state)
        for group, settings in zip(self.param_groups, state["settings"], strict=True):
            group.update(settings)


class _Settings(MutableMapping[str, Any]):
    """An optimizer's plain attributes and its learning rate. Its other variables are changed by steps alone."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def _names(self) -> list[str]:
        names = [
            k
            for k, v in vars(self._optimizer).items()
            if type(v) in _PLAIN and not k.startswith("_") and k not in _NOT_SETTINGS
        ]
        return [*names, "learning_rate"] if self._rate is not None else names

    @property
    def _rate(self) -> Any:
        """The variable; None for a schedule, which is a function of the steps done."""
        rate = vars(self._optimizer).get("_learning_rate")
        return rate if hasattr(rate, "assign") else None

    def __getitem__(self, name: str) -> Any:
        return self._rate.value.detach().clone() if name == "learning_rate" else vars(self._optimizer)[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name == "learning_rate":
            _assign([self._rate], {name: value})
        else:
            setattr(self._optimizer, name, value)

    def __delitem__(self, name: str) -> None:
        raise TypeError(f"{name} cannot be taken from an optimizer of Keras'")

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())


# -- models -----------------------------------------------------------------------------------------------------


def is_keras_module(module: torch.nn.Module) -> bool:
    """Whether it is a model or layer of Keras'."""
    keras = _keras()
    return keras is not None and isinstance(module, keras.layers.Layer)


def weights_of(module: torch.nn.Module) -> list[torch.Tensor]:
    """Parameters that only an optimizer changes."""
    if not is_keras_module(module):
        return list(module.parameters())
    return [variable.value for variable in _of_keras(module).trainable_variables]


def export_keras(module: torch.nn.Module) -> dict[str, Any]:
    """Its variables, each once, and the buffers of torch modules in it."""
    return {"variables": _values(_of_keras(module).variables), "buffers": _torch_buffers(module)}


def load_keras(module: torch.nn.Module, state: dict[str, Any]) -> None:
    """Take them over. Variables are told by their order, for names change with what else a process has made.

    Of a random seed only what has been used of it is taken over: each rank keeps a seed of its own, if it has one.
    Raises ValueError where they are another model's.
    """
    layer = _of_keras(module)
    seeds = [variable.value.detach().clone() for variable in _seeds(layer)]
    _assign(layer.variables, state["variables"])
    with torch.no_grad():
        for variable, seed in zip(_seeds(layer), seeds, strict=True):
            variable.value[0] = seed[0]
        buffers = _torch_buffers(module)
        if buffers.keys() != state["buffers"].keys():
            raise ValueError(f"it has buffers {sorted(state['buffers'])}, the model has {sorted(buffers)}")
        for name, buffer in buffers.items():
            buffer.copy_(state["buffers"][name])


def refuse_keras_step(optimizer: Any, live: Session, *, uses_ddp: bool) -> None:
    """Raises ConfigError where an optimizer of Keras' would step by gradients of this rank alone, or in exact mode."""
    if not isinstance(optimizer, KerasOptimizer):
        return
    if live.virtual_ranks > 0:
        raise ConfigError(
            "exact mode (virtual_ranks) takes optimizers of torch only: train a Keras model with one of these, on "
            "model.parameters(), or leave virtual_ranks out"
        )
    if live.world_size > 1 and not uses_ddp:
        raise ConfigError(
            "a Keras optimizer is about to apply gradients of this worker alone: the model was called itself, not by "
            "state.ddp. `fit` and `train_on_batch` do that: give the model a train_step of its own that calls "
            "state.ddp(x), or write the loop (docs/how-to/keras.md)"
        )


def _make_ready(name: str, top: torch.nn.Module, layers: list[Any]) -> None:
    """Have what changes without an optimizer be buffers for torch: undone with a step, and the same on all ranks.

    Such as moving statistics. Seeds are undone, too, but are a rank's own. Raises ConfigError for what is not built.
    """
    places = {module: f"{place}." if place else "" for place, module in top.named_modules()}
    own = list(getattr(top, _IGNORED_BY_DDP, []))
    for layer in layers:
        _check_built(name, layer)
        if not {id(v.value) for v in layer.trainable_variables} <= {id(p) for p in layer.parameters()}:
            layer._track_variables()
        seeds = {id(variable.value) for variable in _seeds(layer)}
        known = {id(buffer) for buffer in top.buffers()}
        changing = [*_changing(layer), *_torch_buffers(layer).values()]
        for number, tensor in enumerate(changing):
            if id(tensor) in known:
                continue
            buffer = f"stoker_variable_{number}"
            layer.register_buffer(buffer, tensor.detach(), persistent=False)
            if id(tensor) in seeds:
                own.append(places[layer] + buffer)
    setattr(top, _IGNORED_BY_DDP, own)


def _check_built(name: str, layer: Any) -> None:
    """Raises ConfigError. `build` of a model says of itself that it is built when its layers are not."""
    unbuilt = [one.name for one in layer._flatten_layers() if not one.built]
    if unbuilt:
        raise ConfigError(
            f"{name} is not built ({', '.join(unbuilt)}), so there are no variables yet that could be kept: call it on "
            "a batch before the State is made, and leave out layers that it does not use"
        )


def _changing(layer: Any) -> list[torch.Tensor]:
    """Of variables that change without an optimizer. Frozen weights do not: they would be copied for nothing."""
    weights = {id(variable) for one in layer._flatten_layers() for variable in one._trainable_variables}
    return [variable.value for variable in layer.variables if id(variable) not in weights]


def _seeds(layer: Any) -> list[Any]:
    weights = {id(variable) for variable in layer.weights}
    return [variable for variable in layer.variables if id(variable) not in weights]


def _layers_in(item: Any, keras: Any) -> list[Any]:
    """The outermost of Keras' layers in a module."""
    if not isinstance(item, torch.nn.Module):
        return []
    if isinstance(item, keras.layers.Layer):
        return [item]
    return [one for child in item.children() for one in _layers_in(child, keras)]


def _torch_buffers(layer: Any) -> dict[str, torch.Tensor]:
    """Of torch modules in it, those that belong to `state_dict()`. Layers in lists are hidden from torch."""
    modules = {
        module: None
        for one in layer._flatten_layers()
        for module in one.modules()
        if not is_keras_module(module)
    }
    return {
        f"{number}.{name}": buffer
        for number, module in enumerate(modules)
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


# -- helpers ----------------------------------------------------------------------------------------------------


def _keras() -> Any:
    keras = sys.modules.get("keras")
    return keras if keras is not None and hasattr(keras, "Model") else None


def _of_keras(module: torch.nn.Module) -> Any:
    return module


def _check_backend(name: str, item: Any, keras: Any) -> None:
    if keras.config.backend() != "torch":
        raise ConfigError(
            f"{name} is a {type(item).__name__} of Keras on {keras.config.backend()}: Stoker trains Keras models on "
            "its torch backend, set KERAS_BACKEND=torch in the environment before keras is imported"
        )


def _build(name: str, optimizer: Any, models: list[Any]) -> None:
    """Have the optimizer make its variables, as it would in its first step. Raises ConfigError."""
    if optimizer.built:
        return
    if len(models) != 1:
        raise ConfigError(
            f"{name} is not built, and which variables it is for is not plain: call "
            f"{name}.build(model.trainable_variables) before the State is made"
        )
    optimizer.build(models[0].trainable_variables)


def _values(variables: Iterable[Any]) -> dict[str, torch.Tensor]:
    """By their paths, a number being added where two are alike."""
    values: dict[str, torch.Tensor] = {}
    for number, variable in enumerate(variables):
        name = variable.path if variable.path not in values else f"{variable.path}~{number}"
        values[name] = variable.value.detach()
    return values


def _assign(variables: Iterable[Any], values: Mapping[str, torch.Tensor]) -> None:
    variables = list(variables)
    mine = [tuple(variable.value.shape) for variable in variables]
    others = [tuple(value.shape) for value in values.values()]
    if mine != others:
        raise ValueError(f"it has variables of {others}, here they are of {mine}")
    with torch.no_grad():
        for variable, value in zip(variables, values.values(), strict=True):
            variable.value.copy_(value)
