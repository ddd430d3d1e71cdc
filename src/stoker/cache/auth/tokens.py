"""Bearer tokens and keys as they are given in a word: `TOKEN` opens every bucket, `TOKEN:BUCKET,…` opens those,
`BUCKET=rw` to write to it as well; keys alike, `ACCESS:SECRET` and `ACCESS:SECRET:BUCKET,…`."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stoker.cache.auth.principals import Principal
from stoker.cache.auth.rules import DELETE, EVERYTHING, LIST, READ, WRITE, Rule, Rules
from stoker.errors import ConfigError

_WRITES = "=rw"
"""Behind the name of a bucket that may be written to as well."""
_ACCESS_KEY = re.compile(r"[A-Za-z0-9._-]{3,128}")
_READING = frozenset((READ, LIST))
_SECRET_BYTES_MIN = 8


@dataclass(frozen=True, slots=True)
class Credential:
    """What somebody proves with who it is: a bearer token, which is shown; or a key, which has a name, `access_key`,
    and signs with its secret; or a certificate of that name. With none of them: of those who show nothing."""

    principal: Principal
    secret: str = ""
    access_key: str = ""
    certificate: str = ""


def credentials_of(tokens: Sequence[str], keys: Sequence[str]) -> list[Credential]:
    """Each one speaks for itself. Raises ConfigError."""
    found = []
    for number, text in enumerate(tokens):
        which = f"token {number + 1}"
        secret, _, names = text.partition(":")
        rules = _rules_of(which, names) if ":" in text else EVERYTHING
        found.append(Credential(Principal(f"token-{number + 1}", rules), check_secret(which, secret)))
    for number, text in enumerate(keys):
        which = f"key {number + 1}"
        access, secret, listed = split_key(which, text)
        rules = EVERYTHING if listed is None else _rules_of(which, listed)
        found.append(Credential(Principal(f"key-{access}", rules), secret, access))
    check_unique(found)
    return found


def split_key(which: str, text: str) -> tuple[str, str, str | None]:
    """Access key, secret, and what is behind a second colon. Raises ConfigError, which says nothing of the secret."""
    access, _, rest = text.partition(":")
    if not _ACCESS_KEY.fullmatch(access):
        raise ConfigError(
            f"{which} is written ACCESS:SECRET or ACCESS:SECRET:BUCKET,BUCKET, where ACCESS has 3 to 128 "
            "letters, digits, '-', '_' or '.'"
        )
    secret, colon, names = rest.partition(":")
    return access, check_secret(which, secret), names if colon else None


def check_secret(which: str, secret: str) -> str:
    """Raises ConfigError, which does not tell it."""
    if len(secret) < _SECRET_BYTES_MIN or not secret.isascii() or not secret.isprintable() or " " in secret:
        raise ConfigError(
            f"{which} must have {_SECRET_BYTES_MIN} or more printable ASCII characters and no space"
        )
    return secret


def check_unique(credentials: Iterable[Credential]) -> None:
    """Raises ConfigError if it would not be clear whom one of them speaks for."""
    keys: dict[str, Principal] = {}
    tokens: dict[str, Principal] = {}
    for one in credentials:
        seen, name = (keys, one.access_key) if one.access_key else (tokens, one.secret)
        other = seen.setdefault(name, one.principal)
        if other is not one.principal and one.access_key:
            raise ConfigError(f"there is another key with the access key {name!r}")
        if other is not one.principal and other.name != one.principal.name:
            what = "the same token" if one.secret else "those who show no credential"
            raise ConfigError(f"{other.name} and {one.principal.name} both have {what}")


def _rules_of(which: str, names: str) -> Rules:
    listed = [name.strip() for name in names.split(",") if name.strip()]
    if not listed:
        raise ConfigError(
            f"{which} ends with ':' but names no bucket: write {which.split()[0].upper()}:BUCKET,BUCKET"
        )
    return Rules(
        Rule(
            name.removesuffix(_WRITES), "", _READING | ({WRITE, DELETE} if name.endswith(_WRITES) else set())
        )
        for name in listed
    )


def is_loopback(host: str) -> bool:
    """Whether this address is reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
