"""`stoker cache …`: its commands."""

from __future__ import annotations

import argparse
from typing import Any

from stoker.cli.cache_ask import add_questions
from stoker.cli.cache_envoy import add_envoy_parser
from stoker.cli.cache_link import add_link_parser
from stoker.cli.cache_load import add_load_parser
from stoker.cli.cache_top import add_top_parser
from stoker.cli.later import LaterParser

_EPILOG = """\
examples:
  stoker cache serve --dir /ssd/cache --capacity 200GB --bucket train=/data/train
  stoker cache ls stoker://train/images/ -l
  stoker cache load stoker://train/images/       have it held before the job starts
  stoker cache top                               what is read right now, and from where
  stoker cache evict stoker://train/old/

All but `serve` and `envoy` ask the server at --endpoint, or at STOKER_CACHE_ENDPOINT, with --token or
STOKER_CACHE_TOKEN.
In stoker://BUCKET/PREFIX the prefix is taken as it stands: images/ is a folder, images is images2/ as well.

exit codes:
  0 done   1 not all of it, no such object, or the token does not suffice   2 wrong usage
  4 no server answers, no such bucket, or its origin fails   5 the machine refuses (port, disk)   130 interrupted
"""


def add_cache_parser(subparsers: Any) -> None:
    """Add `stoker cache` to a parser's subcommands; each leaf sets `handler`."""
    cache = subparsers.add_parser(
        "cache",
        help="run a dataset cache server, or steer one",
        description="Run a dataset cache server, look at one, and change what it holds.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = cache.add_subparsers(
        dest="cache_command", required=True, metavar="COMMAND", parser_class=LaterParser
    )
    server = commands.add_parser("serve", help="serve buckets from a folder")
    server.options_by = "stoker.cli.cache_serve", "add_serve_options"
    add_questions(commands)
    add_load_parser(commands)
    add_top_parser(commands)
    add_link_parser(commands)
    add_envoy_parser(commands)
