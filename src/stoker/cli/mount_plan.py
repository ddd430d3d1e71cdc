"""What `stoker mount` is told, as what a holder needs: sources, settings, and whether the folder can be used."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import secrets
import stat
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import xxhash
from msgspec.structs import replace

from stoker.base.units import parse_duration_s
from stoker.cache.embedded import DEFAULT_CAPACITY_BYTES
from stoker.cache.mount import device
from stoker.cache.mount.holder import HolderConfig
from stoker.cache.mount.own_cache import EmbeddedConfig
from stoker.cache.mount.places import (
    FILE_SYSTEM,
    BucketPlace,
    MountedThere,
    MountPlace,
    is_on,
    is_utf8,
    mounted_on,
)
from stoker.cache.mount.state import MountSettings
from stoker.cli.cache_options import SCHEME, parse_below, parse_capacity_bytes, warn
from stoker.errors import ConfigError, EnvironmentProblem
from stoker.settings import ClientTlsFiles, cache_settings

BUCKET = "mount"
_FILES = "file://"
_TIME_MAX_S = 3650 * 86400.0
_DIGITS_MAX = 10
_NAMES_MIN = 1000
"""Fewer than a list has on a page the kernel would forget while it is read."""
_CAPACITY_BYTES_MIN = 20_000_000
"""Who reads on in a file has several blocks fetched ahead at a time."""


def settings_of(arguments: argparse.Namespace) -> MountSettings:
    """Raises ConfigError."""
    names_max = _names_max(arguments.names_max)
    return MountSettings(
        uid=_number(arguments.uid, "--uid", os.getuid()),
        gid=_number(arguments.gid, "--gid", os.getgid()),
        file_mode=_mode(arguments.file_mode or ("644" if arguments.writable else "444"), "--file-mode"),
        folder_mode=_mode(arguments.folder_mode or ("755" if arguments.writable else "555"), "--folder-mode"),
        kernel_ttl_s=_time(arguments.kernel_ttl, "--kernel-ttl"),
        ttl_s=_time(arguments.ttl, "--ttl"),
        absent_ttl_s=_time(arguments.absent_ttl, "--absent-ttl"),
        timeout_s=_time(arguments.timeout, "--timeout", least_s=0.1),
        nodes_max=names_max,
        known_max=names_max // 2,
        wants_passthrough=os.geteuid() == 0 and not arguments.no_passthrough and not arguments.small_files,
        is_writable=arguments.writable,
        has_xattrs=not arguments.no_xattrs and not arguments.small_files,
    )


def plan(arguments: argparse.Namespace, folder: str) -> HolderConfig:
    """What to mount on a folder. Raises ConfigError."""
    for name, said in vars(arguments).items():
        if isinstance(said, str):
            if not said:  # a path would be that of the folder that somebody works in
                raise ConfigError(
                    f"--{name.replace('_', '-')} is empty: say what it is to be, or leave it out"
                )
            _check_text(said, name.replace("_", "-"))
    config = _planned(arguments, folder)
    _check_apart(config)
    return config


def _planned(arguments: argparse.Namespace, folder: str) -> HolderConfig:
    settings = settings_of(arguments)
    where = cache_settings()
    tls = _absolute(where.tls if arguments.ca is None else dataclasses.replace(where.tls, ca=arguments.ca))
    kept = _full(str(where.directory), "STOKER_CACHE_DIR")
    source: str = arguments.source
    base = HolderConfig(
        folder=folder, source=source, place=BucketPlace(endpoint="", bucket=BUCKET, prefix=""), settings=settings,
        lets_others=arguments.allow_other,
        runs_programs=not arguments.noexec,
        may_skip_opens=arguments.small_files is None and not arguments.writable,
        staging_path=os.path.join(kept, "staging", MountPlace(folder).path.name),
    )  # fmt: skip
    if not source.startswith(SCHEME):
        return _embedding(base, arguments, _origin(source))
    below = parse_below(source)
    endpoint, token = arguments.endpoint or where.endpoint, _token(arguments)
    token_from = (
        f"--token-file {arguments.token_file}" if token else ("STOKER_CACHE_TOKEN" if where.token else "")
    )
    token = token or where.token
    base = replace(base, token_from=token_from)
    if endpoint is None:
        raise ConfigError(
            f"{source}: say where its cache server is: --endpoint http://HOST:PORT, or set STOKER_CACHE_ENDPOINT"
        )
    fleet = BucketPlace(endpoint=endpoint, token=token, bucket=below.bucket, prefix=below.prefix, tls=tls)
    if arguments.cache_dir is None:
        for name in ("capacity", "cache_ttl"):
            if getattr(arguments, name) is not None:
                raise ConfigError(
                    f"--{name.replace('_', '-')} is of a cache that the mount has for itself: say --cache-dir DIR as "
                    "well"
                )
        is_near = endpoint.startswith("unix://")
        found = dataclasses.replace(settings, wants_passthrough=settings.wants_passthrough and is_near)
        return replace(base, place=fleet, settings=found)
    if endpoint.startswith("unix://"):
        raise ConfigError(
            f"--cache-dir: the server at {endpoint} is on this machine already, and its cache is used"
        )
    listed = ",".join(one.strip().partition("://")[2].rstrip("/") for one in endpoint.split(","))
    # An URL names no secret: whoever holds the place writes the file.
    fields = [f"token_file={quote(str(MountPlace(folder).token_path))}"] if token else []
    fields += [f"ca_file={quote(tls.ca)}"] if tls.ca else []
    scheme = "stoker+https" if endpoint.startswith("https://") else "stoker+http"
    url = f"{scheme}://{listed}/{below.bucket}/{below.prefix}".rstrip("/")
    return _embedding(replace(base, behind=fleet), arguments, f"{url}?{'&'.join(fields)}" if fields else url)


def _check_apart(config: HolderConfig) -> None:
    """That the mount needs nothing which lies in it: it would wait for itself."""
    folder, embedded = config.folder, config.embedded
    _check_outside(
        folder, str(MountPlace(folder).path), "what is kept of a mount while it lasts", "take another folder"
    )
    if config.settings.is_writable:
        _check_outside(
            folder,
            config.staging_path,
            "what is written until it is put",
            "set STOKER_CACHE_DIR to another folder",
        )
    if embedded is None:
        return
    if embedded.directory is not None:
        _check_outside(folder, embedded.directory, "the cache", "say --cache-dir with a folder elsewhere")
    if embedded.origin_url.startswith(_FILES):
        origin = unquote(urlsplit(embedded.origin_url.replace("#", "%23")).path)
        _check_outside(folder, origin, "the origin", "mount it on a folder elsewhere")


def _check_outside(folder: str, path: str, what: str, mend: str) -> None:
    real = os.path.realpath(path)
    if os.path.commonpath((real, folder)) in (real, folder):
        raise ConfigError(
            f"{what}, {real}, and the mount on {folder} cannot lie in one another, for it would wait for itself: {mend}"
        )


def check_folder(folder: str, *, may_have_files: bool) -> None:
    """Whether something can be mounted there. What a mount that was not ended has left there is taken away. Raises
    EnvironmentProblem, ConfigError."""
    there = mounted_on(folder)
    if there is not None and there.file_system == FILE_SYSTEM:
        if there.uid not in (None, os.getuid()):
            raise EnvironmentProblem(
                f"{there.source} is mounted on {folder} by another user, of number {there.uid}"
            )
        place = MountPlace(folder)
        if not place.is_known():
            raise EnvironmentProblem(
                f"{there.source} is mounted on {folder} by a process that is not known here, which may be at work: "
                f"`stoker umount --lazy {folder}` takes the mount away"
            )
        if place.is_held():
            raise EnvironmentProblem(
                f"{there.source} is mounted on {folder}: `stoker umount {folder}` ends that"
            )
        warn(
            f"{folder}: a mount of {there.source} was left there by a process that is gone; it is taken away"
        )
        take_away(there, place)
        return check_folder(folder, may_have_files=may_have_files)
    if there is not None and not may_have_files:
        raise ConfigError(
            f"{there.source} ({there.file_system}) is mounted on {folder}: choose a folder in it, or say --nonempty"
        )
    try:
        is_folder = stat.S_ISDIR(os.stat(folder).st_mode)
        names = os.listdir(folder) if is_folder else []
    except FileNotFoundError:
        raise ConfigError(f"{folder} is not there: make it first (mkdir {folder})") from None
    except OSError as error:
        raise EnvironmentProblem(f"cannot look at {folder}: {error.strerror}") from None
    if not is_folder:
        raise ConfigError(f"{folder} is no folder")
    if names and not may_have_files:
        raise ConfigError(
            f"{folder} is not empty ({names[0]}, …), and what is in it would be hidden: take an empty folder, or say "
            "--nonempty"
        )
    return None


def take_away(there: MountedThere, place: MountPlace) -> None:
    """End a mount that its holder has left, and clear away what was kept of it: a token is in it. Raises
    EnvironmentProblem."""
    if not place.take():
        return  # somebody else has just come, to do the same or to mount
    try:
        if is_on(there.folder, there.number):  # and not yet what somebody has mounted since
            with contextlib.suppress(OSError):  # who still waits has waited for nobody
                device.abort(there.number)
            device.unmount(there.folder, is_lazy=True)
    except BaseException:
        place.let_go()  # it is still known what it was
        raise
    place.leave()


def _embedding(base: HolderConfig, arguments: argparse.Namespace, origin_url: str) -> HolderConfig:
    capacity_bytes = DEFAULT_CAPACITY_BYTES
    if arguments.capacity is not None:
        capacity_bytes = parse_capacity_bytes(arguments.capacity, _CAPACITY_BYTES_MIN)
    directory = arguments.cache_dir
    if directory is None:
        # The next mount of the same finds it again.
        directory = cache_settings().directory / "mounts" / xxhash.xxh3_64_hexdigest(origin_url)
    embedded = EmbeddedConfig(
        origin_url=origin_url, directory=_full(str(directory), "--cache-dir"), capacity_bytes=capacity_bytes,
        ttl_s=_time(arguments.cache_ttl or "1h", "--cache-ttl"),
    )  # fmt: skip
    place = replace(base.place, token=secrets.token_hex(16))
    return replace(base, embedded=embedded, place=place)


def _origin(source: str) -> str:
    """An URL of an origin; a path is that of a folder of this machine. Raises ConfigError."""
    if "://" in source:
        return source
    path = _full(source, "SOURCE")
    if not os.path.isdir(path):
        raise ConfigError(
            f"{source} is neither an URL (stoker://BUCKET/PREFIX, s3://BUCKET/PREFIX, …) nor a folder that is there"
        )
    return f"{_FILES}{quote(path)}"


def _full(path: str, name: str) -> str:
    found = os.path.abspath(path)
    _check_text(found, name)
    return found


def _check_text(said: str, name: str) -> None:
    """What a holder is told is JSON, which has no other bytes."""
    if not is_utf8(said):
        raise ConfigError(f"{name} {said!r}: give a name that is UTF-8")


def _absolute(tls: ClientTlsFiles) -> ClientTlsFiles:
    """In the background a holder works in another folder."""
    ca, certificate, key = (
        _full(name, "the certificate") if name else "" for name in (tls.ca, tls.certificate, tls.key)
    )
    return ClientTlsFiles(ca, certificate, key)


def _token(arguments: argparse.Namespace) -> str | None:
    if arguments.token_file is None:
        return None
    try:
        return Path(arguments.token_file).read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--token-file {arguments.token_file}: {error}") from None


def _number(text: str | None, name: str, default: int) -> int:
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > _DIGITS_MAX or int(text) >= 2**32 - 1:
        raise ConfigError(f"{name} {text}: give a number")
    return int(text)


def _names_max(text: str) -> int:
    names_max = _number(text, "--names-max", 0)
    if names_max < _NAMES_MIN:
        raise ConfigError(f"--names-max {text}: give at least {_NAMES_MIN}")
    return names_max


def _mode(text: str, name: str) -> int:
    if not text or set(text) - set("01234567") or int(text, 8) > 0o777:
        raise ConfigError(f"{name} {text}: give rights as chmod takes them in digits, like 444")
    return int(text, 8)


def _time(text: str, name: str, *, least_s: float = 0.0) -> float:
    try:
        value = parse_duration_s(text)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None
    if value > _TIME_MAX_S:
        raise ConfigError(f"{name} {text}: give at most ten years (3650d)")
    if value < least_s:
        raise ConfigError(f"{name} {text}: give at least {least_s:g}s")
    return value
