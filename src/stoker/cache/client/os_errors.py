"""Errors of the cache as those who read files expect them."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from stoker.errors import AccessDenied, ObjectNotFound, StokerError


def os_error(error: StokerError, path: str | None) -> Exception:
    """What is not there and what may not be read, as errors of the system; any other stays what it is. No path: the
    error itself names what it is about."""
    if isinstance(error, ObjectNotFound):
        return FileNotFoundError(errno.ENOENT, str(error), path)
    if isinstance(error, AccessDenied):
        return PermissionError(errno.EACCES, str(error), path)
    return error


@contextmanager
def os_errors(path: str | None) -> Iterator[None]:
    """Raise them so, for that path."""
    try:
        yield
    except (ObjectNotFound, AccessDenied) as error:
        raise os_error(error, path) from error


def read_only(path: object) -> PermissionError:
    """The error for who wants to write there."""
    return PermissionError(
        errno.EROFS, "stoker:// is read only: write to the origin, then `stoker cache refresh`", str(path)
    )
