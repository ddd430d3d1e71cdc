"""Say to a cache server what is going to be read: see `wire/cache_orders.py`."""

from __future__ import annotations

import msgspec

from stoker.cache.client.client import CacheClient
from stoker.wire.cache_orders import Announced, Announcement, OrdersStatus, orders_target


def announce(client: CacheClient, bucket: str, said: Announcement) -> Announced:
    """Announce a part of a stream. Raises ObjectNotFound for the bucket, ConfigError for more than a server takes."""
    return client.call("POST", orders_target(bucket, said.stream), Announced, msgspec.msgpack.encode(said))


def withdraw(client: CacheClient, bucket: str, stream: str) -> Announced:
    """A stream that was announced goes on no more."""
    return client.call("DELETE", orders_target(bucket, stream), Announced)


def orders(client: CacheClient, bucket: str) -> OrdersStatus:
    """What is announced of a bucket, and how much of it was fetched ahead."""
    return client.call("GET", orders_target(bucket), OrdersStatus)
