"""Rows of a database as records, over files of SQLite."""

from __future__ import annotations

import datetime
import os
import random
import sqlite3
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from torch.utils.data import DataLoader

from stoker.data.formats import sql_source
from stoker.data.formats.sql import SqlRecords
from stoker.data.formats.sql_partitions import Partitions, plan_reads
from stoker.data.formats.sql_source import SqlSource
from stoker.errors import BadRecord, ConfigError, DatasetChanged, EmptyDataset, OriginError

IDS = sorted(random.Random(1).sample(range(100_000), 5000))


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "data.db"
    with sqlite3.connect(path) as connection:
        connection.execute(
            "create table sparse (id integer primary key, text text, number real, day date, data blob)"
        )
        connection.executemany(
            "insert into sparse values (?, ?, ?, ?, ?)",
            [(i, f"ä{i}", i / 2 if i % 3 else None, "2026-01-01", bytes([i % 256])) for i in IDS],
        )
        connection.execute("create table dense (id integer primary key, twice integer)")
        connection.executemany("insert into dense values (?, ?)", [(i, 2 * i) for i in range(100, 2600)])
        connection.execute("create table named (name text not null unique, number integer)")
        connection.executemany("insert into named values (?, ?)", [(f"n{i:05}", i) for i in range(2500)])
        connection.execute("create view even as select * from dense where id % 2 = 0")
        connection.execute("create table empty (id integer primary key)")
    connection.close()
    return path


def records(database: Path, **options: Any) -> SqlRecords:
    return SqlRecords(f"sqlite:///{database}", **{"partition_records": 1000, **options})


def change(database: Path, statement: str) -> None:
    with sqlite3.connect(database) as connection:
        connection.execute(statement)
    connection.close()


def statements(of: SqlRecords) -> list[str]:
    """What this process asks the database from now on."""
    said: list[str] = []
    sa.event.listen(
        of._source._engine(), "before_cursor_execute", lambda *event: said.append(event[2]), named=False
    )
    return said


def test_rows_come_in_the_order_of_the_key_and_in_any_order(database: Path) -> None:
    found = records(database, table="sparse")
    assert len(found) == 5000
    assert found.groups().tolist() == [0, 1000, 2000, 3000, 4000]
    assert found.reads(np.array([1])) is None
    assert [row["id"] for row in found.read(range(5000))] == IDS
    numbers = random.Random(2).choices(range(5000), k=3000)
    assert [row["id"] for row in found.read(numbers)] == [IDS[n] for n in numbers]
    i = IDS[7]
    assert found.read([7]) == [
        {
            "id": i,
            "text": f"ä{i}",
            "number": i / 2 if i % 3 else None,
            "day": datetime.date(2026, 1, 1),
            "data": bytes([i % 256]),
        }
    ]
    assert found.read([]) == []
    with pytest.raises(IndexError):
        found.read([5000])


def test_keys_of_text_views_and_queries(database: Path) -> None:
    named = records(database, table="named", key="name", columns=["number"])
    assert named.read([2499, 0, 1000]) == [{"number": 2499}, {"number": 0}, {"number": 1000}]
    even = records(database, table="even", key="id", partition_records=100)
    assert [row["id"] for row in even.read(range(len(even)))] == list(range(100, 2600, 2))
    query = "select name || ':x' as label, number from named where number >= 10;"
    asked = records(database, query=query, key="label", partition_records=70)
    assert len(asked) == 2490
    assert asked.read([0, 2489]) == [
        {"label": "n00010:x", "number": 10},
        {"label": "n02499:x", "number": 2499},
    ]


def test_a_shuffled_batch_is_one_statement(database: Path) -> None:
    dense = records(database, table="dense")
    assert len(dense) == 2500
    said = statements(dense)
    numbers = random.Random(3).sample(range(2500), 64)
    assert [row["id"] for row in dense.read(numbers)] == [n + 100 for n in numbers]
    assert len(said) == 1, "consecutive integers need no look at the keys"
    sparse = records(database, table="sparse")
    assert len(sparse) == 5000
    sparse.read(range(0, 5000, 500))
    said = statements(sparse)
    numbers = random.Random(3).sample(range(5000), 64)
    assert [row["id"] for row in sparse.read(numbers)] == [IDS[n] for n in numbers]
    assert len(said) == 1, "the keys of partitions are kept"
    sparse.read(range(990, 1020))
    assert len(said) == 3, "rows one after the other are asked for by their range, in each partition"
    assert "BETWEEN" in said[-1]


def test_boundaries_are_found_by_the_key(database: Path) -> None:
    found = records(database, table="sparse")
    said = statements(found)
    assert len(found) == 5000
    looked = [text for text in said if "OFFSET" in text]
    assert len(looked) == 6
    assert all(">=" in text for text in looked[1:])


def test_plans_ask_for_ranges_where_most_rows_are_wanted() -> None:
    known = Partitions((0, 100, 200), 250, 100, 251)
    assert [known.is_dense(p) for p in range(3)] == [True, True, True]
    assert not Partitions((0, 110), 250, 100, 200).is_dense(0)
    assert not Partitions(("a", "b"), "c", 100, 200).is_dense(1)
    plan = plan_reads(
        known, np.array([3, 1, 250, *range(120, 150), 3]), lambda p: range(100 * p, 100 * p + 100)
    )
    assert [(span.keys[0], span.keys[-1]) for span in plan.spans] == [(120, 149)]
    assert plan.singles == (1, 3, 250)
    assert len(plan.key_of) == 33


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"table": "nowhere"}, "no table 'nowhere': there are 'dense', 'empty', 'named', 'sparse', 'even'"),
        ({"table": "sparse", "columns": ["texts"]}, "no column 'texts': it has 'id', 'text'"),
        ({"table": "sparse", "key": "number"}, "which does not name a row exactly"),
        ({"table": "named"}, "needs key='COLUMN'.*'name', 'number'"),
        ({"table": "dense", "query": "select 1"}, "either table"),
        ({}, "either table"),
        ({"query": "select nope from dense", "key": "nope"}, "does not take the query: no such column: nope"),
        ({"query": "select from", "key": "nope"}, "does not take the query: .*syntax error"),
        ({"query": "select id % 5 as k from dense", "key": "k"}, "2495 rows have one that another row has"),
        ({"query": "select nullif(id, 100) as k from dense", "key": "k"}, "1 rows have none"),
        ({"table": "dense", "partition_records": 0}, "at least 1"),
        ({"table": "dense", "columns": "twice"}, r"columns=\['twice'\]"),
    ],
)
def test_what_cannot_be_is_said(database: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        len(records(database, **options))


def test_an_empty_table(database: Path) -> None:
    with pytest.raises(EmptyDataset):
        len(records(database, table="empty"))


def test_a_missing_file_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no database"):
        len(SqlRecords(f"sqlite:///{tmp_path}/none.db", table="t"))
    assert not list(tmp_path.iterdir())


def test_urls_that_cannot_be_and_drivers_that_are_missing() -> None:
    with pytest.raises(ConfigError, match="not a database's URL"):
        SqlRecords("postgres//me:secret@host", table="t")
    with pytest.raises(ConfigError, match=r"postgresql.*Install the database's driver") as caught:
        len(SqlRecords("postgresql+psycopg2://me:secret@host/db", table="t"))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("delete from sparse where id = {}", "no row|rows, not"),
        ("insert into sparse (id) values ({} + 1)", "more than 1000 rows"),
    ],
)
def test_rows_that_come_or_go_are_noticed(database: Path, statement: str, words: str) -> None:
    gap = next(i for i in range(100, 900) if IDS[i + 1] > IDS[i] + 1)
    found = records(database, table="sparse")
    before = found.fingerprint
    assert before == records(database, table="sparse").fingerprint
    change(database, statement.format(IDS[gap]))
    with pytest.raises(DatasetChanged, match=words):
        found.read([gap])
    assert records(database, table="sparse").fingerprint != before


def test_a_row_that_goes_after_its_key_is_known(database: Path) -> None:
    found = records(database, table="sparse")
    found.read([0])
    change(database, f"delete from sparse where id = {IDS[5]}")
    with pytest.raises(DatasetChanged, match=f"no row {IDS[5]} any more"):
        found.read([5])
    with pytest.raises(DatasetChanged, match="there are 19 rows, not 20"):
        found.read(range(20))


def test_a_bad_value_is_a_bad_record(database: Path) -> None:
    change(database, f"update sparse set day = 'soon' where id = {IDS[3]}")
    change(database, f"update sparse set text = cast(x'ff' as text) where id = {IDS[5]}")
    found = records(database, table="sparse").read(range(20))
    assert [n for n, row in enumerate(found) if isinstance(row, BadRecord)] == [3, 5]
    assert f"record 3 (row {IDS[3]} of sparse" in str(found[3])
    assert found[4]["id"] == IDS[4]
    assert isinstance(records(database, table="sparse").read([5])[0], BadRecord)


def test_a_locked_database_is_asked_again(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = sqlite3.connect(database, isolation_level=None)
    other.execute("begin exclusive")
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            other.execute("commit")

    found = records(database, table="dense", engine_options={"connect_args": {"timeout": 0}})
    monkeypatch.setattr(found._source, "_wait", wait)
    assert len(found) == 2500
    assert len(waits) == 2
    other.execute("begin exclusive")
    waits.extend([0.0] * 2)
    with pytest.raises(OriginError, match=r"failed \(after 5 tries\).*database is locked"):
        found.read([0])
    assert len(waits) == 4 + sql_source.TRIES - 1
    other.close()


def test_what_is_no_database_is_not_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "no.db"
    path.write_bytes(b"this is not a database" * 100)

    def wait(seconds: float) -> None:
        raise AssertionError("it waited")

    source = SqlSource(f"sqlite:///{path}", wait=wait)
    with pytest.raises(OriginError, match="file is not a database"):
        source.ask(lambda connection: connection.execute(sa.text("select * from t")))


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_loader_processes_have_connections_of_their_own(database: Path, context: str) -> None:
    found = records(database, table="sparse", columns=["id"])
    assert found.read([0]) == [{"id": IDS[0]}]
    parent = list(found._source._engines)
    loader: DataLoader[Any] = DataLoader(
        _Items(found),
        batch_size=100,
        num_workers=2,
        multiprocessing_context=context,
        collate_fn=_same,
    )
    rows = [row["id"] for batch in loader for row in batch]
    assert rows == IDS
    assert list(found._source._engines) == parent
    assert found.read([1]) == [{"id": IDS[1]}]


def test_without_sqlalchemy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    with pytest.raises(ConfigError, match=r"pip install 'stoker\[sql\]'"):
        SqlRecords("sqlite:///x", table="t")


class _Items:
    def __init__(self, of: SqlRecords) -> None:
        self.of = of

    def __len__(self) -> int:
        return len(self.of)

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        rows = self.of.read(numbers)
        assert os.getpid() in self.of._source._engines, "it used connections of its parent"
        return rows


def _same(batch: Any) -> Any:
    return batch
