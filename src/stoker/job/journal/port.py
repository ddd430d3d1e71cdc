"""The port: an append-only list of entries."""

from __future__ import annotations

from typing import Any, Protocol


class Journal(Protocol):
    """Keeps what the job decided, in order."""

    def append(self, wall_s: float, kind: str, why: str, details: dict[str, Any]) -> None:
        """Add one entry. Raises EnvironmentProblem when it cannot be kept."""
        ...

    def entries(self) -> list[dict[str, Any]]:
        """All entries, oldest first, each with `seq`, `wall_s`, `kind`, `why` and its details."""
        ...

    def close(self) -> None: ...


class NullJournal:
    """Keeps nothing."""

    def append(self, wall_s: float, kind: str, why: str, details: dict[str, Any]) -> None:
        return

    def entries(self) -> list[dict[str, Any]]:
        return []

    def close(self) -> None:
        return
