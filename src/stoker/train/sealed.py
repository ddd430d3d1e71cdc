"""What the runtime needs of a State."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol


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

    def load(self, state: dict[str, Any]) -> None: ...

    def forget_group(self) -> None:
        """Drop every wrapper of the group that is going away."""
        ...

    def rehearsal(self) -> AbstractContextManager[None]:
        """Undoes what happens within, and refuses that parameters change. Raises ConfigError."""
        ...
