"""Hosts found by real scripts, and commands started on them through real shells."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from stoker.cli.hosts_discovery import OUTPUT_BYTES_MAX, HostScript
from stoker.errors import ConfigError, EnvironmentProblem, StokerError
from stoker.job.hosts_list import HostList
from stoker.platform.remote import RemoteProcess, RemoteShell, start_with_input
from tests.e2e.run_helpers import free_port, wait_for

pytestmark = pytest.mark.real

ODD = [
    "",
    " ",
    "a b",
    "'",
    '"',
    "$HOME",
    "`id`",
    "$(id)",
    "\\",
    "*",
    "a\nb",
    "ä€",
    "!x",
    "#c",
    "-n",
    "~",
    "{}",
    ";:",
    "&&",
]
SAY_ARGUMENTS = "import json,sys; print(json.dumps(sys.argv[1:]))"


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


# -- scripts ----------------------------------------------------------------------------------------------


def ask(*argv: str, timeout_s: float = 20.0) -> HostList:
    script = HostScript(argv, environment=os.environ, default_slots=2, timeout_s=timeout_s)

    async def read() -> HostList:
        return await script.read()

    return asyncio.run(read())


def asked_in_vain(*argv: str, timeout_s: float = 20.0) -> str:
    with pytest.raises(StokerError) as caught:
        ask(*argv, timeout_s=timeout_s)
    assert isinstance(caught.value, ConfigError | EnvironmentProblem)
    return str(caught.value)


def test_a_script_names_the_hosts(tmp_path: Path) -> None:
    script = executable(
        tmp_path / "hosts.sh", "#!/bin/sh\necho h1:4\necho '# none'\necho h$1 >&2\necho h$1\n"
    )
    assert ask(str(script), "2").hosts == (("h1", 4), ("h2", 2))


def test_a_script_that_fails_says_why(tmp_path: Path) -> None:
    script = executable(
        tmp_path / "hosts.sh", "#!/bin/sh\necho h1:4\necho no scheduler answers >&2\nexit 3\n"
    )
    assert asked_in_vain(str(script)) == "exit code 3: no scheduler answers"
    assert "signal 9" in asked_in_vain("sh", "-c", "kill -9 $$")


def test_a_script_that_cannot_be_started(tmp_path: Path) -> None:
    assert "cannot start" in asked_in_vain(str(tmp_path / "nothing.sh"))
    (tmp_path / "not_executable").write_text("echo h1")
    assert "it may not be executed: `chmod +x " in asked_in_vain(str(tmp_path / "not_executable"))


def test_garbage_is_no_list() -> None:
    assert "line 1" in asked_in_vain(
        "sh", "-c", "head -c 5000 /dev/urandom | tr -d '\\n\\r\\f\\v#'; echo '%%'"
    )


def test_a_script_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    script = executable(
        tmp_path / "hosts.sh", f"#!/bin/sh\necho h1\nsleep 1000 &\necho $! > {tmp_path}/pid\nwait\n"
    )
    assert "no answer within 5 s" in asked_in_vain(str(script), timeout_s=5.0)
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not runs(pid), why="the script's child to be gone")


def test_a_script_whose_child_keeps_its_output_open_has_answered(tmp_path: Path) -> None:
    script = executable(
        tmp_path / "hosts.sh", f"#!/bin/sh\nsleep 1000 &\necho $! > {tmp_path}/pid\necho h1\n"
    )
    assert ask(str(script)).hosts == (("h1", 2),)
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not runs(pid), why="the script's child to be gone")


def test_a_script_that_never_stops_printing_is_killed() -> None:
    assert f"more than {OUTPUT_BYTES_MAX} bytes" in asked_in_vain("yes", "h1:1")
    assert "no answer within" in asked_in_vain("sh", "-c", "yes >&2", timeout_s=1.0), (
        "errors may be of any length"
    )


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# -- shells -----------------------------------------------------------------------------------------------


def through(argv: list[str], *, feed: bytes = b"", act: Callable[[RemoteProcess], None] | None = None) -> Ran:
    """Run a command, give it input, and wait for its end."""

    async def run() -> Ran:
        ran = Ran()
        ended = asyncio.Event()

        def end(code: int | None, signal_number: int | None, last_words: str) -> None:
            ran.code, ran.signal, ran.last_words = code, signal_number, last_words
            ended.set()

        process = start_with_input(
            argv, os.environ, on_line=lambda s, line: ran.lines.append((s, line)), on_exit=end
        )
        process.write(feed)
        process.close_input()
        if act is not None:
            act(process)
        await asyncio.wait_for(ended.wait(), 60)
        process.write(b"too late")
        process.signal(signal.SIGKILL)
        return ran

    return asyncio.run(run())


class Ran:
    def __init__(self) -> None:
        self.lines: list[tuple[str, bytes]] = []
        self.code: int | None = None
        self.signal: int | None = None
        self.last_words = ""

    @property
    def out(self) -> str:
        return b"\n".join(line for stream, line in self.lines if stream == "stdout").decode()


@pytest.fixture
def ssh(tmp_path: Path) -> Path:
    """What ssh and sshd do with a command: join its words with spaces, and give that to the user's shell."""
    (tmp_path / "bin").mkdir()
    return executable(
        tmp_path / "bin" / "ssh",
        '#!/bin/sh\nwhile [ "$1" = -o ]; do shift 2; done\n'
        '[ "$1" = "$FAR_HOST" ] || exit 255\nshift\nexec sh -c "$*"\n',
    )


def test_odd_arguments_survive_a_shell_on_the_other_side(ssh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAR_HOST", "h1")
    say = [sys.executable, "-c", SAY_ARGUMENTS, *ODD]
    ran = through(RemoteShell(f"{ssh} -o BatchMode=yes {{host}}").argv("h1", say))
    assert json.loads(ran.out) == ODD
    ran = through(RemoteShell(f"{ssh} {{host}} {ssh} {{host}}").argv("h1", say))
    assert json.loads(ran.out) == ODD, "through two shells"
    ran = through(
        RemoteShell(f"{ssh} {{host}}", quotes="no").argv("h1", [sys.executable, "-c", SAY_ARGUMENTS, "a b"])
    )
    assert ran.code != 0, "this test can tell quoted from not quoted"


def test_odd_arguments_survive_without_a_shell(tmp_path: Path) -> None:
    say = [sys.executable, "-c", SAY_ARGUMENTS, *ODD]
    for shell in (
        RemoteShell("env WHERE={host}"),
        RemoteShell("sh -c {host}", quotes="0"),
        RemoteShell("env 'WHERE={host} and on'"),
    ):
        argv = shell.argv('exec "$0" "$@"', say)
        assert json.loads(through(argv).out) == ODD
    ran = through(RemoteShell("env 'WHERE={host} and on'").argv("h1", ["printenv", "WHERE"]))
    assert ran.out == "h1 and on"
    asked_for = RemoteShell("env WHERE={host} sh -c", quotes="yes")
    assert json.loads(through(asked_for.argv("h1", say)).out) == ODD


@pytest.mark.parametrize(
    ("template", "quotes"),
    [("ssh h1", "auto"), ("", "auto"), ("env 'X={host}", "auto"), ("no-such-program-here {host}", "auto"),
     ("env X={host}", "maybe"), ("env X={host}", "9")],
)  # fmt: skip
def test_templates_that_cannot_be(template: str, quotes: str) -> None:
    with pytest.raises(ConfigError, match="--remote-shell"):
        RemoteShell(template, quotes=quotes)


def test_a_namespace_is_a_host() -> None:
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need ip and root")
    name = f"st-disc-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        subprocess.run(["ip", "netns", "exec", name, "ip", "link", "set", "lo", "up"], check=True)
        say = [
            sys.executable,
            "-c",
            f"import os; print(os.readlink('/proc/self/ns/net')); {SAY_ARGUMENTS}",
            *ODD,
        ]
        ran = through(RemoteShell("ip netns exec {host}").argv(name, say))
        there, arguments = ran.out.split("\n", 1)
        assert there != os.readlink("/proc/self/ns/net")
        assert json.loads(arguments) == ODD
        assert through(RemoteShell("ip netns exec {host}").argv("st-nowhere", say)).code not in (0, None)
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


def test_input_lines_and_last_words() -> None:
    big = b"x" * 3_000_000  # more than a pipe holds
    ran = through(["cat"], feed=big + b"\nend")
    assert b"".join(line for _, line in ran.lines) == big + b"end"
    assert all(len(line) <= 64 * 1024 + 256 * 1024 for _, line in ran.lines)
    ran = through(["sh", "-c", "echo out; printf 'one\\r\\ntwo\\n\\n' >&2; exit 9"])
    assert (ran.code, ran.last_words) == (9, "two")
    assert ("stderr", b"one") in ran.lines
    ran = through(["sh", "-c", "exec <&-; sleep 0.2; exit 4"], feed=big)
    assert ran.code == 4, "a command that does not read its input"
    ran = through(["sleep", "1000"], act=lambda process: process.signal(signal.SIGTERM))
    assert (ran.code, ran.signal) == (None, signal.SIGTERM)
    with pytest.raises(EnvironmentProblem, match="cannot start"):
        through(["/nowhere/at/all"])


DRIVER = """
import asyncio, os, sys
from stoker.platform.remote import RemoteShell, start_with_input

async def main():
    shell = RemoteShell(sys.argv[1])
    command = [sys.executable, "-c", sys.argv[2]]
    start_with_input(shell.argv("h1", command), os.environ, on_line=lambda s, line: print(line.decode(), flush=True),
                     on_exit=lambda *how: None)
    await asyncio.sleep(1000)

asyncio.run(main())
"""

AGENT = """
import os, sys, time
print(os.getpid(), flush=True)
said = sys.stdin.read()
time.sleep(0.3)
open(sys.argv[1] if len(sys.argv) > 1 else os.environ["GOODBYE"], "w").write("left in good order")
"""


@pytest.mark.parametrize("through_shell", [False, True], ids=["exec", "ssh"])
def test_a_driver_that_is_killed_is_noticed_by_the_end_of_input(
    tmp_path: Path, ssh: Path, through_shell: bool
) -> None:
    template = f"{ssh} {{host}}" if through_shell else "env WHERE={host}"
    goodbye = tmp_path / "goodbye"
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, template, AGENT],
        env={**os.environ, "GOODBYE": str(goodbye), "FAR_HOST": "h1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert driver.stdout is not None
    agent = int(driver.stdout.readline())
    assert runs(agent)
    driver.kill()
    driver.communicate()
    wait_for(goodbye.exists, why="the agent's goodbye")
    wait_for(lambda: not runs(agent), why="the agent to be gone")
    assert goodbye.read_text() == "left in good order"


# -- a real sshd ------------------------------------------------------------------------------------------


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[str]:
    """A template that reaches a real sshd on this machine."""
    program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None or shutil.which("ssh") is None:
        pytest.skip("needs ssh and sshd")
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
    port = free_port()
    config = tmp_path / "sshd_config"
    config.write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {tmp_path}/host\nAuthorizedKeysFile {tmp_path}/user.pub\n"
        f"StrictModes no\nUsePAM no\nPidFile {tmp_path}/sshd.pid\nPermitRootLogin yes\n"
    )
    if os.geteuid() == 0:
        os.makedirs("/run/sshd", 0o755, exist_ok=True)  # as its service does where there is one
    server = subprocess.Popen([program, "-D", "-e", "-f", config], stderr=subprocess.PIPE)
    options = f"-p {port} -i {tmp_path}/user -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
    template = f"ssh -o BatchMode=yes -o LogLevel=ERROR -o ConnectTimeout=30 {options} {{host}}"
    try:
        deadline = time.monotonic() + 60
        while subprocess.run([*RemoteShell(template).argv("127.0.0.1", ["true"])], check=False).returncode:
            if server.poll() is not None or time.monotonic() > deadline:
                server.kill()
                pytest.skip(f"sshd does not work here: {server.communicate()[1][-300:]!r}")
            time.sleep(0.1)
        yield template
    finally:
        server.kill()
        server.wait()
        if server.stderr is not None:
            server.stderr.close()


def test_odd_arguments_survive_ssh(sshd: str) -> None:
    ran = through(RemoteShell(sshd).argv("127.0.0.1", [sys.executable, "-c", SAY_ARGUMENTS, *ODD]))
    assert json.loads(ran.out) == ODD
    assert through(RemoteShell(sshd).argv("127.0.0.1", ["sh", "-c", "exit 7"])).code == 7
    unreachable = RemoteShell(sshd.replace(f"-p {sshd.split('-p ')[1].split()[0]}", "-p 1"))
    ran = through(unreachable.argv("127.0.0.1", ["true"]))
    assert ran.code == 255
    assert "refused" in ran.last_words


@pytest.mark.parametrize("victim", ["driver", "ssh"])
def test_the_end_of_ssh_is_noticed_on_the_other_side(sshd: str, tmp_path: Path, victim: str) -> None:
    goodbye = tmp_path / "goodbye"
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, sshd.replace("{host}", "127.0.0.1 env X={host}"),
         AGENT.replace('os.environ["GOODBYE"]', repr(str(goodbye)))],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert driver.stdout is not None
    agent = int(driver.stdout.readline())
    if victim == "ssh":
        for child in psutil.Process(driver.pid).children():
            child.kill()
    else:
        driver.kill()
    wait_for(goodbye.exists, why="the agent's goodbye")
    wait_for(lambda: not runs(agent), why="the agent to be gone")
    driver.kill()
    driver.communicate()
