"""The command line of one command is that of all, without what the others import."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

from stoker import __version__
from stoker.cli.main import COMMANDS, build_parser


def said(words: list[str], command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        build_parser(command).parse_args(words)
    return "".join(capsys.readouterr())


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_the_same_alone(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([command, "--help"], [command, "--bogus"]):
        assert said(words, command, capsys) == said(words, "", capsys)
    assert f"usage: stoker {command} " in said([command, "--help"], command, capsys)


def test_all_commands_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    listed = said(["--help"], "", capsys)
    assert all(f"\n    {command} " in listed for command in COMMANDS)
    assert all(f"'{command}'" in said(["bogus"], "bogus", capsys) for command in COMMANDS)


@pytest.mark.parametrize(
    ("command", "heavy"),
    [
        ("mount", ["numpy", "rich", "stoker.job.master", "stoker.cache.server.server"]),
        ("job", ["numpy", "torch", "stoker.cache.server.server"]),
        ("run", ["numpy", "torch", "stoker.cache.server.server"]),
        ("cache", ["numpy", "torch", "stoker.job.master", "stoker.cache.server.server"]),
    ],
)
def test_a_command_imports_nothing_of_the_others(command: str, heavy: list[str]) -> None:
    program = f"import sys; sys.argv = ['stoker', '-v', {command!r}, '--help']; import stoker.cli.main as m\n"
    program += "try: m.main()\nexcept SystemExit: pass\n"
    program += f"sys.exit(' '.join(name for name in {heavy!r} if name in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_the_version_is_that_of_the_package() -> None:
    assert version("stoker") == __version__
