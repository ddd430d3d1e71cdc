"""What is kept of where records are, and which format names tell."""

from __future__ import annotations

import gc
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.data.corrupt import REASONS_MAX, Tally
from stoker.data.formats.choose import choose, make_format, names
from stoker.data.formats.folder import base_of
from stoker.data.formats.lines import Lines
from stoker.data.index_build import index_name
from stoker.data.index_file import BadIndexFile, open_columns, save_columns
from stoker.data.index_store import Entry, IndexName, IndexStore, outdated
from stoker.data.record_index import Columns, Damage, Listing, RecordIndex, StringTable
from stoker.errors import ConfigError, DatasetChanged

TEXTS = st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=8), max_size=20)


def index_of(objects: int, records: int) -> RecordIndex:
    listing = Listing(
        StringTable.of(f"train/shard-{n:08}.tar" for n in range(objects)),
        StringTable.of(f"{n}-1795265158814090152" for n in range(objects)),
        np.full(objects, 10**6, np.int64),
    )
    columns = Columns(
        np.sort(np.arange(records) % objects).astype(np.uint32),
        np.arange(records, dtype=np.int64) * 100,
        np.full(records, 100, np.uint32),
    )
    return RecordIndex(
        listing, columns, ["a,b", ""], np.arange(objects, dtype=np.uint32) % 2, [Damage(1, 5, "why")]
    )


@given(TEXTS)
@settings(deadline=None)
def test_a_table_of_texts_is_a_sequence(texts: list[str]) -> None:
    table = StringTable.of(texts)
    assert list(table) == texts
    assert [table[n] for n in range(-len(texts), len(texts))] == texts + texts
    assert table[1:3] == texts[1:3]
    assert list(pickle.loads(pickle.dumps(table))) == texts
    assert list(table.some(range(0, len(texts), 2))) == texts[::2]
    with pytest.raises(IndexError):
        table[len(texts)]


def test_a_table_of_many_texts_is_the_same_as_one_of_few() -> None:
    texts = [f"{number:x}é" * (number % 3) for number in range(40_000)]
    table = StringTable.of(iter(texts))
    assert list(table) == texts
    assert table[16_380:16_390] == texts[16_380:16_390]
    assert table[39_999] == texts[39_999]
    places = list(range(39_999, 0, -7))
    assert list(table.some(places)) == [texts[place] for place in places]
    assert table.some(range(len(texts))) is table
    assert list(StringTable.joined([table, StringTable.of(()), table.some([3, 1])])) == [
        *texts,
        texts[3],
        texts[1],
    ]
    assert list(StringTable.joined([])) == []


def test_an_index_there_and_back(tmp_path: Path) -> None:
    index = index_of(7, 100)
    kept = index.save(tmp_path / "i")
    for found in (kept, pickle.loads(pickle.dumps(kept)), pickle.loads(pickle.dumps(index))):
        assert list(found.listing.keys) == list(index.listing.keys)
        assert list(found.listing.versions) == list(index.listing.versions)
        assert all((a == b).all() for a, b in zip(found.columns, index.columns, strict=True))
        assert (found.fingerprint, found.damage, found.common(2)) == (index.fingerprint, index.damage, "a,b")
    assert len(pickle.dumps(kept)) < 1000, "who opens the file is not handed what is in it"
    assert [path.name for path in tmp_path.iterdir()] == ["i"]
    del found, kept
    data = pickle.dumps(index.save(tmp_path / "i"))
    gc.collect()
    (tmp_path / "i").unlink()
    with pytest.raises(DatasetChanged):
        pickle.loads(data)


def test_an_index_takes_tens_of_bytes_for_each_record_and_object(tmp_path: Path) -> None:
    records = index_of(10, 100_000).save(tmp_path / "records")
    assert records.size_bytes / 100_000 < 17
    objects = StringTable.of(f"train/n01440764/n01440764_{n:08}.JPEG" for n in range(100_000))
    assert (objects.blob.nbytes + objects.ends.nbytes) / 100_000 == len(objects[0]) + 5


@pytest.mark.parametrize("other", ["keys", "starts", "sizes", "damage"])
def test_a_fingerprint_is_of_all_that_says_which_records_there_are(other: str) -> None:
    index = index_of(3, 10)
    listing, columns, damage = index.listing, index.columns, index.damage
    if other == "keys":
        listing = listing._replace(keys=StringTable.of(["a", "b", "c"]))
    elif other == "damage":
        damage = []
    else:
        columns = columns._replace(**{other: getattr(columns, other) + 1})
    assert (
        RecordIndex(listing, columns, index.commons, index.common_of, damage).fingerprint != index.fingerprint
    )


@pytest.mark.parametrize("part", ["url", "options", "key", "version", "size"])
def test_an_index_has_the_name_of_what_it_was_made_of(part: str) -> None:
    def name(
        key: str = "k", version: str = "v", size: int = 1, url: str = "u", keep_empty: bool = True
    ) -> IndexName:
        listing = Listing(StringTable.of([key]), StringTable.of([version]), np.array([size]))
        return index_name(url, Lines(keep_empty=keep_empty), listing)

    same, first = name(), name()
    assert same == first
    changed = {"url": {"url": "w"}, "options": {"keep_empty": False}, "key": {"key": "l"},
               "version": {"version": "w"}, "size": {"size": 2}}[part]  # fmt: skip
    other = name(**changed)  # type: ignore[arg-type]
    assert other.content != first.content
    assert (other.dataset == first.dataset) == (part not in ("url", "options"))


@given(st.integers(0, 400), st.integers(0, 255))
@settings(deadline=None)
def test_a_file_of_columns_with_a_wrong_byte(
    tmp_path_factory: pytest.TempPathFactory, place: int, byte: int
) -> None:
    path = tmp_path_factory.mktemp("columns") / "f"
    save_columns(path, {"a": 1}, {"x": np.arange(5), "y": np.empty(0, np.uint8)})
    data = bytearray(path.read_bytes())
    data[place % len(data)] = byte
    path.write_bytes(data)
    try:
        said, arrays = open_columns(path)
    except BadIndexFile:
        return
    assert said == {"a": 1}
    assert len(arrays["x"]) == 5


def test_which_indexes_can_go() -> None:
    now = IndexName("aa", "3")
    entries = [
        Entry("aa-3.index", 10**7), Entry("aa-2.index", 4000), Entry("aa-1.index", 3000),
        Entry("bb-1.index", 86400), Entry("cc-1.index", 31 * 86400), Entry(".aa-2.index.x.partial", 4000),
    ]  # fmt: skip
    assert outdated(now, entries) == ["aa-2.index", "cc-1.index", ".aa-2.index.x.partial"]


def test_a_store_says_when_an_index_was_used(tmp_path: Path) -> None:
    store, name = IndexStore(tmp_path / "a" / "b"), IndexName("aa", "1")
    assert store.find(name) is None
    with store.building(name):
        kept = store.keep(name, index_of(2, 3))
    assert kept.path == tmp_path / "a" / "b" / "aa-1.index"
    found = store.find(name)
    assert found is not None
    assert len(found) == 3


@pytest.mark.parametrize(("keys", "name"), [
    (["a.tar", "b.tar", "README.md", "sizes.json", ".x", "_SUCCESS"], "tar"),
    (["x/train.tfrecord", "x/train.tfrecord.idx"], "tfrecord"),
    (["a.rec", "a.idx", "a.lst"], "recordio"),
    (["index.json", "shard.00000.mds"], "mds"),
    (["a.CSV", "b.tsv"], "csv"),
    (["a.jsonl"], "jsonl"),
    (["cat/1.jpg", "dog/2.PNG"], "folder"),
    (["1.jpg", "2.jpg"], "objects"),
    (["cat/1.jpg", "dog/2.bin"], "objects"),
    (["a.txt", "b.txt"], "objects"),
    (["a.json"], "objects"),
    (["0001", "0002"], "objects"),
    ([f"{n}.tar.gz" for n in range(3)], "tar"),
    (["_a.bin", "1.tar", "2.tar", ".b.bin", "_c.bin"], "tar"),
    (["1.gz", "2.gz", "3.txt"], "objects"),
    (["cat/1.jpg", "dog/2.jpg", "cat/_3.bin", "dog/jpg"], "objects"),
])  # fmt: skip
def test_which_format_names_tell(keys: list[str], name: str) -> None:
    assert choose("u", keys).name == name


@pytest.mark.parametrize(("keys", "words"), [
    (["a.tar", "b.jsonl"], "'tar' (1 objects) or 'jsonl' (1 objects)"),
    (["a.tar", "b.bin"], "'tar' (1 objects) or 'objects' (2, one record each)"),
    (["a.csv", *(f"{n}.txt" for n in range(20))], "'csv' (1 objects) or 'objects' (21, one record each)"),
    (["1.gz", "2.tar.gz", "3.gz"], "'tar' (1 objects) or 'objects' (3, one record each)"),
    (["_a.bin", "b.bin", "1.tar"], "'tar' (1 objects) or 'objects' (3, one record each)"),
    (["a/1.jpg", "b/2.jpg", "labels.csv"], "'csv' (1 objects) or 'objects'"),
])  # fmt: skip
def test_names_that_tell_several_formats(keys: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose("u", keys)
    assert words in str(caught.value)


def test_formats_by_name() -> None:
    for name in set(names()) - {"parquet", "arrow", "sql"}:
        assert make_format(name, {}).name == name
    for name, options in (
        ("nosuch", {}), ("tar", {"x": 1}), ("csv", {"delimiter": ",,"}), ("csv", {"delimiter": '"'}),
        ("lines", {"encoding": "utf-16"}), ("lines", {"encoding": "nosuch"}), ("folder", {"image": "x"}),
        ("tfrecord", {"parse": "x"}),
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            make_format(name, options)


@pytest.mark.parametrize(
    ("prefix", "base"), [("", ""), ("in/", "in/"), ("in", "in/"), ("in/do", "in/"), ("i", "")]
)
def test_where_folders_begin(prefix: str, base: str) -> None:
    assert base_of(prefix, StringTable.of(["in/dog/1.jpg", "in/dove/2.jpg"])) == base


def test_a_tally_is_one_of_all_its_copies() -> None:
    tally = Tally()
    assert tally.read().count == 0
    copy = pickle.loads(pickle.dumps(tally))
    tally.add("a\nb")
    for n in range(50):
        copy.add(f"c{n}")
    del copy
    gc.collect()
    assert tally.read().count == 51
    assert tally.read().reasons[:2] == ["a b", "c0"]
    assert len(tally.read().reasons) == REASONS_MAX
    path = tally._path
    assert path.exists()
    del tally
    gc.collect()
    assert not path.exists()
