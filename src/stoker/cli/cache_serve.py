"""`stoker cache serve`: runs a server."""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from pathlib import Path

import msgspec

from stoker.base.ids import check_name
from stoker.base.units import parse_size_bytes
from stoker.cache.fleet.open import parse_member
from stoker.cache.maglev import WEIGHT_MAX
from stoker.cache.server.blobs.buckets import check_blob_buckets
from stoker.cache.server.buckets import check_bucket
from stoker.cache.server.listening import OWN_USER_MODE
from stoker.cache.server.serving import serve
from stoker.cache.server.settings import Listening, ServerSettings, ServerTlsFiles
from stoker.cli.cache_blobs import BlobBucketFile, add_blob_options, blob_buckets
from stoker.cli.cache_link import link_age_max_s
from stoker.cli.cache_observe import ObserveFile, add_observe_options, observe_settings, write_logs
from stoker.cli.cache_options import CAPACITY_BYTES_MIN, parse_capacity_bytes
from stoker.errors import ConfigError
from stoker.settings import cache_settings, environment
from stoker.wire.cache_api import BucketSpec

_EXAMPLES = """\
examples:
  stoker cache serve --dir /var/cache/stoker --capacity 20GB --bucket train=/data/train
  stoker cache serve --listen 0.0.0.0:7070 --token s3cret-token --dir /ssd/cache --capacity 2TB \\
      --bucket images=s3://my-bucket/images --policy images=uniform
  stoker cache serve --dir /var/cache/stoker --capacity 20GB --bucket train=/data/train \\
      --key AKID:a-long-secret      then: aws --endpoint-url http://127.0.0.1:7070 s3 ls s3://train/
  stoker cache serve --config cache.toml

The file says the same, and arguments beat it:
  listen = "127.0.0.1:7070"
  dir = "/ssd/cache"
  capacity = "2TB"
  tokens = ["s3cret-token", "other-token:images"]
  keys = ["ACCESS:SECRET", "OTHER:ITS-SECRET:images"]   # for S3 clients
  tls_cert = "/etc/stoker/server.pem"
  tls_key = "/etc/stoker/server.key"
  [buckets.images]
  origin_url = "s3://my-bucket/images"
  policy = "uniform"        # lru (default) or uniform
  ttl_s = 3600.0
  stale_if_error_s = 86400.0
  identity = ""             # the same at all servers of a fleet where one data set has different URLs
  [blob_buckets.pfio]
  capacity = "20GB"         # for what is pushed to http://HOST:PORT/blob/pfio/KEY

Objects are then at http://HOST:PORT/BUCKET/KEY. Stop it with Ctrl-C or SIGTERM: it finishes what was asked
and exits with 0.
"""


class ServeFile(msgspec.Struct, forbid_unknown_fields=True):
    """What `--config FILE` may say."""

    listen: str | None = None
    unix: str | None = None
    socket_mode: str | None = None
    egress: str | int | None = None
    connection_egress: str | int | None = None
    dir: str | None = None
    capacity: str | int | None = None
    tokens: list[str] = []
    keys: list[str] = []
    access: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    tls_client_required: bool = False
    link_max_age: str | None = None
    s3_domains: list[str] = []
    s3_buckets_at: str = ""
    buckets: dict[str, BucketSpec] = {}
    blob_buckets: dict[str, BlobBucketFile] = {}
    fleet: str = ""
    advertise: str = ""
    name: str = ""
    zone: str = ""
    weight: int | None = None
    observe: ObserveFile = ObserveFile()


def add_serve_options(server: argparse.ArgumentParser) -> None:
    """What `stoker cache serve` may be told; it sets `handler`."""
    server.epilog, server.formatter_class = _EXAMPLES, argparse.RawDescriptionHelpFormatter
    server.add_argument(
        "--listen", metavar="HOST:PORT", help="default 127.0.0.1:7070; port 0 takes a free one"
    )
    server.add_argument("--unix", metavar="PATH", help="a Unix socket to listen on as well")
    server.add_argument(
        "--socket-mode",
        metavar="MODE",
        help="who may connect to the Unix socket, as chmod has it; default 0600: this user only",
    )
    server.add_argument("--dir", metavar="DIR", help="where blocks are kept; one server each")
    server.add_argument(
        "--capacity", metavar="SIZE", help="hard limit of the folder, such as 20GB; 1MB at least"
    )
    server.add_argument(
        "--egress",
        metavar="SIZE",
        help="content that goes out each second at most, such as 2GB; default: no limit",
    )
    server.add_argument(
        "--connection-egress", metavar="SIZE", help="the same, on each connection; default: no limit"
    )
    _add_access(server)
    server.add_argument(
        "--tls-cert",
        metavar="FILE",
        help="speak TLS: this server's certificate, and behind it who signed it, in PEM",
    )
    server.add_argument(
        "--tls-key", metavar="FILE", help="its private key; both are read again when they change"
    )
    server.add_argument(
        "--tls-client-ca", metavar="FILE",
        help="who signs the certificates of clients, which --access FILE says the principals of",
    )  # fmt: skip
    server.add_argument(
        "--tls-client-required", action="store_true",
        help="let in only who shows such a certificate, whatever token comes with it",
    )  # fmt: skip
    server.add_argument(
        "--fleet", metavar="WHERE",
        help="be one of many: where they meet (http://HOST:PORT,… or file:///SHARED/FOLDER or etcd://HOST:PORT/PREFIX)",
    )  # fmt: skip
    server.add_argument(
        "--advertise", metavar="URL", help="where the others reach this server; default: where it listens"
    )
    server.add_argument("--name", metavar="NAME", help="this server's in its fleet; default: its address")
    server.add_argument("--zone", metavar="ZONE", help="where it stands: copies go to other zones first")
    server.add_argument(
        "--weight",
        metavar="N",
        type=int,
        help="its share of the blocks beside the others'; default 1, or what a list says",
    )
    add_observe_options(server)
    server.add_argument("--config", metavar="FILE", help="a TOML file that says the same")
    server.set_defaults(handler=_serve)


def _add_access(server: argparse.ArgumentParser) -> None:
    """What it serves, and to whom."""
    server.add_argument(
        "--bucket", metavar="NAME=ORIGIN_URL", action="append", default=[], help="a bucket to serve (repeats)"
    )
    add_blob_options(server)
    server.add_argument(
        "--writable", metavar="NAME", action="append", default=[],
        help="a bucket that S3 clients may write to, through to its origin (repeats)",
    )  # fmt: skip
    server.add_argument(
        "--token", metavar="TOKEN[:BUCKET,…]", action="append", default=[],
        help="who may read: everything, or only these buckets (repeats)",
    )  # fmt: skip
    server.add_argument(
        "--key", metavar="ACCESS:SECRET[:BUCKET,…]", action="append", default=[],
        help="the same for S3 clients, which sign with it (repeats)",
    )  # fmt: skip
    server.add_argument(
        "--access", metavar="FILE",
        help="a TOML file of principals: their rules, limits and credentials; read again when it has changed",
    )  # fmt: skip
    server.add_argument(
        "--link-max-age",
        metavar="TIME",
        help="refuse links that are good for longer; default 7d; 0: all links",
    )
    server.add_argument(
        "--s3-domain", metavar="DOMAIN", action="append", default=[],
        help="S3 clients may ask BUCKET.DOMAIN for what is in a bucket (repeats)",
    )  # fmt: skip
    server.add_argument(
        "--s3-buckets-at", metavar="ORIGIN_URL",
        help="where S3 clients whose key opens everything may make buckets; default: they may not",
    )  # fmt: skip
    server.add_argument(
        "--policy",
        metavar="NAME=POLICY",
        action="append",
        default=[],
        help="lru or uniform for a bucket (repeats)",
    )


def serve_settings(arguments: argparse.Namespace) -> ServerSettings:
    """The settings that arguments and file say together. Raises ConfigError."""
    file = _read_file(arguments.config)
    host, port = _split_listen(arguments.listen or file.listen or "127.0.0.1:7070")
    folder = arguments.dir or file.dir
    if folder is None:
        raise ConfigError("say where blocks are kept: --dir DIR")
    capacity = arguments.capacity if arguments.capacity is not None else file.capacity
    if capacity is None:
        raise ConfigError("say how much disk the cache may take: --capacity 20GB")
    buckets = _buckets(arguments, file)
    blobs = blob_buckets(arguments.blob_bucket, file.blob_buckets)
    check_blob_buckets(blobs, buckets)
    return ServerSettings(
        folder=Path(folder),
        capacity_bytes=parse_capacity_bytes(capacity, CAPACITY_BYTES_MIN),
        host=host,
        port=port,
        unix_path=arguments.unix or file.unix,
        unix_mode=_mode(arguments.socket_mode or file.socket_mode),
        egress_bytes_per_s=_size("--egress", arguments.egress or file.egress or 0),
        connection_bytes_per_s=_size(
            "--connection-egress", arguments.connection_egress or file.connection_egress or 0
        ),
        buckets=buckets,
        blob_buckets=blobs,
        tokens=arguments.token or file.tokens,
        keys=arguments.key or file.keys,
        access_path=Path(arguments.access or file.access) if arguments.access or file.access else None,
        tls=_tls(arguments, file),
        client_tls=cache_settings().tls,
        link_age_max_s=link_age_max_s(arguments.link_max_age or file.link_max_age),
        s3_domains=[name.lower() for name in arguments.s3_domain or file.s3_domains],
        s3_buckets_at=arguments.s3_buckets_at or file.s3_buckets_at,
        environment=environment(),
        fleet=arguments.fleet or file.fleet,
        advertise=_advertised(arguments.advertise or file.advertise),
        name=_name(arguments.name or file.name),
        zone=arguments.zone or file.zone,
        weight=_weight(file.weight if arguments.weight is None else arguments.weight),
        observe=observe_settings(arguments, file.observe),
    )


def _buckets(arguments: argparse.Namespace, file: ServeFile) -> dict[str, BucketSpec]:
    """Raises ConfigError."""
    buckets = dict(file.buckets)
    for text in arguments.bucket:
        name, url = _split_pair("--bucket", text)
        known = buckets.get(name)
        buckets[name] = BucketSpec(url) if known is None else msgspec.structs.replace(known, origin_url=url)
    for text in arguments.policy:
        name, policy = _split_pair("--policy", text)
        if name not in buckets:
            raise ConfigError(f"--policy {text}: there is no bucket {name!r}; add --bucket {name}=ORIGIN_URL")
        buckets[name] = msgspec.structs.replace(buckets[name], policy=policy)
    for name in arguments.writable:
        if name not in buckets:
            raise ConfigError(
                f"--writable {name}: there is no bucket {name!r}; add --bucket {name}=ORIGIN_URL"
            )
        buckets[name] = msgspec.structs.replace(buckets[name], writable=True)
    for name, spec in buckets.items():
        check_bucket(name, spec)
    return buckets


def _tls(arguments: argparse.Namespace, file: ServeFile) -> ServerTlsFiles | None:
    """Raises ConfigError."""
    certificate = arguments.tls_cert or file.tls_cert
    key = arguments.tls_key or file.tls_key
    client_ca = arguments.tls_client_ca or file.tls_client_ca
    is_required = arguments.tls_client_required or file.tls_client_required
    if is_required and not client_ca:
        raise ConfigError(
            "--tls-client-required: give --tls-client-ca FILE, who signs the certificates of clients"
        )
    if not certificate and not key and not client_ca:
        return None
    if not certificate or not key:
        raise ConfigError("to speak TLS, give both --tls-cert FILE and --tls-key FILE")
    if client_ca and not is_required and not (arguments.access or file.access):
        raise ConfigError(
            "--tls-client-ca is of no use without --access FILE, which says whose the certificates of clients are, or "
            "--tls-client-required"
        )
    return ServerTlsFiles(Path(certificate), Path(key), Path(client_ca) if client_ca else None, is_required)


def _advertised(url: str) -> str:
    return parse_member(url).url if url else ""


def _name(name: str) -> str:
    try:
        return check_name("server", name) if name else ""
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _mode(text: str | None) -> int:
    if text is None:
        return OWN_USER_MODE
    if not re.fullmatch("0?[0-7]{3}", text):
        raise ConfigError(f"--socket-mode is what chmod takes, such as 0660 or 0666, not {text!r}")
    return int(text, 8)


def _weight(weight: int | None) -> int | None:
    if weight is not None and not 0 <= weight <= WEIGHT_MAX:
        raise ConfigError(f"--weight is 0 to {WEIGHT_MAX}, not {weight}")
    return weight


def _serve(arguments: argparse.Namespace) -> int:
    settings = serve_settings(arguments)
    write_logs(settings.observe)
    serve(settings, _announce, lambda _: None)
    return 0


def _announce(listening: Listening) -> None:
    for note in listening.notes:
        print(f"note: {note}", file=sys.stderr)
    also = f" and unix://{listening.unix_path}" if listening.unix_path else ""
    print(f"serving at {listening.endpoint}{also}", flush=True)


def _read_file(path: str | None) -> ServeFile:
    if path is None:
        return ServeFile()
    try:
        with open(path, "rb") as file:
            return msgspec.convert(tomllib.load(file), ServeFile)
    except OSError as error:
        raise ConfigError(f"cannot read --config {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"--config {path}: {error}") from error


def _split_listen(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigError(f"--listen {text!r} is not HOST:PORT")
    return host, int(port)


def _split_pair(option: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise ConfigError(f"{option} {text!r} is not NAME=VALUE")
    return name, value


def _size(option: str, text: str | int) -> int:
    try:
        size_bytes = text if isinstance(text, int) else parse_size_bytes(text)
        if size_bytes < 0:
            raise ValueError(f"{text!r} is negative")
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error
    return size_bytes
