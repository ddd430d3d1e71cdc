"""A program that cannot be started: which one, why, and what to do, in the words of the error."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from stoker.errors import EnvironmentProblem
from stoker.platform.local import LocalPlatform
from stoker.platform.programs import require_program, why_not_started

pytestmark = pytest.mark.real


def refusal(argv: Sequence[str], environment: Mapping[str, str]) -> str:
    """What the platform says of a start that fails."""

    async def start() -> None:
        LocalPlatform().start(argv, environment, on_output=lambda *_: None, on_exit=lambda *_: None)

    with pytest.raises(EnvironmentProblem) as caught:
        asyncio.run(start())
    return str(caught.value)


def script(path: Path, text: str, mode: int = 0o755) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_a_program_that_is_not_on_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    environment = {"PATH": "/usr/bin:/bin"}
    with pytest.raises(EnvironmentProblem, match="cannot start no-such-program: there is no such program on"):
        require_program("no-such-program", environment)
    assert "no such program on this machine's PATH" in refusal(["no-such-program"], environment)
    script(tmp_path / "train.sh", "#!/bin/sh\n")
    with pytest.raises(EnvironmentProblem, match=r"in this folder give \./train\.sh"):
        require_program("train.sh", environment)
    require_program("./train.sh", environment)
    require_program("sh", environment)


def test_a_program_that_may_not_be_executed(tmp_path: Path) -> None:
    path = script(tmp_path / "train.sh", "#!/bin/sh\n", stat.S_IRUSR)
    with pytest.raises(EnvironmentProblem, match=f"chmod \\+x {path}"):
        require_program(path, os.environ)
    assert f"`chmod +x {path}`" in refusal([path], os.environ)
    with pytest.raises(EnvironmentProblem, match="it is a folder"):
        require_program(str(tmp_path), os.environ)
    with pytest.raises(EnvironmentProblem, match="there is no such file on this machine"):
        require_program(str(tmp_path / "absent"), os.environ)


def test_a_script_whose_interpreter_is_not_there(tmp_path: Path) -> None:
    path = script(tmp_path / "train.sh", "#!/nonexistent/python\nx\n")
    require_program(path, os.environ)
    said = refusal([path], os.environ)
    assert said.startswith(f"cannot start {path}: its first line names an interpreter"), said
    assert "/nonexistent/python" in said


def test_a_file_that_is_no_program(tmp_path: Path) -> None:
    path = script(tmp_path / "train", "no program\n")
    assert "neither a program of this kind of machine nor a script that begins with a #! line" in refusal(
        [path], os.environ
    )


def test_arguments_that_no_program_can_be_given() -> None:
    assert refusal(["sh", "a\0b"], os.environ) == "cannot start sh: embedded null byte"
    assert "arguments and environment are too long" in refusal(["sh", "x" * (1 << 22)], os.environ)


def test_too_many_processes_are_named() -> None:
    said = why_not_started("sh", os.environ, BlockingIOError(11, "Resource temporarily unavailable"))
    assert said.startswith("cannot start sh: Resource temporarily unavailable: this user, container or")
