"""Which format a dataset is in: as it was said, or as the names of its objects tell."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from stoker.data.formats.folder import IMAGE_SUFFIXES
from stoker.data.formats.port import Records
from stoker.data.formats.source import Source
from stoker.errors import ConfigError

AUTO = "auto"
_DATABASE = re.compile(
    r"(postgres(ql)?|mysql|mariadb|sqlite|oracle|mssql|cockroachdb)(\+\w+)?://", re.IGNORECASE
)
_PASSWORD = re.compile(r"(://[^:/@]*):[^@/]*@")
_DATABASE_PASSWORD = re.compile(r"(://[^:/@]*):.*@")
"""SQLAlchemy takes some that are not quoted."""


class Format(Protocol):
    """How a dataset's records are read. `Tar()`, `Csv(delimiter=";")` and their like are formats. One whose records do
    not come through the cache has `is_cached = False`."""

    @property
    def name(self) -> str: ...

    def open(self, source: Source) -> Records: ...


class _Home(NamedTuple):
    """Where a format is, and what its objects' names end in."""

    module: str
    type: str
    suffixes: tuple[str, ...] = ()


_HOMES: Mapping[str, _Home] = {
    "objects": _Home("objects", "Objects"),
    "folder": _Home("folder", "Folder"),
    "tar": _Home("tar", "Tar", (".tar", ".tar.gz", ".tgz", ".tar.zst", ".tar.xz", ".tar.bz2")),
    "tfrecord": _Home("tfrecord", "TFRecord", (".tfrecord", ".tfrecords", ".tfrec", ".tfrecord.gz", ".tfrecords.gz")),
    "recordio": _Home("recordio", "RecordIO", (".rec", ".recordio")),
    "lines": _Home("lines", "Lines"),
    "jsonl": _Home("jsonl", "Jsonl", (".jsonl", ".ndjson", ".jsonl.gz", ".jsonl.zst")),
    "csv": _Home("csv", "Csv", (".csv", ".tsv", ".csv.gz", ".tsv.gz")),
    "mds": _Home("mds", "Mds", (".mds", ".mds.zstd", ".mds.gz")),
    "parquet": _Home("parquet", "Parquet", (".parquet", ".pq", ".parq")),
    "arrow": _Home("arrow", "Arrow", (".arrow", ".arrows", ".feather", ".ipc")),
    "sql": _Home("sql", "Sql"),
}  # fmt: skip
_ASIDE = (
    ".json", ".md", ".txt", ".idx", ".index", ".lst", ".yaml", ".yml", ".crc", ".md5", ".sha256", ".html", ".license",
)  # fmt: skip
"""What may lie beside files of records."""

_OUTER = ("gz", "zst", "zstd", "xz", "bz2")
"""What stands before these tells."""
_KNOWN_MAX = 1000


class Choice(NamedTuple):
    """A format, and what speaks for it."""

    name: str
    why: str


def names() -> list[str]:
    """Of all formats."""
    return list(_HOMES)


def is_database(url: str) -> bool:
    """Whether a URL is one of SQLAlchemy's."""
    return _DATABASE.match(url) is not None


def shown(url: str) -> str:
    """A dataset's URL as messages may have it: without a password."""
    return (_DATABASE_PASSWORD if is_database(url) else _PASSWORD).sub(r"\1:***@", url)


def make_format(name: str, options: Mapping[str, Any]) -> Format:
    """A format by its name. Raises ConfigError for unknown names and options."""
    home = _HOMES.get(name)
    if home is None:
        raise ConfigError(
            f"format={name!r} is unknown: it is 'auto' or one of {', '.join(map(repr, _HOMES))}"
        )
    try:
        kind = getattr(import_module(f"stoker.data.formats.{home.module}"), home.type)
    except ImportError as error:
        raise ConfigError(f"format {name!r} cannot be used here: {error}") from error
    try:
        made: Format = kind(**options)
    except TypeError as error:
        raise ConfigError(f"options of format {name!r}: {error}") from None
    return made


def choose(url: str, keys: Iterable[str]) -> Choice:
    """The format that the names of objects tell. Raises ConfigError where they tell several."""
    counts: Counter[str] = Counter()
    folders: set[str] = set()
    known: dict[str, str] = {}
    for key in keys:
        name = key.rpartition("/")[2].lower()
        # Of millions of names most end alike.
        stem, _, suffix = name.rpartition(".")
        kind = known.get(suffix) if stem and not name.startswith(("_", ".")) else None
        if kind is None:
            kind = _kind(name)
            if stem and suffix not in _OUTER and len(known) < _KNOWN_MAX:
                known[suffix] = _kind(f"x.{suffix}")
        counts[kind] += 1
        if kind == "image":
            folders.add(key.rpartition("/")[0])
    files = [kind for kind in counts if kind in _HOMES]
    others = counts["image"] + counts["other"]
    if len(files) > 1 or (files and (others or counts["aside"] > counts[files[0]] + 10)):
        found = [f"{kind!r} ({counts[kind]} objects)" for kind in files]
        if others or len(files) == 1:
            found.append(f"'objects' ({sum(counts.values())}, one record each)")
        raise ConfigError(
            f"the format of {url!r} could be {' or '.join(found)}: say which with format=…, or name a prefix with one "
            "kind of files"
        )
    if files:
        return Choice(files[0], f"{counts[files[0]]} objects are named so")
    if counts["image"] and not counts["other"] and len(folders) > 1:
        return Choice("folder", f"{counts['image']} images are in {len(folders)} folders")
    return Choice("objects", "each object is one record")


def _kind(name: str) -> str:
    for kind, home in _HOMES.items():
        if home.suffixes and name.endswith(home.suffixes):
            return kind
    if name.startswith((".", "_")) or name.endswith(_ASIDE):
        return "aside"
    return "image" if name.endswith(IMAGE_SUFFIXES) else "other"
