"""What loaders and the training runtime know of each other within one process."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from stoker.data.order import Share
from stoker.errors import ConfigError


class Positioned(Protocol):
    """Something whose position belongs to each commit: a loader."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class MicroBatch(NamedTuple):
    """The part of a global batch that one virtual rank reads."""

    number: int
    """Of the virtual rank."""
    virtual_ranks: int
    seed: int
    """For random generators: of this part alone, whoever reads it."""
    batch_seed: int
    """The same for all parts of the global batch."""
    parts: int
    """That this rank reads of the global batch."""
    is_first: bool
    """Of these."""
    is_last: bool
    share: Share
    """Of the global batch."""


class HandedOut(NamedTuple):
    """A batch that a loader gives to the training loop."""

    loader: str
    epoch: int
    records: tuple[int, ...]
    """Record numbers of this rank's share; empty for a record that only keeps in step."""
    cursor: int
    """Records of the epoch that the world has been handed after this batch."""
    total: int
    """Records of a whole epoch."""


@dataclass
class Session:
    """This process's place in the world, as loaders see it. The training runtime keeps it true."""

    rank: int = 0
    world_size: int = 1
    generation: int = 0
    share: Share | None = None
    """Of the batch that was handed out last; gradients are weighted by it."""
    check: Callable[[], None] = lambda: None
    """Raises when the world must be left; loaders call it before they wait for data."""
    on_batch: Callable[[HandedOut], None] | None = None
    """Called with every batch that is handed out."""
    progress: int = 0
    """Batches handed out and collectives entered: of ranks that wait for each other the lowest keeps the others.
    Rises, too, while a checkpoint is written and while a lease of a shard is waited for."""
    waited_s: float = 0.0
    """Seconds that loops have waited for batches, since the process began."""
    ready_at: float = 0.0
    """When this rank's gradients were ready last, by `time.perf_counter`."""
    virtual_ranks: int = 0
    """Parts of every global batch, in exact mode."""
    micro_batch: MicroBatch | None = None
    """What was handed out last, in exact mode."""
    begin_micro_batch: Callable[[MicroBatch], None] | None = None
    """Called before each of these is made or handed out."""
    end_micro_batches: Callable[[MicroBatch], None] | None = None
    """Called with the last one of a loop, when that is left."""
    is_closed: bool = False
    """Inside the training function: it runs again after each change of the world, so a loader made there would be a
    new one each time, and its position lost."""
    _loaders: dict[str, weakref.ref[Positioned]] = field(default_factory=dict)

    def register(self, loader: Positioned, name: str | None) -> str:
        """Give a loader its name: the same on every worker, because each runs the same script. Raises ConfigError."""
        if self.is_closed:
            raise ConfigError(
                "make every stoker.Loader before the @stoker.elastic function is called: one made inside it would "
                "begin anew after each change of the world"
            )
        chosen = name if name is not None else f"loader-{len(self._loaders)}"
        known = self._loaders.get(chosen)
        if name is not None and known is not None and known() is not None:
            raise ValueError(f"there is a loader named {name!r} already: give each its own name")
        self._loaders[chosen] = weakref.ref(loader)
        return chosen

    def divide(self, virtual_ranks: int) -> None:
        """A loader divides its global batches into so many parts. Raises ConfigError where another does otherwise."""
        if self.virtual_ranks not in (0, virtual_ranks):
            raise ConfigError(
                f"virtual_ranks={virtual_ranks}, but another loader of this script has {self.virtual_ranks}: all that "
                "have any must have as many"
            )
        self.virtual_ranks = virtual_ranks

    def loaders(self) -> list[Positioned]:
        """Every live loader, in the order in which they were made."""
        return [loader for ref in self._loaders.values() if (loader := ref()) is not None]

    def positions(self) -> dict[str, dict[str, Any]]:
        """The position of every live loader."""
        return {
            name: loader.state_dict() for name, ref in self._loaders.items() if (loader := ref()) is not None
        }

    def restore(self, positions: dict[str, dict[str, Any]]) -> None:
        """Put every live loader back."""
        for name, position in positions.items():
            ref = self._loaders.get(name)
            loader = ref() if ref is not None else None
            if loader is not None:
                loader.load_state_dict(position)


@functools.cache
def session() -> Session:
    """The process's one session: a process is one worker."""
    return Session()
