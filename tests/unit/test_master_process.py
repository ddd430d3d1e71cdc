"""`stoker run` keeps its master running: what it tells the next one, and what it makes of an end."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoker.cli import master_process
from stoker.cli.master import EXIT_AGAIN, MasterStart
from stoker.cli.master_process import MasterProcess
from stoker.errors import ConfigError, EnvironmentProblem
from stoker.job.master import listen
from stoker.job.state import JobConfig
from stoker.wire.job import Outcome

pytestmark = pytest.mark.real
PYTHON = sys.executable
OUTCOME = '{"success": true, "exit_code": 0, "why": "every worker finished"}'

Masters = Callable[..., tuple[MasterProcess, Path]]


@pytest.fixture
def masters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Masters:
    """Masters that end as they are told to: the first with the first line of Python, and so on."""

    def prepare(*lives: str) -> tuple[MasterProcess, Path]:
        told, python = tmp_path / "told", tmp_path / "python"
        told.unlink(missing_ok=True)
        python.write_text(
            f"#!{PYTHON}\n"
            "import os, sys\n"
            f"told = {str(told)!r}\n"
            "with open(told, 'a') as file:\n"
            "    file.write(sys.stdin.readline())\n"
            f"exec({list(lives)!r}[len(open(told).readlines()) - 1])\n"
        )
        python.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(python))
        start = MasterStart(JobConfig(), "secret", "127.0.0.1:1", "memory:")
        return MasterProcess(start, listen("127.0.0.1", 0)), told

    return prepare


def end_of(process: MasterProcess) -> Outcome | None:
    async def story() -> Outcome | None:
        process.start()
        try:
            return await asyncio.wait_for(process.wait(), 60.0)
        finally:
            await process.close()

    return asyncio.run(story())


def starts(told: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in told.read_text().splitlines()]


@pytest.mark.parametrize("has_taken_part", [True, False])
def test_a_candidate_that_comes_again_continues_the_job_that_its_node_was_in(
    masters: Masters, has_taken_part: bool
) -> None:
    process, told = masters(f"sys.exit({EXIT_AGAIN})", f"print({OUTCOME!r})")
    process.has_taken_part = lambda: has_taken_part
    outcome = end_of(process)
    assert outcome is not None
    assert outcome.success
    assert [start["continues"] for start in starts(told)] == [False, has_taken_part]
    assert [start["follows"] for start in starts(told)] == [False, True]


def test_one_that_is_killed_is_continued(masters: Masters) -> None:
    process, told = masters("os.kill(os.getpid(), 9)", f"print({OUTCOME!r})")
    assert end_of(process) is not None
    assert [start["continues"] for start in starts(told)] == [False, True]


def test_one_that_refuses_to_begin_is_not_started_again(masters: Masters) -> None:
    process, told = masters("print('REFUSES no such journal', file=sys.stderr); sys.exit(2)")
    with pytest.raises(ConfigError, match="no such journal"):
        end_of(process)
    assert len(starts(told)) == 1


def test_one_that_had_settled_is_started_again_whatever_its_exit_code(
    masters: Masters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(master_process, "SETTLED_S", 0.0)
    process, told = masters("sys.exit(5)", f"print({OUTCOME!r})")
    assert end_of(process) is not None
    assert len(starts(told)) == 2
    monkeypatch.setattr(master_process, "SETTLED_S", 60.0)
    process, told = masters("sys.exit(5)", "sys.exit(5)", "sys.exit(5)")
    with pytest.raises(EnvironmentProblem, match="ended with code 5"):
        end_of(process)


def test_an_outcome_with_a_long_traceback_arrives(masters: Masters) -> None:
    long = json.dumps({"success": False, "exit_code": 1, "why": "it raised", "error": "x" * 500_000})
    process, _ = masters(f"print({long!r})")
    outcome = end_of(process)
    assert outcome is not None
    assert len(outcome.error) == 500_000
