"""Whether the place where a fleet meets can be reached. An outage is said once, not at each try."""

from __future__ import annotations

import logging

log = logging.getLogger("stoker.cache")


class Reach:
    """What fails now, of what is done there again and again."""

    def __init__(self) -> None:
        self._problems: dict[str, str] = {}

    @property
    def problem(self) -> str | None:
        """Why the place cannot be reached; None while it can."""
        return next(iter(self._problems.values()), None)

    def failed(self, what: str, problem: str) -> None:
        """It could not be done."""
        if what not in self._problems:
            log.warning("%s; it is tried again and again", problem)
        self._problems[what] = problem

    def worked(self, what: str) -> None:
        """It was done."""
        if self._problems.pop(what, None) is not None:
            log.info("%s works again", what)
