"""Fixtures for tests of what is once in a process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The test is a worker of its own, alone."""
    import torch

    from stoker.data.session import session
    from stoker.train.runtime import runtime

    for name in ("STOKER_AGENT_SOCKET", "STOKER_CHECKPOINT_DIR", "STOKER_AUDIT_DIR"):
        monkeypatch.delenv(name, raising=False)
    runtime.cache_clear()
    session.cache_clear()
    yield
    torch.set_grad_enabled(True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    runtime.cache_clear()
    session.cache_clear()


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An agent's folder for snapshots."""
    folder = tmp_path / "node"
    folder.mkdir()
    monkeypatch.setenv("STOKER_SNAPSHOT_DIR", str(folder))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run-1")
    return folder
