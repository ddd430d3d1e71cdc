"""What was renamed or made in a folder reaches the disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def flush_folder(folder: Path | str) -> None:
    """Names reach the disk too. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that cannot flush a folder
            raise
    finally:
        os.close(descriptor)
