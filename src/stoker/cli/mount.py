"""`stoker mount`, `stoker umount`: a dataset as a folder."""

from __future__ import annotations

import argparse
import os
import select
import signal
import socket
import sys
import time
from typing import Any

from stoker.cache.mount import device, holding
from stoker.cache.mount.holder import HolderConfig
from stoker.cache.mount.leftovers import clear_left
from stoker.cache.mount.places import (
    FILE_SYSTEM,
    MountedThere,
    MountPlace,
    full_path,
    mounted,
    mounted_on,
    users_of,
)
from stoker.cli.cache_options import print_json, warn
from stoker.cli.mount_plan import check_folder, plan, take_away
from stoker.cli.mount_words import take_options
from stoker.errors import ConfigError, EnvironmentProblem
from stoker.settings import notify_socket

_GONE_S = 60.0
"""A holder gives its daemon and its cache their time to end."""
_RELOADED_S = 60.0
_LOOK_S = 0.02
_MOUNT_EXAMPLES = """\
examples:
  stoker mount s3://bucket/imagenet /data/imagenet          until Ctrl-C, through a cache of its own
  stoker mount stoker://imagenet /data/imagenet --daemon    from the cache server at STOKER_CACHE_ENDPOINT
  stoker mount s3://bucket/llm /data/llm --cache-dir /ssd/cache --capacity 500GB
  stoker mount                                              what is mounted
  stoker mount --reload /data/llm                           have a new daemon go on, as after an upgrade

Without DIR it lists what is mounted. stoker://BUCKET is read from the server at --endpoint or STOKER_CACHE_ENDPOINT
(best over its Unix socket, unix:///PATH: then the kernel reads the cache's own files); with --cache-dir through a cache
on this machine. Any other URL, or a path, is an origin, which is read through a cache on this machine.
To look at DIR/.stoker-refresh makes what is in DIR be asked for anew; DIR/.stoker-status says how things are.
In /etc/fstab:  s3://bucket/llm  /data/llm  stoker  allow_other,cache_dir=/ssd/cache,_netdev  0  0
"""
_UMOUNT_EXAMPLES = """\
examples:
  stoker umount /data/imagenet
  stoker umount --lazy /data/imagenet     even while somebody has files open there: those go on
"""


def add_mount_parsers(subparsers: Any) -> None:
    """Add `stoker mount` and `stoker umount` to a parser's subcommands."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = subparsers.add_parser(
        "mount", help="show a dataset as a folder", epilog=_MOUNT_EXAMPLES, formatter_class=raw,
        description="Show a dataset as a folder, read at the speed of this machine's disk.",
    )  # fmt: skip
    parser.add_argument(
        "source", metavar="SOURCE", nargs="?", help="stoker://BUCKET/PREFIX, an origin's URL, or a path"
    )
    parser.add_argument("folder", metavar="DIR", nargs="?", help="an empty folder")
    parser.add_argument(
        "--daemon", action="store_true", help="return once it is mounted, and go on in the background"
    )
    parser.add_argument("--reload", metavar="DIR", help="start the daemon of this mount anew; readers go on")
    parser.add_argument("--json", action="store_true", help="JSON, for programs")
    where = parser.add_argument_group("where the data come from")
    where.add_argument(
        "--endpoint", metavar="URL", help="the cache: unix:///PATH, http://HOST:PORT, or several with ,"
    )
    where.add_argument("--token-file", metavar="FILE", help="with its token; default: STOKER_CACHE_TOKEN")
    where.add_argument("--ca", metavar="FILE", help="who signed the certificate of an https:// server")
    where.add_argument(
        "--cache-dir", metavar="DIR", help="a cache on this machine, found again by the next mount"
    )
    where.add_argument("--capacity", metavar="SIZE", help="of that cache, at most (20GB; 20MB is the least)")
    looks = parser.add_argument_group("what it looks like")
    looks.add_argument("--uid", metavar="N", help="whom all belongs to (you)")
    looks.add_argument("--gid", metavar="N", help="and which group (yours)")
    looks.add_argument("--file-mode", metavar="MODE", help="rights of files (444; 644)")
    looks.add_argument("--folder-mode", metavar="MODE", help="rights of folders (555; 755)")
    looks.add_argument(
        "--allow-other", action="store_true", help="other users may look at it, as the rights say"
    )
    looks.add_argument("--nonempty", action="store_true", help="hide what is in DIR")
    _add_ways(parser.add_argument_group("how it is read"))
    parser.set_defaults(handler=_mount, noexec=False)
    ending = subparsers.add_parser(
        "umount", help="end a mount", description="End a mount.", epilog=_UMOUNT_EXAMPLES, formatter_class=raw
    )
    ending.add_argument("folder", metavar="DIR")
    ending.add_argument("--lazy", action="store_true", help="at once; who has files open there goes on")
    ending.set_defaults(handler=_umount)


def _add_ways(how: Any) -> None:
    how.add_argument("--kernel-ttl", metavar="TIME", default="60s", help="the kernel asks again after (60s)")
    how.add_argument(
        "--ttl", metavar="TIME", default="60s", help="the daemon asks its cache again after (60s)"
    )
    how.add_argument(
        "--absent-ttl", metavar="TIME", default="5s", help="and about what was not there after (5s)"
    )
    how.add_argument(
        "--cache-ttl", metavar="TIME", help="a cache of the mount's own asks the origin again after (1h)"
    )
    how.add_argument(
        "--timeout", metavar="TIME", default="30s", help="no program waits longer for an answer (30s)"
    )
    how.add_argument(
        "--names-max",
        metavar="N",
        default="200000",
        help="so many names and files the kernel keeps, with what it has read of them; about 2 KB of memory each, half "
        "of it the kernel's (200000)",
    )
    how.add_argument(
        "--small-files",
        action=argparse.BooleanOptionalAction,
        help="the kernel opens files without asking, and knows no extended attributes; by default it does the former "
        "where nearly all is in files of 1 MiB at most",
    )
    how.add_argument(
        "--no-xattrs", action="store_true", help="the kernel asks for none: `ls -l` of much is faster"
    )
    how.add_argument("--no-passthrough", action="store_true", help="the daemon reads, not the kernel")
    how.add_argument(
        "--writable", action="store_true", help="whole files may be written, through to the origin"
    )
    how.add_argument(
        "-o",
        metavar="NAME[=VALUE],…",
        action="append",
        default=[],
        help="as in fstab: the same options, and noexec",
    )


def _mount(arguments: argparse.Namespace) -> int:
    if arguments.reload is not None:
        return _reload(_folder(arguments.reload))
    if arguments.source is None:
        return _list(is_json=arguments.json)
    if arguments.folder is None:
        raise ConfigError(f"say on which folder: stoker mount {arguments.source} DIR")
    if not arguments.source:  # as of a variable that is not set: not the folder that somebody works in
        raise ConfigError("SOURCE is empty: say what to mount")
    take_options(arguments)
    folder = _folder(arguments.folder)
    check_folder(folder, may_have_files=arguments.nonempty)
    place = MountPlace(folder)
    with place.kept():
        clear_left()
        return _hold(arguments, plan(arguments, folder), place)


def _hold(arguments: argparse.Namespace, config: HolderConfig, place: MountPlace) -> int:
    folder = config.folder
    if arguments.daemon:
        pid = holding.start(config, place)
        print_json({"folder": folder, "source": config.source, "pid": pid}) if arguments.json else print(
            _shown(f"{config.source} is mounted on {folder} (process {pid}); log: {place.log_path}")
        )
        return 0

    def ready(_: str) -> None:
        warn(f"{config.source} is mounted on {folder}; Ctrl-C ends it")
        _tell_systemd()

    return holding.hold(config, place, ready)


def _folder(said: str) -> str:
    if not said:
        raise ConfigError("DIR is empty: say which folder")
    return full_path(said)


def _tell_systemd() -> None:
    """Where it has started this, that it is ready (sd_notify)."""
    address = notify_socket()
    if address is None:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        try:
            told.sendto(b"READY=1", f"\0{address[1:]}" if address.startswith("@") else address)
        except OSError as error:
            warn(f"systemd cannot be told at {address}: {error.strerror}")


def _list(*, is_json: bool) -> int:
    found = []
    for there in mounted():
        if there.file_system == FILE_SYSTEM:
            place = MountPlace(there.folder)
            info = place.info()
            found.append({
                "folder": _text(there.folder),
                "source": _text(there.source),
                "pid": None if info is None else info.pid,
                "state": _state(there, place),
            })  # fmt: skip
    if is_json:
        print_json(found)
        return 0
    for one in found:
        pid = "" if one["pid"] is None else f", process {one['pid']}"
        print(_shown(f"{one['source']} on {one['folder']} ({one['state']}{pid})"))
    if not found:
        warn("nothing is mounted")
    return 0


def _text(path: str) -> str:
    """A path that others have mounted something on may have any bytes: those that are no UTF-8 as `\\xff`."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _shown(text: str) -> str:
    """For a terminal, which would obey control characters, and may not have all others."""
    encoding = sys.stdout.encoding or "utf-8"
    plain = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)
    return plain.encode(encoding, "backslashreplace").decode(encoding)


def _state(there: MountedThere, place: MountPlace) -> str:
    if there.uid not in (None, os.getuid()):
        return "another user's"
    if place.is_held():
        return "mounted"
    return "left by a process that is gone" if place.is_known() else "by a process that is not known here"


def _reload(folder: str) -> int:
    place = MountPlace(folder)
    info = place.info()
    if info is None:
        raise ConfigError(f"nothing is mounted on {folder} by this user: `stoker mount` lists what is")
    try:
        holder = os.pidfd_open(info.pid)
        try:
            if not place.is_held():  # its number may be another one's by now
                raise ProcessLookupError
            signal.pidfd_send_signal(holder, signal.SIGHUP)
            _wait_for_next(place, holder, info.daemon_pid)
        finally:
            os.close(holder)
    except ProcessLookupError:
        raise EnvironmentProblem(
            f"the process that held the mount on {folder} is gone: `stoker umount {folder}` takes away what is left"
        ) from None
    except OSError as error:
        raise EnvironmentProblem(
            f"process {info.pid}, which holds the mount on {folder}, cannot be told: {error.strerror}"
        ) from None
    return 0


def _wait_for_next(place: MountPlace, holder: int, last: int) -> None:
    """Until another daemon than that one answers. Raises EnvironmentProblem."""
    until = time.monotonic() + _RELOADED_S
    while (info := place.info()) is None or info.daemon_pid == last or not info.answers:
        why = ""
        if select.select([holder], [], [], _LOOK_S)[0]:
            why = "has ended in place of starting its daemon anew"
        elif time.monotonic() > until:
            why = f"has no new daemon that answers after {_RELOADED_S:g} s, and goes on trying"
        if why:
            raise EnvironmentProblem(
                f"the mount on {place.folder} {why}: its log says why ({place.log_path})"
            )


def _who_has(folder: str) -> str:
    if inner := [one.folder for one in mounted() if one.folder.startswith(f"{folder}/")]:
        return f"something is mounted on {', '.join(_text(one) for one in inner[:5])}"
    # What is open here was handed on by who has started this.
    found = [(pid, words) for pid, words in users_of(folder) if pid != os.getpid()]
    users = ", ".join(f"{pid} ({words[:60]})" for pid, words in found[:5])
    return f"used by {users or 'a process that this user cannot look at, or that has a file mapped'}"


def _umount(arguments: argparse.Namespace) -> int:
    folder = _folder(arguments.folder)
    there = mounted_on(folder)
    if there is None:
        raise ConfigError(f"nothing is mounted on {folder}: `stoker mount` lists what is")
    if there.file_system != FILE_SYSTEM:
        raise ConfigError(
            f"{there.source} ({there.file_system}) is mounted on {folder}: umount {folder} ends that"
        )
    place = MountPlace(folder)
    if there.uid in (None, os.getuid()) and place.is_known() and not place.is_held():
        take_away(there, place)
        return 0
    try:
        device.unmount(folder, is_lazy=arguments.lazy)
    except device.MountBusy as error:
        raise EnvironmentProblem(
            f"{error}; {_who_has(folder)}: end that first, or say `stoker umount --lazy {folder}`"
        ) from None
    until = time.monotonic() + _GONE_S
    while not arguments.lazy and place.is_held():
        if time.monotonic() > until:
            raise EnvironmentProblem(
                f"{folder} is unmounted, but its process has not ended; see {place.log_path}"
            )
        time.sleep(0.02)
    return 0
