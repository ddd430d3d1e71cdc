"""Say to a cache server what is going to be read: see `wire/cache_orders.py`."""

from __future__ import annotations

from urllib.parse import quote, urlencode

import msgspec

from stoker.cache.client.client import CacheClient
from stoker.wire.cache_orders import Announced, Announcement, OrdersStatus


def announce(client: CacheClient, bucket: str, said: Announcement) -> Announced:
    """Announce a part of a stream. Raises ObjectNotFound for the bucket, ConfigError for more than a server takes."""
    return client.call("POST", _target(bucket), Announced, msgspec.msgpack.encode(said))


def withdraw(client: CacheClient, bucket: str, stream: str) -> Announced:
    """A stream that was announced goes on no more."""
    return client.call("DELETE", f"{_target(bucket)}?{urlencode({'stream': stream})}", Announced)


def orders(client: CacheClient, bucket: str) -> OrdersStatus:
    """What is announced of a bucket, and how much of it was fetched ahead."""
    return client.call("GET", _target(bucket), OrdersStatus)


def _target(bucket: str) -> str:
    return f"/-/orders/{quote(bucket, safe='')}"
