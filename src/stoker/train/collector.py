"""Python's garbage collector, kept from what it cannot free."""

from __future__ import annotations

import gc


def set_aside_from_collector() -> None:
    """What imports and set-up have made lives as long as the process: from now on collections do not look at it."""
    gc.collect()
    gc.freeze()
