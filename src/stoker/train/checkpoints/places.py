"""Where checkpoints lie: a folder of this machine's, or what fsspec opens by a URL. Directories of files."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qsl, unquote, urlsplit

from stoker.base.flushing import flush_folder
from stoker.cache.origin.open import without_query, without_secrets
from stoker.errors import CheckpointDamaged, ConfigError, EnvironmentProblem, StokerError
from stoker.settings import environment
from stoker.train.checkpoints.manifest import MANIFEST, REMOVAL, commits_of, step_name
from stoker.train.checkpoints.place_files import Copied, FileRange, Flushed, cause_of, sizes_in

PART = ".part"
"""Ends the name of a directory that is no checkpoint, or not yet."""
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

    def begin(self, step: str, attempt: str) -> str:
        """The directory in which the files of this step are written until `publish`, by all who name this attempt and
        by nobody else."""

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
        """The directory has all its files: from now on it is one of the step. Its name, with the attempt behind it
        where there is no renaming, or another of the step."""

    def remove(self, directory: str) -> None:
        """Should this break off, what remains is no checkpoint."""

    def remove_torn(self, directory: str) -> None:
        """What a writer has left that did not publish it. One that is at work after all cannot do so any more, or finds
        afterwards that files are missing or the removal is under way; what it has published before stays."""


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


def place_within(url: str, name: str) -> str:
    """The URL of a place in the place at `url`. In what names a folder `?` and `#` are letters like others."""
    scheme, separator, _ = url.partition("://")
    if not separator or scheme == "file":
        return f"{url.rstrip('/')}/{name}"
    base, query, options = url.partition("?")
    return f"{base.rstrip('/')}/{name}{query}{options}"


class LocalPlace:
    """A folder: files are flushed to the disk, a directory gets its name when it is whole."""

    reads_at_once = writes_at_once = 1

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()  # wherever the script goes to
        self.shown = str(self.folder)

    def list(self) -> dict[str, dict[str, int]]:
        with self._told("list"):
            try:
                entries = [entry for entry in os.scandir(self.folder) if entry.is_dir()]
            except FileNotFoundError:
                return {}
            return {entry.name: sizes_in(Path(entry.path)) for entry in entries}

    def begin(self, step: str, attempt: str) -> str:
        directory = f".{step}.{attempt}{PART}"
        with self._told("write to"):
            (self.folder / directory).mkdir(parents=True, exist_ok=True)
        return directory

    @contextlib.contextmanager
    def create(self, directory: str, name: str) -> Iterator[Sink]:
        with self._told("write to"), (self.folder / directory / name).open("wb") as file:
            yield Flushed(file)
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
            # At once, under a name that nobody publishes and everybody removes.
            step = directory.removeprefix(".").partition(".")[0][: len(step_name(0))]
            gone = self.folder / f".{step}.gone-{uuid.uuid4().hex[:12]}{PART}"
            (self.folder / directory).rename(gone)
            shutil.rmtree(gone)

    def remove_torn(self, directory: str) -> None:
        self.remove(directory)

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except StokerError:
            raise
        except (OSError, RuntimeError) as error:
            if isinstance(error, FileNotFoundError) and what != "write to":
                raise
            why = cause_of(error)
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

    def begin(self, step: str, attempt: str) -> str:
        directory = f"{step}-{attempt}"
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
                yield Copied(file)

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
        self._remove(directory, self.list().get(directory, {}))

    def remove_torn(self, directory: str) -> None:
        # Whoever publishes puts the manifest first and then looks; we put the removal first. So one of us sees the
        # other's, and where both do the checkpoint is given up and what is left of it goes some other time.
        with self.create(directory, REMOVAL) as sink:
            sink.write(b"{}")
        names = self.list().get(directory, {})
        if MANIFEST in names:
            self.drop(directory, REMOVAL)
        else:
            self._remove(directory, names)

    def _remove(self, directory: str, names: Iterable[str]) -> None:
        """The manifest first, and last what says that the others go."""
        for name in sorted(names, key=lambda name: (name == REMOVAL, name != MANIFEST)):
            self.drop(directory, name)
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
        except Exception as error:  # each of fsspec's file systems has errors of its own
            if isinstance(error, FileNotFoundError) and what != "write to":
                raise
            why = cause_of(error)
            said = without_secrets(f"{type(why).__name__}: {why}", self._url)
            raise EnvironmentProblem(f"cannot {what} {self.shown}: {said}") from error
