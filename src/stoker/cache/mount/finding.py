"""Finds out what a mount's core asks, from its source; what goes wrong becomes a reason that programs understand."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Mapping

from stoker.cache.mount import device
from stoker.cache.mount.questions import (
    Back,
    Fetch,
    Find,
    Held,
    List,
    MakeFolder,
    Put,
    Question,
    Read,
    Refresh,
    Remove,
    RemoveFolder,
    Rename,
    Room,
    Stage,
    StageDrop,
    StageKeep,
    StageRead,
    StageSize,
    Status,
)
from stoker.cache.mount.source_port import Found, Source
from stoker.cache.mount.staging import Staging
from stoker.cache.mount.status import status_text
from stoker.cache.mount.waiting import Failed
from stoker.errors import (
    AccessDenied,
    BadKey,
    CacheUnavailable,
    ObjectChanged,
    ObjectNotFound,
    ObjectTooLarge,
    OriginBusy,
    OriginFull,
    OriginReadOnly,
    StokerError,
    WriteDenied,
    WriteRefused,
)

log = logging.getLogger("stoker.mount")
_AGAIN_S, _AGAIN_S_MAX = 0.05, 1.0
_QUIET_S = 5.0
_TOLD_MAX = 5


_REFUSED = (
    (OriginReadOnly, errno.EROFS),
    (WriteDenied, errno.EACCES),
    (OriginFull, errno.ENOSPC),
    (BadKey, errno.EINVAL),
    (ObjectTooLarge, errno.EFBIG),
)


class Finding:
    """Blocking, for many threads. A cache server that cannot be reached is tried again until it has been so for
    `timeout_s`: it may be about to be there again. So is an origin that does not take what is written just now; what is
    only read the cache has tried again. `behind`: where the source has it from, and is kept for a while as
    well."""

    def __init__(
        self, source: Source, staging: Staging, fd: int, timeout_s: float, behind: Source | None = None
    ) -> None:
        self._source = source
        self._behind = behind
        self._staging = staging
        self._fd = fd
        self._timeout_s = timeout_s
        self._said: dict[str, float] = {}
        self._copied: dict[tuple[str, str], tuple[Found, Found]] = {}
        self.facts: Callable[[], Mapping[str, object]] = dict
        """What a status says beside what the source does."""

    def tell_left(self) -> None:
        """Of what mounts before could not write, where nobody has looked after it yet."""
        left = sorted(self._staging.left())
        if left:
            some = ", ".join(left[:_TOLD_MAX]) + (", …" if len(left) > _TOLD_MAX else "")
            log.warning(
                "%d files that could not be written by mounts before are kept in %s (%s): look after them, and remove "
                "them", len(left), self._staging.folder, some,
            )  # fmt: skip

    def find(self, question: Question) -> object:
        """The answer, or Failed."""
        deadline: float | None = None
        pause_s = _AGAIN_S
        while True:
            try:
                return self._once(question)
            except (CacheUnavailable, OriginBusy) as error:
                if isinstance(error, OriginBusy) and not _may_be_done_again(question):
                    self._say(error)
                    return Failed(errno.EIO)
                # What had gone on for long when the server went has as much time as all else.
                deadline = deadline or time.monotonic() + self._timeout_s
                if time.monotonic() + pause_s > deadline:
                    self._say(error)
                    return Failed(errno.EIO)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _AGAIN_S_MAX)
            except ObjectChanged:
                return Failed(errno.ESTALE)
            except ObjectNotFound:
                return Failed(errno.ENOENT if isinstance(question, List) else errno.ESTALE)
            except AccessDenied as error:
                self._say(error)
                return Failed(errno.EACCES)
            except WriteRefused as error:
                self._say(error)
                return Failed(next((code for kind, code in _REFUSED if isinstance(error, kind)), errno.EIO))
            except OSError as error:
                self._say(error)
                return Failed(error.errno or errno.EIO)
            except StokerError as error:
                self._say(error)
                return Failed(errno.EIO)

    def _once(self, question: Question) -> object:
        source = self._source
        match question:
            case Find(path):
                return source.find(path)
            case List(path, after, limit):
                return source.page(path, after, limit)
            case Read(path, version, start, stop):
                return source.read(path, version, start, stop)
            case Back(_, path, version):
                return self._back(path, version)
            case Fetch(path, version):
                source.fetch(path, version)
                return None
            case Held(path, version):
                return source.held_bytes(path, version)
            case Refresh(path):
                if self._behind is not None:
                    self._behind.refresh(path)
                return source.refresh(path)
            case Room():
                return source.room()
            case Status(path):
                return status_text(source, path, self.facts())
        return self._change(question)

    def _change(self, question: Question) -> object:
        source, staging = self._source, self._staging
        match question:
            case Stage(stage, offset, data):
                staging.write(stage, offset, data)
            case StageSize(stage, size_bytes):
                staging.resize(stage, size_bytes)
            case StageRead(stage, start, stop):
                return staging.read(stage, start, stop)
            case StageDrop(stage):
                staging.drop(stage)
            case StageKeep(stage, path):
                if kept := staging.keep(stage, path):
                    log.error("%s could not be written: what was is kept in %s", path, kept)
                else:
                    log.error("%s could not be written: nothing of it is there", path)
            case Put(stage, path, _):
                with staging.open(stage) as file:
                    return source.put(path, file, os.fstat(file.fileno()).st_size)
            case Remove(path):
                source.remove(path)
                self._keep_folder(path)
            case MakeFolder(path):
                source.make_folder(path)
            case RemoveFolder(path):
                return self._remove_folder(path)
            case Rename(path, to, replaces):
                return self._rename(path, to, replaces=replaces)
            case _:
                raise AssertionError(question)
        return None

    def _remove_folder(self, path: str) -> object:
        if self._source.page(path, None, 1).entries:
            return Failed(errno.ENOTEMPTY)
        self._source.remove(f"{path}/")
        self._keep_folder(path)
        return None

    def _rename(self, path: str, to: str, *, replaces: bool) -> object:
        """Tried again, it goes on where it was: what it has copied it only has to remove, if that is what is there."""
        source = self._source
        found = source.find(path)
        copied = self._copied.get((path, to))
        if copied is None or found not in (None, copied[0]):  # or there is something else to be copied by now
            if found is None:
                return Failed(errno.ENOENT)
            if found.is_folder:
                return Failed(errno.EXDEV)
            if not replaces and source.find(to) is not None:
                return Failed(errno.EEXIST)
            copied = self._copied[path, to] = found, source.copy(path, to)
        if found == copied[0]:
            source.remove(path)
        del self._copied[path, to]
        self._keep_folder(path)
        return copied

    def _keep_folder(self, path: str) -> None:
        """A folder does not go with the last file in it, as far as that depends on what keys begin with."""
        folder = path.rpartition("/")[0]
        if folder and self._source.find(folder) is None:
            self._source.make_folder(folder)

    def _back(self, path: str, version: str) -> int | None:
        fd = self._source.whole_file(path, version)
        if fd is None:
            return None
        try:
            return device.open_backing(self._fd, fd)
        except OSError as error:
            self._say(error)
            return None
        finally:
            os.close(fd)

    def _say(self, error: Exception) -> None:
        """Once in a while of each kind: a thousand readers may meet the same."""
        kind, now = type(error).__name__, time.monotonic()
        if now - self._said.get(kind, -_QUIET_S) >= _QUIET_S:
            self._said[kind] = now
            log.warning("%s", error)


def _may_be_done_again(question: Question) -> bool:
    """Whether it is something to be written that is the same when it is written twice, as whole files are: an origin
    that said that it failed may have done it."""
    return isinstance(question, Put | MakeFolder | Remove) or (
        isinstance(question, Rename) and question.replaces
    )
