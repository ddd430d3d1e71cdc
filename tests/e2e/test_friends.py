"""What others read with, through a running cache server: each gives what it gives of a local file, and what reads a
part costs a part."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

import stoker
from stoker.cache.client.client import CacheClient
from stoker.cache.client.files import HEAD_BYTES
from tests.e2e.cache_helpers import ServerProcess, client_of, served

np = pytest.importorskip("numpy")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pads = pytest.importorskip("pyarrow.dataset")
pd = pytest.importorskip("pandas")
pl = pytest.importorskip("polars")
duckdb = pytest.importorskip("duckdb")
zarr = pytest.importorskip("zarr")
torch = pytest.importorskip("torch")
image = pytest.importorskip("PIL.Image")

pytestmark = pytest.mark.real
ROWS = 200_000
AROUND_BYTES = 4 * HEAD_BYTES
"""What is read of a Parquet file beside its columns: the head with which it is opened, and twice what is at its end."""
Cost = Callable[[Callable[[], Any]], tuple[Any, int]]


@pytest.fixture(scope="module")
def table() -> Any:
    numbers = np.random.default_rng(0)
    return pa.table(
        {
            "n": np.arange(ROWS),
            "x": numbers.random(ROWS),
            "noise": numbers.random(ROWS),
            "text": [f"row {n}" for n in range(ROWS)],
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, table: Any) -> Path:
    folder = tmp_path_factory.mktemp("origin")
    # Eight row groups of some 800 KB: a column is a small part, and is in many places.
    pq.write_table(table, folder / "table.parquet", row_group_size=ROWS // 8, use_dictionary=False)
    for part in range(3):
        (folder / "parts" / f"year={2020 + part}").mkdir(parents=True)
        rows = table.slice(part * 1000, 1000)
        pq.write_table(rows, folder / "parts" / f"year={2020 + part}" / "part.parquet")
    rows = table.slice(0, 1000)
    rows.to_pandas().to_csv(folder / "table.csv", index=False)
    rows.to_pandas().to_csv(folder / "table.csv.gz", index=False)
    rows.to_pandas().to_json(folder / "table.jsonl", orient="records", lines=True)
    with tarfile.open(folder / "shard.tar", "w") as tar:
        for n in range(20):
            for name, data in ((f"{n:03}.txt", f"text {n}".encode()), (f"{n:03}.json", b'{"n": %d}' % n)):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    torch.save({"weights": torch.arange(300_000.0), "step": 7}, folder / "model.pt")
    image.effect_noise((300, 200), 50).save(folder / "image.png")
    for name, more in (("plain", {}), ("sharded", {"shards": (500, 500)})):
        array = zarr.create_array(
            store=str(folder / f"{name}.zarr"), shape=(1000, 1000), chunks=(100, 100), dtype="f4", **more
        )
        array[:] = np.arange(1_000_000, dtype="f4").reshape(1000, 1000)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with served(tmp_path_factory.mktemp("cache"), {"b": str(folder)}) as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> Iterator[CacheClient]:
    with client_of(server) as found:
        yield found


@pytest.fixture
def options(server: ServerProcess) -> dict[str, str]:
    return {"endpoint": server.url}


@pytest.fixture
def fs(options: dict[str, str]) -> Any:
    return fsspec.filesystem("stoker", **options)


@pytest.fixture
def cost(client: CacheClient) -> Cost:
    """What something gives, and how many bytes the cache sent for it."""
    for info in client.list_objects("b"):
        client.load("b", [info.key])  # a hit tells of its bytes

    def sent() -> int:
        (bucket,) = client.status().buckets
        return bucket.hit_bytes

    def ask(question: Callable[[], Any]) -> tuple[Any, int]:
        before = sent()
        found = question()
        return found, sent() - before

    return ask


@pytest.fixture(scope="module")
def column_bytes(folder: Path) -> dict[str, int]:
    """Of each column of the table, over all row groups."""
    found: dict[str, int] = {}
    metadata = pq.read_metadata(folder / "table.parquet")
    for group in range(metadata.num_row_groups):
        for number in range(metadata.num_columns):
            column = metadata.row_group(group).column(number)
            found[column.path_in_schema] = found.get(column.path_in_schema, 0) + column.total_compressed_size
    return found


# -- pandas ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["table.csv", "table.csv.gz"])
def test_pandas_reads_csv(options: dict[str, str], folder: Path, name: str) -> None:
    found = pd.read_csv(f"stoker://b/{name}", storage_options=options)
    pd.testing.assert_frame_equal(found, pd.read_csv(folder / name))


def test_pandas_reads_lines_of_json(options: dict[str, str], folder: Path) -> None:
    found = pd.read_json("stoker://b/table.jsonl", lines=True, storage_options=options)
    pd.testing.assert_frame_equal(found, pd.read_json(folder / "table.jsonl", lines=True))


def test_pandas_reads_a_column_of_parquet_for_what_it_costs(
    options: dict[str, str], table: Any, cost: Cost, column_bytes: dict[str, int], folder: Path
) -> None:
    url = "stoker://b/table.parquet"
    whole = pd.read_parquet(url, storage_options=options)
    pd.testing.assert_frame_equal(whole, table.to_pandas())
    column, sent = cost(lambda: pd.read_parquet(url, columns=["x"], storage_options=options))
    pd.testing.assert_frame_equal(column, table.select(["x"]).to_pandas())
    assert column_bytes["x"] < sent <= column_bytes["x"] + AROUND_BYTES
    assert sent < (folder / "table.parquet").stat().st_size / 2


# -- pyarrow ---------------------------------------------------------------------------------------------------------


def test_pyarrow_reads_through_its_own_port_for_file_systems(
    fs: Any, table: Any, cost: Cost, column_bytes: dict[str, int]
) -> None:
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    files = PyFileSystem(FSSpecHandler(fs))
    assert pq.read_table("b/table.parquet", filesystem=files).equals(table)
    column, sent = cost(lambda: pq.read_table("b/table.parquet", columns=["x"], filesystem=files))
    assert column.equals(table.select(["x"]))
    assert column_bytes["x"] < sent <= column_bytes["x"] + AROUND_BYTES
    with fs.open("b/table.parquet") as file:
        group, sent = cost(lambda: pq.ParquetFile(file).read_row_group(3, columns=["n"]))
        assert group.equals(table.select(["n"]).slice(3 * ROWS // 8, ROWS // 8))
        assert sent <= column_bytes["n"] / 8 + AROUND_BYTES


def test_a_dataset_of_pyarrow_finds_its_parts(fs: Any, table: Any) -> None:
    found = pads.dataset("b/parts", filesystem=fs, format="parquet", partitioning="hive")
    assert found.count_rows() == 3000
    rows = found.to_table(filter=pads.field("year") == 2021, columns=["n", "year"])
    assert rows.column("n").to_pylist() == table.column("n").slice(1000, 1000).to_pylist()


# -- polars ----------------------------------------------------------------------------------------------------------


def test_polars_reads_files_that_were_opened(
    fs: Any, options: dict[str, str], table: Any, folder: Path
) -> None:
    assert pl.read_parquet(fs.open("b/table.parquet")).equals(pl.from_arrow(table))
    assert (
        pl.scan_parquet(fs.open("b/table.parquet"))
        .select("x")
        .collect()
        .equals(pl.from_arrow(table.select(["x"])))
    )
    assert pl.read_csv(fs.open("b/table.csv")).equals(pl.read_csv(folder / "table.csv"))
    url = "stoker://b/table.parquet"
    found = pl.read_parquet(url, use_pyarrow=True, columns=["x"], storage_options=options)
    assert found.equals(pl.from_arrow(table.select(["x"])))


def test_polars_scans_what_it_needs_through_a_dataset_of_pyarrow(
    fs: Any, table: Any, cost: Cost, column_bytes: dict[str, int]
) -> None:
    lazy = pl.scan_pyarrow_dataset(pads.dataset("b/table.parquet", filesystem=fs))
    found, sent = cost(lambda: lazy.filter(pl.col("n") >= ROWS - 5).select("n").collect())
    assert found["n"].to_list() == list(range(ROWS - 5, ROWS))
    assert sent <= column_bytes["n"] + AROUND_BYTES


# -- DuckDB ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def database(options: dict[str, str]) -> Any:
    found = duckdb.connect()
    # It moves about in one file from many threads, and would read other places' bytes.
    found.register_filesystem(fsspec.filesystem("stoker", threads_apart=True, **options))
    yield found
    found.close()


def test_duckdb_queries_files(database: Any, folder: Path) -> None:
    for name in ("table.csv", "parts/*/*.parquet", "table.parquet"):
        query = "select count(*), sum(n), max(text), min(x) from '{}/" + name + "'"
        local = duckdb.sql(query.format(folder)).fetchall()
        assert database.execute(query.format("stoker://b")).fetchall() == local


def test_threads_of_duckdb_read_each_at_its_own_place(database: Any, table: Any) -> None:
    """Without `threads_apart` most of these queries fail, or are answered from other rows."""
    expected = table.column("text").to_pylist()
    for _ in range(5):
        database.execute("set enable_external_file_cache=false")
        found = database.execute("select text from 'stoker://b/table.parquet' order by n").fetchall()
        assert [text for (text,) in found] == expected


def test_duckdb_reads_a_column_for_what_it_costs(
    database: Any, cost: Cost, column_bytes: dict[str, int], folder: Path
) -> None:
    (found,), sent = cost(
        lambda: database.execute("select sum(n) from 'stoker://b/table.parquet'").fetchone()
    )
    assert found == ROWS * (ROWS - 1) // 2
    # It reads from several places at once, each with something of its neighbours.
    assert sent < (folder / "table.parquet").stat().st_size / 2


def test_duckdb_scans_a_dataset_of_pyarrow(fs: Any) -> None:
    with duckdb.connect() as database:
        database.register("files", pads.dataset("b/table.parquet", filesystem=fs))
        assert database.execute("select sum(n) from files where n < 10").fetchall() == [(45,)]


# -- zarr ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "sharded"])
def test_zarr_reads_its_chunks(options: dict[str, str], name: str, cost: Cost, folder: Path) -> None:
    from zarr.storage import FsspecStore

    local = zarr.open_array(str(folder / f"{name}.zarr"), mode="r")
    store = FsspecStore.from_url(f"stoker://b/{name}.zarr", storage_options=options, read_only=True)
    array = zarr.open_array(store, mode="r")
    found, sent = cost(lambda: array[150:250, 310:320])
    assert np.array_equal(found, local[150:250, 310:320])
    assert 0 < sent < 200_000, "the whole is some 2 MB"
    assert np.array_equal(array[:], local[:])
    by_url = zarr.open_array(f"stoker://b/{name}.zarr", mode="r", storage_options=options)
    assert by_url[999, 999] == 999_999
    with pytest.raises((ValueError, PermissionError)):
        by_url[0, 0] = 1


# -- datasets --------------------------------------------------------------------------------------------------------


@pytest.fixture
def datasets(server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The library, with a folder of its own, that reaches no network."""
    found = pytest.importorskip("datasets")
    monkeypatch.setattr(found.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(found.config, "DOWNLOADED_DATASETS_PATH", tmp_path / "datasets" / "downloads")
    monkeypatch.setenv("STOKER_CACHE_ENDPOINT", server.url)
    found.disable_progress_bars()
    return found


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize(
    ("kind", "files", "rows"),
    [
        ("parquet", "stoker://b/parts/*/*.parquet", 3000),
        ("json", "stoker://b/table.jsonl", 1000),
        ("csv", {"train": ["stoker://b/table.csv"]}, 1000),
        ("text", "stoker://b/table.csv", 1001),
        ("webdataset", "stoker://b/shard.tar", 20),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_load_dataset_reads(datasets: Any, kind: str, files: Any, rows: int, streaming: bool) -> None:
    found = datasets.load_dataset(kind, data_files=files, split="train", streaming=streaming)
    samples = list(found)
    assert len(samples) == rows
    if kind == "webdataset":
        assert [(one["txt"], one["json"]["n"]) for one in samples] == [(f"text {n}", n) for n in range(rows)]
    elif kind == "text":
        assert samples[1]["text"].startswith("0,")
    else:
        assert [one["n"] for one in samples] == list(range(rows))


def test_load_dataset_takes_the_endpoint_as_an_option(
    datasets: Any, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STOKER_CACHE_ENDPOINT")
    files = {"train": "stoker://b/table.jsonl"}
    for streaming in (True, False):
        found = datasets.load_dataset(
            "json", data_files=files, storage_options=options, split="train", streaming=streaming
        )
        assert sum(1 for _ in found) == 1000


def test_load_dataset_notices_a_new_version(datasets: Any, folder: Path, client: CacheClient) -> None:
    """What it has prepared and downloaded before is of the old one; without `use_etag` it keeps downloads for good."""
    config = datasets.DownloadConfig(use_etag=True, cache_dir=datasets.config.DOWNLOADED_DATASETS_PATH)
    for rows in (10, 20):
        (folder / "changing.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in range(rows)))
        client.refresh("b", "changing")
        name = "stoker://b/changing.jsonl"
        found = datasets.load_dataset("json", data_files=name, split="train", download_config=config)
        assert len(found) == rows
        streamed = datasets.load_dataset("json", data_files=name, split="train", streaming=True)
        assert sum(1 for _ in streamed) == rows


# -- models and images -----------------------------------------------------------------------------------------------


def test_torch_loads_weights(fs: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, options: Any) -> None:
    monkeypatch.setenv("STOKER_CACHE_ENDPOINT", options["endpoint"])
    local = torch.load(folder / "model.pt", weights_only=True)
    for opened in (fs.open("b/model.pt"), stoker.open("stoker://b/model.pt")):
        with opened as file:
            found = torch.load(file, weights_only=True)
        assert found["step"] == 7
        assert torch.equal(found["weights"], local["weights"])


def test_safetensors_load(fs: Any, folder: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    weights = {"a": torch.arange(1000.0), "b": torch.ones(3, 4)}
    safetensors.save_file(weights, folder / "model.safetensors")
    found = safetensors.load(fs.cat_file("b/model.safetensors"))
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_images_open(fs: Any, folder: Path) -> None:
    with fs.open("b/image.png") as file, image.open(file) as found, image.open(folder / "image.png") as local:
        assert found.tobytes() == local.tobytes()


def test_archives_open(fs: Any) -> None:
    with fs.open("b/shard.tar") as file, tarfile.open(fileobj=file) as tar:
        member = tar.extractfile("007.txt")
        assert member is not None
        assert member.read() == b"text 7"
    inner = fsspec.open("tar://007.txt::stoker://b/shard.tar", stoker=fs.storage_options)
    with inner as file:
        assert file.read() == b"text 7"


def test_a_local_copy_is_made_by_fsspecs_caches(fs: Any, tmp_path: Path, folder: Path) -> None:
    options = {"stoker": fs.storage_options, "simplecache": {"cache_storage": str(tmp_path)}}
    with fsspec.open("simplecache::stoker://b/table.csv", **options) as file:
        assert file.read() == (folder / "table.csv").read_bytes()
    assert len(os.listdir(tmp_path)) == 1
