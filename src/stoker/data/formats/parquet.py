"""Parquet: one record is one row, and rows are decoded by row groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stoker.base.ranges import ByteRange
from stoker.data.attach import Served
from stoker.data.formats.table_index import Group, Place, Scanned
from stoker.data.formats.table_objects import Objects, SpanFile
from stoker.data.formats.table_records import HELD_BYTES, Head, TableRecords, damage, needs_pyarrow
from stoker.data.formats.table_rows import features_of
from stoker.errors import DataError
from stoker.wire.cache_api import ObjectInfo

FOOTER_GUESS_BYTES = 64 * 1024
_MAGIC, _ENCRYPTED = b"PAR1", b"PARE"
_END_BYTES = 8
_HEAD_FACTOR = 4
"""A decoded footer takes about so many times its bytes."""


class ParquetRecords(TableRecords):
    """The rows of Parquet files. Options and errors are those of TableRecords; pages that have a checksum are checked.

    The index is made of the files' footers. Of a row group only the wanted columns are read.
    """

    def __init__(
        self,
        served: Served,
        *,
        columns: Sequence[str] | None = None,
        held_bytes: int = HELD_BYTES,
        suffixes: Sequence[str] | None = None,
    ) -> None:
        needs_pyarrow("Parquet files")
        super().__init__(served, ParquetLayout(), columns=columns, held_bytes=held_bytes, suffixes=suffixes)


class ParquetLayout:
    """Row groups, found by the footer."""

    suffixes: Sequence[str] = (".parquet", ".pq", ".parq")

    def list_objects(self, objects: Objects, listed: Sequence[ObjectInfo]) -> None:
        return None

    def scan(self, objects: Objects, info: ObjectInfo, columns: Sequence[str] | None) -> Scanned:
        size = info.size_bytes
        guess = objects.read(info, max(0, size - FOOTER_GUESS_BYTES), size)
        length = _footer_bytes(info, guess) + _END_BYTES
        footer = guess[-length:]
        if length > len(guess):
            footer = objects.read(info, size - length, size - len(guess)) + guess
        try:
            metadata = _metadata(footer)
            schema = metadata.schema.to_arrow_schema()
            wanted = schema.names if columns is None else columns
            groups = [
                _group(metadata, number, wanted, size - length) for number in range(metadata.num_row_groups)
            ]
            if sum(group.rows for group in groups) != metadata.num_rows:
                raise ValueError("its row groups do not have as many rows as it says")
        except damage() as error:
            raise DataError(f"the footer of {info.key!r} is damaged: {error}") from error
        return Scanned(
            tuple(schema.names), groups, [ByteRange(size - length, size)], features_of(schema.metadata)
        )

    def head(self, spans: Sequence[ByteRange], parts: Sequence[bytes]) -> Head:
        return Head(_metadata(parts[0]), _HEAD_FACTOR * len(parts[0]))

    def spans(self, head: Head, place: Place, columns: Sequence[str]) -> list[ByteRange]:
        return _spans(head.content.row_group(place.within), columns)

    def decode(self, head: Head, place: Place, columns: Sequence[str], file: SpanFile) -> Any:
        import pyarrow.parquet as pq

        # All that is needed is at hand, so reading ahead gains nothing; and who wants threads has DataLoader workers.
        opened = pq.ParquetFile(
            file, metadata=head.content, pre_buffer=False, page_checksum_verification=True
        )
        table = opened.read_row_group(place.within, columns=list(columns), use_threads=False)
        table = table.select(columns).combine_chunks()
        table.validate()
        return table


def _footer_bytes(info: ObjectInfo, guess: bytes) -> int:
    """The length that the end of a file says, checked. Raises DataError."""
    magic = guess[-len(_MAGIC) :]
    if magic == _ENCRYPTED:
        raise DataError(f"{info.key!r} has an encrypted footer, which cannot be read here")
    if magic != _MAGIC or info.size_bytes < len(_MAGIC) + _END_BYTES:
        raise DataError(
            f"{info.key!r} ({info.size_bytes} bytes) is not a Parquet file, or was cut off: it does not end in "
            f"{_MAGIC.decode()!r}"
        )
    length = int.from_bytes(guess[-_END_BYTES : -len(_MAGIC)], "little")
    if length + _END_BYTES + len(_MAGIC) > info.size_bytes:
        raise DataError(
            f"{info.key!r} is damaged: its footer is said to have {length} bytes, the file has {info.size_bytes}"
        )
    return length


def _metadata(footer: bytes) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    return pq.read_metadata(pa.BufferReader(footer))


def _group(metadata: Any, number: int, columns: Sequence[str], end: int) -> Group:
    row_group = metadata.row_group(number)
    if row_group.num_rows < 0:
        raise ValueError(f"row group {number} has {row_group.num_rows} rows")
    spans = _spans(row_group, columns)
    start = min((span.start for span in spans), default=0)
    stop = max((span.stop for span in spans), default=0)
    if not all(0 <= span.start <= span.stop <= end for span in spans):
        raise ValueError(f"row group {number} lies outside the file")
    return Group(row_group.num_rows, start, stop)


def _spans(row_group: Any, columns: Sequence[str]) -> list[ByteRange]:
    """The bytes of each leaf of those columns."""
    spans = []
    names, prefixes = set(columns), tuple(f"{name}." for name in columns)
    for number in range(row_group.num_columns):
        chunk = row_group.column(number)
        path = chunk.path_in_schema
        if path in names or path.startswith(prefixes):
            start = chunk.data_page_offset
            if chunk.has_dictionary_page:
                start = min(start, chunk.dictionary_page_offset)
            spans.append(ByteRange(start, start + chunk.total_compressed_size))
    return spans
