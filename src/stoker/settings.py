"""Settings that come from outside, in frozen groups. This is the only file that reads the environment.

An argument beats the environment; the environment beats the default. A group is read once, where a process
starts, and handed on.
"""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from stoker.base.units import parse_size_bytes
from stoker.errors import ConfigError, EnvironmentProblem

DEFAULT_TIMEOUT_S = 300.0
"""The one user-facing timeout: how long anything may stand still before Stoker gives up and says why."""
STOP_GRACE_S = 30.0
"""As with torchrun: what a script may need to save its work on SIGTERM."""


def environment() -> Mapping[str, str]:
    """The process's environment, for libraries that take theirs as a mapping."""
    return os.environ


@dataclass(frozen=True)
class Timeouts:
    """Every waiting time of a job, derived from the one that a user sets."""

    user_s: float = DEFAULT_TIMEOUT_S
    """Seconds that anything may stand still: waiting for nodes, below the minimum, a stuck collective."""

    beat_interval_s: float = 1.0
    """Seconds between an agent's reports when nothing changes."""

    beat_timeout_s: float = 5.0
    """Seconds of silence after which an agent counts as gone."""

    park_s: float = DEFAULT_TIMEOUT_S / 2
    """Seconds that a worker may take to leave an interrupted step before it is replaced. As long as the user's timeout
    allows: a worker in a long step or evaluation is healthy, and with it dies the state that it holds."""

    last_call_s: float = 1.0
    """Seconds to wait for more nodes, or for more newcomers, once there are enough to begin."""

    stop_grace_s: float = STOP_GRACE_S
    """Seconds between SIGTERM and SIGKILL when workers are stopped."""

    @property
    def collective_s(self) -> float:
        """Seconds that a collective may wait for a peer: with the time to leave the step it is the user's."""
        return self.user_s - self.park_s if self.user_s > self.park_s else self.user_s

    def __post_init__(self) -> None:
        order = (
            ("beat_interval_s", self.beat_interval_s),
            ("beat_timeout_s", self.beat_timeout_s),
            ("park_s", self.park_s),
            ("user_s", self.user_s),
        )
        for (low_name, low), (high_name, high) in pairwise(order):
            if not 0 < low <= high:
                raise ConfigError(
                    f"timeouts are out of order: {low_name}={low} must be above 0 and at most {high_name}={high}"
                )

    @classmethod
    def from_user_timeout(cls, user_s: float, stop_grace_s: float | None = None) -> Timeouts:
        """Derive all from `--timeout`, except a given `--shutdown-timeout`. Raises ConfigError below one second."""
        if user_s < 1.0:
            raise ConfigError(f"--timeout {user_s:g} is too short: give at least 1 second")
        beat_timeout_s = min(5.0, user_s / 2)
        return cls(
            user_s=user_s,
            beat_interval_s=beat_timeout_s / 5,
            beat_timeout_s=beat_timeout_s,
            park_s=max(beat_timeout_s, user_s / 2),
            last_call_s=min(1.0, user_s / 4),
            stop_grace_s=min(STOP_GRACE_S, user_s) if stop_grace_s is None else stop_grace_s,
        )


@dataclass(frozen=True)
class WorkerSettings:
    """What an agent tells the worker that it starts."""

    agent_socket: str | None
    """Path of the agent's Unix socket; None when the script runs on its own."""

    worker: str
    """This worker's id, unique in the job."""

    timeout_s: float
    """The one user-facing timeout."""

    address: str
    """Where other workers reach this one."""

    checkpoint_dir: str | None
    """Folder for checkpoints of `stoker.State`; None: no checkpoints are written."""

    checkpoint_every: int
    """Commits between two checkpoints."""

    stack_file: str | None
    """Where this worker writes its stacks when its agent asks by signal; None: it is not asked."""

    audit_dir: str | None
    """Folder for the record of which worker read what; None: no record is kept."""

    accelerator: str
    """What it trains on: `auto`, `cpu`, or a kind of device as torch names it."""

    auto_tune: bool
    """Whether loader workers and micro-batches are tuned while it trains."""

    rank: int
    local_rank: int
    world_size: int
    """Rank, local rank and world size at launch; the live values are in `stoker.init()`."""

    snapshot_dir: str | None
    """Folder in this node's shared memory for snapshots of `stoker.State`; None: this process makes one of its own."""

    run_id: str
    """The job; empty: the script runs alone."""

    has_saver: bool = False
    """Whether the agent has snapshots written to a storage, where one is named in their folder."""


@dataclass(frozen=True)
class LaunchPlace:
    """Where this process stood when it was launched, by torchrun's variables; alone: rank 0 of 1."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    group_rank: int
    """Of its node."""
    group_world_size: int
    """Nodes."""


@dataclass(frozen=True)
class ClientTlsFiles:
    """What `https://` needs, as files in PEM."""

    ca: str = ""
    """Certificates of who signed those of the servers; empty: what the system trusts."""

    certificate: str = ""
    """Our own, to show to servers; empty: none."""

    key: str = ""
    """Of that certificate; empty: it is in the same file."""

    @property
    def names(self) -> tuple[str, ...]:
        """Those that there are."""
        return tuple(name for name in (self.ca, self.certificate, self.key) if name)


@dataclass(frozen=True)
class CacheSettings:
    """Where the cache is, for clients."""

    endpoint: str | None
    """`http://host:port`, `https://host:port` or `unix:///path`; None: there is no server yet."""

    token: str | None = field(repr=False)
    """Bearer token for it."""

    directory: Path
    """Folder of the cache that a script embeds when there is no server."""

    capacity_bytes: int
    """Hard limit of that folder, in bytes."""

    tls: ClientTlsFiles = field(default_factory=ClientTlsFiles)

    def trusting(self, ca: str | None) -> CacheSettings:
        """The same, where that file has the certificates of who signed those of the servers; None: as it is. Of no
        consequence where there is no server yet."""
        if ca is None or self.endpoint is None:
            return self
        return replace(self, tls=replace(self.tls, ca=ca))


def worker_settings() -> WorkerSettings:
    """What the agent put into this process's environment. Raises ConfigError."""
    env = os.environ
    return WorkerSettings(
        agent_socket=env.get("STOKER_AGENT_SOCKET"),
        worker=env.get("STOKER_WORKER_ID", f"solo-{os.getpid()}"),
        timeout_s=_number(env, "STOKER_TIMEOUT_S", DEFAULT_TIMEOUT_S),
        address=env.get("STOKER_NODE_ADDRESS", "127.0.0.1"),
        checkpoint_dir=env.get("STOKER_CHECKPOINT_DIR"),
        checkpoint_every=int(_number(env, "STOKER_CHECKPOINT_EVERY", 100)),
        stack_file=env.get("STOKER_STACK_FILE"),
        audit_dir=env.get("STOKER_AUDIT_DIR"),
        accelerator=env.get("STOKER_ACCELERATOR") or "auto",
        auto_tune=env.get("STOKER_AUTO_TUNE", "0") not in ("", "0"),
        rank=int(_number(env, "RANK", 0)),
        local_rank=int(_number(env, "LOCAL_RANK", 0)),
        world_size=int(_number(env, "WORLD_SIZE", 1)),
        snapshot_dir=env.get("STOKER_SNAPSHOT_DIR") or None,
        run_id=env.get("TORCHELASTIC_RUN_ID", ""),
        has_saver=env.get("STOKER_SAVER", "0") not in ("", "0"),
    )


def launch_place() -> LaunchPlace:
    """`RANK`, `WORLD_SIZE`, `LOCAL_*` and `GROUP_*`. Raises ConfigError."""
    env = os.environ
    return LaunchPlace(
        rank=int(_number(env, "RANK", 0)),
        world_size=int(_number(env, "WORLD_SIZE", 1)),
        local_rank=int(_number(env, "LOCAL_RANK", 0)),
        local_world_size=int(_number(env, "LOCAL_WORLD_SIZE", 1)),
        group_rank=int(_number(env, "GROUP_RANK", 0)),
        group_world_size=int(_number(env, "GROUP_WORLD_SIZE", 1)),
    )


def cache_settings() -> CacheSettings:
    """`STOKER_CACHE_ENDPOINT`, `_TOKEN`, `_DIR`, `_CAPACITY`, `_CA`, `_CERT` and `_CERT_KEY`. Raises ConfigError."""
    # Asked with each object that is read by its URL: worked out once for the same variables.
    return _cache_settings(*map(os.environ.get, _CACHE_VARIABLES))


_CACHE_VARIABLES = (
    "STOKER_CACHE_ENDPOINT",
    "STOKER_CACHE_TOKEN",
    "STOKER_CACHE_DIR",
    "STOKER_CACHE_CAPACITY",
    "STOKER_CACHE_CA",
    "STOKER_CACHE_CERT",
    "STOKER_CACHE_CERT_KEY",
    "XDG_CACHE_HOME",
    "HOME",
)


@functools.lru_cache(maxsize=8)
def _cache_settings(
    endpoint: str | None,
    token: str | None,
    directory: str | None,
    capacity: str | None,
    ca: str | None,
    certificate: str | None,
    key: str | None,
    caches: str | None,
    _home: str | None,
) -> CacheSettings:
    try:
        capacity_bytes = parse_size_bytes("20GB" if capacity is None else capacity)
    except ValueError as error:
        raise ConfigError(f"STOKER_CACHE_CAPACITY: {error}") from None
    return CacheSettings(
        endpoint=endpoint,
        token=token,
        directory=Path(directory or Path(caches or Path.home() / ".cache") / "stoker"),
        capacity_bytes=capacity_bytes,
        tls=ClientTlsFiles(ca or "", certificate or "", key or ""),
    )


def survive_nccl_errors() -> None:
    """Have NCCL's watchdog clean up after a failed collective instead of ending the process, which goes on."""
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "2"
    # A watchdog that has met an error sleeps four times as long, and the end of its group waits for it.
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "100")


def have_cublas_repeat_itself() -> None:
    """Before its first use: the same bits from the same numbers each time."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def reports_at_exit() -> bool:
    """Whether loaders say at the end of a program where its time went: unless `STOKER_REPORT` is 0."""
    return os.environ.get("STOKER_REPORT", "1") not in ("", "0")


def snapshot_base() -> Path | None:
    """`STOKER_SNAPSHOT_DIR`: where agents make their folders for snapshots; None: in shared memory."""
    folder = os.environ.get("STOKER_SNAPSHOT_DIR")
    return Path(folder) if folder else None


def job_token() -> str | None:
    """`STOKER_JOB_TOKEN`, the secret that agents and master of one job share across hosts."""
    return os.environ.get("STOKER_JOB_TOKEN") or None


def notify_socket() -> str | None:
    """`NOTIFY_SOCKET`: where systemd wants to be told that a service is ready; None: nobody does."""
    return os.environ.get("NOTIFY_SOCKET") or None


def runtime_dir() -> Path:
    """A folder of this user's own for sockets and tokens, made with mode 0700: in XDG_RUNTIME_DIR, else in TMPDIR.

    Under Slurm, sudo or su XDG_RUNTIME_DIR may name a folder that is not there or is another user's: then it does not
    count. Raises ConfigError for a folder that others may enter, EnvironmentProblem when it cannot be made.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and _is_own_folder(Path(base)):
        path, name = Path(base) / "stoker", "XDG_RUNTIME_DIR"
    else:
        path, name = Path(os.environ.get("TMPDIR") or "/tmp") / f"stoker-{os.getuid()}", "TMPDIR"
    return _private(path, f"; see {name}", f", or set {name} to another folder")


def mounts_dir() -> Path:
    """Where it is kept what this user has mounted: the same whatever the environment says, for what a service has
    mounted is to be found from a login as well. Not in a folder that a server may have below /run, and not in
    /run/user/UID, which goes when the user logs out: mounts stay.

    Raises ConfigError for a folder that others may enter, EnvironmentProblem when it cannot be made.
    """
    return _private(_mounts_parents()[0], "", "") / "mounts"


def other_mounts_dirs() -> list[Path]:
    """Where it may be kept as well: it was so before, or /run had no folder for this user when something was mounted.
    Nothing is made."""
    return [other / "mounts" for other in _mounts_parents()[1:] if _is_private(other)]


def _mounts_parents() -> tuple[Path, Path]:
    """Where new ones are kept, and where others may be."""
    uid = os.getuid()
    in_tmp = Path("/tmp") / f"stoker-{uid}"
    in_run = Path("/run/user") / str(uid) / "stoker" if uid else Path("/run/stoker-0")
    # Users need /run only where another one has taken their name in /tmp: else that one could keep them from mounting.
    is_wanted = not uid or _is_anothers(in_tmp)
    return (in_run, in_tmp) if is_wanted and _is_own_folder(in_run.parent) else (in_tmp, in_run)


def _is_anothers(path: Path) -> bool:
    try:
        return path.lstat().st_uid != os.getuid()
    except OSError:
        return False


def _is_private(path: Path) -> bool:
    try:
        info = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o077


def _private(path: Path, see: str, otherwise: str) -> Path:
    """A folder of this user's alone, made if need be."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.lstat()  # a link that another user has put there is not followed
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot make the folder {path} for sockets and tokens: {error.strerror}{see}"
        ) from None
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        raise ConfigError(f"{path} must be a folder of your own: remove it{otherwise}")
    if info.st_mode & 0o077:
        raise ConfigError(f"{path} must belong to you alone: run `chmod 700 {path}`{otherwise}")
    return path


def _is_own_folder(path: Path) -> bool:
    try:
        info = path.stat()
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and os.access(path, os.W_OK | os.X_OK)


def _number(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name)
    if text is None or text == "":
        return default
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} is not a number") from None
