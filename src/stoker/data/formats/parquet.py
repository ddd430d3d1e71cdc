"""Parquet: one record is one row, and rows are decoded by row groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stoker.base.ranges import ByteRange
from stoker.data.attach import Served
from stoker.data.formats.parquet_footer import DamagedFooter, RowGroup, read_footer
from stoker.data.formats.source import Source
from stoker.data.formats.table_index import Group, Place, Scanned, coalesced
from stoker.data.formats.table_objects import Objects, SpanFile, check_limits
from stoker.data.formats.table_records import HELD_BYTES, Head, TableRecords, needs_pyarrow
from stoker.data.formats.table_rows import features_of
from stoker.errors import DataError
from stoker.wire.cache_api import ObjectInfo

FOOTER_GUESS_BYTES = 64 * 1024
_MAGIC, _ENCRYPTED = b"PAR1", b"PARE"
_END_BYTES = 8
_HEAD_FACTOR = 4
"""A decoded footer takes about so many times its bytes."""


@dataclass(frozen=True)
class Parquet:
    """A sample is a row of Parquet files, as a dict of its columns. Options are those of TableRecords."""

    name = "parquet"
    columns: Sequence[str] | None = None
    held_bytes: int = HELD_BYTES
    suffixes: Sequence[str] | None = None

    def __post_init__(self) -> None:
        needs_pyarrow("Parquet files")
        check_limits(self.held_bytes, self.columns)

    def open(self, source: Source) -> ParquetRecords:
        """The rows under a URL. Raises EmptyDataset, ConfigError, DataError, CacheError."""
        records = ParquetRecords(
            source, columns=self.columns, held_bytes=self.held_bytes, suffixes=self.suffixes
        )
        len(records)  # finds them
        return records


class ParquetRecords(TableRecords):
    """The rows of Parquet files. Options and errors are those of TableRecords; pages that have a checksum are checked.

    The index is made of the files' footers. Of a row group only the wanted columns are read.
    """

    def __init__(
        self,
        served: Served | Source,
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
            found = read_footer(footer)
            wanted = set(found.columns if columns is None else columns)
            groups = [_group(group, wanted, size - length) for group in found.row_groups]
        except DamagedFooter as error:
            raise DataError(f"the footer of {info.key!r} cannot be read: {error}") from error
        return Scanned(found.columns, groups, [ByteRange(size - length, size)], features_of(found.metadata))

    def head(self, spans: Sequence[ByteRange], parts: Sequence[bytes]) -> Head:
        import pyarrow as pa
        import pyarrow.parquet as pq

        return Head(pq.read_metadata(pa.BufferReader(parts[0])), _HEAD_FACTOR * len(parts[0]))

    def decode(self, head: Head, place: Place, columns: Sequence[str], file: SpanFile) -> Any:
        import pyarrow as pa
        import pyarrow.parquet as pq

        # All that is needed is at hand, so reading ahead gains nothing; and who wants threads has DataLoader workers.
        opened = pq.ParquetFile(
            file, metadata=head.content, pre_buffer=False, page_checksum_verification=True
        )
        table = opened.read_row_group(place.within, columns=list(columns), use_threads=False)
        table = table.select(columns).combine_chunks()
        for column in table.columns:
            column.validate(
                full=pa.types.is_dictionary(column.type)
            )  # which values there are is not checked before
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


def _group(group: RowGroup, columns: set[str], end: int) -> Group:
    spans = [chunk.span for chunk in group.chunks if chunk.column in columns]
    if any(span.stop > end for span in spans):
        raise DamagedFooter("a column lies outside the file")
    return Group(group.rows, coalesced(spans) or [ByteRange(0, 0)])
