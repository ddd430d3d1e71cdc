"""From a dataset's URL to a cache that serves it."""

from __future__ import annotations

import atexit
import functools
import hashlib
import logging
import os
from typing import NamedTuple
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from stoker.base.ids import new_token
from stoker.cache.client.client import CacheClient
from stoker.cache.client.fleet import open_client
from stoker.cache.client.servers import Servers
from stoker.cache.embedded import EmbeddedCache
from stoker.errors import ConfigError, EnvironmentProblem, StokerError
from stoker.settings import CacheSettings, ClientTlsFiles, cache_settings

log = logging.getLogger("stoker.data")


class Served(NamedTuple):
    """Where a dataset's objects are to be had."""

    client: CacheClient
    bucket: str
    prefix: str


class Started(NamedTuple):
    """A cache that a process has started for itself. `repr` does not show the token."""

    endpoint: str
    token: str

    def __repr__(self) -> str:
        return f"Started({self.endpoint!r})"


def attach(url: str, settings: CacheSettings | None = None, parents: Started | None = None) -> Served:
    """Find the cache for a URL: `stoker://bucket/prefix`, or an origin's own (`file:///…`, `s3://…`).

    A file becomes the prefix of its folder. An origin's URL becomes a bucket of the cache that is known
    (`STOKER_CACHE_ENDPOINT`; `stoker run` sets it), or of the one that a parent process has started, if that runs, or
    of one that is started now and ends with this process. Raises ConfigError.
    """
    known = settings if settings is not None else cache_settings()
    _adopt(known, parents)
    parts = urlsplit(url)
    if parts.scheme == "stoker":
        if not parts.netloc:
            raise ConfigError(f"{url!r} names no bucket: write stoker://BUCKET/PREFIX")
        _check_known(url, parts.netloc, known)
        return Served(_client(*_server(known), known.tls), parts.netloc, parts.path.lstrip("/"))
    if not parts.scheme:
        url = _file_url(url)
        parts = urlsplit(url)
    prefix = ""
    if parts.scheme == "file" and not parts.netloc and os.path.isfile(unquote(parts.path)):
        folder, _, prefix = unquote(parts.path).rpartition("/")
        url = urlunsplit(parts._replace(path=f"{quote(folder)}/"))
    bucket = "origin-" + hashlib.sha256(url.encode()).hexdigest()[:16]
    client = _client(*_server(known), known.tls)
    client.add_bucket(bucket, url)
    return Served(client, bucket, prefix)


class Place(NamedTuple):
    """A bucket, and the name of something in it: a key, or a folder, which ends with a slash."""

    client: CacheClient
    bucket: str
    key: str


def attach_object(url: str, ca: str | None = None) -> Place:
    """Find the cache for the URL of one object: `stoker://bucket/key`, an origin's, or a path of a local file. `ca`:
    who signed the certificate of its server, if not who the settings say.

    All objects of one storage bucket (`s3://bucket/…`) or one host (`https://host/…`) are one bucket of the cache, and
    so are the files of one local folder. Raises ConfigError.
    """
    known = cache_settings().trusting(ca)
    if url.startswith("stoker://"):
        bucket, _, key = url.removeprefix("stoker://").partition("/")
        if not bucket:
            raise ConfigError(f"{url!r} names no bucket: write stoker://BUCKET/KEY")
        _check_known(url, bucket, known)
        return Place(_client(*_server(known), known.tls), bucket, key)
    root, key = _root_and_key(url)
    return Place(*_attached(root, known)[:2], key)


def attach_folder(url: str, ca: str | None = None) -> Served:
    """As `attach`, of a folder whether its URL ends with a slash or not; what was attached before costs nothing."""
    known = cache_settings().trusting(ca)
    if "://" not in url:
        return _attached(_file_url(f"{url}/"), known)
    address, mark, query = url.partition("?")
    return _attached(f"{address.rstrip('/')}/{mark}{query}", known)


def open_servers(timeout_s: float = 30.0, ca: str | None = None) -> Servers:
    """The cache that all URLs are read through, for questions that may take long."""
    known = cache_settings().trusting(ca)
    endpoint, token = _server(known)
    return Servers(endpoint, token, timeout_s=timeout_s, tls=known.tls)


def _root_and_key(url: str) -> tuple[str, str]:
    scheme, separator, rest = url.partition("://")
    if "::" in scheme or "::" in rest:
        raise ConfigError(
            f"{url!r} leads through several file systems: give the folder as `base`, and keys below it"
        )
    if not separator:
        url, (scheme, _, rest) = _file_url(url), _file_url(url).partition("://")
    address, mark, query = rest.partition("?")
    if scheme == "file":
        folder, _, name = address.rpartition("/")
        # A folder is a bucket by itself: what is wanted of it is everything.
        return f"file://{folder}/{mark}{query}", unquote(name)
    host, _, key = address.partition("/")
    if not host:
        raise ConfigError(f"{url!r} names no bucket and no host: write {scheme}://NAME/KEY")
    return f"{scheme}://{host}{mark}{query}", unquote(key) if scheme in ("http", "https") else key


def _file_url(path: str) -> str:
    return f"file://{quote(os.path.abspath(path))}{'/' if path.endswith('/') else ''}"


def _check_known(url: str, bucket: str, known: CacheSettings) -> None:
    if known.endpoint is None:
        raise ConfigError(
            f"{url!r} needs a cache server and none is known: start the script with `stoker run --bucket "
            f"{bucket}=ORIGIN_URL`, or set STOKER_CACHE_ENDPOINT to one started with `stoker cache serve`"
        )


@functools.lru_cache(maxsize=1024)
def _attached(url: str, known: CacheSettings) -> Served:
    return attach(url, known)


def _server(known: CacheSettings) -> tuple[str, str | None]:
    """Where the cache is, and its token."""
    if known.endpoint is not None:
        return known.endpoint, known.token
    started = _started()
    if known not in started:
        started[known] = _own_cache(known)
    return started[known]


def start_cache(settings: CacheSettings) -> None:
    """Start this process's cache, where none is known and none was started. Raises EnvironmentProblem."""
    _server(settings)


def started_cache(settings: CacheSettings | None = None) -> Started | None:
    """The cache that was started as none is known: what a process that is started by this one is to be told."""
    return _started().get(settings if settings is not None else cache_settings())


@functools.cache
def _started() -> dict[CacheSettings, Started]:
    """The caches that this process has started, or has been told of, by the settings that know of none."""
    return {}


def _adopt(known: CacheSettings, parents: Started | None) -> None:
    """Use a parent's cache in place of one of this process's own, unless it has ended or is another machine's."""
    if parents is None or known.endpoint is not None or known in _started():
        return
    try:
        _client(*parents, known.tls).status()
    except StokerError as error:
        log.debug("the cache of the process that made the dataset is not used: %s", error)
        return
    _started()[known] = parents


@functools.cache
def _client(endpoint: str, token: str | None, tls: ClientTlsFiles) -> CacheClient:
    return open_client(endpoint, token, tls=tls)


def _own_cache(settings: CacheSettings) -> Started:
    """Start this process's cache; a folder that another process uses is left to it."""
    token = new_token()
    cache = EmbeddedCache(settings.directory, capacity_bytes=settings.capacity_bytes, token=token)
    try:
        endpoint = cache.start()
    except EnvironmentProblem as error:
        log.warning("using a cache folder of this process's own, removed at its end: %s", error)
        cache = EmbeddedCache(None, capacity_bytes=settings.capacity_bytes, token=token)
        endpoint = cache.start()
    owner = os.getpid()
    atexit.register(lambda: cache.stop() if os.getpid() == owner else None)
    return Started(endpoint.unix_url, token)
