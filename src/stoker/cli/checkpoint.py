"""`stoker checkpoint …`: look at the checkpoints of a run, check them, take them out."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.base.units import format_bytes, format_duration
from stoker.cache.origin.open import without_query
from stoker.cli.cache_options import print_json, warn
from stoker.cli.cache_progress import Progress
from stoker.cli.job_view import clean
from stoker.errors import EXIT_FAILED, EXIT_OK, ConfigError

if TYPE_CHECKING:
    from stoker.train.checkpoints.export import Listed

_EPILOG = """\
examples:
  stoker checkpoint ls /shared/checkpoints                 what there is
  stoker checkpoint verify s3://bucket/run-7               whether it is what was written
  stoker checkpoint export s3://bucket/run-7 model.pt --only modules.model

URL is a folder, or what fsspec knows: s3://bucket/prefix (with ?endpoint=… and ?region=…, or AWS_* variables),
gs://…, file:///… . A directory step-000000000200 is also a checkpoint of torch.distributed.checkpoint.

exit codes:
  0 done   1 a checkpoint is broken   2 wrong usage   5 there is none, or the storage cannot be reached
"""


def add_checkpoint_parser(subparsers: Any) -> None:
    """Add `stoker checkpoint`; PyTorch is needed by its commands alone."""
    checkpoint = subparsers.add_parser(
        "checkpoint",
        help="look at checkpoints, check them, take models out of them",
        description="Look at a run's checkpoints, check them, take models out of them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = checkpoint.add_subparsers(dest="checkpoint_command", required=True, metavar="COMMAND")
    ls = _leaf(
        commands, "ls", "list checkpoints, oldest first", _ls,
        "  stoker checkpoint ls /shared/checkpoints\n"
        "  stoker checkpoint ls 's3://bucket/run-7?endpoint=http://minio:9000' --json",
    )  # fmt: skip
    ls.add_argument("--json", action="store_true", help="JSON, for programs")
    verify = _leaf(
        commands, "verify", "read checkpoints and compare them with their checksums; exit code 1 if one is broken",
        _verify,
        "  stoker checkpoint verify /shared/checkpoints\n"
        "  stoker checkpoint verify s3://bucket/run-7 --commits 1200",
    )  # fmt: skip
    verify.add_argument("--commits", metavar="N", type=int, help="that one alone")
    verify.add_argument("--json", action="store_true", help="JSON, for programs")
    export = _leaf(
        commands, "export", "write a checkpoint, or a part of it, to one file", _export,
        "  stoker checkpoint export /shared/checkpoints all.pt\n"
        "  stoker checkpoint export s3://bucket/run-7 model.pt --only modules.model --commits 1200\n"
        "  stoker checkpoint export s3://bucket/run-7 model.safetensors --only modules.model\n\n"
        "torch.load(DST, weights_only=True) reads it: a dict of modules, optimizers, objects, values and positions,\n"
        "or with --only what is at that place in it. Without --commits it is the newest whole one. safetensors\n"
        "holds tensors and nothing else.",
    )  # fmt: skip
    export.add_argument("target", metavar="DST", type=Path, help="a file that is not there yet")
    export.add_argument("--commits", metavar="N", type=int, help="that one, instead of the newest")
    export.add_argument(
        "--only", metavar="PATH", default="", help="a part: modules.model, optimizers.adam, …"
    )
    export.add_argument("--format", choices=["pt", "safetensors"], help="of the file (by its name, else pt)")
    export.add_argument("--force", action="store_true", help="replace DST")


def _leaf(commands: Any, name: str, help_text: str, handler: Any, examples: str) -> Any:
    parser = commands.add_parser(
        name,
        help=help_text,
        description=f"{help_text[0].upper()}{help_text[1:]}.",
        epilog=f"examples:\n{examples}\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url", metavar="URL", help="where the run writes its checkpoints")
    parser.set_defaults(handler=handler)
    return parser


def _ls(arguments: argparse.Namespace) -> int:
    from stoker.train.checkpoints.export import listed

    found = listed(arguments.url)
    now = time.time()
    if arguments.json:
        print_json({"url": without_query(arguments.url), "checkpoints": [_described(one) for one in found]})
        return EXIT_OK
    if not found:
        print(f"{_shown(arguments)}: no checkpoints")
    for one in found:
        age = f"{format_duration(max(0.0, now - one.written_at))} ago" if one.written_at else ""
        ranks = f"{one.world_size} rank{'s' if one.world_size != 1 else ''}" if one.world_size else ""
        problem = f": {clean(one.problem)}" if one.problem else ""
        print(
            f"{one.commits:>12}  {format_bytes(one.size_bytes):>10}  {age:>14}  {ranks:<8}  {one.state}{problem}"
        )
    return EXIT_OK


def _verify(arguments: argparse.Namespace) -> int:
    from stoker.train.checkpoints.export import choose, listed, verify

    found = listed(arguments.url)
    if arguments.commits is not None:
        found = [one for one in found if one.commits == arguments.commits]
    if not found:
        choose(found, arguments.commits, _shown(arguments))  # says that there is none
    size_bytes = sum(one.size_bytes for one in found if one.state == "whole")
    done_bytes, broken = 0, False
    with Progress(f"checking {_shown(arguments)}", size_bytes) as progress:

        def read(count: int) -> None:
            nonlocal done_bytes
            done_bytes += count
            rate = done_bytes / max(progress.took_s, 1e-3)
            said = f"{format_bytes(done_bytes)} of {format_bytes(size_bytes)}, {format_bytes(rate)}/s"
            progress.say(said, done_bytes)

        checked = [(one, [] if one.state == "torn" else verify(one, read)) for one in found]
    for one, problems in checked:
        # One that is being written is torn as well: only who asks for it by its number has a complaint.
        is_broken = bool(problems) or (one.state == "torn" and arguments.commits is not None)
        broken = broken or is_broken
        if arguments.json:
            print_json({**_described(one), "is_broken": is_broken, "problems": problems})
            continue
        state = one.state if one.state == "torn" else "broken" if problems else "whole"
        print(f"{one.commits:>12}  {format_bytes(one.size_bytes):>10}  {state}")
        for problem in problems or ([one.problem] if one.problem else []):
            warn(clean(problem))
    return EXIT_FAILED if broken else EXIT_OK


def _export(arguments: argparse.Namespace) -> int:
    from stoker.train.checkpoints.export import PT, SAFETENSORS, choose, listed, read_part, write_file

    target: Path = arguments.target
    if target.is_dir() or (target.exists() and not arguments.force):
        raise ConfigError(f"{target} is there already: name another file, or give --force to replace one")
    one = choose(listed(arguments.url), arguments.commits, _shown(arguments))
    form = arguments.format or (SAFETENSORS if target.suffix == ".safetensors" else PT)
    write_file(read_part(one, arguments.only), target, form)
    what = (
        f"{arguments.only} of commit {one.commits}"
        if arguments.only
        else f"the state at commit {one.commits}"
    )
    print(f"{clean(str(target))}: {what}, {format_bytes(target.stat().st_size)}")
    return EXIT_OK


def _described(one: Listed) -> dict[str, Any]:
    return {
        "commits": one.commits,
        "name": one.name,
        "state": one.state,
        "size_bytes": one.size_bytes,
        "written_at": one.written_at,
        "world_size": one.world_size,
        "problem": one.problem,
    }


def _shown(arguments: argparse.Namespace) -> str:
    return clean(without_query(arguments.url))
