"""Static bearer tokens: `TOKEN` opens every bucket, `TOKEN:BUCKET,…` opens those."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from stoker.errors import AccessDenied, ConfigError


class Principal:
    """Who a request speaks for. `buckets` are those that it may read; None means all, and administration."""

    __slots__ = ("buckets", "name")

    def __init__(self, name: str, buckets: frozenset[str] | None) -> None:
        self.name = name
        self.buckets = buckets

    @property
    def is_unrestricted(self) -> bool:
        """Whether it may also administer the server."""
        return self.buckets is None

    def may_read(self, bucket: str) -> bool:
        """Whether it may read this bucket."""
        return self.buckets is None or bucket in self.buckets


class TokenAuth:
    """The tokens of a server. Without any everyone is let in: only ever right on loopback."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._principals: list[tuple[str, Principal]] = []
        for number, text in enumerate(tokens):
            token, colon, names = text.partition(":")
            buckets = frozenset(name.strip() for name in names.split(",") if name.strip())
            if len(token) < 8 or not token.isascii() or not token.isprintable() or " " in token:
                raise ConfigError(
                    f"token {number + 1} must have 8 or more printable ASCII characters and no space"
                )
            if colon and not buckets:
                raise ConfigError(
                    f"token {number + 1} ends with ':' but names no bucket: write TOKEN:BUCKET,BUCKET"
                )
            self._principals.append((token, Principal(f"token-{number + 1}", buckets if colon else None)))
        self._anyone = None if self._principals else Principal("anyone", None)

    @property
    def is_open(self) -> bool:
        """Whether no token is needed."""
        return self._anyone is not None

    def rules(self) -> list[tuple[int, str, list[str] | None]]:
        """Each token's id and secret, and the buckets that it opens (None: all), for the front, which checks them."""
        return [
            (number, secret, None if principal.buckets is None else sorted(principal.buckets))
            for number, (secret, principal) in enumerate(self._principals)
        ]

    def fleet_token(self) -> str | None:
        """What this server shows to the others of its fleet: the first token that opens everything."""
        return next((secret for secret, principal in self._principals if principal.is_unrestricted), None)

    def principal(self, token: int) -> Principal:
        """Who has proved the token of that id; a negative one stands for anyone, where no token is needed.

        Raises AccessDenied for an id that is none.
        """
        if token < 0 and self._anyone is not None:
            return self._anyone
        if not 0 <= token < len(self._principals):
            raise AccessDenied("the token is not known any more")
        return self._principals[token][1]


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
