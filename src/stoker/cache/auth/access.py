"""All who may use a server, and how they prove who they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from stoker.cache.auth.links import link_name
from stoker.cache.auth.principals import ANYONE, UNPROVEN, Principal
from stoker.cache.auth.tokens import Credential, check_unique, credentials_of, is_loopback
from stoker.errors import ConfigError

PROVED_MAX = 4096
"""Of tokens and certificates that others have vouched for, so many are remembered."""
_ANYONE_ID = -2
NO_QUOTAS: Mapping[str, int] = MappingProxyType({})


FrontRule = tuple[int, str, dict[str, list[str]], str, str]
"""A credential's id and secret, prefixes of what it may read by bucket, its access key (empty for a token) and its
principal's name: what the front checks."""


class Changes(NamedTuple):
    """Of what the front checks; `certificates`: the ids of those that are new, by their names."""

    added: list[FrontRule]
    removed: list[int]
    certificates: dict[str, int]


class Access:
    """Credentials that are given at the start, those of a file, which may change, and tokens and certificates that
    somebody else has vouched for, for a while. `is_open`: where there are none, and no file, everyone is let in: only
    ever right on loopback. `asks_back`: tokens that are not known here may still be proved; `asks_of_certificates`: the
    names in certificates may stand for somebody."""

    def __init__(
        self, given: Sequence[Credential] = (), *, is_closed: bool = False, asks_back: bool = False
    ) -> None:
        self._given = tuple(given)
        self._of_file: tuple[Credential, ...] = ()
        self._principals: tuple[Principal, ...] = ()
        self.quotas: Mapping[str, int] = {}
        """What the buckets of each principal may take of the server's disk together, where that is limited."""
        self._proved: dict[str, tuple[int, float]] = {}
        self._ids: dict[tuple[str, ...], int] = {}
        self._next_id = 0
        self._by_id: dict[int, Credential] = {}
        self._by_key: dict[str, Credential] = {}
        self._added: list[int] = []
        self._removed: list[int] = []
        self._is_all_new = True
        self._link_makers: dict[str, Credential] | None = None
        self.is_open = not self._given and not is_closed
        self.asks_back = asks_back
        self.asks_of_certificates = False
        self.writes_need_user = False
        """Who is nobody at a bucket's origin may not write there."""
        self._index()

    def take_file(
        self,
        credentials: Iterable[Credential],
        quotas: Mapping[str, int] = NO_QUOTAS,
        principals: Iterable[Principal] = (),
    ) -> None:
        """These are now in the file, and no others; what the buckets of each principal may take together; and all
        principals, also those for whom others vouch. Raises ConfigError, and changes nothing, where one of the
        credentials has been given to somebody else."""
        credentials = tuple(credentials)
        check_unique((*self._given, *credentials))
        self._of_file = credentials
        self.quotas = dict(quotas)
        self._principals = tuple(principals)
        self._link_makers = None
        # Whom they spoke for is as old as the rules.
        self._proved.clear()
        self._index()

    def remember(self, token: str, principal: Principal, until_s: float) -> None:
        """That token was proved to be this principal's, and is so until then (`time.time`)."""
        self._remember(token, Credential(principal, token), until_s)

    def remember_certificate(self, name: str, principal: Principal, until_s: float) -> None:
        """As `remember`, of who has shown a certificate of that name; nothing where none stands for anybody by now."""
        if self.asks_of_certificates:
            self._remember(f"certificate {name}", Credential(principal, certificate=name), until_s)

    def certificates(self) -> dict[str, int] | None:
        """The ids of certificates by their names, for the front; None where no certificate stands for anybody."""
        if not self.asks_of_certificates:
            return None
        return {one.certificate: number for number, one in self._by_id.items() if one.certificate}

    def anonymous(self) -> Principal | None:
        """Who they are that show nothing."""
        everyone = (
            one for one in self._by_id.values() if not (one.secret or one.access_key or one.certificate)
        )
        return next((one.principal for one in everyone), None)

    def expire(self, now_s: float) -> bool:
        """Forget tokens and certificates whose time is over; whether there was one."""
        over = [name for name, (_, until_s) in self._proved.items() if until_s <= now_s]
        for name in over:
            self._forget(name)
        return bool(over)

    def proved(self, token: str) -> Principal | None:
        """Whose a token is for which somebody has vouched."""
        found = self._proved.get(token)
        return None if found is None else self._by_id[found[0]].principal

    def rules(self) -> list[FrontRule]:
        """All credentials, for the front."""
        return [_rule(number, one) for number, one in self._by_id.items()]

    def take_changes(self) -> Changes | None:
        """Credentials that are new since this was asked last, and the ids of those that are known no more; None: all
        may be others."""
        is_all_new, added, removed = self._is_all_new, self._added, self._removed
        self._is_all_new, self._added, self._removed = False, [], []
        if is_all_new:
            return None
        new = [(number, self._by_id[number]) for number in added]
        names = {one.certificate: number for number, one in new if one.certificate}
        return Changes([_rule(*one) for one in new], removed, names)

    def tenants(self) -> dict[str, float]:
        """What each principal may be sent each second; 0: no limit of its own."""
        known = *self._principals, *(one.principal for one in self._by_id.values())
        return {principal.name: principal.egress_bytes_per_s for principal in known}

    def names(self) -> list[str]:
        """Of all principals that are configured, those of the command line first."""
        given = *(one.principal.name for one in self._given), *(one.name for one in self._principals)
        return list(dict.fromkeys(given))

    def named(self, name: str) -> Principal | None:
        """The principal of that name in the file, as it is now."""
        return next((one for one in self._principals if one.name == name), None)

    def fleet_token(self) -> str | None:
        """What this server shows to the others of its fleet: the first token that opens everything."""
        return next(iter(self.unrestricted_tokens()), None)

    def unrestricted_tokens(self) -> list[str]:
        """Bearer tokens that open everything."""
        return [
            one.secret
            for one in self._by_id.values()
            if one.principal.is_unrestricted and one.secret and not one.access_key
        ]

    def secret_of(self, access_key: str) -> str | None:
        """What those who use this access key sign with; None if there is no such key."""
        found = self._by_key.get(access_key)
        return None if found is None else found.secret

    def principal_of_key(self, access_key: str) -> Principal:
        """Who has proved that key. Raises KeyError."""
        return self._by_key[access_key].principal

    def link_maker(self, name: str) -> Credential | None:
        """The token or key that links of that name are made with (`link_name`); not one that others have vouched for:
        not every server knows it."""
        if self._link_makers is None:
            known = (*self._given, *self._of_file)
            self._link_makers = {link_name(one): one for one in known if one.secret}
        return self._link_makers.get(name)

    def principal(self, number: int) -> Principal:
        """Who has proved the credential of that id: anyone, where none is needed; UNPROVEN where the front leaves it to
        the back to find out, or the credential is not known any more."""
        if number == _ANYONE_ID and self.is_open:
            return ANYONE
        found = self._by_id.get(number)
        return UNPROVEN if found is None else found.principal

    def _remember(self, name: str, credential: Credential, until_s: float) -> None:
        if name in self._proved:
            self._forget(name)
        while len(self._proved) >= PROVED_MAX:
            self._forget(next(iter(self._proved)))
        number, self._next_id = self._next_id, self._next_id + 1
        self._proved[name] = number, until_s
        self._by_id[number] = credential
        self._added.append(number)

    def _forget(self, name: str) -> None:
        number, _ = self._proved.pop(name)
        del self._by_id[number]
        if number in self._added:
            self._added.remove(number)
        else:
            self._removed.append(number)

    def _index(self) -> None:
        """A credential keeps its id, and no id is ever another's: requests that wait have been told theirs."""
        ids: dict[tuple[str, ...], int] = {}
        self._by_id, self._by_key = {}, {}
        self._is_all_new, self._added, self._removed = True, [], []
        for one in (*self._given, *self._of_file):
            name = one.access_key, one.secret, one.certificate
            number = self._ids.get(name)
            if number is None:
                number, self._next_id = self._next_id, self._next_id + 1
            if name in ids:
                continue
            ids[name] = number
            self._by_id[number] = one
            if one.access_key:
                self._by_key[one.access_key] = one
        self._ids = ids


def _rule(number: int, one: Credential) -> FrontRule:
    return number, one.secret, one.principal.rules.reads(), one.access_key, one.principal.name


def access_of(tokens: Sequence[str], keys: Sequence[str] = ()) -> Access:
    """Of tokens and keys as they are given in a word. Raises ConfigError."""
    return Access(credentials_of(tokens, keys))


def check_listen(host: str, access: Access) -> None:
    """Refuse to serve other machines without a token. Raises ConfigError."""
    if access.is_open and not is_loopback(host):
        raise ConfigError(
            f"refusing to listen on {host!r} without a token: give --token TOKEN or --access FILE, or listen on "
            "127.0.0.1"
        )
