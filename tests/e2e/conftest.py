"""What every end-to-end test leaves behind: nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.run_helpers import Stoker, kill_all


@pytest.fixture(autouse=True)
def commands_end() -> Iterator[None]:
    """Commands that a failed test has left run on otherwise, beside the tests that follow."""
    Stoker.begun.clear()
    yield
    for command in Stoker.begun:
        if command.process.poll() is None:
            kill_all(command)
    Stoker.begun.clear()
