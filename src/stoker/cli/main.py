"""`stoker`: one command, a few subcommands."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from importlib import import_module

from stoker import __version__
from stoker.errors import EXIT_INTERRUPTED, EXIT_USAGE, StokerError

EPILOG = """\
examples:
  stoker demo                                   train, kill a worker, watch the run go on
  stoker run --nproc-per-node 4 train.py        run a script as torchrun does, elastically
  stoker job status --watch                     look at the job that runs here
  stoker cache serve --dir /ssd --bucket d=s3://bucket/data
  stoker cache status --endpoint http://localhost:7070 --token TOKEN
  stoker data head s3://bucket/data -n 3
  stoker mount s3://bucket/data /data
  stoker checkpoint ls s3://bucket/run-7

exit codes:
  0 done   1 the script failed (or its own code)   2 wrong usage   3 too few nodes or a timeout
  4 data or cache   5 the machine refuses (port, disk)   130 interrupted
"""


COMMANDS = {
    "demo": ("demo", "add_demo_parser"),
    "run": ("run", "add_run_parser"),
    "master": ("master", "add_master_parser"),
    "job": ("job", "add_job_parser"),
    "cache": ("cache", "add_cache_parser"),
    "data": ("data", "add_data_parser"),
    "checkpoint": ("checkpoint", "add_checkpoint_parser"),
    "mount": ("mount", "add_mount_parsers"),
    "umount": ("mount", "add_mount_parsers"),
    "agent": ("agent", "add_agent_parser"),
}
"""In which module of this package a command is, and what adds it."""


def build_parser(command: str = "") -> argparse.ArgumentParser:
    """The whole command line, or that of one command, for which no other one is imported. What is imported is so here:
    that takes long enough for a Ctrl-C, which `main` answers."""
    parser = argparse.ArgumentParser(
        prog="stoker",
        description="Keeps accelerators fed and training runs alive.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"stoker {__version__}")
    parser.add_argument("-v", "--verbose", action="store_true", help="say more about what is going on")
    subparsers = parser.add_subparsers(metavar="COMMAND")
    for module, add in dict.fromkeys([COMMANDS[command]] if command in COMMANDS else COMMANDS.values()):
        getattr(import_module(f"stoker.cli.{module}"), add)(subparsers)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    _open_closed()
    try:
        return _run(argv)
    finally:
        if argv is None:  # it is this process's command, and done: Ctrl-C changes its exit code no more
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def _open_closed() -> None:
    """Streams that whoever has started this has closed (`2>&-`) lead nowhere: else what is opened next would have their
    numbers, and children would take it for theirs."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            fd = os.open(os.devnull, os.O_RDWR)  # of the lowest number that is free
            os.set_inheritable(fd, True)
            setattr(sys, name, os.fdopen(fd, "r" if name == "stdin" else "w", closefd=False))


def _run(argv: list[str] | None) -> int:
    try:
        words = sys.argv[1:] if argv is None else argv
        parser = build_parser(next((word for word in words if not word.startswith("-")), ""))
        arguments = parser.parse_args(argv)
        logging.basicConfig(
            level=logging.DEBUG if arguments.verbose else logging.INFO,
            format="stoker: %(message)s",
            stream=sys.stderr,
        )
        handler = getattr(arguments, "handler", None)
        if handler is None:
            parser.print_help(sys.stderr)
            return EXIT_USAGE
        return int(handler(arguments))
    except StokerError as error:
        print(f"stoker: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stoker: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return 0


if __name__ == "__main__":
    sys.exit(main())
