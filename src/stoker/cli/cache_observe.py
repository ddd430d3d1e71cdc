"""How a cache server may be watched: the options of `stoker cache serve` that say so."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from stoker.cache.server.client_address import ClientAddresses
from stoker.cache.server.logs import DEFAULT_LEVEL, FORMATS, LEVELS, TEXT, set_up_logs
from stoker.cache.server.observing import ObserveSettings
from stoker.cache.server.tracing import check_otlp


class ObserveFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the table `[observe]` of `--config FILE` may say."""

    log_format: str = TEXT
    log_level: str = DEFAULT_LEVEL
    access_log: bool = False
    open_metrics: bool = False
    otlp: str = ""
    audit_log: str = ""
    trusted_proxies: list[str] = []


def add_observe_options(server: argparse.ArgumentParser) -> None:
    """Of `stoker cache serve`."""
    server.add_argument("--log-format", choices=FORMATS, help=f"of lines on standard error; default {TEXT}")
    server.add_argument("--log-level", choices=LEVELS, help=f"default {DEFAULT_LEVEL}")
    server.add_argument(
        "--access-log",
        action="store_true",
        help="a line for each request that is no hit of the native front, at any level",
    )
    server.add_argument(
        "--audit-log",
        metavar="FILE",
        help="who wrote, removed and administered what, and who was refused, as lines of JSON",
    )
    server.add_argument(
        "--trusted-proxy",
        metavar="NETWORK",
        action="append",
        default=[],
        help="who is believed when it says for whom it asks (X-Forwarded-For), for the logs: a network such as "
        "10.1.0.0/16, an address, or 'unix'; may be repeated",
    )
    server.add_argument(
        "--open-metrics", action="store_true", help="everybody may read /-/metrics, without a token"
    )
    server.add_argument(
        "--otlp",
        metavar="URL",
        help="send traces to this OpenTelemetry collector, such as http://127.0.0.1:4318",
    )


def observe_settings(arguments: argparse.Namespace, file: ObserveFile) -> ObserveSettings:
    """What arguments and file say together. Raises ConfigError."""
    url = arguments.otlp or file.otlp
    audit = arguments.audit_log or file.audit_log
    proxies = *arguments.trusted_proxy, *file.trusted_proxies
    ClientAddresses(proxies)  # what is wrong is said at once
    return ObserveSettings(
        open_metrics=arguments.open_metrics or file.open_metrics,
        access_log=arguments.access_log or file.access_log,
        audit_path=Path(audit) if audit else None,
        otlp_url=check_otlp(url) if url else "",
        log_format=arguments.log_format or file.log_format,
        log_level=arguments.log_level or file.log_level,
        trusted_proxies=proxies,
    )


def write_logs(settings: ObserveSettings) -> None:
    """To standard error, from now on. Raises ConfigError."""
    set_up_logs(settings.log_format, settings.log_level, logs_access=settings.access_log)
