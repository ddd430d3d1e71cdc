"""A driver whose master keeps its journal in etcd, or in the file of an earlier job."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.cli.job_events import journalled
from tests.e2e.etcd import running_etcd
from tests.e2e.run_helpers import TOY, Finished, run

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


def driven(folder: Path, journal: str, *more: str) -> Finished:
    return run(folder, "run", "--hosts", "localhost:1", "--no-cache", "--timeout", "40s", "--journal", journal,
               *more, TOY, "--out", ".", "--epochs", "1")  # fmt: skip


def test_a_driver_keeps_its_journal_in_etcd(tmp_path: Path) -> None:
    with running_etcd(tmp_path / "etcd") as etcd:
        for _ in range(2):
            done = driven(tmp_path, etcd.url)
            assert done.code == 0, done.text
        kinds = [event.kind for event in journalled(etcd.url, None, 0, 10.0)]
    assert kinds.count("ended") == kinds.count("world") == 2, "the second command begins anew"


def test_the_limit_of_changes_is_each_jobs_own(tmp_path: Path) -> None:
    for _ in range(3):
        done = driven(tmp_path, str(tmp_path / "job.db"), "--reset-limit", "1")
        assert done.code == 0, done.text
