"""From a journal's URL to the journal, and to the locator that agents find its master with.

/path, sqlite:///path             one SQLite file on this host
memory:                           nothing is kept
etcd://host[:port],…[/prefix]     etcd; keys lie below /prefix/jobs/<job>/, where the prefix is /stoker by default
    ?ca=FILE or ?ca=system        speak TLS and trust this authority's certificates, or the system's
    &cert=FILE&key=FILE           and show this certificate
    &compact_s=SECONDS or off     how often at least to let etcd forget old revisions (1 hour); off: something else
                                  does, and makes room when etcd is full
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, unquote

from stoker.base.ids import check_name
from stoker.base.units import parse_duration_s
from stoker.errors import ConfigError
from stoker.job.journal.durable import Journal
from stoker.job.journal.file import FileJournal
from stoker.job.journal.memory import MemoryJournal

if TYPE_CHECKING:
    from stoker.job.journal.leadership import EtcdLocator
    from stoker.wire.etcd import EtcdClient

FORMS = "a path, sqlite:///path, or etcd://host:2379,host:2379[/prefix][?ca=FILE&cert=FILE&key=FILE]"
ETCD_PORT = 2379
ETCD_OPTIONS = frozenset(("ca", "cert", "key", "compact_s"))
COMPACT_S = 3600.0
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*):(?!\\)(.*)$", re.DOTALL)
_ENDPOINT = re.compile(r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(?::([0-9]+))?$")
_PREFIX = re.compile(r"^(/[A-Za-z0-9._-]+)+$")


@dataclass(frozen=True)
class FilePlace:
    """One SQLite file."""

    path: Path


@dataclass(frozen=True)
class MemoryPlace:
    """This process."""


@dataclass(frozen=True)
class EtcdPlace:
    """A cluster and a prefix in it. `ca`: a file, "system", or empty for no TLS; `compact_s` None: never."""

    endpoints: tuple[str, ...]
    prefix: str = "/stoker"
    ca: str = ""
    cert: str = ""
    key: str = ""
    compact_s: float | None = COMPACT_S


def parse_journal_url(url: str) -> FilePlace | MemoryPlace | EtcdPlace:
    """What the URL names. Touches neither disk nor network. Raises ConfigError."""
    match = _SCHEME.match(url)
    if not url or "\0" in unquote(url):
        raise ConfigError(f"{url!r} is no place for a journal: give {FORMS}")
    if match is None:
        return FilePlace(Path(url))
    scheme, rest = match[1].lower(), match[2]
    if scheme == "memory":
        return MemoryPlace()
    if scheme == "sqlite":
        path = unquote(rest[2:]) if rest.startswith("//") else ""
        if not path.startswith("/") or path.endswith("/"):
            raise ConfigError(f"{url!r} names no file: write sqlite:///absolute/path, or a plain path")
        return FilePlace(Path(path))
    if scheme == "etcd":
        return _parse_etcd(url, rest)
    raise ConfigError(f"no journal can be kept in {url!r}: give {FORMS}")


def journal_file(url: str) -> str:
    """Absolute path of the file that the URL names; empty: it names none. Raises ConfigError."""
    place = parse_journal_url(url)
    return str(place.path.absolute()) if isinstance(place, FilePlace) else ""


def open_journal(url: str, job: str) -> Journal:
    """The job's journal at that place; nothing is opened yet. Raises ConfigError."""
    match parse_journal_url(url):
        case FilePlace(path):
            if path.is_dir():
                raise ConfigError(f"{path} is a folder: name a file in it for the journal")
            return FileJournal(path)
        case MemoryPlace():
            return MemoryJournal()
        case EtcdPlace() as place:
            _need_etcd(url)
            from stoker.job.journal.etcd import EtcdJournal
            from stoker.job.journal.etcd_layout import Keys

            keys = Keys(place.prefix, _checked(job))
            return EtcdJournal(_client(place), keys, compact_after_s=place.compact_s)


def open_locator(url: str, job: str) -> EtcdLocator:
    """What tells agents where the job's master is. Raises ConfigError for a journal that cannot tell."""
    place = parse_journal_url(url)
    if not isinstance(place, EtcdPlace):
        raise ConfigError(
            f"{url!r} cannot tell other hosts where the master is: give its host:port, or etcd://…"
        )
    _need_etcd(url)
    from stoker.job.journal.etcd_layout import Keys
    from stoker.job.journal.leadership import EtcdLocator

    return EtcdLocator(_client(place), Keys(place.prefix, _checked(job)))


def _need_etcd(url: str) -> None:
    try:
        import aiohttp  # noqa: F401
    except ImportError:
        raise ConfigError(f"{url!r} needs an HTTP client: pip install 'stoker[etcd]'") from None


def _checked(job: str) -> str:
    try:
        return check_name("job", job)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _client(place: EtcdPlace) -> EtcdClient:
    from stoker.wire.etcd import EtcdClient

    return EtcdClient(place.endpoints, tls=_tls(place))


def _parse_etcd(url: str, rest: str) -> EtcdPlace:
    body, _, query = rest.partition("?")
    if not body.startswith("//"):
        raise ConfigError(f"{url!r} names no etcd: write etcd://host:2379,host:2379")
    hosts, slash, path = body[2:].partition("/")
    if "@" in hosts:
        raise ConfigError(
            "a journal's URL must not hold a password: show etcd a certificate (?ca=…&cert=…&key=…)"
        )
    prefix = (slash + path).rstrip("/") or "/stoker"
    if not _PREFIX.match(prefix):
        raise ConfigError(
            f"{prefix!r} in {url!r} is no prefix: use /name or /name/name, of letters, digits, '._-'"
        )
    options = _options(url, query)
    if bool(options.get("cert")) != bool(options.get("key")):
        raise ConfigError(f"{url!r} has only one of cert= and key=: give both, or none")
    if options.get("cert") and not options.get("ca"):
        raise ConfigError(f"{url!r} has a certificate but no authority: add ca=FILE, or ca=system")
    compact = options.get("compact_s", "")
    try:
        compact_s = None if compact == "off" else parse_duration_s(compact) if compact else COMPACT_S
    except ValueError as error:
        raise ConfigError(f"compact_s in {url!r}: {error}; or write off") from None
    endpoints = tuple(dict.fromkeys(_endpoint(url, host) for host in hosts.split(",")))
    return EtcdPlace(
        endpoints,
        prefix,
        options.get("ca", ""),
        options.get("cert", ""),
        options.get("key", ""),
        compact_s,
    )


def _endpoint(url: str, host: str) -> str:
    match = _ENDPOINT.match(host)
    port = int(match[2] or ETCD_PORT) if match is not None else 0
    if match is None or not 0 < port < 65536:
        raise ConfigError(f"{host!r} in {url!r} is no endpoint: write host, host:port or [IPv6]:port")
    return f"{match[1]}:{port}"


def _options(url: str, query: str) -> Mapping[str, str]:
    try:
        options = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=True)) if query else {}
    except ValueError:
        raise ConfigError(f"{query!r} in {url!r} is not name=value&name=value") from None
    unknown = sorted(options.keys() - ETCD_OPTIONS)
    if unknown:
        raise ConfigError(
            f"{unknown[0]!r} in {url!r} is unknown: there are {', '.join(sorted(ETCD_OPTIONS))}"
        )
    return options


def _tls(place: EtcdPlace) -> ssl.SSLContext | None:
    if not place.ca:
        return None
    name = place.ca
    try:
        context = ssl.create_default_context(cafile=None if place.ca == "system" else place.ca)
        if place.cert:
            name = f"{place.cert} and {place.key}"
            context.load_cert_chain(
                place.cert, place.key, password=""
            )  # an encrypted key fails instead of asking
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot read the TLS files for etcd ({name}): {error}") from None
    return context
