"""What the runtime needs of a State."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Sealed(Protocol):
    """A state that can be sealed at a commit, undone to it, and copied."""

    @property
    def stands_at_commit(self) -> bool:
        """Whether no optimizer has stepped since the last commit."""
        ...

    def doubt(self) -> None:
        """Until it is sealed or loaded, it stands at no commit."""
        ...

    def seal(self) -> None: ...

    def roll_back(self) -> None: ...

    def export(self) -> dict[str, Any]: ...

    def export_committed(self) -> dict[str, Any] | None:
        """As `export` was at the last commit; None where parameters are not as they were then."""
        ...

    def load(self, state: dict[str, Any], but: Collection[str] = ()) -> None:
        """Take over what `export` gave, but for these parts of it."""
        ...

    def restore_random(self, state: dict[str, Any]) -> None:
        """Go on with the random generators of an exported state, if it is of this very rank."""
        ...

    def stable_tensors(self) -> Iterable[torch.Tensor]:
        """Tensors that only an optimizer's step changes, beside what optimizers keep."""
        ...

    def forget_group(self) -> None:
        """Drop every wrapper of the group that is going away."""
        ...

    def rehearsal(self) -> AbstractContextManager[None]:
        """Undoes what happens within, and refuses that parameters change. Raises ConfigError."""
        ...
