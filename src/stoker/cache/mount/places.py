"""Which mounts there are on this machine: where, of what, and by whom they are held.

Nothing here looks at what is mounted, which could wait for ever: the kernel's list of mounts says what is there, and a
lock in a folder of this user's whether anybody holds it. That folder itself has a BSD lock on it for as long: by that
systemd-tmpfiles and `leftovers` know what to leave alone.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import xxhash

from stoker.cache.mount.kept_files import is_at, remove_but
from stoker.errors import ConfigError, EnvironmentProblem
from stoker.settings import ClientTlsFiles, mounts_dir, other_mounts_dirs

FILE_SYSTEM = "fuse.stoker"
_MOUNTS = "/proc/self/mountinfo"
_LOG_BYTES_MAX = 16_000_000
"""It lies in memory, as all below /run does."""
_FIELDS_MIN, _MORE_FIELDS_MIN = 5, 3
_SOCKET_BYTES_MAX = 100
LOG_NAME = "log"
_LOCK_NAME = "lock"
_LOCK = struct.Struct("@hhqqi0q")
"""A `struct flock`: kind, from where, begin, length (0: all), process (0: it belongs to the open file)."""
_CLEARING_S = 5.0
"""Who clears up is done much sooner. What else has locked the folder as they do keeps nobody from mounting."""
_AGAIN_S = 0.01
_LINKS_MAX = 40
"""As many as the kernel follows."""


class MountedThere(NamedTuple):
    """A line of the kernel's list. `number`: MAJOR:MINOR of its device; `uid`: of who mounted it, if that is said."""

    folder: str
    number: str
    file_system: str
    source: str
    uid: int | None


class BucketPlace(msgspec.Struct, frozen=True, kw_only=True):
    """What lies below a prefix of a bucket, and who has it. `endpoint`: as clients take it."""

    endpoint: str
    bucket: str
    prefix: str
    token: str | None = None
    tls: ClientTlsFiles = ClientTlsFiles()


class MountInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a holder says of itself. `is_ready`: it is mounted; `answers`: by this daemon, which others may have been
    before."""

    folder: str
    source: str
    pid: int
    place: BucketPlace
    is_ready: bool = False
    daemon_pid: int = 0
    answers: bool = False


class MountPlace:
    """What is kept of the mount on one folder, in a folder of its own: the one that somebody holds, wherever it is, or
    where it would be now."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._all = [above / place_name(folder) for above in (mounts_dir(), *other_mounts_dirs())]
        # Of one that was left more is to be cleared away than of none.
        known = [path for path in self._all if (path / _LOCK_NAME).exists()]
        self.path = next((path for path in known if is_locked(path)), (known or self._all)[0])
        self._held: list[int] = []

    @property
    def state_path(self) -> Path:
        """Where daemons write down what the next one must know."""
        return self.path / "state"

    @property
    def log_path(self) -> Path:
        """Where a holder in the background and its daemons log."""
        return self.path / LOG_NAME

    @property
    def token_path(self) -> Path:
        """Where the token lies with which a cache of the mount's own asks the fleet behind it."""
        return self.path / "token"

    def keep_token(self, token: str) -> None:
        """By who holds it. Raises OSError."""
        with open(os.open(self.token_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(token)

    def shorten_log(self) -> None:
        """Begin the log anew where it has become too long."""
        with suppress(OSError):
            if os.stat(self.log_path).st_size > _LOG_BYTES_MAX:
                os.truncate(self.log_path, 0)

    def socket_folder(self) -> Path | None:
        """Where the socket of a cache of the mount's own can be; None: nowhere here, its path would be too long."""
        folder = self.path / "cache"
        if len(os.fsencode(folder / "socket")) >= _SOCKET_BYTES_MAX:
            return None
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def open_log(self) -> BinaryIO:
        """What is written to it comes last. Raises OSError."""
        while True:
            self._make()
            with suppress(FileNotFoundError):  # who held it has just left
                return open(self.log_path, "ab")

    @contextmanager
    def kept(self) -> Iterator[None]:
        """By who is about to have it taken: meanwhile nobody clears away what is in it. Raises OSError."""
        folder = self._locked_folder()
        try:
            yield
        finally:
            with suppress(OSError):  # there is something in it
                self.path.rmdir()
            os.close(folder)

    def take(self) -> bool:
        """Hold it, until this process ends; False where another one does."""
        while True:
            folder = self._locked_folder()
            try:
                fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                os.close(folder)
                continue  # who held it has just left
            self._held = [fd, folder]
            try:
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _lock(fcntl.F_WRLCK))
            except (BlockingIOError, PermissionError):  # POSIX has either
                self.let_go()
                return False
            # Else others would not find it: it was removed by who had it.
            if is_at(fd, self._lock_path) and is_at(folder, self.path):
                if any(is_locked(other) for other in self._all if other != self.path):
                    self._lock_path.unlink(missing_ok=True)
                    self.let_go()
                    return False
                return True
            self.let_go()

    def is_known(self) -> bool:
        """Whether it is known who holds it, if anybody does. Where it is not, a process may well: in a container, or
        one whose files were cleared away."""
        return self._lock_path.exists()

    def is_held(self) -> bool:
        """Whether a process is known to hold it. To look is in nobody's way who takes it, or looks as well."""
        return is_locked(self.path)

    def say(self, info: MountInfo) -> None:
        """For others, who it is that holds it."""
        fresh = self.path / "info.new"
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(info))  # it has a token
        fresh.rename(self.path / "info")

    def info(self) -> MountInfo | None:
        """What the holder says, if there is one."""
        if not self.is_held():
            return None
        try:
            return msgspec.json.decode((self.path / "info").read_bytes(), type=MountInfo)
        except (OSError, msgspec.MsgspecError):
            return None

    def clear(self) -> None:
        """What a mount before has left for its next daemon is no concern of this one."""
        for name in ("state", "state.new", "state.request", "info", "token"):
            (self.path / name).unlink(missing_ok=True)

    def leave(self) -> None:
        """By who holds it: nothing of it is needed any more, and others may take it. What was logged stays."""
        # The lock last: from there on it may be another one's.
        remove_but(self.path, LOG_NAME, _LOCK_NAME)
        self._lock_path.unlink(missing_ok=True)
        with suppress(OSError):
            self.path.rmdir()
        self.let_go()

    def let_go(self) -> None:
        """By who holds it: others may take it with all that is in it."""
        assert self._held
        for fd in self._held:
            os.close(fd)
        self._held = []

    @property
    def _lock_path(self) -> Path:
        return self.path / _LOCK_NAME

    def _make(self) -> None:
        """Have its folder be there, unless somebody takes it away again. Raises OSError."""
        with suppress(FileExistsError):  # also where `exist_ok` finds it gone by then
            self.path.mkdir(mode=0o700, parents=True)

    def _locked_folder(self) -> int:
        """Its folder, made if need be, with a lock that others may share."""
        until = time.monotonic() + _CLEARING_S
        while True:
            mounts_dir()  # were it cleared away, it could be another user's by now
            try:
                self._make()
                fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                continue  # somebody has just cleared it away
            with suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if is_at(fd, self.path):
                    return fd
            if time.monotonic() > until:
                return fd
            os.close(fd)
            time.sleep(_AGAIN_S)


def place_name(folder: str) -> str:
    """Of what is kept of the mount on a folder."""
    return xxhash.xxh3_64_hexdigest(os.fsencode(folder))


def is_locked(path: Path) -> bool:
    """Whether a process holds the mount that is kept in a folder."""
    try:
        fd = os.open(path / _LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _lock(fcntl.F_WRLCK))
    finally:
        os.close(fd)
    kind, *_ = _LOCK.unpack(found)
    return bool(kind != fcntl.F_UNLCK)


def _lock(kind: int) -> bytes:
    return _LOCK.pack(kind, os.SEEK_SET, 0, 0, 0)


def mounted() -> Iterator[MountedThere]:
    """All that is mounted, what lies on top last."""
    # A path may have any line end but the kernel's own.
    with open(_MOUNTS, encoding="utf-8", errors="surrogateescape", newline="\n") as lines:
        for line in lines:
            fields, _, more = line.partition(" - ")
            parts, rest = fields.split(" "), more.split(" ")
            if len(parts) < _FIELDS_MIN or len(rest) < _MORE_FIELDS_MIN:
                continue
            said = re.search(r"(?:^|,)user_id=(\d+)", rest[2])
            uid = None if said is None else int(said[1])
            yield MountedThere(_unescaped(parts[4]), parts[2], rest[0], _unescaped(rest[1]), uid)


def mounted_on(folder: str) -> MountedThere | None:
    """What a folder shows, if something is mounted on it."""
    found = [one for one in mounted() if one.folder == folder]
    return found[-1] if found else None


def is_on(folder: str, number: str) -> bool:
    """Whether a folder shows the mount of that MAJOR:MINOR: not what is mounted there since."""
    there = mounted_on(folder)
    return there is not None and (there.file_system, there.number) == (FILE_SYSTEM, number)


def mount_of(path: str) -> MountInfo | None:
    """The mount of this user that a path lies in, if it lies in one."""
    for there in mounted():
        is_in = path == there.folder or path.startswith(f"{there.folder}/")
        if (
            there.file_system == FILE_SYSTEM
            and is_in
            and (info := MountPlace(there.folder).info()) is not None
        ):
            return info
    return None


def full_path(folder: str) -> str:
    """Absolute and without links, as the kernel's list has it. Looks at no more than the folder that it lies in, and
    at links: what is mounted on it may not answer. Raises EnvironmentProblem, ConfigError."""
    path = _without_links(folder)
    if not is_utf8(path):  # what a holder is told, and says of itself, could not name it
        raise ConfigError(f"{path!r}: take a folder whose path is UTF-8")
    return path


def is_utf8(text: str) -> bool:
    """Whether a name as the system has it, which may have any bytes, is text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _without_links(folder: str) -> str:
    path = os.path.abspath(folder)
    for _ in range(_LINKS_MAX):
        parent, name = os.path.split(path)
        if not name:
            return path
        try:
            path = str(Path(parent).resolve(strict=True) / name)
        except OSError as error:
            raise EnvironmentProblem(
                f"{parent} is not there: {os.strerror(error.errno or errno.ENOENT)}"
            ) from None
        except RuntimeError:
            break
        try:
            target = os.readlink(path)  # of what is no link, mounted or not, the kernel says so unasked
        except OSError:
            return path
        path = os.path.normpath(os.path.join(os.path.dirname(path), target))
    raise EnvironmentProblem(
        f"{folder} is a link to a link, and so on, {_LINKS_MAX} times: name the folder itself"
    )


def users_of(folder: str) -> list[tuple[int, str]]:
    """Which processes have something open in a folder, or work in it: their numbers, and what they are called. Of
    those that may be looked at; by what links say, without following them."""
    found: list[tuple[int, str]] = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and any(_is_in(link, folder) for link in _links(process)):
            try:
                words = (
                    (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                )
            except OSError:
                words = ""
            found.append((int(process.name), words))
    return found


def _links(process: Path) -> Iterator[str]:
    try:
        names = [process / "cwd", process / "root", *(process / "fd").iterdir()]
    except OSError:
        return
    for name in names:
        try:
            yield os.readlink(name)
        except OSError:
            continue


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def _unescaped(text: str) -> str:
    r"""A path of mountinfo, which has spaces, tabs, line ends and backslashes as `\040` and so on."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
