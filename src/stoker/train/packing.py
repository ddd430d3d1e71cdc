"""Turn nested state into plain values and a flat list of tensors, and back. Nothing is pickled."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from stoker.errors import ConfigError, WireError

_PLAIN = (bool, int, float, str, bytes, type(None))


def pack(value: Any, tensors: list[torch.Tensor], where: str = "state") -> Any:
    """Replace tensors by their number in `tensors`. Raises ConfigError, naming `where`, for other objects."""
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach())
        return {"t": len(tensors) - 1}
    if type(value) in _PLAIN:
        return value
    if isinstance(value, dict):
        pairs = [[pack(k, tensors, where), pack(v, tensors, f"{where}[{k!r}]")] for k, v in value.items()]
        return {"d": pairs}
    if isinstance(value, (list, tuple)):
        items = [pack(v, tensors, f"{where}[{i}]") for i, v in enumerate(value)]
        return items if isinstance(value, list) else {"u": items}
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return value.item()
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
        if kind == "t":
            return tensors[inner]
        if kind == "u":
            return tuple(unpack(v, tensors) for v in inner)
        if kind == "d":
            return {unpack(k, tensors): unpack(v, tensors) for k, v in inner}
    except (ValueError, IndexError, TypeError) as error:
        raise WireError(f"broken state header: {error}") from None
    raise WireError(f"broken state header: unknown kind {kind!r}")


def encode_header(plain: Any, tensors: list[torch.Tensor]) -> bytes:
    """The plain part with each tensor's dtype and shape."""
    shapes = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]
    return msgspec.msgpack.encode([plain, shapes])


def decode_header(raw: bytes) -> tuple[Any, list[tuple[torch.dtype, tuple[int, ...]]]]:
    """The plain part and each tensor's dtype and shape. Raises WireError."""
    try:
        plain, shapes = msgspec.msgpack.decode(raw)
        described = [(getattr(torch, name), tuple(int(n) for n in shape)) for name, shape in shapes]
    except (msgspec.MsgspecError, ValueError, TypeError, AttributeError) as error:
        raise WireError(f"broken state header: {error}") from None
    if not all(isinstance(dtype, torch.dtype) for dtype, _ in described):
        raise WireError("broken state header: not a tensor type")
    return plain, described
