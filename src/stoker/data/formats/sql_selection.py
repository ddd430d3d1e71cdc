"""What is read from a database: columns of a table, view or query, ordered by a key."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from stoker.errors import ConfigError

if TYPE_CHECKING:
    from sqlalchemy import Connection, FromClause, Index, Select

_KEY = "stoker_key"
_SQLITE_FAULTS = re.compile("syntax error|no such")
"""SQLite calls these operational as well."""


class Asked(NamedTuple):
    """What the user named. One of `table` and `query` is not None."""

    table: str | None
    query: str | None
    key: str | None
    columns: tuple[str, ...] | None


class Selection:
    """Builds the statements. All order and compare keys in the database, by its own rules."""

    def __init__(self, source: FromClause, key: Any, columns: Sequence[Any]) -> None:
        self._source = source
        self.key = key
        self._columns = columns
        self.names = tuple(column.name for column in columns)

    def at(self, start: Any | None, skipped: int) -> Select[Any]:
        """The key that comes so many keys after `start`; of all, without a start."""
        import sqlalchemy as sa

        keys = sa.select(self.key).order_by(self.key).limit(1).offset(skipped)
        return keys if start is None else keys.where(self.key >= start)

    def tail(self, start: Any) -> Select[Any]:
        """How many keys there are from `start` on, and the last."""
        import sqlalchemy as sa

        return sa.select(sa.func.count(self.key), sa.func.max(self.key)).where(self.key >= start)

    def flaws(self, *, is_unique: bool) -> Select[Any]:
        """Rows without a key, and rows whose key another row has."""
        import sqlalchemy as sa

        missing = sa.select(sa.func.count()).select_from(self._source).where(self.key.is_(None))
        if is_unique:
            return sa.select(missing.scalar_subquery(), sa.literal(0))
        doubled = sa.func.count(self.key) - sa.func.count(sa.distinct(self.key))
        return sa.select(missing.scalar_subquery(), sa.select(doubled).scalar_subquery())

    def keys(self, start: Any, stop: Any | None, limit: int) -> Select[Any]:
        """Keys from `start` to before `stop`, or to the end."""
        import sqlalchemy as sa

        keys = sa.select(self.key).where(self.key >= start).order_by(self.key).limit(limit)
        return keys if stop is None else keys.where(self.key < stop)

    def between(self, first: Any, last: Any) -> Select[Any]:
        """The rows of all keys from one to another: key, then columns."""
        return self._rows().where(self.key.between(first, last)).order_by(self.key)

    def among(self, keys: Sequence[Any]) -> Select[Any]:
        """The rows of these keys: key, then columns."""
        return self._rows().where(self.key.in_(keys))

    def _rows(self) -> Select[Any]:
        import sqlalchemy as sa

        return sa.select(self.key.label(_KEY), *self._columns)


class _Source(NamedTuple):
    table: FromClause
    primary: str | None
    """The primary key, where it is one column."""
    unique: frozenset[str]
    """Columns in which the database lets no value be twice."""


def select_from(connection: Connection, asked: Asked) -> tuple[Selection, bool]:
    """What was asked for, as the database has it; and whether it sees to it that keys are unique.

    Raises ConfigError for what is not there, which names what is.
    """
    is_table = asked.table is not None
    source = (
        _table(connection, asked.table) if asked.table is not None else _query(connection, asked.query or "")
    )
    what = f"table {asked.table!r}" if is_table else "the query's result"
    there = source.table.columns
    key = asked.key or source.primary
    if key is None:
        raise ConfigError(
            f"{what} needs key='COLUMN', by which its rows are ordered: it has no primary key of one column. Its "
            f"columns are {_names(there)}"
        )
    for name in (key, *(asked.columns or ())):
        if name not in there:
            raise ConfigError(f"{what} has no column {name!r}: it has {_names(there)}")
    _check_kind(there[key], what)
    columns = [there[name] for name in asked.columns or there.keys()]
    return Selection(source.table, there[key], columns), key in source.unique


def _table(connection: Connection, name: str) -> _Source:
    import sqlalchemy as sa

    schema, _, bare = name.rpartition(".")
    inspector = sa.inspect(connection)
    try:
        table = sa.Table(
            bare, sa.MetaData(), schema=schema or None, autoload_with=connection, resolve_fks=False
        )
    except sa.exc.NoSuchTableError as error:
        there = [*inspector.get_table_names(schema or None), *inspector.get_view_names(schema or None)]
        raise ConfigError(
            f"there is no table {name!r}: there are {', '.join(map(repr, there)) or 'none'}"
        ) from error
    kinds = sa.PrimaryKeyConstraint, sa.UniqueConstraint
    sets = [made.columns.keys() for made in table.constraints if isinstance(made, kinds)]
    sets += [index.columns.keys() for index in table.indexes if index.unique and not _is_partial(index)]
    primary = table.primary_key.columns.keys()
    return _Source(
        table,
        primary[0] if len(primary) == 1 else None,
        frozenset(names[0] for names in sets if len(names) == 1),
    )


def _query(connection: Connection, text: str) -> _Source:
    import sqlalchemy as sa

    # SQLAlchemy would take `:name` for a parameter.
    query = re.sub(r"(?<![:\w\\]):(?=\w)", r"\:", text.strip().rstrip(";"))
    try:
        result = connection.execute(sa.text(f"SELECT * FROM ({query}) AS stoker_query WHERE 1 = 0"))
    except (sa.exc.ProgrammingError, sa.exc.OperationalError) as error:
        if isinstance(error, sa.exc.ProgrammingError) or _SQLITE_FAULTS.search(str(error.orig)):
            raise ConfigError(f"the database does not take the query: {error.orig}") from error
        raise
    names = list(result.keys())
    if len(set(names)) < len(names):
        raise ConfigError(f"the query gives several columns of one name: {', '.join(map(repr, names))}")
    table = sa.text(query).columns(*(sa.column(name) for name in names)).subquery("stoker_query")
    return _Source(table, None, frozenset())


def _is_partial(index: Index) -> bool:
    """Whether it is over some of the rows only."""
    return any(option.endswith("_where") for option in index.dialect_kwargs)


def _check_kind(key: Any, what: str) -> None:
    import sqlalchemy as sa

    if isinstance(key.type, sa.Float | sa.LargeBinary | sa.JSON | sa.Boolean):
        raise ConfigError(
            f"column {key.name!r} of {what} is {key.type!r}, which does not name a row exactly: choose a key of "
            "integers, text or times"
        )


def _names(columns: Any) -> str:
    return ", ".join(map(repr, columns.keys()))
