"""Which jobs run on this machine: one private file per command, in this user's runtime folder.

Each `stoker run` or `stoker master` writes `jobs/JOB.PID.json` once its master's endpoint is known, and removes it at
its end. Several commands of one job (its nodes on this machine) have a file each. A file whose processes have all
ended, or whose process numbers now belong to others, is stale and is removed by whoever looks next.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from stoker.errors import ConfigError, EnvironmentProblem
from stoker.settings import runtime_dir

log = logging.getLogger("stoker.registry")

RECORD_BYTES_MAX = 1024 * 1024
TOKEN_KEPT_S = 86400.0
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")


class ProcessId(msgspec.Struct, frozen=True):
    """A process, told apart from a later one with the same number."""

    role: str
    """What it is: run, master, …"""
    pid: int
    started_ticks: int
    """When it started, in clock ticks since boot (field 22 of /proc/PID/stat)."""


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What one command says about its job."""

    job: str
    endpoint: str
    """The master's HOST:PORT, as this machine reaches it; with `journal` that of the candidate of this command."""
    journal: str = ""
    """URL of a journal that says where the master is now; empty: it stays at the endpoint."""
    journal_file: str = ""
    """Absolute path of the file in which the master here keeps its journal; empty: it is no file, or not known."""
    token: str = ""
    token_file: str = ""
    """File with the token, where `token` is empty."""
    processes: tuple[ProcessId, ...]
    """The record is live as long as one of them is."""
    log_dir: str = ""
    """Folder of this run's logs."""
    started_wall_s: float = 0.0
    command: tuple[str, ...] = ()
    """The training command."""

    @property
    def key(self) -> tuple[str, str]:
        """Equal for the records of all commands of one job."""
        return self.job, self.journal or self.endpoint

    def secret(self) -> str:
        """The job's token. Raises ConfigError when its file cannot be read."""
        if self.token or not self.token_file:
            return self.token
        return read_token(self.token_file)


class Registration:
    """This command's file. Leave the `with` block, or call `remove`, at the job's end."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def update(self, record: JobRecord) -> None:
        """Say something else, such as the process of a master that was started again. Raises EnvironmentProblem."""
        _write(self.path, record)

    def remove(self) -> None:
        """The job is over here."""
        with contextlib.suppress(OSError):
            self.path.unlink()


def register(record: JobRecord) -> Registration:
    """Write this command's file. Raises EnvironmentProblem when that cannot be done, ConfigError for a runtime folder
    that others may enter."""
    name = _UNSAFE.sub("_", record.job)[:80] or "_"
    path = _folder() / f"{name}.{os.getpid()}.json"
    _write(path, record)
    return Registration(path)


def process_id(role: str, pid: int | None = None) -> ProcessId:
    """A running process, this one by default. Raises EnvironmentProblem when there is none with that number."""
    pid = os.getpid() if pid is None else pid
    started = _started_ticks(pid)
    if started is None:
        raise EnvironmentProblem(f"there is no process {pid}")
    return ProcessId(role, pid, started)


def is_alive(process: ProcessId) -> bool:
    """Whether it still runs: the number exists, is no zombie and did not go to another process."""
    return _started_ticks(process.pid) == process.started_ticks


def records() -> list[JobRecord]:
    """The jobs of this machine, oldest first: one record for each master, with the processes of all commands that take
    part in it. Stale files are removed."""
    live = []
    for path in sorted(_folder().glob("*.json")):
        record = _read(path)
        if record is None:
            continue
        if any(is_alive(process) for process in record.processes):
            live.append(record)
        else:
            log.debug("%s is stale: none of its processes runs", path)
            with contextlib.suppress(OSError):
                path.unlink()
    return _merge(live)


def sweep() -> None:
    """Remove what commands that were killed have left in the runtime folder: sockets that nobody answers at, and tokens
    of ports at which no job has been for a day."""
    folder = runtime_dir()
    for path in folder.glob("agent-*-*.sock"):
        pid = path.name.split("-")[1]
        if pid.isdigit() and _started_ticks(int(pid)) is None and not _answers(path):
            _remove(path)
    ports = {record.endpoint.rpartition(":")[2] for record in records()}
    for path in folder.glob("job-*.token"):
        with contextlib.suppress(OSError):
            is_old = time.time() - path.stat().st_mtime > TOKEN_KEPT_S
            if is_old and path.stem.removeprefix("job-") not in ports:
                _remove(path)


def _answers(path: Path) -> bool:
    """Whether somebody may listen at a socket, also in another container that shares this folder."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
    return True


def _remove(path: Path) -> None:
    log.debug("%s was left behind: removed", path)
    with contextlib.suppress(OSError):
        path.unlink()


def read_token(path: str) -> str:
    """A token from a file. Raises ConfigError."""
    try:
        text = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        said = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"--job-token-file {path} cannot be read: {said}") from None
    if not text:
        raise ConfigError(f"the job token file {path} is empty")
    return checked_token(text, f"the job token file {path}")


def checked_token(token: str, where: str) -> str:
    """A token that can be sent. Raises ConfigError."""
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(f"{where} holds no token: that has one line, of printable ASCII characters only")
    return token


def new_record(
    *,
    job: str,
    endpoint: str,
    token: str,
    log_dir: str,
    command: Sequence[str],
    journal: str = "",
    journal_file: str = "",
    processes: Iterable[ProcessId] = (),
) -> JobRecord:
    """The record of a job that begins now, with this process when none is named."""
    return JobRecord(
        job=job,
        endpoint=endpoint,
        token=token,
        log_dir=log_dir,
        command=tuple(command),
        journal=journal,
        journal_file=journal_file,
        processes=tuple(processes) or (process_id("run"),),
        started_wall_s=time.time(),
    )


def _folder() -> Path:
    folder = runtime_dir() / "jobs"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise EnvironmentProblem(f"cannot make {folder}: {error.strerror}; see XDG_RUNTIME_DIR") from None
    return folder


def _write(path: Path, record: JobRecord) -> None:
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(record))
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise EnvironmentProblem(f"cannot note this job in {path}: {error.strerror}") from None


def _read(path: Path) -> JobRecord | None:
    """None for a file that has gone meanwhile, or that another version wrote in another way."""
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(RECORD_BYTES_MAX), type=JobRecord)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        log.debug("%s cannot be read: %s", path, error)
        return None


def _merge(live: list[JobRecord]) -> list[JobRecord]:
    """One record per master: the oldest one that knows its logs, with everybody's processes."""
    jobs: dict[tuple[str, str], list[JobRecord]] = {}
    for record in sorted(live, key=lambda r: r.started_wall_s):
        jobs.setdefault(record.key, []).append(record)
    merged = []
    for same in jobs.values():
        main = next((r for r in same if any(p.role == "master" for p in r.processes)), same[0])
        processes = dict.fromkeys(process for record in same for process in record.processes)
        merged.append(msgspec.structs.replace(main, processes=tuple(processes)))
    return merged


def _started_ticks(pid: int) -> int | None:
    """None when there is no such process, or only its remains."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat.rpartition(b")")[2].split()  # the name before it may hold anything, brackets too
    return None if len(fields) < 20 or fields[0] in (b"Z", b"X") else int(fields[19])
