"""`limited_server.py BYTES_PER_S ARGUMENTS…`: `stoker ARGUMENTS…` whose cache server sends no more data than that."""

from __future__ import annotations

import sys

from stoker._native import FrontSettings
from stoker.cache.server import server
from stoker.cli.main import main


def limited() -> FrontSettings:
    settings = FrontSettings()
    settings.egress_bytes_per_s = float(sys.argv[1])
    return settings


if __name__ == "__main__":
    server.FrontSettings = limited  # the command line has no flag for it
    sys.exit(main(sys.argv[2:]))
