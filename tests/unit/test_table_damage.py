"""Tables that were cut off or damaged: errors that say so, for the records it hits; never a crash or a hang."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import random
import struct
from collections import Counter
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stoker.data.attach import Served
from stoker.data.formats.arrow import ArrowRecords
from stoker.data.formats.arrow_messages import Damaged, Message, messages
from stoker.data.formats.parquet import ParquetRecords
from stoker.data.formats.parquet_footer import DamagedFooter, read_footer
from stoker.data.formats.table_records import TableRecords
from stoker.errors import BadRecord, ConfigError, DataError
from tests.tables import MemoryClient, arrow_bytes, assert_samples, parquet_bytes, table_of

ROWS = 100
TRIES = 150
TABLE = table_of(ROWS)
GOOD = {
    "snappy.parquet": parquet_bytes(TABLE),
    "checked.parquet": parquet_bytes(
        TABLE, compression="none", write_page_checksum=True, use_dictionary=False
    ),
    "stream.arrow": arrow_bytes(TABLE, is_file=False),
    "file.arrow": arrow_bytes(TABLE, is_file=True, compression="zstd"),
}


def records_of(name: str, data: bytes, **options: Any) -> TableRecords:
    served = Served(MemoryClient({name: data}), "b", "")  # type: ignore[arg-type]
    return (ParquetRecords if name.endswith(".parquet") else ArrowRecords)(served, **options)


def footer_of(data: bytes) -> bytes:
    return data[-8 - int.from_bytes(data[-8:-4], "little") :]


def _damage(name: str, answers: multiprocessing.Queue[Counter[str]]) -> None:
    logging.disable(logging.WARNING)
    counts: Counter[str] = Counter()
    for number in range(TRIES):
        rng = random.Random(f"{name} {number}")
        data = bytearray(GOOD[name])
        if number % 5 == 4:
            del data[rng.randrange(len(data)) :]
        else:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        try:
            records = records_of(name, bytes(data))
            samples = records.read(range(len(records)))
            bad = sum(isinstance(sample, BadRecord) for sample in samples)
            assert bad + sum(isinstance(sample, dict) for sample in samples) == len(records)
            counts["bad" if bad else "read"] += 1
        except DataError:
            counts["refused"] += 1
    answers.put(counts)


@pytest.mark.parametrize("name", GOOD)
def test_no_damage_ends_the_process(name: str) -> None:
    context = multiprocessing.get_context("spawn")
    answers: multiprocessing.Queue[Counter[str]] = context.Queue()
    child = context.Process(target=_damage, args=(name, answers))
    child.start()
    child.join(200)
    assert child.exitcode == 0, f"exit code {child.exitcode}"
    counts = answers.get(timeout=30)
    assert counts.total() == TRIES
    assert counts["bad"] > 5, counts
    assert counts["refused"] > 5, counts


@pytest.mark.parametrize("name", GOOD)
def test_damage_to_one_group_leaves_the_others(name: str) -> None:
    data = bytearray(GOOD[name])
    reads = records_of(name, bytes(data)).reads(TABLE["id"].to_numpy())
    start, stop = int(reads.starts[30]), int(reads.stops[30])
    data[start + 8 : stop] = b"\xa5" * (stop - start - 8)
    if name.endswith(".arrow"):
        data[start:stop] = GOOD[name][start : start + 300] + data[start + 300 : stop]  # keep the lengths
    records = records_of(name, bytes(data))
    samples = records.read([5, 29, 30, 59, 60, 99])
    assert [isinstance(sample, BadRecord) for sample in samples] == [False, False, True, True, False, False]
    assert f"record 59 (row 29 of group 1 of '{name}' of 'stoker://b/') cannot be decoded" in str(samples[3])
    assert_samples([samples[0], samples[-1]], [5, 99])
    with pytest.raises(BadRecord, match="record 59"):
        records.read_table([5, 59])


def test_a_bad_group_is_read_once() -> None:
    data = bytearray(GOOD["checked.parquet"])
    data[len(data) // 40] ^= 1
    client = MemoryClient({"a.parquet": bytes(data)})
    records = ParquetRecords(Served(client, "b", ""))  # type: ignore[arg-type]
    first = records.read([0])
    asked = len(client.asked)
    assert [type(sample) for sample in (*first, *records.read([1]))] == [BadRecord, BadRecord]
    assert len(client.asked) == asked


def test_pages_with_a_checksum_are_checked() -> None:
    table = pa.table({"x": [float(i) for i in range(100)]})
    for is_checked in (True, False):
        data = bytearray(
            parquet_bytes(table, compression="none", use_dictionary=False, write_page_checksum=is_checked)
        )
        at = bytes(data).index(struct.pack("<d", 7.0))
        data[at] ^= 1
        found = [type(sample) for sample in records_of("a.parquet", bytes(data)).read([7, 50])]
        assert found == [BadRecord if is_checked else dict, dict]


def test_text_that_is_none_is_one_bad_record() -> None:
    text = pa.Array.from_buffers(pa.string(), 3, pa.array([b"a", b"\xff", b"c"]).buffers())
    data = parquet_bytes(pa.table({"text": text}))
    samples = records_of("a.parquet", data).read([0, 1, 2])
    assert [samples[0], samples[2]] == [{"text": "a"}, {"text": "c"}]
    assert isinstance(samples[1], BadRecord)
    assert "UnicodeDecodeError" in str(samples[1]) or "utf-8" in str(samples[1])


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.parquet", b"", "not a Parquet file, or was cut off"),
        ("a.parquet", b"PAR1", "not a Parquet file, or was cut off"),
        ("a.parquet", b"name,age\nann,5\n" * 9, "not a Parquet file, or was cut off"),
        ("a.parquet", GOOD["snappy.parquet"][:-100], "not a Parquet file, or was cut off"),
        ("a.parquet", GOOD["snappy.parquet"][-100:], "its footer is said to have"),
        ("a.parquet", GOOD["snappy.parquet"][:-4] + b"PARE", "encrypted footer"),
        ("a.arrow", b"", "does not begin with a schema"),
        ("a.arrow", b"name,age\nann,5\n" * 9, "not an Arrow file"),
        ("a.arrow", GOOD["stream.arrow"][:-5000], "inside the message at byte"),
        ("a.arrow", GOOD["file.arrow"][:-100], "cut off"),
        ("a.arrow", GOOD["snappy.parquet"], "not an Arrow file"),
    ],
)
def test_what_is_not_such_a_file_is_refused(name: str, data: bytes, words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        len(records_of(name, data))
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("name", ["snappy.parquet", "checked.parquet"])
def test_footers_are_read_as_pyarrow_reads_them(name: str) -> None:
    footer = footer_of(GOOD[name])
    found = read_footer(footer)
    known = pq.read_metadata(pa.BufferReader(footer))
    assert list(found.columns) == known.schema.to_arrow_schema().names
    assert [group.rows for group in found.row_groups] == [30, 30, 30, 10]
    for number, group in enumerate(found.row_groups):
        for at, chunk in enumerate(group.chunks):
            theirs = known.row_group(number).column(at)
            start = theirs.dictionary_page_offset if theirs.has_dictionary_page else theirs.data_page_offset
            assert chunk.column == theirs.path_in_schema.split(".")[0]
            assert chunk.span == (start, start + theirs.total_compressed_size)
    for end in range(0, len(footer) - 9, 7):
        with pytest.raises(DamagedFooter):
            read_footer(footer[:end])


@pytest.mark.parametrize("is_file", [False, True])
def test_messages_lie_where_pyarrow_wrote_them(is_file: bool) -> None:
    data = arrow_bytes(TABLE, is_file=is_file)
    found = messages(lambda start, stop: data[start:stop], len(data))
    assert [(m.kind, m.rows) for m in found] == [(1, 0), (2, 0), (3, 30), (3, 30), (3, 30), (3, 10)]
    assert found[0].start == (8 if is_file else 0)
    for before, after in itertools.pairwise(found):
        assert before.stop == after.start
    if not is_file:
        assert found == messages(lambda start, stop: data[start:stop], found[-1].stop), "without its end mark"
    with pytest.raises(Damaged):
        messages(lambda start, stop: data[start:stop], found[-1].start + 20)
    assert isinstance(found[0], Message)


def test_one_set_of_columns() -> None:
    first, other = parquet_bytes(pa.table({"a": [1], "b": [2]})), parquet_bytes(pa.table({"b": [3]}))

    def records(**options: Any) -> ParquetRecords:
        client = MemoryClient({"1.parquet": first, "2.parquet": other})
        return ParquetRecords(Served(client, "b", ""), **options)  # type: ignore[arg-type]

    with pytest.raises(DataError, match=r"'2\.parquet' has other columns than '1.parquet' .'a'.: name those"):
        len(records())
    with pytest.raises(ConfigError, match=r"no column 'a' in '2\.parquet': it has 'b'"):
        len(records(columns=["a"]))
    assert records(columns=["b"]).read([1, 0]) == [{"b": 3}, {"b": 2}]


def test_columns_of_one_name_are_refused() -> None:
    table = pa.table([pa.array([1]), pa.array([2])], names=["a", "a"])
    with pytest.raises(DataError, match="several columns of one name"):
        len(records_of("a.arrow", arrow_bytes(table, is_file=False)))
