"""A rename is a copy and a removal: what is done when it was left half done before."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from stoker.base.rng import Rng
from stoker.cache.mount.questions import Rename
from stoker.cache.mount.waiting import Failed
from stoker.errors import WriteDenied
from tests.mount.source import FakeSource
from tests.mount.writing_kernel import WritingKernel
from tests.mount.writing_source import WritingSource


@pytest.mark.parametrize("is_written_again", [False, True])
def test_a_rename_after_one_that_failed_moves_what_is_there_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_written_again: bool
) -> None:
    def refuse(*_: Any) -> None:
        raise WriteDenied("so it is")

    source = WritingSource(Rng(1), WritingKernel(Rng(2)), tmp_path)
    source.write("new")
    source.notice("")
    rename = Rename("new", "final", True)
    with monkeypatch.context() as denied:
        denied.setattr(WritingSource, "remove", refuse)
        failed = source.answer(rename)
    assert isinstance(failed, Failed)
    assert failed.code == errno.EACCES
    if is_written_again:
        FakeSource.write(source, "new")
        source.notice("")
    wanted = source.content("new")
    assert not isinstance(source.answer(rename), Failed)
    assert (source.content("final"), source.content("new")) == (wanted, None)
