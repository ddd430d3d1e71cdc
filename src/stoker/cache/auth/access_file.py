"""The file that says who may do what: principals with their rules, limits and credentials, in TOML.

    [principals.vision]
    rules = ["images: read, list", "scratch/vision/: all"]
    token_files = ["vision.token"]
    keys = ["VISION:its-secret"]
    egress = "500MB"
    origin_users = { "*" = { unix = "vision" } }

Secrets can stand in files of their own, whose names are relative to this one's folder. All are read again when one has
changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stoker.base.ids import check_name
from stoker.base.marks import file_mark
from stoker.base.units import parse_size_bytes
from stoker.cache.auth.claims import CLAIM_KINDS, Claimant
from stoker.cache.auth.origin_users import OriginUserSaid, origin_users
from stoker.cache.auth.principals import Principal
from stoker.cache.auth.rules import Rules, parse_rule
from stoker.cache.auth.tokens import Credential, check_secret, check_unique, split_key
from stoker.errors import ConfigError

_RESERVED = ("token-", "key-")
_LEAST_BYTES = 1000
_SECRETS_BYTES_MAX = 1024 * 1024
_CERTIFICATE_NAMES = ("URI:", "DNS:", "CN:")


class PrincipalSaid(msgspec.Struct, forbid_unknown_fields=True):
    """One principal, as the file has it."""

    rules: list[str] = []
    tokens: list[str] = []
    token_files: list[str] = []
    """One token in each line: several while one takes the place of another."""
    keys: list[str] = []
    key_files: list[str] = []
    """One ACCESS:SECRET in each line."""
    egress: str | int = 0
    """What it is sent each second at most, by each server."""
    quota: str | int = 0
    """What the buckets that name it as their tenant may take of each server's disk together."""
    anonymous: bool = False
    """It is all who show no credential."""
    subjects: list[str] = []
    """Of JSON Web Tokens; `*` stands for anything."""
    service_accounts: list[str] = []
    """NAMESPACE/NAME in Kubernetes; `*` stands for anything."""
    certificates: list[str] = []
    """Names in the certificates of clients (`--tls-client-ca`): `URI:…`, or `DNS:…` in those that have no URI, or
    `CN:…` in those that have neither; `*` stands for anything."""
    origin_users: dict[str, OriginUserSaid] = {}
    """Whom it is at the origins that it writes to, by bucket; `*` is all others."""


class JwtSaid(msgspec.Struct, forbid_unknown_fields=True):
    """Whose JSON Web Tokens are taken."""

    issuer: str
    audience: str
    jwks: str
    """The issuer's public keys: an https:// URL, or a file."""
    ca_file: str = ""
    """Of who signed the certificate of that URL; empty: those of the system."""
    subject: str = "sub"
    """The claim that says who it is."""


class KubernetesSaid(msgspec.Struct, forbid_unknown_fields=True):
    """Where tokens of service accounts are reviewed; the defaults are right in a pod."""

    api_server: str = "https://kubernetes.default.svc"
    ca_file: str = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"
    token_file: str = "/var/run/secrets/kubernetes.io/serviceaccount/token"
    audiences: list[str] = []
    """That a token must be for; empty: the API server's own."""


class AccessSaid(msgspec.Struct, forbid_unknown_fields=True):
    """The file."""

    principals: dict[str, PrincipalSaid] = {}
    writes_need_user: bool = False
    """Who is nobody at a bucket's origin may not write there."""
    jwt: JwtSaid | None = None
    kubernetes: KubernetesSaid | None = None


@dataclass(frozen=True)
class AccessRead:
    """What a file says: credentials, and who is whom of those for whom somebody else vouches."""

    credentials: tuple[Credential, ...]
    quotas: Mapping[str, int]
    claimants: tuple[Claimant, ...]
    jwt: JwtSaid | None = None
    jwt_keys: str | None = None
    """What the file of the issuer's keys says; None: they are at a URL."""
    kubernetes: KubernetesSaid | None = None
    writes_need_user: bool = False
    principals: tuple[Principal, ...] = ()
    """All of them, in their order."""


class AccessFile:
    """Raises ConfigError where the file, or a file of secrets, cannot be read or understood."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: dict[Path, tuple[int, ...]] = {}

    def read(self) -> AccessRead:
        """What it says now."""
        seen: dict[Path, tuple[int, ...]] = {}
        try:
            said = self._decode(self._text(self._path, seen))
            credentials: list[Credential] = []
            quotas: dict[str, int] = {}
            claimants: list[Claimant] = []
            principals: list[Principal] = []
            for name, one in said.principals.items():
                principal = self._principal(name, one, seen)
                principals.append(principal)
                if one.quota:
                    quotas[name] = self._size(name, "quota", one.quota)
                credentials += self._credentials(principal, one, seen)
                _check_certificates(name, one.certificates)
                claimants += (
                    Claimant(kind, pattern, principal)
                    for kind, field in CLAIM_KINDS.items()
                    for pattern in getattr(one, field)
                )
            check_unique(credentials)
            keys = None
            for one_ca in (said.jwt, said.kubernetes):
                if one_ca is not None and one_ca.ca_file:
                    one_ca.ca_file = str(self._path.parent / one_ca.ca_file)
                    self._text(Path(one_ca.ca_file), seen)
            if said.jwt is not None and not said.jwt.jwks.startswith("https://"):
                keys = self._text(self._path.parent / said.jwt.jwks, seen)
            return AccessRead(
                tuple(credentials),
                quotas,
                tuple(claimants),
                said.jwt,
                keys,
                said.kubernetes,
                said.writes_need_user,
                tuple(principals),
            )
        except ConfigError as error:
            raise ConfigError(f"{self._path}: {error}") from error
        finally:
            # What is wrong is not looked at again before it has changed.
            self._seen = seen

    def has_changed(self) -> bool:
        """Whether it, or a file of secrets, is another than when it was read."""
        return any(file_mark(path) != mark for path, mark in self._seen.items())

    def _decode(self, text: str) -> AccessSaid:
        try:
            return msgspec.toml.decode(text, type=AccessSaid)
        except msgspec.DecodeError as error:
            raise ConfigError(str(error)) from error

    def _principal(self, name: str, said: PrincipalSaid, seen: dict[Path, tuple[int, ...]]) -> Principal:
        try:
            check_name("principal", name)
        except ValueError as error:
            raise ConfigError(f"principals.{name}: {error}") from error
        if name.startswith(_RESERVED):
            raise ConfigError(
                f"principals.{name}: names with {' or '.join(_RESERVED)} are those of --token and --key"
            )
        rules = Rules(parse_rule(text) for text in said.rules)
        users = origin_users(
            f"principals.{name}", said.origin_users, lambda file: list(self._lines([file], seen))
        )
        return Principal(name, rules, self._size(name, "egress", said.egress), users)

    def _size(self, name: str, what: str, said: str | int) -> int:
        try:
            size_bytes = said if isinstance(said, int) else parse_size_bytes(said)
            if size_bytes < 0:
                raise ValueError(f"{said!r} is negative")
        except ValueError as error:
            raise ConfigError(f"principals.{name}: {what}: {error}") from error
        if 0 < size_bytes < _LEAST_BYTES:
            raise ConfigError(
                f"principals.{name}: {what}: {said!r} is less than {_LEAST_BYTES} bytes; 0 is no limit"
            )
        return size_bytes

    def _credentials(
        self, principal: Principal, said: PrincipalSaid, seen: dict[Path, tuple[int, ...]]
    ) -> Iterator[Credential]:
        where = f"principals.{principal.name}"
        for number, secret in enumerate((*said.tokens, *self._lines(said.token_files, seen))):
            yield Credential(principal, check_secret(f"{where}: token {number + 1}", secret))
        for number, text in enumerate((*said.keys, *self._lines(said.key_files, seen))):
            access, secret, names = split_key(f"{where}: key {number + 1}", text)
            if names is not None:
                raise ConfigError(f"{where}: key {access} names buckets: they stand in its rules here")
            yield Credential(principal, secret, access)
        if said.anonymous:
            yield Credential(principal)

    def _lines(self, names: list[str], seen: dict[Path, tuple[int, ...]]) -> Iterator[str]:
        for name in names:
            lines = self._text(self._path.parent / name, seen).splitlines()
            yield from (line.strip() for line in lines if line.strip())

    def _text(self, path: Path, seen: dict[Path, tuple[int, ...]]) -> str:
        seen[path] = file_mark(path)
        try:
            with path.open("rb") as file:
                data = file.read(_SECRETS_BYTES_MAX + 1)
            if len(data) > _SECRETS_BYTES_MAX:
                raise ConfigError(f"{path} has more than {_SECRETS_BYTES_MAX} bytes")
            return data.decode()
        except (OSError, ValueError) as error:  # a name with a NUL, bytes that are no text
            raise ConfigError(f"{str(path)!r} cannot be read: {error}") from error


def _check_certificates(name: str, patterns: list[str]) -> None:
    for pattern in patterns:
        if not pattern.startswith(_CERTIFICATE_NAMES):
            raise ConfigError(
                f"principals.{name}: {pattern!r} names no certificate: write URI:…, DNS:… or CN:…, by the kind of name"
            )
