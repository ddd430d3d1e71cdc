"""Folders as objects: keys that end with a slash, without content, by which clients of S3 make folders. Such a folder
of the file system is marked; one that is not is none. Every function here blocks, and raises OSError."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from contextlib import suppress

from stoker.cache.origin import local_files
from stoker.cache.origin.writing_port import Attributes
from stoker.wire.cache_api import ObjectInfo

_MADE = local_files.FOLDER


def is_folder(key: str) -> bool:
    """Whether that is the key of a folder."""
    return key.endswith("/")


def found(folder: str | int, key: str) -> ObjectInfo | None:
    """The folder at a path, or of a descriptor, as an object; None: it is none. `headers` are not told."""
    try:
        made_ns = int(os.getxattr(folder, _MADE))
    except (OSError, ValueError):
        return None
    return ObjectInfo(key, 0, f"0-{made_ns}", made_ns / 1e9)


def make(root: str, key: str, attributes: Attributes, check: Callable[[bool], object]) -> ObjectInfo | None:
    """Have a folder as an object, where `check` raises nothing, as `local_files.publish` has it. None: the file system
    cannot remember that."""
    fd = local_files.enter(root, key[:-1], makes=True, owner=attributes.owner)
    try:
        with local_files.locked(root) as is_alone:
            check(is_alone)
            if attributes.owner is not None:
                local_files.give(fd, attributes.owner)
            try:
                os.setxattr(fd, _MADE, str(time.time_ns()).encode())
            except OSError as error:
                if error.errno == errno.ENOTSUP:
                    return None
                raise
            local_files.forget(fd)
            local_files.keep(fd, attributes)
        os.fsync(fd)
        return found(fd, key)
    finally:
        os.close(fd)


def remove(root: str, key: str) -> None:
    """Have it no more as an object, nor as a folder, if nothing is in it."""
    above, _, name = key[:-1].rpartition("/")
    fd = local_files.enter(root, key[:-1], makes=False)
    try:
        with local_files.locked(root):
            os.removexattr(fd, _MADE)
    finally:
        os.close(fd)
    fd = local_files.enter(root, above, makes=False)
    try:
        with suppress(OSError):  # there are objects in it
            os.rmdir(name, dir_fd=fd)
    finally:
        os.close(fd)
