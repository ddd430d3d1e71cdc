"""What commands do with the checkpoints of a place."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from stoker.errors import CheckpointDamaged, ConfigError, EnvironmentProblem
from stoker.train.checkpoints.reader import CheckpointReader
from stoker.train.checkpoints.storage import CheckpointStorage
from stoker.train.packing import unpack

PT, SAFETENSORS = "pt", "safetensors"


class Listed(NamedTuple):
    """A checkpoint, as it is listed."""

    commits: int
    name: str
    written_at: float
    """Seconds since 1970; 0: not known."""
    size_bytes: int
    world_size: int
    state: str
    """`whole`, `torn`, `damaged`."""
    problem: str
    reader: CheckpointReader | None


def listed(url: str) -> list[Listed]:
    """All that lie there, oldest first. Raises ConfigError, EnvironmentProblem."""
    found = []
    for held in CheckpointStorage(url).held():
        manifest = held.reader.manifest if held.reader is not None else None
        found.append(
            Listed(
                commits=held.commits,
                name=held.name,
                written_at=manifest.written_at if manifest is not None else 0.0,
                size_bytes=held.size_bytes,
                world_size=manifest.world_size if manifest is not None else 0,
                state="whole" if held.reader is not None else "torn" if held.is_torn else "damaged",
                problem=held.problem,
                reader=held.reader,
            )
        )
    return found


def verify(one: Listed, on_bytes: Callable[[int], None]) -> list[str]:
    """What is wrong with a checkpoint. Raises EnvironmentProblem where the storage cannot be reached."""
    if one.reader is not None:
        return one.reader.verify(on_bytes)
    return [one.problem]


def choose(found: list[Listed], commits: int | None, shown: str) -> Listed:
    """The one at that commit, or the newest whole one. Raises EnvironmentProblem."""
    fitting = [one for one in found if commits is None or one.commits == commits]
    whole = [one for one in fitting if one.state == "whole"]
    if whole:
        return whole[-1]
    if fitting:
        raise CheckpointDamaged(f"{fitting[-1].name} in {shown}: {fitting[-1].problem}")
    what = "no checkpoint" if commits is None else f"no checkpoint at commit {commits}"
    raise EnvironmentProblem(f"there is {what} in {shown}")


def read_part(one: Listed, only: str) -> Any:
    """The state, or what is at `modules.model` or the like in it. Raises CheckpointDamaged, ConfigError."""
    assert one.reader is not None
    plain, names = one.reader.read_plain()
    wanted = [name for name in names if not only or name == only or name.startswith(f"{only}.")]
    tensors = one.reader.read_tensors(wanted)
    nothing = torch.empty(0)
    state = unpack(plain, [tensors.get(name, nothing) for name in names])
    return _at(state, only) if only else state


def write_file(held: Any, path: Path, form: str) -> None:
    """One file, whole or not at all. Raises ConfigError, EnvironmentProblem."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if form == SAFETENSORS:
            _save_safetensors(held, part)
        else:
            torch.save(held, part)
        part.rename(path)
    except (OSError, RuntimeError) as error:
        why = error.__context__ if isinstance(error.__context__, OSError) else error
        raise EnvironmentProblem(f"cannot write {path}: {why}") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def _save_safetensors(held: Any, path: Path) -> None:
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise ConfigError("--format safetensors needs the package: pip install safetensors") from None
    flat = _flat(held, ())
    if not flat:
        raise ConfigError("there are no tensors to write")
    save_file({name: tensor.contiguous() for name, tensor in flat.items()}, path)


def _flat(held: Any, way: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """All tensors by the way to them; what else there is has no place in such a file."""
    if isinstance(held, torch.Tensor):
        return {".".join(way): held}
    found: dict[str, torch.Tensor] = {}
    items = (
        held.items() if isinstance(held, dict) else enumerate(held) if isinstance(held, (list, tuple)) else ()
    )
    for key, value in items:
        found |= _flat(value, (*way, str(key)))
    return found


def _at(state: Any, only: str) -> Any:
    """Keys may have dots in them. Raises ConfigError."""
    rest, held = only, state
    while rest:
        if not isinstance(held, dict):
            raise ConfigError(f"the checkpoint holds nothing at {only!r}")
        fitting = [key for key in held if rest == str(key) or rest.startswith(f"{key}.")]
        if not fitting:
            there = ", ".join(sorted(map(str, held))[:8])
            raise ConfigError(
                f"the checkpoint holds nothing at {only!r}; at that place there are {there or 'none'}"
            )
        key = max(fitting, key=lambda one: len(str(one)))
        rest, held = rest[len(str(key)) + 1 :], held[key]
    return held
