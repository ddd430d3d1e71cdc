"""Static bearer tokens and keys: `TOKEN` opens every bucket, `TOKEN:BUCKET,…` opens those, `BUCKET=rw` to write
to it as well; keys alike."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from stoker.errors import ConfigError

_WRITES = "=rw"
"""Behind the name of a bucket that may be written to as well."""
_ACCESS_KEY = re.compile(r"[A-Za-z0-9._-]{3,128}")


class Principal:
    """Who a request speaks for. `buckets` are those that it may read; None means all, to write to as well, and
    administration. `writable`: those of them that it may write to."""

    __slots__ = ("buckets", "name", "writable")

    def __init__(
        self, name: str, buckets: frozenset[str] | None, writable: frozenset[str] = frozenset()
    ) -> None:
        self.name = name
        self.buckets = buckets
        self.writable = writable

    @property
    def is_unrestricted(self) -> bool:
        """Whether it may also administer the server."""
        return self.buckets is None

    def may_read(self, bucket: str) -> bool:
        """Whether it may read this bucket."""
        return self.buckets is None or bucket in self.buckets

    def may_write(self, bucket: str) -> bool:
        """Whether it may write to this bucket, where anybody may."""
        return self.buckets is None or bucket in self.writable


UNPROVEN = Principal("unproven", frozenset())
"""Until it is found out who asks."""
_ANYONE_ID = -2
_UNPROVEN_ID = -3


class TokenAuth:
    """The bearer tokens of a server, and its keys: `ACCESS:SECRET` opens every bucket to who signs with it (AWS
    signature, version 4), `ACCESS:SECRET:BUCKET,…` those. Without any of both everyone is let in: only ever right on
    loopback."""

    def __init__(self, tokens: Sequence[str], keys: Sequence[str] = ()) -> None:
        self._principals: list[Principal] = []
        self._secrets: list[tuple[str, str]] = []
        self._of_key: dict[str, int] = {}
        for number, text in enumerate(tokens):
            self._add(f"token-{number + 1}", "", *_secret_and_buckets(f"token {number + 1}", text))
        for number, text in enumerate(keys):
            which = f"key {number + 1}"
            access, _, rest = text.partition(":")
            if not _ACCESS_KEY.fullmatch(access):
                raise ConfigError(
                    f"{which} is written ACCESS:SECRET or ACCESS:SECRET:BUCKET,BUCKET, where ACCESS has 3 to 128 "
                    "letters, digits, '-', '_' or '.'"
                )
            if access in self._of_key:
                raise ConfigError(f"{which}: there is another key with the access key {access!r}")
            self._of_key[access] = len(self._principals)
            self._add(f"key-{access}", access, *_secret_and_buckets(which, rest))
        self._anyone = None if self._principals else Principal("anyone", None)

    def _add(
        self,
        name: str,
        access: str,
        secret: str,
        buckets: frozenset[str] | None,
        writable: frozenset[str],
    ) -> None:
        self._principals.append(Principal(name, buckets, writable))
        self._secrets.append((access, secret))

    @property
    def is_open(self) -> bool:
        """Whether neither token nor key is needed."""
        return self._anyone is not None

    def rules(self) -> list[tuple[int, str, list[str] | None, str]]:
        """Each credential's id and secret, the buckets that it opens (None: all), and its access key (empty for a
        token), for the front, which checks them."""
        return [
            (number, secret, None if principal.buckets is None else sorted(principal.buckets), access)
            for number, (principal, (access, secret)) in enumerate(
                zip(self._principals, self._secrets, strict=True)
            )
        ]

    def fleet_token(self) -> str | None:
        """What this server shows to the others of its fleet: the first token that opens everything."""
        pairs = zip(self._principals, self._secrets, strict=True)
        return next((secret for who, (access, secret) in pairs if who.is_unrestricted and not access), None)

    def secret_of(self, access_key: str) -> str | None:
        """What those who use this access key sign with; None if there is no such key."""
        number = self._of_key.get(access_key)
        return None if number is None else self._secrets[number][1]

    def principal_of_key(self, access_key: str) -> Principal:
        """Who has proved that key. Raises KeyError."""
        return self._principals[self._of_key[access_key]]

    def principal(self, number: int) -> Principal:
        """Who has proved the credential of that id: anyone, where none is needed; UNPROVEN where the front leaves it to
        the back to find out, or the credential is not known any more."""
        if number == _ANYONE_ID and self._anyone is not None:
            return self._anyone
        return self._principals[number] if 0 <= number < len(self._principals) else UNPROVEN


def _secret_and_buckets(which: str, text: str) -> tuple[str, frozenset[str] | None, frozenset[str]]:
    secret, colon, names = text.partition(":")
    listed = [name.strip() for name in names.split(",") if name.strip()]
    if len(secret) < 8 or not secret.isascii() or not secret.isprintable() or " " in secret:
        raise ConfigError(f"{which} must have 8 or more printable ASCII characters and no space")
    if colon and not listed:
        raise ConfigError(
            f"{which} ends with ':' but names no bucket: write {which.split()[0].upper()}:BUCKET,BUCKET"
        )
    writable = frozenset(name.removesuffix(_WRITES) for name in listed if name.endswith(_WRITES))
    return secret, frozenset(name.removesuffix(_WRITES) for name in listed) if colon else None, writable


def check_listen(host: str, auth: TokenAuth) -> None:
    """Refuse to serve other machines without a token. Raises ConfigError."""
    if auth.is_open and not is_loopback(host):
        raise ConfigError(
            f"refusing to listen on {host!r} without a token: give --token TOKEN, or listen on 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Whether this address is reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
