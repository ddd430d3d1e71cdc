"""Start a command on another host through a remote shell: ssh, or anything that runs an argv somewhere else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence

from stoker.errors import ConfigError, EnvironmentProblem
from stoker.platform.local import LocalProcess

DEFAULT_REMOTE_SHELL = "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 {host}"
SHELLS = frozenset({"ssh", "rsh", "remsh", "dbclient", "plink", "autossh"})
"""Programs that join their arguments with spaces and have a shell on the other side take them apart again."""
LINE_BYTES = 64 * 1024
LAST_WORDS_BYTES = 2000


class Lines:
    """Cuts a stream of bytes into lines."""

    def __init__(self, on_line: Callable[[bytes], None]) -> None:
        """`on_line` gets each line without its end; one longer than LINE_BYTES comes in pieces."""
        self._on_line = on_line
        self._rest = b""

    def feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._on_line(line.removesuffix(b"\r"))
        if len(self._rest) > LINE_BYTES:
            self.close()

    def close(self) -> None:
        rest, self._rest = self._rest, b""
        if rest:
            self._on_line(rest)


class RemoteProcess:
    """A command on another host, as seen through its remote shell here.

    It does not die with this process: it is told by the end of its input, so that it can end in good order.
    """

    def __init__(
        self,
        child: subprocess.Popen[bytes],
        on_line: Callable[[str, bytes], None],
        on_exit: Callable[[int | None, int | None, str], None],
    ) -> None:
        self._on_exit = on_exit
        self._tail = b""
        self._unsent = bytearray()
        self._closing = False
        self._loop = asyncio.get_running_loop()
        assert child.stdin is not None
        self._stdin = child.stdin
        os.set_blocking(self._stdin.fileno(), False)
        self._lines = {
            "stdout": Lines(lambda line: on_line("stdout", line)),
            "stderr": Lines(lambda line: on_line("stderr", line)),
        }
        self._ended = False
        self._process = LocalProcess(child, self._take, self._end)

    @property
    def pid(self) -> int:
        """The remote shell's process id, on this machine."""
        return self._process.pid

    def write(self, data: bytes) -> None:
        """Send to the command's standard input, in the background; what a command that is gone leaves is lost."""
        if not self._closing and not self._stdin.closed:
            self._unsent += data
            self._flush()

    def close_input(self) -> None:
        """End the command's input once all is sent: it then leaves in good order."""
        self._closing = True
        self._flush()

    def signal(self, signal_number: int) -> None:
        """Send a signal to the remote shell here and what it started here. Does nothing once it has ended."""
        if not self._ended:
            self._process.signal(signal_number)

    def _flush(self) -> None:
        if self._stdin.closed:
            return
        descriptor = self._stdin.fileno()
        self._loop.remove_writer(descriptor)
        try:
            while self._unsent:
                del self._unsent[: os.write(descriptor, self._unsent)]
        except BlockingIOError:
            self._loop.add_writer(descriptor, self._flush)
            return
        except BrokenPipeError:
            self._closing = True
        if self._closing:
            self._stdin.close()

    def _take(self, stream: str, data: bytes) -> None:
        if stream == "stderr":
            self._tail = (self._tail + data)[-LAST_WORDS_BYTES:]
        self._lines[stream].feed(data)

    def _end(self, code: int | None, signal_number: int | None) -> None:
        self._ended = True
        if not self._stdin.closed:
            self._loop.remove_writer(self._stdin.fileno())
            with contextlib.suppress(BrokenPipeError):
                self._stdin.close()
        for lines in self._lines.values():
            lines.close()
        said = [line for line in self._tail.decode("utf-8", "replace").splitlines() if line.strip()]
        self._on_exit(code, signal_number, said[-1].strip() if said else "")


class RemoteShell:
    """A template like `ssh {host}`: its words, with the host put in, in front of a command.

    The template is split as a shell would split it, and never given to one. What is behind it is of two kinds:

    - `ip netns exec {host}`, `docker exec -i {host}`, `kubectl exec -i {host} --` run the words that follow as they
      are: nothing is quoted;
    - `ssh {host}` sends one line to a shell on the other side: each word is quoted, and the line is one word. Through
      two (`ssh gateway ssh {host}`) it is quoted twice.
    """

    def __init__(self, template: str = DEFAULT_REMOTE_SHELL, *, quotes: str = "auto") -> None:
        """`quotes`: how many shells take the command apart on its way: `no`, `yes` (one), a digit, or `auto`, the
        number of words in the template that are ssh or its like.

        Raises ConfigError for a template without a program or without `{host}`.
        """
        flag = f"--remote-shell {template!r}"
        try:
            self._words = shlex.split(template)
        except ValueError as error:
            raise ConfigError(f"{flag}: {error}") from None
        if not any("{host}" in word for word in self._words):
            raise ConfigError(f"{flag}: write {{host}} where the host's name goes, as in 'ssh {{host}}'")
        if shutil.which(self._words[0]) is None:
            raise ConfigError(f"{flag}: there is no program {self._words[0]!r} on this machine's PATH")
        layers = {"no": 0, "yes": 1, "auto": sum(os.path.basename(word) in SHELLS for word in self._words)}
        if quotes not in layers and not (quotes.isdecimal() and int(quotes) <= 3):
            raise ConfigError(
                f"--remote-shell-quotes {quotes!r}: give auto, yes, no, or a number from 0 to 3"
            )
        self._layers = layers[quotes] if quotes in layers else int(quotes)

    def argv(self, host: str, command: Sequence[str]) -> list[str]:
        """What is started here to run `command` there."""
        words = list(command)
        for _ in range(self._layers):
            words = [shlex.join(words)]
        return [word.replace("{host}", host) for word in self._words] + words


def start_with_input(
    argv: Sequence[str],
    environment: Mapping[str, str],
    *,
    on_line: Callable[[str, bytes], None],
    on_exit: Callable[[int | None, int | None, str], None],
) -> RemoteProcess:
    """Start a remote shell, or a command of this machine that is to be treated as one, with a pipe as its input.

    `on_line(stream, line)` gets what it prints, with stream `"stdout"` or `"stderr"`; `on_exit(code, signal,
    last_words)` comes once, after the last line, with the last line of its standard error. Raises EnvironmentProblem
    if it cannot be started.
    """
    try:
        child = subprocess.Popen(
            list(argv),
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise EnvironmentProblem(f"cannot start {argv[0]}: {error}") from None
    return RemoteProcess(child, on_line, on_exit)
