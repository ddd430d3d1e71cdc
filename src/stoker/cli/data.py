"""`stoker data …`: look at a dataset, find its records beforehand, write them anew."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from stoker.base.units import format_bytes, format_duration, parse_size_bytes
from stoker.cli.cache_options import count, print_json, warn
from stoker.cli.cache_progress import Progress
from stoker.cli.job_view import clean
from stoker.data.dataset import Dataset
from stoker.data.formats.choose import AUTO, names, shown
from stoker.data.formats.source import IndexProgress
from stoker.data.pack import SHARD_BYTES, PackProgress, pack
from stoker.data.pack_shards import WRITERS
from stoker.errors import ConfigError
from stoker.settings import cache_settings

_EPILOG = """\
examples:
  stoker data head s3://bucket/train/ -n 3                what the first records are
  stoker data index stoker://train/                       find the records before the job starts
  stoker data pack ./images/ ./shards/ --format tar       write records into shards

A URL is stoker://BUCKET/PREFIX, an origin's own (s3://…, file:///…), or a path. It is read through the cache at
--endpoint, or at STOKER_CACHE_ENDPOINT; without one a cache is started that ends with the command.

exit codes:
  0 done   2 wrong usage, an unknown format, or a folder that is not empty
  4 data or cache: a damaged record, no server   5 the machine refuses (disk)
  130 interrupted: nothing is left half done
"""
_TEXT_MAX = 60


def add_data_parser(subparsers: Any) -> None:
    """Add `stoker data` to a parser's subcommands; each leaf sets `handler`."""
    raw = argparse.RawDescriptionHelpFormatter
    data = subparsers.add_parser(
        "data",
        help="look at datasets, find their records, pack them",
        description="Look at datasets, find their records, and write them anew.",
        epilog=_EPILOG,
        formatter_class=raw,
    )
    commands = data.add_subparsers(dest="data_command", required=True, metavar="COMMAND")
    head = _leaf(
        commands, "head", "show what the first records are", _head,
        "  stoker data head s3://bucket/train/\n"
        "  stoker data head ./words.txt -n 10 --format lines\n"
        "  stoker data head table.csv --option delimiter=';'\n"
        "  stoker data head sqlite:////data/shop.db --option table=orders",
    )  # fmt: skip
    head.add_argument("-n", metavar="N", type=count, default=3, help="so many records (3)")
    _leaf(
        commands, "index", "find the records of a dataset, so that jobs need not", _index,
        "  stoker data index stoker://train/shards/\n"
        "  stoker data index s3://bucket/train/ --format tfrecord --json\n\n"
        "The index is kept in the cache's folder (STOKER_CACHE_DIR) of this machine, until the objects change; of\n"
        "Parquet and Arrow the cache keeps what it is made of.",
    )  # fmt: skip
    packer = _leaf(
        commands, "pack", "write the records of a dataset into shards of a local folder", _pack,
        "  stoker data pack ./images/ ./shards/ --format tar\n"
        "  stoker data pack s3://bucket/logs.csv ./shards/ --format mds --shard-size 128MiB\n"
        "  stoker data pack stoker://train/ ./shards/ --from tfrecord --format recordio --on-corrupt skip\n\n"
        "tar: a dataset for WebDataset. tfrecord: bytes as they are, what has names as tf.train.Example. recordio:\n"
        "bytes and text only. jsonl: bytes within samples as base64. mds: the first record says which columns there\n"
        "are. The shards appear together when all are written.",
        form="--from",
    )  # fmt: skip
    packer.add_argument("folder", metavar="DST", type=Path, help="a local folder: new, or empty")
    packer.add_argument("--format", required=True, choices=list(WRITERS), help="what to write")
    packer.add_argument(
        "--shard-size", metavar="SIZE", type=_size, default=SHARD_BYTES, help="of each shard (64MiB), about"
    )
    packer.add_argument("--force", action="store_true", help="replace the shards that are in DST")


def _leaf(
    commands: Any, name: str, help_text: str, handler: Any, examples: str, *, form: str = "--format"
) -> Any:
    parser = commands.add_parser(
        name,
        help=help_text,
        description=f"{help_text[0].upper()}{help_text[1:]}.",
        epilog=f"examples:\n{examples}\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url", metavar="SRC" if form == "--from" else "URL", help="of a dataset, or a path")
    parser.add_argument(
        form, dest="read_as", metavar="FORMAT", choices=[AUTO, *names()], default=AUTO,
        help=f"how its records lie in objects: auto (by the objects' names), {', '.join(names())}",
    )  # fmt: skip
    parser.add_argument(
        "--option", metavar="NAME=VALUE", action="append", default=[], help="of that format (repeats)"
    )
    parser.add_argument(
        "--on-corrupt", choices=["error", "skip"], default="error", help="with damaged records (error)"
    )
    parser.add_argument("--endpoint", metavar="URL", help="the cache: http://HOST:PORT or unix:///PATH")
    parser.add_argument("--token", metavar="TOKEN")
    parser.add_argument("--json", action="store_true", help="JSON, for programs")
    parser.set_defaults(handler=handler)
    return parser


def _dataset(arguments: argparse.Namespace, progress: Progress) -> Dataset:
    settings = cache_settings()
    return Dataset(
        arguments.url,
        format=arguments.read_as,
        on_corrupt=arguments.on_corrupt,
        cache=replace(
            settings,
            endpoint=arguments.endpoint or settings.endpoint,
            token=arguments.token or settings.token,
        ),
        on_progress=lambda found: _indexed(progress, found),
        **_options(arguments.option),
    )


def _index(arguments: argparse.Namespace) -> int:
    began_at = time.monotonic()
    with Progress(f"finding the records of {_name(arguments)}", 1000) as progress:
        dataset = _dataset(arguments, progress)
        records = len(dataset)
    index = getattr(dataset.records, "index", None)
    path = None if index is None or index.path is None else str(index.path)
    size_bytes = 0 if index is None else index.size_bytes
    objects, objects_bytes = _objects(dataset.records)
    found = {
        "url": shown(arguments.url),
        "format": dataset.format,
        "records": records,
        "objects": objects,
        "size_bytes": objects_bytes,
        "index": path,
        "index_bytes": size_bytes,
        "damaged": dataset.corrupt.reasons,
        "took_s": round(time.monotonic() - began_at, 3),
    }
    if arguments.json:
        print_json(found)
        return 0
    took = format_duration(time.monotonic() - began_at)
    where = f" in {objects} objects of {format_bytes(objects_bytes)}" if dataset.is_cached else ""
    print(f"{_name(arguments)}: {records} records{where}, format {dataset.format}, in {took}")
    if path is not None:
        print(
            f"  index: {format_bytes(size_bytes)}, {size_bytes / records:.0f} bytes a record, {clean(path)}"
        )
    for reason in dataset.corrupt.reasons:
        warn(clean(reason))
    return 0


def _objects(records: Any) -> tuple[int, int]:
    """How many objects there are, and their bytes; none of a database."""
    index = getattr(records, "index", None)
    if index is not None:
        return len(index.listing.keys), int(index.listing.sizes.sum())
    found = getattr(records, "objects", ())
    return len(found), sum(info.size_bytes for info in found)


def _name(arguments: argparse.Namespace) -> str:
    """The dataset's URL, for who looks at the terminal."""
    return clean(shown(arguments.url))


def _head(arguments: argparse.Namespace) -> int:
    with Progress(f"finding the records of {_name(arguments)}", 1000) as progress:
        dataset = _dataset(arguments, progress)
        records = len(dataset)
    if not arguments.json:
        print(f"{_name(arguments)}: {records} records, format {dataset.format}")
    for number in range(min(records, arguments.n)):
        samples = dataset.__getitems__([number])
        reads = dataset.reads(np.array([number], np.int64))
        place = {}
        if reads is not None:
            place = {
                "object": reads.keys[int(reads.objects[0])],
                "start": int(reads.starts[0]),
                "stop": int(reads.stops[0]),
            }
        said = _said(samples[0]) if samples else "damaged"
        if arguments.json:
            print_json({"record": number, **place, "sample": said})
        else:
            print(clean(f"{number}: {said}"))
    for reason in dataset.corrupt.reasons:
        warn(clean(reason))
    return 0


def _pack(arguments: argparse.Namespace) -> int:
    began_at = time.monotonic()
    with Progress(f"finding the records of {_name(arguments)}", 1000) as progress:
        dataset = _dataset(arguments, progress)
        records = len(dataset)
    with Progress(f"packing {_name(arguments)}", records) as progress:
        done = pack(
            dataset,
            arguments.folder,
            arguments.format,
            shard_bytes=arguments.shard_size,
            is_forced=arguments.force,
            on_progress=lambda at: _packed(progress, at),
        )
    took_s = time.monotonic() - began_at
    if arguments.json:
        print_json({**done._asdict(), "format": arguments.format, "took_s": round(took_s, 3)})
    else:
        print(
            f"{clean(str(arguments.folder))}: {done.records} records in {len(done.files)} files, "
            f"{format_bytes(done.size_bytes)}, in {format_duration(took_s)}"
        )
    if done.skipped:
        warn(f"{done.skipped} damaged records were left out; the first: {clean(dataset.corrupt.reasons[0])}")
    return 0


def _indexed(progress: Progress, found: IndexProgress) -> None:
    progress.say(
        f"{found.records} records, {found.objects_done} of {found.objects} objects, "
        f"{format_bytes(found.done_bytes)} of {format_bytes(found.size_bytes)}",
        1000 * found.done_bytes // max(1, found.size_bytes),
    )


def _packed(progress: Progress, at: PackProgress) -> None:
    rate = at.written_bytes / max(progress.took_s, 1e-3)
    progress.say(
        f"{at.records_done} of {at.records} records, {format_bytes(at.written_bytes)} in {at.shards} shards, "
        f"{format_bytes(rate)}/s",
        at.records_done,
    )


def _said(sample: Any) -> str:
    """A sample in a line."""
    if isinstance(sample, Mapping):
        return ", ".join(f"{name}={_said(value)}" for name, value in sample.items())
    if isinstance(sample, tuple):
        return f"({', '.join(_said(value) for value in sample)})"
    if isinstance(sample, bytes):
        return repr(sample) if len(sample) <= _TEXT_MAX and sample.isascii() else f"<{len(sample)} bytes>"
    if isinstance(sample, np.ndarray):
        return f"<{sample.dtype} {list(sample.shape)}>" if sample.size > 8 else repr(sample.tolist())
    if isinstance(sample, list) and 0 < len(sample) <= 8:
        return f"[{', '.join(_said(value) for value in sample)}]"
    text = repr(sample)
    return text if len(text) <= _TEXT_MAX else f"{text[:_TEXT_MAX]}… ({len(text)} characters)"


def _options(texts: list[str]) -> dict[str, Any]:
    """`NAME=VALUE`; a value that is JSON is what it says, another one text."""
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"--option {text!r} is not NAME=VALUE")
        try:
            found[name] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            found[name] = value
        if isinstance(found[name], list):
            found[name] = tuple(found[name])
    return found


def _size(text: str) -> int:
    try:
        size_bytes = parse_size_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if size_bytes < 1:
        raise argparse.ArgumentTypeError("a shard has at least 1 byte")
    return size_bytes
