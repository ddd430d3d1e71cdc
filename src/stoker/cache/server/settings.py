"""What a server is told at its start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from stoker.cache.auth.links import AGE_MAX_S
from stoker.cache.layout import DEFAULT_BLOCK_SIZE_BYTES
from stoker.cache.server.blobs.buckets import BlobBucketSpec
from stoker.cache.server.listening import OWN_USER_MODE
from stoker.cache.server.observing import ObserveSettings
from stoker.cache.server.summaries import EVERY_S
from stoker.settings import ClientTlsFiles
from stoker.wire.cache_api import BucketSpec


class ServerTlsFiles(NamedTuple):
    """What a server needs to speak TLS, as files in PEM, which are read again when they have changed."""

    certificate: Path
    """Its own, and behind it those of who signed it."""

    key: Path
    client_ca: Path | None = None
    """Who signs the certificates of clients, where these are a way to say who asks."""

    is_client_required: bool = False
    """Who shows none of these is not let in."""


@dataclass(frozen=True)
class ServerSettings:
    """One cache server."""

    folder: Path
    """Where blocks and index live; one server at a time."""

    capacity_bytes: int
    """The hard limit for blocks on disk."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one."""

    unix_path: str | None = None
    """A Unix socket to listen on as well."""

    unix_mode: int = OWN_USER_MODE
    """Who may connect to it: all whom its permissions let write. What they may read their tokens say."""

    tls: ServerTlsFiles | None = None
    """With them the port speaks TLS, and nothing else; the Unix socket does not."""
    client_tls: ClientTlsFiles = field(default_factory=ClientTlsFiles)
    """For talking to the others of its fleet."""

    egress_bytes_per_s: float = 0.0
    """How much content may go out, to all readers together; 0: no limit."""
    connection_bytes_per_s: float = 0.0
    """How much content may go out on one connection; 0: no limit."""

    buckets: Mapping[str, BucketSpec] = field(default_factory=dict)
    blob_buckets: Mapping[str, BlobBucketSpec] = field(default_factory=dict)
    tokens: Sequence[str] = ()
    keys: Sequence[str] = ()
    """ACCESS:SECRET or ACCESS:SECRET:BUCKET,… for S3 clients."""
    access_path: Path | None = None
    """A file that says who may do what, read again when it has changed."""
    link_age_max_s: float = AGE_MAX_S
    """Links that are good for longer are refused; 0: all are."""
    s3_domains: Sequence[str] = ()
    """In lower case; S3 clients may name a bucket by their host, `BUCKET.DOMAIN`."""
    s3_buckets_at: str = ""
    """The origin below which S3 clients may make buckets, each a folder or prefix; empty: they may not."""
    block_size_bytes: int = DEFAULT_BLOCK_SIZE_BYTES
    environment: Mapping[str, str] = field(default_factory=dict)
    """Where origins look up AWS_* variables."""

    fleet: str = ""
    """Where the members of the fleet meet, see `open_membership`; empty: this server is alone."""

    advertise: str = ""
    """The URL at which the others reach this server; empty: where it listens."""

    name: str = ""
    """This server's own in its fleet, the same after a restart; empty: its URL."""

    zone: str = ""
    weight: int | None = None
    """Its share of the fleet's blocks, beside the others'; None: 1, or what a fixed list of the members says."""

    observe: ObserveSettings = field(default_factory=ObserveSettings)

    summary_every_s: float = EVERY_S
    """How often it tells the others what it holds, for `replica-aware` buckets."""


@dataclass(frozen=True)
class Listening:
    """Where a server listens, and what its operator should know."""

    endpoint: str
    unix_path: str | None
    notes: list[str]
