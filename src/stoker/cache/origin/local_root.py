"""The folder that an origin is, which may be gone: removed, or not mounted any more. Blocks."""

from __future__ import annotations

import os

from stoker.errors import ConfigError, OriginError

_LOCAL_FILE_SYSTEMS = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "ramfs", "overlay", "f2fs", "zfs"}
)
_MOUNTS = "/proc/self/mounts"


class Root:
    """What is not found below it is not there only while it is there itself, on the file system on which it was opened.

    Raises ConfigError if the folder cannot be opened.
    """

    def __init__(self, folder: str) -> None:
        self.path = os.path.realpath(folder)
        if not os.path.isdir(self.path):
            raise ConfigError(f"the origin folder {folder!r} is not there, or is not a folder")
        self._device = os.stat(self.path).st_dev
        self._point, kind = mounted(self.path)
        self.is_local = kind in _LOCAL_FILE_SYSTEMS

    def check(self) -> None:
        """Raises OriginError if it is gone, or what lies there is the bare folder on which it was mounted."""
        try:
            device = os.stat(f"{self.path}/").st_dev
        except OSError as error:
            raise OriginError(
                f"the origin folder {self.path} is gone: {error.strerror}; mount it again, or make it again if it was "
                "removed"
            ) from error
        if device == self._device:
            return
        point, _ = mounted(self.path)
        if len(point) < len(self._point):
            raise OriginError(
                f"the origin folder {self.path} is not what it was: nothing is mounted at {self._point} any more; "
                "mount it again"
            )
        # Mounted again it may have another number; and what was mounted over it since is what is meant.
        self._device, self._point = device, point


def mounted(path: str) -> tuple[str, str]:
    """Where the file system is mounted that `path` lies on, and its type, as /proc names it; empty if it cannot be
    told."""
    best, kind = "", ""
    try:
        with open(_MOUNTS, encoding="utf-8", errors="replace") as mounts:
            for line in mounts:
                fields = line.split(" ")
                point = fields[1].replace("\\040", " ")
                if len(point) >= len(best) and (path == point or path.startswith(point.rstrip("/") + "/")):
                    best, kind = point, fields[2]
    except OSError:
        return "", ""
    return best, kind
