"""Arrow IPC files and streams: one record is one row, and rows are decoded by record batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from stoker.base.ranges import ByteRange
from stoker.data.attach import Served
from stoker.data.formats.arrow_messages import DICTIONARY, END_OF_STREAM, RECORDS, SCHEMA, messages
from stoker.data.formats.source import Source
from stoker.data.formats.table_index import Group, Place, Scanned
from stoker.data.formats.table_objects import Objects, SpanFile, check_limits
from stoker.data.formats.table_records import HELD_BYTES, Head, TableRecords, needs_pyarrow
from stoker.data.formats.table_rows import damage, features_of
from stoker.errors import ConfigError, DataError
from stoker.wire.cache_api import ObjectInfo


@dataclass(frozen=True)
class Arrow:
    """A sample is a row of Arrow files and streams, as a dict of its columns. Options are those of TableRecords."""

    name = "arrow"
    columns: Sequence[str] | None = None
    held_bytes: int = HELD_BYTES
    suffixes: Sequence[str] | None = None

    def __post_init__(self) -> None:
        needs_pyarrow("Arrow files")
        check_limits(self.held_bytes, self.columns)

    def open(self, source: Source) -> ArrowRecords:
        """The rows under a URL. Raises EmptyDataset, ConfigError, DataError, CacheError."""
        records = ArrowRecords(
            source, columns=self.columns, held_bytes=self.held_bytes, suffixes=self.suffixes
        )
        len(records)  # finds them
        return records


class ArrowRecords(TableRecords):
    """The rows of Arrow files, in the file and in the stream format. Options and errors are those of TableRecords.

    A folder that `datasets.Dataset.save_to_disk` wrote has the files that its `state.json` names, in that order.
    Batches that are not compressed are used without a copy.
    """

    def __init__(
        self,
        served: Served | Source,
        *,
        columns: Sequence[str] | None = None,
        held_bytes: int = HELD_BYTES,
        suffixes: Sequence[str] | None = None,
    ) -> None:
        needs_pyarrow("Arrow files")
        super().__init__(served, ArrowLayout(), columns=columns, held_bytes=held_bytes, suffixes=suffixes)


class _Batches(NamedTuple):
    """What is needed of an object to decode its record batches."""

    schema: Any
    first: bytes
    """The message with the schema."""
    dictionaries: Sequence[tuple[int, bytes]]
    """Where each was, and its message."""
    is_file: bool


class ArrowLayout:
    """Record batches, found by the footer of a file, or by going from message to message in a stream."""

    suffixes: Sequence[str] = (".arrow", ".arrows", ".feather", ".ipc")

    def list_objects(self, objects: Objects, listed: Sequence[ObjectInfo]) -> list[ObjectInfo] | None:
        return saved_to_disk(objects, listed)

    def scan(self, objects: Objects, info: ObjectInfo, columns: Sequence[str] | None) -> Scanned:
        import pyarrow as pa

        try:
            found = messages(lambda start, stop: objects.read(info, start, stop), info.size_bytes)
            first = objects.read(info, found[0].start, found[0].stop)
            schema = pa.ipc.read_schema(pa.py_buffer(first))
            columns = tuple(schema.names)
        except damage() as error:
            raise DataError(
                f"{info.key!r} ({info.size_bytes} bytes) is not an Arrow file, is damaged or was cut off: {error}"
            ) from error
        heads = [ByteRange(m.start, m.stop) for m in found if m.kind in (SCHEMA, DICTIONARY)]
        groups = [Group(m.rows, [ByteRange(m.start, m.stop)]) for m in found if m.kind == RECORDS]
        return Scanned(columns, groups, heads, features_of(schema.metadata))

    def head(self, spans: Sequence[ByteRange], parts: Sequence[bytes]) -> Head:
        import pyarrow as pa

        dictionaries = [(span.start, part) for span, part in zip(spans[1:], parts[1:], strict=True)]
        schema = pa.ipc.read_schema(pa.py_buffer(parts[0]))
        is_file = spans[0].start > 0
        return Head(_Batches(schema, parts[0], dictionaries, is_file), sum(map(len, parts)))

    def decode(self, head: Head, place: Place, columns: Sequence[str], file: SpanFile) -> Any:
        """The batch is read as a stream of its own: the schema, the dictionaries before it, and the batch."""
        import pyarrow as pa

        known: _Batches = head.content
        (span,) = place.spans
        file.seek(span.start)
        batch = file.read_buffer(span.size_bytes)
        # In a stream a dictionary may be replaced on the way; in a file all of them are for all batches.
        before = [part for start, part in known.dictionaries if known.is_file or start < span.start]
        parts: list[bytes | memoryview] = [known.first, *before, batch, END_OF_STREAM]
        options = pa.ipc.IpcReadOptions(included_fields=[known.schema.names.index(c) for c in columns])
        with pa.ipc.open_stream(pa.PythonFile(joined(parts), mode="r"), options=options) as reader:
            table = pa.Table.from_batches([reader.read_next_batch()]).select(list(columns))
        # Unlike Parquet's, these bytes are used as they are: a wrong offset would be read from anywhere.
        table.validate(full=True)
        return table


def saved_to_disk(objects: Objects, listed: Sequence[ObjectInfo]) -> list[ObjectInfo] | None:
    """The files that `Dataset.save_to_disk` says it wrote, in its order; None if it did not write this folder.

    Raises ConfigError for a folder of several splits, DataError if a file is not there.
    """
    prefix = objects.prefix
    folder = prefix if not prefix or prefix.endswith("/") else f"{prefix}/"
    by_key = {info.key: info for info in listed}
    splits, state = by_key.get(f"{folder}dataset_dict.json"), by_key.get(f"{folder}state.json")
    if state is None and splits is not None:
        names = _json(objects, splits).get("splits", [])
        raise ConfigError(
            f"{objects.where!r} holds several datasets: name one of them, as in "
            + " or ".join(f"stoker://…/{folder}{name}/" for name in names)
        )
    if state is None:
        return None
    said = _json(objects, state)
    if said.get("_indices_data_files"):
        raise DataError(
            f"{state.key!r} is of an old `datasets` and keeps its order apart: load it with load_from_disk() and save "
            "it anew"
        )
    try:
        names = [f"{folder}{file['filename']}" for file in said["_data_files"]]
    except (KeyError, TypeError) as error:
        raise DataError(f"{state.key!r} names no data files, as save_to_disk() does") from error
    missing = [name for name in names if name not in by_key]
    if missing:
        raise DataError(f"{state.key!r} names {missing[0]!r}, which is not there")
    return [by_key[name] for name in names]


def joined(parts: Sequence[bytes | memoryview]) -> SpanFile:
    """Parts as one file, without a copy."""
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + len(part))
    return SpanFile(starts[-1], list(zip(starts, parts, strict=False)), _nothing)


def _nothing(start: int, stop: int) -> bytes:
    raise ValueError(f"a message reaches over its end: bytes [{start}, {stop})")


def _json(objects: Objects, info: ObjectInfo) -> dict[str, Any]:
    try:
        return msgspec.json.decode(objects.read(info, 0, info.size_bytes), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise DataError(f"{info.key!r} is not what save_to_disk() writes: {error}") from error
