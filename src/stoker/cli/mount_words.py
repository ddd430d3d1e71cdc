"""What `-o` says to `stoker mount`: its own options, and the words of a line of fstab."""

from __future__ import annotations

import argparse
import re

from stoker.errors import ConfigError

_OF_OTHERS = frozenset((
    "_netdev", "_rnetdev", "async", "atime", "auto", "comment", "defaults", "dev", "diratime", "dirsync", "helper",
    "iversion", "lazytime", "loud", "mand", "noatime", "noauto", "nodev", "nodiratime", "nofail", "nogroup",
    "noiversion", "nolazytime", "nomand", "noowner", "norelatime", "nostrictatime", "nosuid", "nosymfollow", "nouser",
    "nousers", "relatime", "ro", "rw", "silent", "strictatime", "suid", "symfollow", "sync", "uhelper",
))  # fmt: skip
"""Of any line of fstab: what mount(8) and systemd are told by, and what makes no difference. A mount has no devices, no
links, no programs with another user's rights and no times of access, and what is written is put when it is closed."""
_OF_USERS = frozenset(("group", "owner", "user", "users"))
"""Not only root may mount it: then nothing is run there unless it says `exec`."""
_FLAGS = frozenset((
    "allow_other", "no_passthrough", "no_small_files", "no_xattrs", "nonempty", "small_files", "writable",
))  # fmt: skip
_VALUES = frozenset((
    "endpoint", "token_file", "ca", "cache_dir", "cache_ttl", "capacity", "kernel_ttl", "ttl", "absent_ttl", "timeout",
    "names_max", "uid", "gid", "file_mode", "folder_mode",
))  # fmt: skip
_WORD = re.compile(r'(?:\\,|"[^"]*"|[^,])+')
"""A comma in a value is written as mount(8) has it: `NAME="a,b"`, or after a backslash."""


def take_options(arguments: argparse.Namespace) -> None:
    """Have what `-o` says as if the options themselves said it. Raises ConfigError."""
    words = [word for text in arguments.o for word in _WORD.findall(text)]
    if "writable" in words and [word for word in words if word in ("ro", "rw")][-1:] == ["ro"]:
        raise ConfigError("-o ro,writable: it is either the one or the other")
    for word in words:
        name, is_said, value = word.partition("=")
        known = name.replace("-", "_")
        if known in _FLAGS and not is_said:
            if known == "no_small_files":
                arguments.small_files = False
            else:
                setattr(arguments, known, True)
        elif known in _VALUES and value:
            setattr(arguments, known, _plain(value))
        elif name in ("exec", "noexec") or name in _OF_USERS:
            arguments.noexec = name != "exec"
        elif name == "remount":
            raise ConfigError("-o remount: a mount stays as it is: unmount it, and mount it anew")
        elif name not in _OF_OTHERS and not name.startswith(("x-", "X-")):
            raise ConfigError(
                f"-o {word}: {'it takes no value' if known in _FLAGS else 'there is no such option'}; there are "
                f"{', '.join(sorted(_FLAGS))}, and {', '.join(sorted(_VALUES))} with =VALUE"
            )


def _plain(value: str) -> str:
    if len(value) > 1 and value[0] == value[-1] == '"':
        return value[1:-1]
    return value.replace("\\,", ",")
