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
from stoker.cache.embedded import EmbeddedCache
from stoker.errors import ConfigError, EnvironmentProblem
from stoker.settings import CacheSettings, cache_settings

log = logging.getLogger("stoker.data")


class Served(NamedTuple):
    """Where a dataset's objects are to be had."""

    client: CacheClient
    bucket: str
    prefix: str


def attach(url: str, settings: CacheSettings | None = None) -> Served:
    """Find the cache for a URL: `stoker://bucket/prefix`, or an origin's own (`file:///…`, `s3://…`).

    A file becomes the prefix of its folder. An origin's URL becomes a bucket of the cache that is known
    (`STOKER_CACHE_ENDPOINT`; `stoker run` sets it), or of one that is started now and ends with this process. Raises
    ConfigError.
    """
    known = settings if settings is not None else cache_settings()
    parts = urlsplit(url)
    if parts.scheme == "stoker":
        if not parts.netloc:
            raise ConfigError(f"{url!r} names no bucket: write stoker://BUCKET/PREFIX")
        if known.endpoint is None:
            raise ConfigError(
                f"{url!r} needs a cache server and none is known: start the script with `stoker run --bucket "
                f"{parts.netloc}=ORIGIN_URL`, or set STOKER_CACHE_ENDPOINT to one started with `stoker cache serve`"
            )
        return Served(_client(known.endpoint, known.token), parts.netloc, parts.path.lstrip("/"))
    if not parts.scheme:
        url = f"file://{os.path.abspath(url)}{'/' if url.endswith('/') else ''}"
        parts = urlsplit(url)
    prefix = ""
    if parts.scheme == "file" and not parts.netloc and os.path.isfile(unquote(parts.path)):
        folder, _, prefix = unquote(parts.path).rpartition("/")
        url = urlunsplit(parts._replace(path=f"{quote(folder)}/"))
    bucket = "origin-" + hashlib.sha256(url.encode()).hexdigest()[:16]
    if known.endpoint is not None:
        client = _client(known.endpoint, known.token)
    else:
        client = _own_cache(known)
    client.add_bucket(bucket, url)
    return Served(client, bucket, prefix)


@functools.cache
def _client(endpoint: str, token: str | None) -> CacheClient:
    return open_client(endpoint, token)


@functools.cache
def _own_cache(settings: CacheSettings) -> CacheClient:
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
    return CacheClient(endpoint.unix_url, token)
