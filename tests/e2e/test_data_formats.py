"""`stoker.Dataset` over records in files, through a real cache server."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from stoker.data.formats.csv import Csv
from stoker.data.framing import example, recordio, tfrecord
from stoker.data.pack import pack
from stoker.errors import BadRecord, ConfigError, DatasetChanged, EmptyDataset, ObjectChanged
from tests.e2e.data_helpers import Behind, behind, no_progress, write_tar

pytestmark = pytest.mark.real
BODIES = [b"%04d-" % n * (n % 50 + 1) for n in range(300)]


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Behind]:
    with behind(tmp_path) as found:
        yield found


def write_shards(folder: Path, suffix: str, framed: Callable[[bytes], bytes], shards: int = 3) -> list[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    size = len(BODIES) // shards
    for shard in range(shards):
        part = BODIES[shard * size : (shard + 1) * size]
        (folder / f"s{shard}{suffix}").write_bytes(b"".join(map(framed, part)))
    return BODIES


def make_tar(folder: Path) -> list[Any]:
    records = [{"__key__": f"d/{n:04d}", "x": body, "n.txt": b"%d" % n} for n, body in enumerate(BODIES)]
    for shard in range(3):
        part = records[shard * 100 : shard * 100 + 100]
        files = [(f"{r['__key__']}.{kind}", r[kind]) for r in part for kind in ("x", "n.txt")]
        write_tar(folder / f"s{shard}.tar", files)  # type: ignore[arg-type]
    return records


def make_lines(folder: Path) -> list[Any]:
    (folder / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n\nfour")
    (folder / "b.txt").write_bytes("fünf\n".encode())
    return ["one", "two", "", "four", "fünf"]


def make_jsonl(folder: Path) -> list[Any]:
    (folder / "a.jsonl").write_text('{"a": 1}\n\n[2, "\\u00fc"]\nInfinity\n')
    return [{"a": 1}, [2, "ü"], float("inf")]


def make_csv(folder: Path) -> list[Any]:
    (folder / "a.csv").write_text('x,y\n1,"a\n""b"""\n\n2,c\n')
    (folder / "b.tsv").write_text("z\ty\n3\td,e\n")
    return [{"x": "1", "y": 'a\n"b"'}, {"x": "2", "y": "c"}, {"z": "3", "y": "d,e"}]


def make_mds(folder: Path) -> list[Any]:
    records = [{"a": n, "b": body} for n, body in enumerate(BODIES)]
    source = folder.parent / "mds-source"
    source.mkdir()
    (source / "r.jsonl").write_text(
        "".join(f'{{"a": {n}, "b": "{body.decode()}"}}\n' for n, body in enumerate(BODIES))
    )
    from stoker.data.dataset import Dataset
    from stoker.settings import CacheSettings

    with behind(source.parent / "mds-cache-of-its-own") as own:
        (own.folder / "r.jsonl").write_bytes((source / "r.jsonl").read_bytes())
        pack(Dataset("stoker://b/", cache=own.settings), folder / "mds", "mds", shard_bytes=5000)
        assert isinstance(own.settings, CacheSettings)
    return [{**record, "b": body.decode()} for record, body in zip(records, BODIES, strict=True)]


FORMATS: dict[str, Callable[[Path], list[Any]]] = {
    "tar": make_tar,
    "tfrecord": lambda folder: write_shards(folder, ".tfrecord", tfrecord.framed),
    "recordio": lambda folder: write_shards(folder, ".rec", recordio.framed),
    "lines": make_lines,
    "jsonl": make_jsonl,
    "csv": make_csv,
    "mds": make_mds,
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_indexed_once_and_read_at_random(tmp_path: Path, name: str) -> None:
    (tmp_path / "mds-cache-of-its-own").mkdir()
    with behind(tmp_path) as data:
        wanted = FORMATS[name](data.folder)
        built: list[Any] = []
        first = data.dataset(format="lines" if name == "lines" else "auto", on_progress=built.append)
        assert len(first) == len(wanted)
        assert first.format == name
        assert built
        assert built[-1].records == len(wanted)
        assert built[-1].done_bytes == built[-1].size_bytes
        order = np.random.default_rng(0).permutation(len(wanted)).tolist()
        assert first.__getitems__(order) == [wanted[number] for number in order]
        assert first[-1] == wanted[-1]
        assert len(data.indexes) == 1

        before = data.origin_bytes
        again = data.dataset(format=name, on_progress=no_progress)
        assert again.fingerprint == first.fingerprint
        assert again[0] == wanted[0]
        assert data.origin_bytes == before
        assert len(data.indexes) == 1

        reads = again.reads(np.arange(len(wanted)))
        assert reads is not None
        for number in range(0, len(wanted), 7):
            key = reads.keys[int(reads.objects[number])]
            part = (data.folder / key).read_bytes()[int(reads.starts[number]) : int(reads.stops[number])]
            assert len(part) == reads.stops[number] - reads.starts[number]
        copy = pickle.loads(pickle.dumps(again))
        assert copy[0] == wanted[0]
        assert copy.records.index.path is not None, "a copy maps the same file"


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_loader_processes(data: Behind, context: str) -> None:
    wanted = make_tar(data.folder)
    dataset = data.dataset()
    if context == "fork":
        assert len(dataset) == 300
    loader = DataLoader(dataset, 32, num_workers=2, multiprocessing_context=context, collate_fn=_same)
    assert [sample for batch in loader for sample in batch] == wanted
    assert len(data.indexes) == 1
    assert data.origin_bytes == sum(path.stat().st_size for path in data.folder.iterdir())


def _same(batch: list[Any]) -> list[Any]:
    return batch


def test_examples_of_tensorflow(data: Behind) -> None:
    body = example.build({"label": 3, "image": b"jpeg"})
    (data.folder / "train-00000-of-00001").write_bytes(tfrecord.framed(body))
    assert data.dataset(format="tfrecord")[0] == body, "names without a suffix will do if the format is said"
    assert data.dataset(format="tfrecord", parse="example")[0]["image"] == [b"jpeg"]
    assert len(data.indexes) == 1, "what does not change where records are is no reason for another index"


@pytest.mark.parametrize("image", ["bytes", "array", "pil"])
def test_image_folders(data: Behind, image: str) -> None:
    from PIL import Image

    for number, name in enumerate(["dog/a.png", "cat/deep/b.PNG", "cat/c.png", "flat.png", "cat/notes.txt"]):
        path = data.folder / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 3), (number, 0, 0)).save(path, "png")
    for prefix in ("in/", "in"):
        dataset = data.dataset(prefix, format="folder", image=image)
        assert dataset.classes == ["cat", "dog"]
        assert [label for _, label in dataset] == [0, 0, 1]
        assert list(dataset.keys) == ["in/cat/c.png", "in/cat/deep/b.PNG", "in/dog/a.png"]
    found = dataset[0][0]
    if image == "bytes":
        assert found == (data.folder / "in/cat/c.png").read_bytes()
    else:
        assert np.asarray(found)[0, 0].tolist() == [2, 0, 0]
    (data.folder / "in/dog/a.png").write_bytes(b"\x89PNG broken")
    data.client.refresh("b")
    broken = data.dataset("in/", format="folder", image=image)
    if image != "bytes":
        with pytest.raises(BadRecord, match=r"in/dog/a\.png"):
            broken[2]


def test_data_that_changed_is_indexed_anew(data: Behind) -> None:
    make_tar(data.folder)
    old = data.dataset()
    assert len(old) == 300
    assert old[100]["__key__"] == "d/0100"
    write_tar(data.folder / "s1.tar", [("new/0.x", b"new")])
    assert old[0]["__key__"] == "d/0000", "the cache goes on giving what was there"
    data.client.refresh("b")
    new = data.dataset()
    assert len(new) == 201
    assert new[100] == {"__key__": "new/0", "x": b"new"}
    assert new.fingerprint != old.fingerprint
    assert len(data.indexes) == 2, "a run that began with it may still need the old one"
    with pytest.raises(DatasetChanged, match=r"s1\.tar"):
        old.__getitems__([0, 150])
    copy = pickle.loads(pickle.dumps(new))
    for path in (data.settings.directory / "indexes").glob("*.index"):
        os.utime(path, (time.time() - 7200,) * 2)
    write_tar(data.folder / "s1.tar", [("newer/0.x", b"newer")])
    data.client.refresh("b")
    assert data.dataset()[100]["x"] == b"newer"
    assert len(data.indexes) == 1
    with pytest.raises(DatasetChanged):
        copy[100]


def test_a_list_that_is_older_than_what_the_cache_reads(data: Behind) -> None:
    """1. the dataset is listed and indexed, 2. an object changes, 3. only what is known of that object is refreshed,
    4. somebody starts anew and is given the list from before."""
    (data.folder / "a.jsonl").write_text("1\n2\n")
    (data.folder / "b.jsonl").write_text("3\n4\n")
    old = data.dataset()
    assert list(old) == [1, 2, 3, 4]
    (data.folder / "b.jsonl").write_text("300\n400\n500\n")
    with pytest.raises(ObjectChanged):
        data.client.read("b", "b.jsonl", version="of which there is none")
    stale = data.dataset(on_progress=no_progress)
    assert len(stale) == 4
    with pytest.raises(DatasetChanged, match=r"b\.jsonl"):
        stale[3]
    assert list(data.dataset()) == [1, 2, 300, 400, 500], "the next start sees it"


def test_data_that_changes_before_it_is_indexed(data: Behind) -> None:
    (data.folder / "a.jsonl").write_text("1\n2\n")
    assert len(data.client.list_objects("b")) == 1
    (data.folder / "a.jsonl").write_text("300\n400\n500\n")
    assert list(data.dataset()) == [300, 400, 500]


@pytest.mark.parametrize("is_forgotten", [False, True], ids=["held", "evicted"])
def test_text_that_changed_is_noticed_at_once(data: Behind, is_forgotten: bool) -> None:
    """Lines have no checksums, so that those of a new file could be taken for those of the old one."""
    for name in "ab":
        (data.folder / f"{name}.txt").write_text("".join(f"{name}{n}\n" for n in range(9)) + "\n")
    old = data.dataset(format="lines")
    assert old.__getitems__([0, 15]) == ["a0", "b5"]
    (data.folder / "b.txt").write_text("".join(f"B{n}\n" for n in range(9)) + "\n")
    if is_forgotten:
        data.client.evict("b")  # what the cache knows is the old version, of which it has nothing
    else:
        data.client.refresh("b")
    for number in (15, 19):  # of which the last has no bytes
        with pytest.raises(DatasetChanged, match=r"'b\.txt' of .* was changed or removed"):
            old.__getitems__([0, number])
    assert old.__getitems__([1, 2]) == ["a1", "a2"]
    assert data.dataset(format="lines")[15] == "B5", "the next start sees it"


def test_an_object_that_is_gone(data: Behind) -> None:
    make_tar(data.folder)
    dataset = data.dataset()
    assert len(dataset) == 300
    (data.folder / "s2.tar").unlink()
    data.client.evict("b")
    data.client.refresh("b")
    with pytest.raises(DatasetChanged, match="start the run again"):
        dataset[250]


def corrupted(data: Behind) -> None:
    """Records 1 and 2 of three in the first of two files have a wrong byte."""
    records = [bytearray(tfrecord.framed(body)) for body in (b"a", b"b", b"c")]
    records[1][12] ^= 1
    records[2][12] ^= 1
    (data.folder / "s0.tfrecord").write_bytes(b"".join(records))
    (data.folder / "s1.tfrecord").write_bytes(tfrecord.framed(b"d"))


def test_what_is_done_with_corrupt_records(data: Behind) -> None:
    corrupted(data)
    strict = data.dataset()
    assert strict.__getitems__([0, 3]) == [b"a", b"d"]
    with pytest.raises(BadRecord, match=r"record 1 of .* \(bytes 17 to 34 of 's0\.tfrecord'\).*checksum"):
        strict.__getitems__([0, 1])
    skips = data.dataset(on_corrupt="skip")
    assert skips.__getitems__([0, 1, 2, 3]) == [b"a", b"d"]
    assert skips.corrupt.count == 2
    assert "record 1" in skips.corrupt.reasons[0]
    with pytest.raises(BadRecord, match="record 1"):
        skips[1]
    replaces = data.dataset(on_corrupt="replace")
    assert replaces.__getitems__([0, 1, 2, 3]) == [b"a", b"d", b"d", b"d"]
    assert replaces[1] == b"d"
    assert replaces.corrupt.count == 3

    def decode(body: bytes) -> bytes:
        if body == b"d":
            raise ValueError("not d")
        return body

    around = data.dataset(on_corrupt="replace", decode=decode)
    assert around.__getitems__([1, 3]) == [b"a", b"a"]
    assert any("decode raised ValueError: not d" in reason for reason in around.corrupt.reasons)
    none = data.dataset("s0", on_corrupt="replace", decode=lambda _: 1 / 0)
    with pytest.raises(BadRecord, match="no record of"):
        none[0]


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_loader_processes_count_corrupt_records(data: Behind, context: str) -> None:
    corrupted(data)
    dataset = data.dataset(on_corrupt="skip")
    loader = DataLoader(dataset, 2, num_workers=2, multiprocessing_context=context, collate_fn=_same)
    assert [sample for batch in loader for sample in batch] == [b"a", b"d"]
    assert dataset.corrupt.count == 2


@pytest.mark.parametrize("name", ["tar", "tfrecord", "recordio", "mds"])
def test_a_file_that_was_cut_off(tmp_path: Path, name: str) -> None:
    (tmp_path / "mds-cache-of-its-own").mkdir()
    with behind(tmp_path) as data:
        wanted = FORMATS[name](data.folder)
        last = sorted(
            path for path in data.folder.rglob("*") if path.is_file() and path.name != "index.json"
        )[-1]
        whole = last.stat().st_size
        os.truncate(last, whole // 2 + 1)
        for _ in range(2):  # the second time it is known from the index
            with pytest.raises(BadRecord, match="on_corrupt='skip'") as caught:
                len(data.dataset())
            assert last.name in str(caught.value)
        skips = data.dataset(on_corrupt="skip", on_progress=no_progress)
        assert 0 < len(skips) < len(wanted)
        assert skips.__getitems__(range(len(skips))) == wanted[: len(skips)]
        assert skips.corrupt.count == 1


def test_compressed_files_are_refused(data: Behind) -> None:
    (data.folder / "a.tar.gz").write_bytes(b"\x1f\x8b\x08" + bytes(600))
    for chosen in ("auto", "tar"):
        with pytest.raises(ConfigError, match="compressed"):
            len(data.dataset(format=chosen))
    (data.folder / "a.tar.gz").rename(data.folder / "a.tar")
    data.client.refresh("b")
    with pytest.raises(ConfigError, match=r"'a\.tar' cannot be read at random: it is compressed with gzip"):
        len(data.dataset())


def test_what_is_not_there(data: Behind) -> None:
    with pytest.raises(EmptyDataset):
        len(data.dataset(format="tar"))
    (data.folder / "a.jsonl").write_bytes(b"\n\n")
    data.client.refresh("b")
    with pytest.raises(EmptyDataset, match="no records"):
        len(data.dataset())
    (data.folder / "b.csv").write_bytes(b"x\n")
    data.client.refresh("b")
    with pytest.raises(ConfigError, match=r"'jsonl' .* or 'csv'"):
        len(data.dataset())
    assert len(data.dataset("b", format="lines")) == 1
    with pytest.raises(ConfigError, match="colour"):
        data.dataset(format="tar", colour=1)
    assert data.dataset("b", format=Csv(header=False))[0] == ["x"]


def test_an_index_that_is_damaged_is_built_again(data: Behind) -> None:
    make_tar(data.folder)
    assert len(data.dataset()) == 300
    (path,) = (data.settings.directory / "indexes").glob("*.index")
    for stop in (0, 10, 100, path.stat().st_size - 1):
        os.truncate(path, stop)
        assert len(data.dataset()) == 300
    assert data.dataset(on_progress=no_progress)[0]["__key__"] == "d/0000"


def test_a_folder_that_cannot_be_written_to(data: Behind, caplog: pytest.LogCaptureFixture) -> None:
    make_tar(data.folder)
    data.settings.directory.write_text("a file")
    dataset = data.dataset()
    assert dataset[299]["__key__"] == "d/0299"
    assert "STOKER_CACHE_DIR" in caplog.text
    assert pickle.loads(pickle.dumps(dataset))[5]["__key__"] == "d/0005"


BUILDER = """
import sys
import stoker
told = []
data = stoker.Dataset("stoker://b/", on_progress=told.append)
print(len(data), "built" if told else "found")
"""


def test_one_process_of_many_builds_the_index(tmp_path: Path) -> None:
    with behind(tmp_path, "?stoker_latency_ms=20") as data:
        make_tar(data.folder)
        environment = {
            **os.environ,
            "STOKER_CACHE_ENDPOINT": data.server.url,
            "STOKER_CACHE_DIR": str(data.settings.directory),
        }
        children = [
            subprocess.Popen(
                [sys.executable, "-c", BUILDER], env=environment, stdout=subprocess.PIPE, text=True
            )
            for _ in range(4)
        ]
        said = sorted(child.communicate(timeout=200)[0].strip() for child in children)
        assert said == ["300 built", "300 found", "300 found", "300 found"]
