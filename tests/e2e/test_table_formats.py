"""Tables read through a cache server: files as pyarrow, pandas and datasets write them."""

from __future__ import annotations

import json
import pickle
import random
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.data import DataLoader

from stoker.cache.client.client import CacheClient
from stoker.data.attach import Served
from stoker.data.formats import table_records
from stoker.data.formats.arrow import ArrowRecords
from stoker.data.formats.parquet import ParquetRecords
from stoker.data.formats.table_records import TableRecords
from stoker.data.formats.table_rows import samples_of
from stoker.errors import ConfigError, DataError, DatasetChanged, EmptyDataset
from tests.e2e.cache_helpers import ServerProcess, client_of, served
from tests.tables import MemoryClient, arrow_bytes, assert_samples, parquet_bytes, sample_of, table_of

pytestmark = pytest.mark.real
ROWS = 100


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    folder = tmp_path / "origin"
    folder.mkdir()
    return folder


@pytest.fixture
def server(tmp_path: Path, origin: Path) -> Iterator[ServerProcess]:
    with served(tmp_path / "cache", {"b": f"file://{origin}"}) as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[CacheClient]:
    with client_of(server) as made:
        yield made


def write(folder: Path, kind: str) -> list[int]:
    """Three objects of a kind; the first row of each group."""
    folder.mkdir(exist_ok=True)
    for number in range(3):
        table = table_of(ROWS, number * ROWS)
        path = folder / f"{number}.{'parquet' if kind == 'parquet' else 'arrow'}"
        if kind == "parquet":
            path.write_bytes(parquet_bytes(table))
        else:
            compression = "lz4" if kind == "compressed" else None
            path.write_bytes(arrow_bytes(table, is_file=kind == "file", compression=compression))
    return [number * ROWS + first for number in range(3) for first in (0, 30, 60, 90)]


def records(kind: str, client: Any, prefix: str = "", **options: Any) -> TableRecords:
    return (ParquetRecords if kind == "parquet" else ArrowRecords)(Served(client, "b", prefix), **options)


@pytest.mark.parametrize("kind", ["parquet", "file", "stream", "compressed"])
def test_every_kind_of_value_in_any_order(kind: str, origin: Path, client: CacheClient) -> None:
    groups = write(origin / "t", kind)
    found = records(kind, client, "t/")
    assert len(found) == 3 * ROWS
    assert found.groups().tolist() == groups
    numbers = random.Random(1).choices(range(3 * ROWS), k=200)
    assert_samples(found.read(numbers), numbers)
    assert_samples(found.read(range(3 * ROWS)), range(3 * ROWS))
    again = pickle.loads(pickle.dumps(found))
    assert_samples(again.read([299, 0]), [299, 0])
    assert again.fingerprint == records(kind, client, "t/").fingerprint


@pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
def test_columns_are_those_asked_for_in_that_order(kind: str, origin: Path, client: CacheClient) -> None:
    write(origin / "t", kind)
    columns = ["vector", "id", "class"]
    found = records(kind, client, "t/", columns=columns)
    assert list(found.columns) == columns
    assert_samples(found.read([250, 3]), [250, 3], columns)
    table = found.read_table([250, 3, 3, 31])
    assert table.column_names == columns
    assert table["id"].to_pylist() == [250, 3, 3, 31]
    assert table["class"].to_pylist() == [sample_of(i)["class"] for i in (250, 3, 3, 31)]
    with pytest.raises(ConfigError, match=r"no column 'ids' in 't/0\.\w+': it has 'id', 'byte'"):
        len(records(kind, client, "t/", columns=["ids"]))


@pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
def test_reads_are_the_bytes_that_are_read(kind: str, origin: Path, client: CacheClient) -> None:
    write(origin, kind)
    memory = MemoryClient({path.name: path.read_bytes() for path in sorted(origin.iterdir())})
    found = records(kind, memory)
    reads = found.reads(np.array([130]))
    memory.asked.clear()
    found.read([130])
    (expected,) = zip([reads.keys[i] for i in reads.objects], reads.starts, reads.stops, strict=True)
    assert expected in memory.asked
    assert len(memory.asked) <= 4
    memory.asked.clear()
    assert_samples(found.read(range(130, 160)), range(130, 160))
    assert memory.asked == []


def test_the_parquet_index_takes_two_requests_a_file_at_most(origin: Path) -> None:
    small = parquet_bytes(table_of(40))
    wide = parquet_bytes(pa.table({f"column{i}": [1.0, 2.0] for i in range(700)}))
    assert int.from_bytes(wide[-8:-4], "little") > 65536
    for data, requests in ((small, 1), (wide, 2)):
        memory = MemoryClient({"a.parquet": data})
        assert len(records("parquet", memory)) in (2, 40)
        assert len(memory.asked) == requests


def test_parquet_reads_only_the_columns_that_are_wanted(origin: Path) -> None:
    rows = 40_000
    table = pa.table({name: np.random.default_rng(1).random(rows) for name in "abcdefgh"})
    memory = MemoryClient({"a.parquet": parquet_bytes(table, row_group_size=rows, use_dictionary=False)})
    found = records("parquet", memory, columns=["g", "b"])
    len(found)
    memory.asked.clear()
    assert found.read([7]) == [{"g": table["g"][7].as_py(), "b": table["b"][7].as_py()}]
    read_bytes = sum(stop - start for _, start, stop in memory.asked)
    assert len(memory.asked) == 3, "the footer and two columns"
    assert read_bytes < len(memory.objects["a.parquet"]) * 0.3


def test_a_shuffle_within_the_limit_reads_each_group_once(origin: Path) -> None:
    memory = MemoryClient({"a.parquet": parquet_bytes(table_of(300))})
    numbers = list(range(300))
    random.Random(1).shuffle(numbers)

    def requests(held_bytes: int) -> int:
        found = records("parquet", memory, held_bytes=held_bytes)
        len(found)
        memory.asked.clear()
        for first in range(0, 300, 20):
            batch = numbers[first : first + 20]
            assert_samples(found.read(batch), batch)
        return len(memory.asked)

    assert requests(10_000_000) == 1 + 10
    assert requests(0) > 100, "each batch reads nearly all groups"


def test_a_footer_is_read_once_for_groups_that_are_read_at_once() -> None:
    data = parquet_bytes(table_of(300))
    another = threading.Event()

    class Client(MemoryClient):
        def read(self, bucket: str, key: str, start: int, stop: int, *, version: str | None = None) -> bytes:
            if stop == len(data):
                footers.append(start)
                if len(footers) > 2:
                    another.set()
                elif len(footers) == 2:
                    another.wait(0.3)
            return super().read(bucket, key, start, stop, version=version)

    footers: list[int] = []
    found = records("parquet", Client({"a.parquet": data}))
    assert_samples(found.read(range(300)), range(300))
    assert len(footers) == 2, "one for the index, one to decode"


def test_rows_of_more_groups_than_may_be_held_are_converted_on_the_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: list[int] = []

    def spy(table: pa.Table, features: dict[str, Any]) -> list[Any]:
        counts.append(table.num_rows)
        return samples_of(table, features)

    monkeypatch.setattr(table_records, "samples_of", spy)
    memory = MemoryClient({"a.parquet": parquet_bytes(table_of(120))})
    for held_bytes, expected in ((10_000_000, [4]), (0, [1, 1, 1, 1])):
        counts.clear()
        numbers = [100, 5, 70, 40]
        assert_samples(records("parquet", memory, held_bytes=held_bytes).read(numbers), numbers)
        assert counts == expected


def test_files_of_pandas(origin: Path, client: CacheClient) -> None:
    frame = pd.DataFrame(
        {
            "number": [1.5, None, 3.5],
            "text": ["a", None, "c"],
            "when": pd.to_datetime(["2026-01-01", "2026-01-02", None]),
            "kind": pd.Categorical(["x", "y", "x"]),
            "list": [[1, 2], [], None],
        }
    )
    frame.to_parquet(origin / "a.parquet")
    frame.to_feather(origin / "a.feather")
    for kind in ("parquet", "feather"):
        first, second, third = records(kind, client).read([0, 1, 2])
        assert (first["number"], first["text"], first["kind"]) == (1.5, "a", "x")
        assert (second["number"], second["text"]) == (None, None)
        assert str(first["when"]).startswith("2026-01-01")
        assert third["when"] is None
        assert first["list"].tolist() == [1, 2]
        assert second["list"].shape == (0,)
        assert third["list"] is None


def saved(folder: Path, rows: int = 2500) -> datasets.Dataset:
    features = datasets.Features(
        {
            "number": datasets.Value("int32"),
            "label": datasets.ClassLabel(names=["cat", "dog"]),
            "picture": datasets.Array2D((2, 3), "float32"),
            "tokens": datasets.List(datasets.Value("int64")),
        }
    )
    made = datasets.Dataset.from_dict(
        {
            "number": list(range(rows)),
            "label": [i % 2 for i in range(rows)],
            "picture": [np.full((2, 3), i, np.float32) for i in range(rows)],
            "tokens": [list(range(i % 5)) for i in range(rows)],
        },
        features=features,
    )
    made.save_to_disk(str(folder), num_shards=2)
    return made


def test_a_folder_of_datasets(origin: Path, client: CacheClient) -> None:
    whole = saved(origin / "saved")
    # A file that an older save left there does not count.
    (origin / "saved" / "data-00002-of-00003.arrow").write_bytes(b"left over")
    found = records("arrow", client, "saved/")
    assert len(found) == 2500
    assert found.features["label"]["names"] == ["cat", "dog"]
    numbers = [2499, 0, 1250, 1249]
    for number, sample in zip(numbers, found.read(numbers), strict=True):
        theirs = whole[number]
        assert (sample["number"], sample["label"]) == (theirs["number"], theirs["label"])
        assert sample["picture"].dtype == np.float32
        np.testing.assert_array_equal(sample["picture"], np.array(theirs["picture"]))
        assert sample["tokens"].tolist() == theirs["tokens"]


def test_a_shuffled_and_filtered_dataset_and_parquet_of_datasets(origin: Path, client: CacheClient) -> None:
    whole = saved(origin / "saved", 300).shuffle(seed=1).select(range(50))
    whole.save_to_disk(str(origin / "chosen"))
    whole.to_parquet(str(origin / "chosen.parquet"), batch_size=20)
    expected = whole["number"][:]
    for found in (records("arrow", client, "chosen/"), records("parquet", client, "chosen.parquet")):
        samples = found.read(range(50))
        assert [sample["number"] for sample in samples] == list(expected)
        assert samples[3]["picture"].shape == (2, 3)


def test_a_folder_of_several_datasets_names_them(origin: Path, client: CacheClient) -> None:
    part = datasets.Dataset.from_dict({"a": [1, 2]})
    datasets.DatasetDict({"train": part, "test": part}).save_to_disk(str(origin / "both"))
    with pytest.raises(
        ConfigError, match=r"several datasets: name one of them, as in stoker://…/both/train/ or"
    ):
        len(records("arrow", client, "both/"))
    assert records("arrow", client, "both/test").read([1]) == [{"a": 2}]


def test_a_file_of_datasets_that_is_missing(origin: Path, client: CacheClient) -> None:
    saved(origin / "saved", 100)
    (origin / "saved" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(
        DataError, match=r"state\.json' names 'saved/data-00001-of-00002\.arrow', which is not there"
    ):
        len(records("arrow", client, "saved/"))
    (origin / "saved" / "state.json").write_text(json.dumps({"_split": None}))
    client.refresh("b")
    with pytest.raises(DataError, match="names no data files"):
        len(records("arrow", client, "saved/"))


def test_dictionaries_that_are_replaced_on_the_way(origin: Path, client: CacheClient) -> None:
    parts = [pa.array(words).dictionary_encode() for words in (["a", "b"], ["c", "d", "c"], ["e"])]
    schema = pa.schema([("word", parts[0].type)])
    with pa.ipc.new_stream(str(origin / "a.arrow"), schema) as writer:
        for part in parts:
            writer.write_batch(pa.record_batch([part], schema=schema))
    found = records("arrow", client)
    assert [sample["word"] for sample in found.read([5, 3, 0, 1, 2, 4])] == ["e", "d", "a", "b", "c", "c"]


def test_tensors_and_types_that_widen(origin: Path, client: CacheClient) -> None:
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12.0).reshape(2, 2, 3))
    pq.write_table(pa.table({"t": tensors, "x": pa.array([1, 2], pa.int32())}), origin / "1.parquet")
    pq.write_table(pa.table({"t": tensors, "x": pa.nulls(2)}), origin / "2.parquet")
    found = records("parquet", client)
    samples = found.read([1, 3])
    np.testing.assert_array_equal(samples[0]["t"], np.arange(6.0, 12.0).reshape(2, 3))
    assert [sample["x"] for sample in samples] == [2, None]
    assert found.read_table([3, 1])["x"].to_pylist() == [None, 2]


def test_names_decide_what_is_read(origin: Path, client: CacheClient) -> None:
    data = parquet_bytes(table_of(10))
    (origin / "_delta_log").mkdir()
    for name in (
        "b.parquet",
        "a.pq",
        "c.PARQ",
        "_metadata",
        ".b.parquet",
        "_delta_log/x.parquet",
        "README.md",
    ):
        (origin / name).write_bytes(data)
    assert records("parquet", client).reads(np.array([0])).keys == ("a.pq", "b.parquet")
    assert len(records("parquet", client, "c.PARQ")) == 10
    assert len(records("parquet", client, suffixes=[".PARQ"])) == 10
    with pytest.raises(EmptyDataset, match=r"no \.arrow or .*\(there are 7 others"):
        len(records("arrow", client))
    with pytest.raises(EmptyDataset, match="nothing is there"):
        len(records("parquet", client, "none/"))
    (origin / "b.parquet").write_bytes(parquet_bytes(table_of(0)))
    with pytest.raises(EmptyDataset, match="have no rows"):
        len(records("parquet", client, "b.parquet"))


@pytest.mark.parametrize("kind", ["parquet", "stream"])
def test_an_object_that_changed_is_noticed(kind: str, origin: Path, client: CacheClient) -> None:
    write(origin, kind)
    found = records(kind, client)
    before = found.fingerprint
    found.read([0])
    path = sorted(origin.iterdir())[1]
    path.write_bytes(path.read_bytes().replace(b"c1", b"c7"))
    client.refresh("b")
    assert_samples(found.read([29, 299]), [29, 299])
    with pytest.raises(
        DatasetChanged, match=rf"'{path.name}' is not what it was when the dataset was indexed"
    ):
        found.read([150])
    anew = records(kind, client)
    assert len(anew.read([150])) == 1
    assert anew.fingerprint == before, "sizes and rows are the same"
    path.unlink()
    client.refresh("b")
    with pytest.raises(DatasetChanged):
        anew.read([199])
    assert records(kind, client).fingerprint != before


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_loader_processes(context: str, origin: Path, client: CacheClient) -> None:
    write(origin, "parquet")
    found = records("parquet", client)
    found.read([0])
    numbers = list(range(3 * ROWS))
    random.Random(1).shuffle(numbers)
    loader: DataLoader[Any] = DataLoader(
        _Items(found),
        batch_sampler=[numbers[i : i + 25] for i in range(0, len(numbers), 25)],
        num_workers=2,
        multiprocessing_context=context,
        collate_fn=_same,
    )
    samples = [sample for batch in loader for sample in batch]
    assert_samples(samples, numbers)
    assert_samples(found.read([1]), [1])


def test_batches_are_collated_as_torch_does(origin: Path, client: CacheClient) -> None:
    pq.write_table(pa.table({"x": [[1.0, 2.0], [3.0, 4.0]], "y": [0, 1]}), origin / "a.parquet")
    loader: DataLoader[Any] = DataLoader(_Items(records("parquet", client)), batch_size=2)
    (batch,) = loader
    assert batch["x"].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert batch["y"].tolist() == [0, 1]


def test_without_pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for kind in ("parquet", "arrow"):
        with pytest.raises(ConfigError, match=r"pip install 'stoker\[parquet\]'"):
            records(kind, MemoryClient({}))


class _Items:
    def __init__(self, of: TableRecords) -> None:
        self.of = of

    def __len__(self) -> int:
        return len(self.of)

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        return self.of.read(numbers)


def _same(batch: Any) -> Any:
    return batch
