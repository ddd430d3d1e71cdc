"""Tables with a column of every kind, for tests of what reads them."""

from __future__ import annotations

import datetime
import decimal
import io
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from stoker.cache.client.client import ByteRange
from stoker.errors import ObjectChanged, ObjectNotFound, StokerError
from stoker.wire.cache_api import ObjectInfo

DAY = datetime.date(2026, 1, 1)
NOON = datetime.datetime(2026, 1, 1, 12, 0, 0, 7)
UTC = datetime.UTC


def table_of(rows: int, first: int = 0) -> pa.Table:
    """Rows `first` and on; every fifth value of most columns is missing."""
    numbers = range(first, first + rows)

    def some(make: Any) -> list[Any]:
        return [None if i % 5 == 4 else make(i) for i in numbers]

    return pa.table(
        {
            "id": pa.array(numbers, pa.int64()),
            "byte": pa.array([i % 256 for i in numbers], pa.uint8()),
            "float": pa.array(some(lambda i: i / 4), pa.float32()),
            "bool": pa.array(some(lambda i: i % 2 == 0)),
            "text": pa.array(some(lambda i: f"ä{i}")),
            "large": pa.array(some(str), pa.large_string()),
            "bytes": pa.array(some(lambda i: b"\0" * (i % 7))),
            "fixed": pa.array(some(lambda i: i.to_bytes(4, "big")), pa.binary(4)),
            "vector": pa.array(some(lambda i: [float(i)] * (i % 4)), pa.list_(pa.float32())),
            "gaps": pa.array(some(lambda i: [i, None] if i % 3 else [i, i]), pa.list_(pa.int64())),
            "flags": pa.array(some(lambda i: [True, False, None][: i % 4]), pa.list_(pa.bool_())),
            "triple": pa.array(some(lambda i: [i, i + 1, i + 2]), pa.list_(pa.int32(), 3)),
            "words": pa.array(some(lambda i: [str(i)] * (i % 3))),
            "struct": pa.array(some(lambda i: {"x": i, "y": {"z": [str(i), None]}})),
            "second": pa.array(
                some(lambda i: NOON + datetime.timedelta(seconds=i)), pa.timestamp("us", "UTC")
            ),
            "nano": pa.array(some(lambda i: i * 1_000_000_007), pa.timestamp("ns")),
            "day": pa.array(some(lambda i: DAY + datetime.timedelta(days=i))),
            "money": pa.array(some(lambda i: decimal.Decimal(i).scaleb(-2)), pa.decimal128(12, 2)),
            "class": pa.array(some(lambda i: f"c{i % 3}")).dictionary_encode(),
            "map": pa.array(some(lambda i: [("a", i)]), pa.map_(pa.string(), pa.int64())),
            "nothing": pa.nulls(rows),
        }
    )


def sample_of(i: int) -> dict[str, Any]:
    """What row `i` must be read as."""
    present: dict[str, Any] = {
        "float": i / 4,
        "bool": i % 2 == 0,
        "text": f"ä{i}",
        "large": str(i),
        "bytes": b"\0" * (i % 7),
        "fixed": i.to_bytes(4, "big"),
        "vector": np.full(i % 4, i, np.float32),
        "gaps": [i, None] if i % 3 else np.array([i, i]),
        "flags": [True, False, None] if i % 4 == 3 else np.array([True, False][: i % 4], bool),
        "triple": np.array([i, i + 1, i + 2], np.int32),
        "words": [str(i)] * (i % 3),
        "struct": {"x": i, "y": {"z": [str(i), None]}},
        "second": (NOON + datetime.timedelta(seconds=i)).replace(tzinfo=UTC),
        "nano": np.datetime64(i * 1_000_000_007, "ns"),
        "day": DAY + datetime.timedelta(days=i),
        "money": decimal.Decimal(i).scaleb(-2),
        "class": f"c{i % 3}",
        "map": [("a", i)],
        "nothing": None,
    }
    if i % 5 == 4:
        present = dict.fromkeys(present)
    return {"id": i, "byte": i % 256, **present}


def assert_samples(
    found: Iterable[Any], numbers: Iterable[int], columns: Iterable[str] | None = None
) -> None:
    """The samples are exactly those rows, in order, of the right types."""
    for sample, number in zip(found, numbers, strict=True):
        expected = sample_of(number)
        if columns is not None:
            expected = {name: expected[name] for name in columns}
        assert isinstance(sample, dict), sample
        assert list(sample) == list(expected)
        for name, value in expected.items():
            got = sample[name]
            assert type(got) is type(value), (name, got, value)
            if isinstance(value, np.ndarray):
                assert got.dtype == value.dtype
                assert got.flags.writeable
                np.testing.assert_array_equal(got, value)
            else:
                assert got == value, name


def parquet_bytes(table: pa.Table, **options: Any) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file, **{"row_group_size": 30, **options})
    return file.getvalue()


def arrow_bytes(table: pa.Table, *, is_file: bool, compression: str | None = None, rows: int = 30) -> bytes:
    file = io.BytesIO()
    make = pa.ipc.new_file if is_file else pa.ipc.new_stream
    with make(file, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table, max_chunksize=rows)
    return file.getvalue()


class MemoryClient:
    """Stands in for a CacheClient, to count requests and to damage objects by the thousand."""

    def __init__(self, objects: dict[str, bytes], version: str = "1") -> None:
        self.objects = objects
        self.version = version
        self.asked: list[tuple[str, int, int]] = []

    def list_objects(self, bucket: str, prefix: str) -> list[ObjectInfo]:
        return [
            ObjectInfo(key, len(data), self.version)
            for key, data in sorted(self.objects.items())
            if key.startswith(prefix)
        ]

    def read(self, bucket: str, key: str, start: int, stop: int, *, version: str | None = None) -> bytes:
        if key not in self.objects:
            raise ObjectNotFound(f"no {key}")
        if version != self.version:
            raise ObjectChanged(f"{key} is another version now")
        self.asked.append((key, start, stop))
        return self.objects[key][start:stop]

    def read_ranges(
        self, bucket: str, ranges: Iterable[ByteRange], *, errors: str
    ) -> list[bytes | StokerError]:
        assert errors == "return"
        found: list[bytes | StokerError] = []
        for key, start, stop, version in ranges:
            try:
                found.append(self.read(bucket, key, start, stop, version=version))
            except StokerError as error:
                found.append(error)
        return found

    def refresh(self, bucket: str, prefix: str) -> int:
        return 0
