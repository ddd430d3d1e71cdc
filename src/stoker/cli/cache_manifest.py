"""A file that names the objects to be loaded."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

import msgspec

from stoker.cache.client.loading import Wanted
from stoker.cli.cache_options import SCHEME
from stoker.errors import ConfigError
from stoker.wire.http import check_key


class _Line(msgspec.Struct):
    """A line of `stoker cache ls --recursive --json`."""

    key: str
    size_bytes: int | None = None
    is_folder: bool = False


def read_manifest(path: str, bucket: str) -> Iterator[Wanted]:
    """The objects that a file names, line by line: keys, stoker:// URLs of that bucket, or lines of `ls --json`, which
    have sizes. Empty lines count for nothing. Raises ConfigError, which names the line."""
    try:
        with open(path, encoding="utf-8", newline="\n") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"--manifest {path}: it is read twice, so it must be a file, not a pipe")
            for number, line in enumerate(file, 1):
                text = line.rstrip("\r\n")
                if text:
                    yield _wanted(text, bucket, f"--manifest {path}, line {number}")
    except OSError as error:
        raise ConfigError(f"cannot read --manifest {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--manifest {path} is not UTF-8: {error}") from error


def _wanted(text: str, bucket: str, where: str) -> Wanted:
    if text.startswith(SCHEME):
        name, _, key = text.removeprefix(SCHEME).partition("/")
        if name != bucket or not key:
            raise ConfigError(f"{where}: {text!r} is no object of {SCHEME}{bucket}")
        return Wanted(_checked(key, where), None)
    if text.startswith("{"):
        try:
            said = msgspec.json.decode(text, type=_Line)
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"{where}: it is not a line of `stoker cache ls --json` ({error}); "
                f"write a key that begins with {{ as {SCHEME}{bucket}/KEY"
            ) from error
        if said.is_folder:
            raise ConfigError(f"{where}: {said.key!r} is a folder; list with --recursive")
        return Wanted(_checked(said.key, where), said.size_bytes)
    return Wanted(_checked(text, where), None)


def _checked(key: str, where: str) -> str:
    try:
        return check_key(key)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
