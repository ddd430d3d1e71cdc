"""Whom a principal is at the origins that it writes to, as the file of access says it."""

from __future__ import annotations

import grp
import pwd
from collections.abc import Callable, Mapping

import msgspec

from stoker.base.ids import check_name
from stoker.cache.auth.rules import ANY_BUCKET
from stoker.cache.origin.s3_signing import Credentials
from stoker.cache.origin.users import OriginUser
from stoker.cache.origin.writing_port import Owner
from stoker.errors import ConfigError

_ID_MAX = 2**32 - 2
"""The number after that stands for nobody: to give a file to it changes nothing."""


class OriginUserSaid(msgspec.Struct, forbid_unknown_fields=True):
    """A user at the origin of one bucket, or of all."""

    unix: str | int = ""
    """Of folders: USER or USER:GROUP, by names or numbers."""
    key: str = ""
    """Of S3: ACCESS:SECRET or ACCESS:SECRET:SESSION_TOKEN."""
    key_file: str = ""
    """The same in the first line of a file."""


def origin_users(
    where: str, said: Mapping[str, OriginUserSaid], lines: Callable[[str], list[str]]
) -> dict[str, OriginUser]:
    """By bucket, `*` for all others. `lines`: of a file of secrets. Raises ConfigError."""
    found = {}
    for bucket, one in said.items():
        which = f"{where}: origin_users.{bucket}"
        if bucket != ANY_BUCKET:
            try:
                check_name("bucket", bucket)
            except ValueError as error:
                raise ConfigError(f"{which}: {error}") from error
        text = one.key
        if one.key_file:
            if text:
                raise ConfigError(f"{which} has a key and a key_file: give one of them")
            text = next(iter(lines(one.key_file)), "")
            if not text:
                raise ConfigError(
                    f"{which}: {one.key_file!r} is empty: it has ACCESS:SECRET in its first line"
                )
        if not text and one.unix == "":
            raise ConfigError(f"{which} names nobody: give unix (for folders), or key or key_file (for S3)")
        found[bucket] = OriginUser(
            None if one.unix == "" else _owner(which, str(one.unix)),
            _credentials(which, text) if text else None,
        )
    return found


def _owner(which: str, text: str) -> Owner:
    user, colon, group = text.partition(":")
    try:
        uid = int(user) if user.isdecimal() else pwd.getpwnam(user).pw_uid
        if colon:
            gid = int(group) if group.isdecimal() else grp.getgrnam(group).gr_gid
        else:
            gid = pwd.getpwuid(uid).pw_gid
    except (KeyError, OverflowError):
        raise ConfigError(
            f"{which}: there is no Unix user or group {text!r} on this machine: write USER, USER:GROUP or UID:GID"
        ) from None
    if max(uid, gid) > _ID_MAX:
        raise ConfigError(f"{which}: {text!r} is no user and group: numbers end at {_ID_MAX}")
    return Owner(uid, gid)


def _credentials(which: str, text: str) -> Credentials:
    access, _, rest = text.partition(":")
    secret, _, session_token = rest.partition(":")
    if not access or not secret or not text.isascii() or not text.isprintable() or " " in text:
        raise ConfigError(
            f"{which}: a key is written ACCESS:SECRET or ACCESS:SECRET:SESSION_TOKEN, in printable ASCII"
        )
    return Credentials(access, secret, session_token)
