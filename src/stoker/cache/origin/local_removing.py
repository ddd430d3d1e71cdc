"""Removing the folder that an origin is, once there are no objects in it. Blocks, and raises OSError."""

from __future__ import annotations

import os
import secrets
import shutil

from stoker.cache.origin.local_folders import found
from stoker.cache.origin.port import STAGING


def remove_folder(root: str) -> bool:
    """Remove it with what is staged in it; False: there are objects, and it is as it was.

    It is set aside first, so that nothing can get a name in it while it is looked through: a writer finds neither the
    folder nor what it has staged.
    """
    above, name = os.path.split(os.path.realpath(root))
    aside = f"{above}/.{name}.{secrets.token_hex(8)}.stoker-removed"
    try:
        os.rename(f"{above}/{name}", aside)
    except FileNotFoundError:
        return True
    if _has_files(aside):
        os.rename(aside, f"{above}/{name}")
        return False
    shutil.rmtree(aside)
    return True


def _has_files(root: str) -> bool:
    """Whether there is anything but folders in it, beside what is staged."""
    for folder, names, files in os.walk(root):
        if folder == root and STAGING in names:
            names.remove(STAGING)
        if files or any(os.path.islink(f"{folder}/{name}") for name in names):
            return True
        if folder != root and found(folder, "") is not None:
            return True
    return False
