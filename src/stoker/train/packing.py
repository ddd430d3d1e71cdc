"""Turn nested state into plain values and a flat list of tensors, and back. Nothing is pickled."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from stoker.errors import ConfigError, WireError
from stoker.train.dtensors import is_dtensor

_PLAIN = (bool, int, float, str, bytes, type(None))
_INT_BITS = 63
"""Of a number that msgpack holds; larger ones, such as the states of NumPy's generators, go as text."""


class Described(NamedTuple):
    """A tensor that is to come."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    kind: str
    """Of the device that it belongs on, as torch names it: `cpu`, `cuda`, …"""


def pack(value: Any, tensors: list[torch.Tensor], where: str = "state") -> Any:
    """Replace tensors by their number in `tensors`. Raises ConfigError, naming `where`, for other objects."""
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_quantized:
            kind = "quantized" if value.is_quantized else str(value.layout).removeprefix("torch.")
            raise ConfigError(f"{where} is a {kind} tensor: State copies dense tensors, keep it as one")
        tensors.append(value.detach().resolve_conj().resolve_neg())
        return {"t": len(tensors) - 1}
    if type(value) is int and value.bit_length() > _INT_BITS:
        return {"i": hex(value)}
    if type(value) in _PLAIN:
        return value
    if isinstance(value, dict):
        pairs = [[pack(k, tensors, where), pack(v, tensors, f"{where}[{k!r}]")] for k, v in value.items()]
        return {"d": pairs}
    if isinstance(value, (list, tuple)):
        items = [pack(v, tensors, f"{where}[{i}]") for i, v in enumerate(value)]
        return items if isinstance(value, list) else {"u": items}
    if hasattr(value, "item") and getattr(value, "shape", None) == () and type(value.item()) in _PLAIN:
        return pack(value.item(), tensors, where)
    raise ConfigError(
        f"{where} is a {type(value).__name__}: State holds modules, optimizers, objects with state_dict(), tensors "
        "and plain values (numbers, strings, lists, tuples, dicts)"
    )


def unpack(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The inverse of `pack`. Raises WireError."""
    if isinstance(value, list):
        return [unpack(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    try:
        ((kind, inner),) = value.items()
        if kind == "i":
            return int(inner, 16)
        if kind == "t":
            return tensors[inner]
        if kind == "u":
            return tuple(unpack(v, tensors) for v in inner)
        if kind == "d":
            return {unpack(k, tensors): unpack(v, tensors) for k, v in inner}
    except (ValueError, IndexError, TypeError) as error:
        raise WireError(f"broken state header: {error}") from None
    raise WireError(f"broken state header: unknown kind {kind!r}")


def normalised(value: Any, where: str = "state") -> Any:
    """What a copy of `value` is, of its own tensors: NumPy's scalars become numbers, named tuples tuples, and so on.

    Raises ConfigError, naming `where`, for what cannot be copied.
    """
    tensors: list[torch.Tensor] = []
    return unpack(pack(value, tensors, where), tensors)


def copied(value: Any) -> Any:
    """A deep copy; of tensors that hang in a graph, which torch copies for nobody, what they are."""
    return copy.deepcopy(value, {id(t): t.detach().clone() for t in _tensors_in(value) if not t.is_leaf})


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for held in value.values():
            yield from _tensors_in(held)
    elif isinstance(value, (list, tuple)):
        for held in value:
            yield from _tensors_in(held)


def placed_as(value: Any, like: Any) -> Any:
    """`value` as what is at the same place in `like`: tensors on its device, named tuples and kinds of dict (Counter,
    defaultdict, …) of its type. Where there is nothing, as it is."""
    if isinstance(value, torch.Tensor):
        return value.to(like.device) if isinstance(like, torch.Tensor) else value
    if isinstance(value, dict) and isinstance(like, dict):
        placed = {key: placed_as(held, dict.get(like, key)) for key, held in value.items()}
        if type(like) is dict:
            return placed
        other = copy.copy(like)
        other.clear()
        other.update(placed)
        return other
    if isinstance(value, (list, tuple)) and isinstance(like, (list, tuple)):
        items = [placed_as(v, like[i] if i < len(like) else None) for i, v in enumerate(value)]
        is_named = isinstance(value, tuple) and len(items) == len(getattr(like, "_fields", ()))
        return type(like)(*items) if is_named else type(value)(items)
    return value


def encode_header(plain: Any, tensors: Sequence[torch.Tensor], kinds: Sequence[str] = ()) -> bytes:
    """The plain part with each tensor's dtype, shape and kind of device: its own, or as `kinds` says.

    Raises ConfigError for tensors that are divided over ranks: nobody has them whole.
    """
    if any(is_dtensor(tensor) for tensor in tensors):
        raise ConfigError(
            "the State holds a model or optimizer that is divided over the workers (FSDP, DTensor), of which no "
            "worker has a copy to give: hold it in a stoker.Sharded (docs/how-to/sharded-models.md)"
        )
    described = [
        [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), kind]
        for tensor, kind in zip(tensors, kinds or [t.device.type for t in tensors], strict=True)
    ]
    return msgspec.msgpack.encode([plain, described])


def decode_header(raw: bytes) -> tuple[Any, list[Described]]:
    """The plain part and what each tensor is. Raises WireError."""
    try:
        plain, described = msgspec.msgpack.decode(raw)
        tensors = [
            Described(getattr(torch, name), tuple(int(n) for n in shape), kind)
            for name, shape, kind in described
        ]
    except (msgspec.MsgspecError, ValueError, TypeError, AttributeError) as error:
        raise WireError(f"broken state header: {error}") from None
    if not all(isinstance(one.dtype, torch.dtype) and isinstance(one.kind, str) for one in tensors):
        raise WireError("broken state header: not a tensor type")
    return plain, tensors
