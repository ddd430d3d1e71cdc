"""`stoker.Dataset` over tables: Parquet and Arrow through a real cache server, and databases."""

from __future__ import annotations

import pickle
import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

import stoker
from stoker.data.attach import started_cache
from stoker.data.formats.parquet import Parquet
from stoker.data.formats.source import IndexProgress
from stoker.data.formats.sql import Sql
from stoker.errors import BadRecord, ConfigError, DatasetChanged, EmptyDataset
from stoker.settings import CacheSettings
from tests.e2e.data_helpers import Behind, behind
from tests.tables import arrow_bytes, assert_samples, parquet_bytes, table_of

pytestmark = pytest.mark.real
ROWS = 200


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Behind]:
    with behind(tmp_path) as found:
        yield found


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "data.db"
    with sqlite3.connect(path) as connection:
        connection.execute("create table words (id integer primary key, word text, half real)")
        connection.executemany(
            "insert into words values (?, ?, ?)", [(3 * n, f"ä{n}", n / 2) for n in range(ROWS)]
        )
    connection.close()
    return path


@pytest.fixture
def nowhere(tmp_path: Path) -> CacheSettings:
    """No cache is known, and none must be started."""
    return CacheSettings(None, None, tmp_path / "unused", 10**9)


def write(folder: Path, kind: str) -> None:
    suffix = {"parquet": "parquet", "file": "arrow", "stream": "arrows"}[kind]
    for number in range(2):
        table = table_of(ROWS // 2, number * ROWS // 2)
        body = parquet_bytes(table) if kind == "parquet" else arrow_bytes(table, is_file=kind == "file")
        (folder / f"{number}.{suffix}").write_bytes(body)


def same(batch: list[Any]) -> list[Any]:
    return batch


@pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
def test_tables_are_found_by_their_names(data: Behind, kind: str) -> None:
    write(data.folder, kind)
    (data.folder / "_SUCCESS").write_bytes(b"")
    told: list[IndexProgress] = []
    dataset = data.dataset(on_progress=told.append)
    assert (dataset.format, len(dataset)) == ("parquet" if kind == "parquet" else "arrow", ROWS)
    assert (told[-1].objects_done, told[-1].records, told[-1].done_bytes) == (2, ROWS, told[-1].size_bytes)
    assert list(dataset.keys) == sorted(path.name for path in data.folder.iterdir())[:2]
    assert dataset.is_cached
    numbers = random.Random(1).sample(range(ROWS), 60)
    assert_samples(dataset.__getitems__(numbers), numbers)
    assert_samples([dataset[-1]], [ROWS - 1])
    with pytest.raises(IndexError):
        dataset[ROWS]
    reads = dataset.reads(np.array([150]))
    assert reads is not None
    assert reads.keys[reads.objects[0]] == dataset.keys[1]
    with pytest.raises(ConfigError, match="have no classes"):
        _ = dataset.classes
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy.fingerprint == dataset.fingerprint
    assert_samples([copy[7]], [7])
    name = "parquet" if kind == "parquet" else "arrow"
    some = data.dataset(format=name, columns=["vector", "id"])
    assert_samples([some[9]], [9], ["vector", "id"])
    assert data.dataset(decode=lambda row: row["id"], format=name)[11] == 11


def test_options_of_tables(data: Behind) -> None:
    write(data.folder, "parquet")
    (data.folder / "0.parquet").rename(data.folder / "0.table")
    assert len(data.dataset(format="parquet")) == ROWS // 2
    assert len(data.dataset(format=Parquet(suffixes=[".table", ".parquet"]))) == ROWS
    with pytest.raises(ConfigError, match=r"columns=\['id'\]"):
        data.dataset(format="parquet", columns="id")
    with pytest.raises(ConfigError, match="colour"):
        data.dataset(format="arrow", colour=1)
    with pytest.raises(ConfigError, match="no column 'absent'"):
        len(data.dataset(format="parquet", columns=["absent"]))
    with pytest.raises(EmptyDataset):
        len(data.dataset("absent/", format="parquet"))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_of_loaders_read_tables(data: Behind, method: str) -> None:
    write(data.folder, "parquet")
    whole = sum(path.stat().st_size for path in data.folder.iterdir())
    dataset = data.dataset(columns=["id", "byte"])
    if method == "fork":
        assert dataset[3]["id"] == 3
    loader = stoker.Loader(
        dataset, global_batch_size=32, shuffle=True, num_workers=2, multiprocessing_context=method
    )
    with loader:
        for _ in range(2):
            batches = list(loader)
            assert sorted(number for batch in batches for number in batch["id"].tolist()) == list(range(ROWS))
            assert all((batch["id"] % 256 == batch["byte"]).all() for batch in batches)
    torch: DataLoader[Any] = DataLoader(
        dataset, 32, num_workers=2, multiprocessing_context=method, collate_fn=same
    )
    assert [row["id"] for batch in torch for row in batch] == list(range(ROWS))
    assert data.origin_bytes <= whole


def test_groups_that_cannot_all_be_kept_are_said_once(data: Behind, caplog: pytest.LogCaptureFixture) -> None:
    write(data.folder, "parquet")
    groups = len(data.dataset().groups())
    assert groups >= 4

    def read(**options: Any) -> list[str]:
        caplog.clear()
        dataset = data.dataset(format="parquet", columns=["id"], **options)
        with stoker.Loader(dataset, global_batch_size=20, shuffle="groups", shuffle_window=4) as loader:
            for _ in range(2):
                assert sum(len(batch["id"]) for batch in loader) == ROWS
        return [record.getMessage() for record in caplog.records if "shuffle_window" in record.message]

    assert read() == []
    (said,) = read(held_bytes=1)
    assert "4 groups of rows are mixed at a time, of which held_bytes=1 has room for about 1" in said
    assert "make shuffle_window smaller, or give the dataset held_bytes=" in said
    assert read(held_bytes=int(said.rpartition("held_bytes=")[2].split()[0]) * 10) == []


def test_a_group_that_is_damaged(data: Behind) -> None:
    body = bytearray(parquet_bytes(table_of(ROWS), write_page_checksum=True, compression="none"))
    (data.folder / "a.parquet").write_bytes(body)
    reads = data.dataset().reads(np.array([40]))
    assert reads is not None
    body[(int(reads.starts[0]) + int(reads.stops[0])) // 2] ^= 0x55
    (data.folder / "a.parquet").write_bytes(body)
    data.client.refresh("b")
    with pytest.raises(BadRecord, match=r"record 40 \(row 10 of group 1 of 'a\.parquet'"):
        data.dataset()[40]
    skips = data.dataset(on_corrupt="skip")
    assert_samples(skips.__getitems__([29, 30, 59, 60]), [29, 60])
    assert skips.corrupt.count == 2
    assert_samples([data.dataset(on_corrupt="replace")[59]], [60])


def test_tables_that_change(data: Behind) -> None:
    write(data.folder, "parquet")
    old = data.dataset()
    assert_samples([old[0], old[150]], [0, 150])
    (data.folder / "1.parquet").write_bytes(parquet_bytes(table_of(50, 1000)))
    anew = pickle.loads(pickle.dumps(old))  # which has read nothing yet
    data.client.evict("b")
    with pytest.raises(DatasetChanged, match=r"'1\.parquet' is not what it was"):
        anew[150]
    new = data.dataset()
    assert len(new) == 150, "who notices has the list refreshed"
    assert_samples([new[100]], [1000])


def test_tables_that_change_after_they_were_listed(data: Behind) -> None:
    write(data.folder, "parquet")
    assert len(data.client.list_objects("b")) == 2
    (data.folder / "1.parquet").write_bytes(parquet_bytes(table_of(50, 1000)))
    assert len(data.dataset()) == 150


def test_rows_of_a_database(database: Path, nowhere: CacheSettings) -> None:
    url = f"sqlite:///{database}"
    dataset = stoker.Dataset(url, format="sql", table="words", key="id", cache=nowhere)
    assert (len(dataset), dataset.format, dataset.is_cached) == (ROWS, "sql", False)
    assert dataset[7] == {"id": 21, "word": "ä7", "half": 3.5}
    assert [row["id"] for row in dataset.__getitems__([5, 0, 5])] == [15, 0, 15]
    assert dataset.reads(np.array([1])) is None
    with pytest.raises(ConfigError, match="not in objects with keys"):
        _ = dataset.keys
    with pytest.raises(ConfigError, match="not read through a cache"):
        _ = dataset.served
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy.fingerprint == dataset.fingerprint
    assert copy[-1]["word"] == f"ä{ROWS - 1}"
    found = stoker.Dataset(url, query="select id, word from words where id > 30", key="id", cache=nowhere)
    assert (found.format, found[0]) == ("sql", {"id": 33, "word": "ä11"})
    assert stoker.Dataset(url, format=Sql("words", columns=("word",)), cache=nowhere)[1] == {"word": "ä1"}
    with pytest.raises(ConfigError, match="table='NAME' or query="):
        stoker.Dataset(url, cache=nowhere)
    with pytest.raises(ConfigError, match="there is no table 'absent'"):
        len(stoker.Dataset(url, table="absent", cache=nowhere))
    bad = stoker.Dataset(url, table="words", decode=lambda row: 1 / 0, cache=nowhere)
    with pytest.raises(BadRecord, match=r"record 3 of .*ZeroDivisionError"):
        bad[3]
    assert started_cache(nowhere) is None


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_of_loaders_read_databases(database: Path, nowhere: CacheSettings, method: str) -> None:
    dataset = stoker.Dataset(f"sqlite:///{database}", table="words", partition_records=50, cache=nowhere)
    if method == "fork":
        assert dataset[3]["id"] == 9
    loader = stoker.Loader(
        dataset, global_batch_size=32, shuffle=True, num_workers=2, multiprocessing_context=method
    )
    with loader:
        batches = list(loader)
    assert sorted(number for batch in batches for number in batch["id"].tolist()) == [
        3 * n for n in range(ROWS)
    ]
    assert started_cache(nowhere) is None, "a database is not read through a cache"


@pytest.mark.parametrize(
    "url", ["postgresql+absent://me:se%40c/ret@host/db", "sqlite://me:secret@/absent.db"]
)
def test_passwords_of_databases_are_not_shown(url: str, nowhere: CacheSettings) -> None:
    dataset = stoker.Dataset(url, table="t", engine_options={"password": "secret"}, cache=nowhere)
    shown = [repr(dataset._format)]
    for ask in (lambda: dataset.keys, lambda: len(dataset), lambda: dataset[0]):
        with pytest.raises(stoker.errors.StokerError) as caught:
            ask()
        shown.append(str(caught.value))
    assert not any("ret" in text.replace("secret_", "") for text in shown), shown
