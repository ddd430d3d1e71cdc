"""`mount.stoker`: what mount(8) calls for lines of fstab with the type `stoker`."""

from __future__ import annotations

import argparse
import sys

from stoker.cli.main import main as stoker


def main(argv: list[str] | None = None) -> int:
    """`mount.stoker SOURCE DIR [-sfnv] [-o OPTIONS]`, in the background; what to exit with."""
    parser = argparse.ArgumentParser(
        prog="mount.stoker",
        description="Mount a dataset, as mount(8) does by a line of /etc/fstab: it finds this program as "
        "/sbin/mount.stoker. `stoker mount --help` says what the options are.",
        epilog="example: mount -t stoker s3://bucket/llm /data/llm -o allow_other,cache_dir=/ssd/cache",
    )
    parser.add_argument("source", metavar="SOURCE")
    parser.add_argument("folder", metavar="DIR")
    parser.add_argument("-o", metavar="NAME[=VALUE],…", action="append", default=[])
    parser.add_argument("-f", action="store_true", help="do everything but mount")
    for flag in "snv":
        parser.add_argument(f"-{flag}", action="store_true", help=argparse.SUPPRESS)
    for option in ("-t", "-N"):
        parser.add_argument(option, help=argparse.SUPPRESS)
    found = parser.parse_args(argv)
    if found.f:
        return 0
    words = ["mount", found.source, found.folder, "--daemon"]
    for options in found.o:
        words += ["-o", options]
    return stoker(words)


if __name__ == "__main__":
    sys.exit(main())
