"""`stoker job …`: the command line for watching and steering running jobs."""

from __future__ import annotations

import argparse
from typing import Any

from stoker.base.units import parse_duration_s
from stoker.cli import job_commands as commands_of
from stoker.cli.job_events import show_events, show_summary

EPILOG = """\
JOB is a name (--rdzv-id) or HOST:PORT of a job's master. It may be left out when exactly one job runs on this machine.
Jobs of this machine are known with their tokens; for others give --job-token-file FILE or set STOKER_JOB_TOKEN.

examples:
  stoker job ls
  stoker job status --watch
  stoker job events --follow --kind generation,world
  stoker job summary --log-dir stoker-logs      where the newest run's time went
  stoker job scale 3                            have three nodes
  stoker job drain night-run node-3f9a1c2b      let a node leave; no step is lost
  stoker job stacks host1:29400                 what every rank does right now
  stoker job stop night-run --why "wrong data"

exit codes:
  0 done   1 the job has ended or refuses   2 wrong usage   3 no job, or no master answers   130 interrupted
"""


def add_job_parser(subparsers: Any) -> None:
    """Add `stoker job` to a parser's subcommands; each leaf sets `handler`."""
    raw = argparse.RawDescriptionHelpFormatter
    job = subparsers.add_parser(
        "job",
        help="watch and steer running jobs",
        description="Watch and steer running jobs.",
        epilog=EPILOG,
        formatter_class=raw,
    )
    commands = job.add_subparsers(dest="job_command", required=True, metavar="COMMAND")

    def leaf(name: str, help_text: str, handler: Any, examples: str, *, names_job: bool = True) -> Any:
        parser = commands.add_parser(
            name,
            help=help_text,
            description=f"{help_text[0].upper()}{help_text[1:]}.",
            epilog=f"examples:\n{examples}",
            formatter_class=raw,
        )
        if names_job:
            parser.add_argument("job", metavar="JOB", nargs="?", help="name, or HOST:PORT of the master")
            parser.add_argument("--job-token-file", metavar="FILE", help="file with the job's token")
        parser.add_argument("--json", action="store_true", help="one JSON object")
        parser.add_argument(
            "--timeout", metavar="TIME", type=_seconds, default=10.0, help="patience with the master (10s)"
        )
        parser.set_defaults(handler=handler)
        return parser

    leaf("ls", "list the jobs of this machine", commands_of.ls, "  stoker job ls --json", names_job=False)
    status = leaf(
        "status", "show a job, its nodes and its workers", commands_of.status, "  stoker job status --watch\n"
        "  stoker job status host1:29400 --job-token-file token",
    )  # fmt: skip
    status.add_argument("-w", "--watch", action="store_true", help="again and again until the job ends")
    status.add_argument("--every", metavar="TIME", type=_seconds, default=1.0, help="between two looks (1s)")
    _add_events(leaf)
    _add_changes(leaf)
    stacks = leaf(
        "stacks", "show what every rank does right now", commands_of.stacks, "  stoker job stacks night-run"
    )
    stacks.add_argument(
        "--within", metavar="TIME", type=_seconds, default=10.0, help="how long ranks may take (10s)"
    )
    stacks.add_argument("--all-threads", action="store_true", help="not the main thread alone")
    leaf("shards", "show how far the dynamic shards have come", commands_of.shards, "  stoker job shards")
    leaf("advice", "say how many nodes the job should have", commands_of.advice, "  stoker job advice --json")
    leaf("metrics", "print figures for Prometheus", commands_of.metrics, "  stoker job metrics night-run")


def _add_events(leaf: Any) -> None:
    events = leaf(
        "events", "show what was decided, and why", show_events,
        "  stoker job events --follow\n"
        "  stoker job events --kind node-lost,node-joined --json\n"
        "  stoker job events --log-dir stoker-logs          of the newest run there, even if it is over\n"
        "  stoker job events resnet --journal etcd://etcd1:2379  of the job with --rdzv-id resnet, even if it is over",
    )  # fmt: skip
    events.add_argument("-f", "--follow", action="store_true", help="go on until the job ends")
    events.add_argument("--after", metavar="N", type=_count, default=0, help="only those after number N")
    events.add_argument(
        "--kind", metavar="KIND", action="append", default=[], help="only these kinds (repeats, or a,b)"
    )
    summary = leaf(
        "summary", "say where a job's time went: starting, changes of the world, data, steps", show_summary,
        "  stoker job summary night-run\n  stoker job summary --log-dir stoker-logs --json",
    )  # fmt: skip
    for parser in (events, summary):
        where = parser.add_mutually_exclusive_group()
        where.add_argument("--log-dir", metavar="PATH", help="read a log folder, or its events.db, instead")
        where.add_argument(
            "--journal", metavar="URL", help="read the job's --journal instead; JOB is its --rdzv-id"
        )


def _add_changes(leaf: Any) -> None:
    scale = leaf(
        "scale", "have another number of nodes", commands_of.scale, "  stoker job scale night-run 3 --wait 5m"
    )
    scale.add_argument("nodes", metavar="N", type=_count, help="nodes, between the job's minimum and maximum")
    stop = leaf("stop", "end a job now", commands_of.stop, '  stoker job stop night-run --why "wrong data"')
    drain = leaf(
        "drain", "have a node leave at an agreed commit; no step is lost", commands_of.drain,
        "  stoker job drain night-run node-3f9a1c2b\n  stoker job drain host2 --wait 5m && reboot",
    )  # fmt: skip
    drain.add_argument("node", metavar="NODE", help="id of the node, or name of its host")
    for parser, why in ((stop, "stopped by `stoker job stop`"), (drain, "drained by `stoker job drain`")):
        parser.add_argument("--why", metavar="TEXT", default=why, help="reason for the job's log")
    for parser in (scale, stop, drain):
        parser.add_argument("--wait", metavar="TIME", type=_seconds, help="until it is done, at most so long")


def _seconds(text: str) -> float:
    try:
        return parse_duration_s(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)
