"""Run `stoker job …` in this process, beside a served job that is listed as one of this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from stoker.cli import registry
from stoker.cli.main import main
from tests.unit.control_fake import TOKEN, FakeJob, Served, served


class Said(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


def commands(capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """Something that runs `stoker job ARGUMENTS`."""

    def run(*arguments: str) -> Said:
        try:
            code = main(["job", *arguments])
        except SystemExit as left:
            code = int(left.code or 0)
        said = capsys.readouterr()
        return Said(code, said.out, said.err)

    return run


def use_runtime_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for jobs in `folder` only, and have no token."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.delenv("STOKER_JOB_TOKEN", raising=False)


@contextmanager
def running(job: FakeJob, *, token: str = TOKEN, journal_file: str = "") -> Iterator[Served]:
    """A job that is served, and listed as one of this machine."""
    with served(job) as server:
        record = registry.new_record(
            job=job.told.job,
            endpoint=server.endpoint,
            token=token,
            log_dir="",
            journal_file=journal_file,
            command=["python", "t.py"],
        )
        name = f"{job.told.job}.{server.port}.json"
        with registry.register(record) as registration:
            registration.path.rename(registration.path.with_name(name))
            registration.path = registration.path.with_name(name)
            yield server
