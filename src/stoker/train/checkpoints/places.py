"""Where checkpoints lie: a folder of this machine's, or what fsspec opens by a URL. Directories of files."""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qsl, unquote, urlsplit

from stoker.base.flushing import flush_folder
from stoker.cache.origin.open import without_query, without_secrets
from stoker.errors import CheckpointDamaged, ConfigError, EnvironmentProblem, StokerError
from stoker.settings import environment
from stoker.train.checkpoints.manifest import MANIFEST, commits_of

FLUSH_BYTES = 64 * 1024 * 1024
"""Of a file that is being written, so much reaches the disk at a time."""
MULTIPART_BYTES = 32 * 1024 * 1024
"""Of an upload; S3 takes 10,000 of them."""


class Sink(Protocol):
    """A file that is being written."""

    def write(self, data: bytes | memoryview, /) -> Any: ...


class Place(Protocol):
    """Directories of files. All raise EnvironmentProblem.

    `read` raises FileNotFoundError for what is not there, and CheckpointDamaged for what a disk does not give; that a
    storage cannot be reached is another matter, and no reason to go back to an older checkpoint.
    """

    shown: str
    """For messages: without secrets."""
    reads_at_once: int
    """More bring nothing."""
    writes_at_once: int
    """Files of one writer."""

    def list(self) -> dict[str, dict[str, int]]:
        """Of each directory the files, with their bytes."""

    def begin(self, step: str, attempt: str, *, is_shared: bool = False) -> str:
        """The directory in which the files of this step are written until `publish`. `is_shared`: several write there,
        who name the same attempt. It is never that of a checkpoint that is there already."""

    def create(self, directory: str, name: str) -> contextlib.AbstractContextManager[Sink]:
        """A new file, or another in the place of one. It is there for good when the context has ended."""

    def read(self, directory: str, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """A range of a file."""

    def read_into(self, directory: str, name: str, start: int, view: memoryview) -> int:
        """Fill `view` from there on; how many bytes there were."""

    def range_of(self, directory: str, name: str, start: int, length: int) -> FileRange | None:
        """A range as a file of its own, where it can be read from without another copy."""

    def drop(self, directory: str, name: str) -> None:
        """Remove a file, if it is there."""

    def publish(self, directory: str, step: str, attempt: str) -> str:
        """The directory has all its files: from now on it is one of the step. Its name: where there is another, with
        the attempt behind it."""

    def remove(self, directory: str) -> None:
        """The manifest goes first, so that what remains should this break off is no checkpoint."""


def open_place(url: str) -> Place:
    """A path, `file://…`, `s3://bucket/prefix` (as of origins), `memory://…`, or what fsspec knows.

    Raises ConfigError.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or scheme == "file":
        parts = urlsplit(url.replace("#", "%23").replace("?", "%3F"))
        path = Path(unquote(parts.path) if separator else url)
        is_here = not separator or (parts.netloc in ("", "localhost") and path.is_absolute())
        if not url or not is_here:
            raise ConfigError(
                f"{url!r} is no place for checkpoints: write a folder, or a URL like s3://bucket/prefix"
            )
        return LocalPlace(path)
    address, _, query = url.partition("?")
    if scheme == "s3":
        from stoker.cache.origin.s3_opening import s3_options

        options = s3_options(address, dict(parse_qsl(query, keep_blank_values=True)), environment())
        store = importlib.import_module("obstore.fsspec").FsspecStore(
            "s3", config=options.config, client_options=options.client, retry_config=options.retry
        )
        return RemotePlace(url, store, rest.partition("?")[0].rstrip("/"))
    import fsspec

    try:
        files, root = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError, OSError) as error:
        why = without_secrets(str(error), url)
        raise ConfigError(f"cannot open {without_query(url)} for checkpoints: {why}") from None
    return RemotePlace(url, files, root.rstrip("/"))


class LocalPlace:
    """A folder: files are flushed to the disk, a directory gets its name when it is whole."""

    reads_at_once = writes_at_once = 1

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shown = str(folder)

    def list(self) -> dict[str, dict[str, int]]:
        with self._told("list"):
            try:
                entries = [entry for entry in os.scandir(self.folder) if entry.is_dir()]
            except FileNotFoundError:
                return {}
            return {entry.name: _sizes(Path(entry.path)) for entry in entries}

    def begin(self, step: str, attempt: str, *, is_shared: bool = False) -> str:
        directory = f".{step}.{attempt}.part"
        with self._told("write to"):
            (self.folder / directory).mkdir(parents=True, exist_ok=True)
        return directory

    @contextlib.contextmanager
    def create(self, directory: str, name: str) -> Iterator[Sink]:
        with self._told("write to"), (self.folder / directory / name).open("wb") as file:
            yield _Flushed(file)
            file.flush()
            os.fsync(file.fileno())

    def read(self, directory: str, name: str, start: int = 0, stop: int | None = None) -> bytes:
        with self._told("read"), (self.folder / directory / name).open("rb") as file:
            file.seek(start)
            return file.read(-1 if stop is None else stop - start)

    def read_into(self, directory: str, name: str, start: int, view: memoryview) -> int:
        range_of = self.range_of(directory, name, start, len(view))
        with self._told("read"), range_of:
            return range_of.readinto(view)

    def range_of(self, directory: str, name: str, start: int, length: int) -> FileRange:
        with self._told("read"):
            return FileRange(self.folder / directory / name, start, length)

    def drop(self, directory: str, name: str) -> None:
        with self._told("remove from"):
            (self.folder / directory / name).unlink(missing_ok=True)

    def publish(self, directory: str, step: str, attempt: str) -> str:
        with self._told("write to"):
            flush_folder(self.folder / directory)
            name = step
            try:
                (self.folder / directory).rename(self.folder / name)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                name = f"{step}-{attempt}"
                (self.folder / directory).rename(self.folder / name)
            flush_folder(self.folder)  # before older ones go
        return name

    def remove(self, directory: str) -> None:
        with self._told("remove from"):
            (self.folder / directory / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(self.folder / directory)

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except StokerError:
            raise
        except (OSError, RuntimeError) as error:
            if isinstance(error, FileNotFoundError) and what != "write to":
                raise
            why = _cause(error)
            problem = CheckpointDamaged if what == "read" else EnvironmentProblem
            raise problem(f"cannot {what} {self.shown}: {why}") from error


class RemotePlace:
    """What has no rename and no flush: a directory is whole as soon as its manifest is there."""

    reads_at_once = writes_at_once = 4

    def __init__(self, url: str, files: Any, root: str) -> None:
        """`files` is an fsspec file system."""
        self.shown = without_query(url)
        self._url = url
        self._files = files
        self._root = root

    def list(self) -> dict[str, dict[str, int]]:
        with self._told("list"):
            self._files.invalidate_cache()
            try:
                found = self._files.find(self._root, maxdepth=2, detail=True)
            except FileNotFoundError:
                return {}
        listed: dict[str, dict[str, int]] = {}
        for path, info in found.items():
            directory, _, name = path.removeprefix(self._root).strip("/").partition("/")
            if name and commits_of(directory) is not None:
                listed.setdefault(directory, {})[name] = int(info["size"] or 0)
        return listed

    def begin(self, step: str, attempt: str, *, is_shared: bool = False) -> str:
        directory = f"{step}-{attempt}" if is_shared or step in self.list() else step
        with self._told("write to"):
            self._files.makedirs(self._path(directory), exist_ok=True)
        return directory

    @contextlib.contextmanager
    def create(self, directory: str, name: str) -> Iterator[Sink]:
        with self._told("write to"):
            path, options = self._path(directory, name), {}
            if hasattr(self._files, "_construct_store"):
                options["buffer_size"] = MULTIPART_BYTES
            with self._files.open(path, "wb", **options) as file:
                yield _Copied(file)

    def read(self, directory: str, name: str, start: int = 0, stop: int | None = None) -> bytes:
        with self._told("read"):
            if stop is not None and stop <= start:
                return b""
            if start == 0 and stop is None:
                return bytes(self._files.cat_file(self._path(directory, name)))
            return bytes(self._files.cat_file(self._path(directory, name), start=start, end=stop))

    def read_into(self, directory: str, name: str, start: int, view: memoryview) -> int:
        raw = self.read(directory, name, start, start + len(view))
        view[: len(raw)] = raw
        return len(raw)

    def range_of(self, directory: str, name: str, start: int, length: int) -> None:
        return None

    def drop(self, directory: str, name: str) -> None:
        with self._told("remove from"), contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._path(directory, name))

    def publish(self, directory: str, step: str, attempt: str) -> str:
        return directory

    def remove(self, directory: str) -> None:
        with self._told("remove from"):
            names = list(self.list().get(directory, {}))
            for name in sorted(names, key=lambda name: name != MANIFEST):
                with contextlib.suppress(FileNotFoundError):
                    self._files.rm_file(self._path(directory, name))
            with contextlib.suppress(OSError, NotImplementedError):
                self._files.rmdir(self._path(directory))  # where there are directories at all

    def _path(self, *names: str) -> str:
        return "/".join((self._root, *names))

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except StokerError:
            raise
        except Exception as error:
            if isinstance(error, FileNotFoundError) and what != "write to":
                raise
            # Each of fsspec's file systems has errors of its own.
            why = _cause(error)
            said = without_secrets(f"{type(why).__name__}: {why}", self._url)
            raise EnvironmentProblem(f"cannot {what} {self.shown}: {said}") from error


class FileRange(io.RawIOBase):
    """A range of a file, as a file that is read into the place where its bytes are wanted."""

    def __init__(self, path: Path, start: int, length: int) -> None:
        """Raises OSError."""
        self._file = path.open("rb", buffering=0)
        self._start = start
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        """All that fits, unless the file is shorter."""
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        filled = 0
        while filled < len(view):
            got = os.preadv(self._file.fileno(), [view[filled:]], self._start + self._at)
            if not got:
                break
            filled += got
            self._at += got
        return filled

    def close(self) -> None:
        self._file.close()
        super().close()


class _Flushed:
    """A file that is brought to the disk while it is written, so that no flush takes minutes."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._unflushed_bytes = 0

    def write(self, data: bytes | memoryview) -> int:
        self._file.write(data)
        self._unflushed_bytes += len(data)
        if self._unflushed_bytes >= FLUSH_BYTES:
            self._file.flush()
            os.fdatasync(self._file.fileno())
            self._unflushed_bytes = 0
        return len(data)


class _Copied:
    """A file that is given bytes of its own: obstore sends them from where they are, at a time when a tensor's memory
    may hold another one."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: bytes | memoryview) -> int:
        self._file.write(bytes(data))
        return len(data)


def _cause(error: Exception) -> Exception:
    """torch's own complaint about a file that could not be written hides why it could not.

    Raises what is no trouble of the storage: what Stoker has said already, an interrupt.
    """
    cause = error.__context__ if isinstance(error, RuntimeError) and error.__context__ is not None else error
    if isinstance(cause, StokerError) or not isinstance(cause, Exception):
        raise cause
    return cause


def _sizes(folder: Path) -> dict[str, int]:
    try:
        return {entry.name: entry.stat().st_size for entry in os.scandir(folder) if entry.is_file()}
    except FileNotFoundError:
        return {}  # it was removed just now
