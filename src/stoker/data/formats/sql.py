"""Rows of a database as records, numbered in the order of a key."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from stoker.data.formats.port import Reads
from stoker.data.formats.source import Source
from stoker.data.formats.sql_partitions import Partitions, find_partitions, plan_reads
from stoker.data.formats.sql_selection import Asked, Selection, select_from
from stoker.data.formats.sql_source import SqlSource, needs_sqlalchemy
from stoker.data.formats.table_held import Held
from stoker.data.formats.table_index import I64, checked_numbers
from stoker.data.formats.table_objects import check_limits
from stoker.data.formats.table_rows import Sample
from stoker.errors import BadRecord, ConfigError, DatasetChanged

if TYPE_CHECKING:
    from sqlalchemy import Connection

PARTITION_RECORDS = 10_000
HELD_KEYS_BYTES = 64 * 1024 * 1024
_KEYS_AT_ONCE = 500
"""In one statement: databases take 999 parameters at least."""
_KEY_BYTES = 40
_SELECTION = "selection"


@dataclass(frozen=True)
class Sql:
    """A sample is a row of a table, view or query, as a dict of its columns. Options are those of SqlRecords; the
    dataset's URL is SQLAlchemy's."""

    name = "sql"
    is_cached = False
    table: str | None = None
    query: str | None = None
    key: str | None = None
    columns: Sequence[str] | None = None
    partition_records: int = PARTITION_RECORDS
    held_bytes: int = HELD_KEYS_BYTES
    engine_options: Mapping[str, Any] | None = field(default=None, repr=False)
    """May hold a password."""

    def __post_init__(self) -> None:
        needs_sqlalchemy()
        _check_asked(self.table, self.query, self.partition_records)
        check_limits(self.held_bytes, self.columns)

    def open(self, source: Source) -> SqlRecords:
        """The rows at a URL. Raises EmptyDataset, ConfigError, OriginError."""
        options = {option.name: getattr(self, option.name) for option in fields(self)}
        return SqlRecords(source.url, **options)


class SqlRecords:
    """The rows of a table, a view (`table="schema.name"`) or a query, as dicts; they do not come through the cache.

    `url` is SQLAlchemy's. `key` orders the rows and names each one: an integer, a text or a time; by default the
    table's primary key. `columns`: only these. `partition_records`: rows between two keys that are looked up once, at
    first use; the keys in between are asked for when they are needed, unless they are consecutive integers, and each
    process keeps `held_bytes` of them. Nothing is asked before it is needed. Works in forked and spawned DataLoader
    workers, each with connections of its own; pickled, the partitions travel, and the URL with its password.

    Raises ConfigError for a table, column or query that the database does not have, EmptyDataset, OriginError when it
    fails again and again, DatasetChanged for rows that came or went in between. New values in old rows are not noticed.
    """

    def __init__(
        self,
        url: str,
        *,
        table: str | None = None,
        query: str | None = None,
        key: str | None = None,
        columns: Sequence[str] | None = None,
        partition_records: int = PARTITION_RECORDS,
        held_bytes: int = HELD_KEYS_BYTES,
        engine_options: Mapping[str, Any] | None = None,
    ) -> None:
        _check_asked(table, query, partition_records)
        check_limits(held_bytes, columns)
        self._source = SqlSource(url, engine_options)
        self._asked = Asked(table, query, key, None if columns is None else tuple(columns))
        self._partition_records = partition_records
        self._held: Held[Any] = Held(held_bytes)
        self._known: Partitions | None = None

    @property
    def fingerprint(self) -> str:
        """Changes when rows are added, or taken away, between the boundaries of partitions or at the end."""
        return self._partitions.fingerprint(
            self._asked.table or self._asked.query or "", self._asked.key or ""
        )

    def __len__(self) -> int:
        return self._partitions.records

    def groups(self) -> I64:
        """The number of the first record of each partition, ascending from 0."""
        return self._partitions.firsts()

    def reads(self, numbers: I64) -> Reads | None:
        """None: rows do not come through the cache."""
        return None

    def read(self, numbers: Sequence[int]) -> list[Sample | BadRecord]:
        """Rows as dicts, in the order of `numbers`; BadRecord in place of one with a value that is none of its type.

        Raises IndexError, ConfigError, OriginError, DatasetChanged.
        """
        wanted = checked_numbers(numbers, len(self))
        return self._source.ask(lambda connection: self._read(connection, wanted))

    def close(self) -> None:
        """Close this process's connections. The records may be read again."""
        self._source.close()

    def _read(self, connection: Connection, numbers: I64) -> list[Sample | BadRecord]:
        selection, _ = self._selection(connection)
        plan = plan_reads(
            self._partitions, numbers, lambda partition: self._keys(connection, selection, partition)
        )
        rows: dict[Any, Any] = {}
        for span in plan.spans:
            rows.update(self._between(connection, selection, span.keys))
        for first in range(0, len(plan.singles), _KEYS_AT_ONCE):
            rows.update(self._among(connection, selection, plan.singles[first : first + _KEYS_AT_ONCE]))
        samples: list[Sample | BadRecord] = []
        for number in numbers.tolist():
            key = plan.key_of[number]
            if key not in rows:
                raise DatasetChanged(self._changed(f"there is no row {key!r} any more"))
            row = rows[key]
            if isinstance(row, Exception):
                reason = f"{type(row).__name__}: {row}"
                samples.append(BadRecord(f"record {number} (row {key!r} of {self._what}): {reason}"))
            else:
                samples.append(dict(zip(selection.names, row[1:], strict=True)))
        return samples

    def _between(
        self, connection: Connection, selection: Selection, keys: Sequence[Any]
    ) -> Iterator[tuple[Any, Any]]:
        try:
            rows = connection.execute(selection.between(keys[0], keys[-1])).all()
        except Exception as error:
            if not _is_of_a_row(error):
                raise
            for first in range(0, len(keys), _KEYS_AT_ONCE):
                yield from self._among(connection, selection, keys[first : first + _KEYS_AT_ONCE])
            return
        if [row[0] for row in rows] != list(keys):
            raise DatasetChanged(
                self._changed(
                    f"between {keys[0]!r} and {keys[-1]!r} there are {len(rows)} rows, not {len(keys)}"
                )
            )
        yield from ((row[0], row) for row in rows)

    def _among(
        self, connection: Connection, selection: Selection, keys: Sequence[Any]
    ) -> Iterator[tuple[Any, Any]]:
        """The rows of single keys; an error in place of one that cannot be read."""
        try:
            rows = connection.execute(selection.among(keys)).all()
        except Exception as error:
            if not _is_of_a_row(error):
                raise
            if len(keys) == 1:
                yield keys[0], error
                return
            for key in keys:
                yield from self._among(connection, selection, [key])
            return
        yield from ((row[0], row) for row in rows)

    def _keys(self, connection: Connection, selection: Selection, partition: int) -> Sequence[Any]:
        """All keys of a partition. Raises DatasetChanged."""
        known = self._partitions
        start, size = known.starts[partition], known.size(partition)
        if known.is_dense(partition):
            return range(start, start + size)
        keys: list[Any] | None = self._held.get(partition)
        if keys is None:
            statement = selection.keys(start, known.stop(partition), size + 1)
            keys = [row[0] for row in connection.execute(statement)]
            if len(keys) != size or keys[0] != start:
                there = f"more than {size}" if len(keys) > size else str(len(keys))
                raise DatasetChanged(
                    self._changed(f"from key {start!r} on there are {there} rows, not {size}")
                )
            self._held.put(partition, keys, sum(map(sys.getsizeof, keys)) + 8 * size)
        return keys

    def _selection(self, connection: Connection) -> tuple[Selection, bool]:
        found: tuple[Selection, bool] | None = self._held.get(_SELECTION)
        if found is None:
            found = select_from(connection, self._asked)
            self._held.put(_SELECTION, found, 0)
        return found

    @property
    def _partitions(self) -> Partitions:
        if self._known is None:

            def find(connection: Connection) -> Partitions:
                selection, is_unique = self._selection(connection)
                return find_partitions(connection, selection, self._partition_records, is_unique=is_unique)

            self._known = self._source.ask(find)
        return self._known

    @property
    def _what(self) -> str:
        return f"{self._asked.table or 'the query'} at {self._source.where}"

    def _changed(self, why: str) -> str:
        return (
            f"the rows of {self._what} are not those that were numbered: {why}. Read a table that nobody writes to, or "
            "start a new run"
        )


def _check_asked(table: str | None, query: str | None, partition_records: int) -> None:
    """Raises ConfigError."""
    if (table is None) == (query is None):
        raise ConfigError("name either table='NAME' or query='SELECT …'")
    if partition_records < 1:
        raise ConfigError(f"partition_records must be at least 1, got {partition_records}")


def _is_of_a_row(error: Exception) -> bool:
    """Whether a value could not be made what its column says, rather than the database having failed."""
    import sqlalchemy as sa

    if isinstance(error, sa.exc.OperationalError):
        return "Could not decode to UTF-8" in str(error.orig)
    return isinstance(error, ValueError | TypeError | ArithmeticError)
