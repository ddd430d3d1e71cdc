"""From decoded Arrow columns to samples: a dict of each row.

Numbers, strings and bytes are Python's; a list of numbers is a writable NumPy array; times to the nanosecond are
NumPy's, as Python's have microseconds; what is missing is None; all else is as pyarrow gives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
Sample = dict[str, Any]
_FEW = 8
"""So many rows are cut out one by one as fast as pyarrow gathers them."""


def samples_of(table: Any, features: dict[str, Any]) -> list[Sample | Exception]:
    """The rows of a table; an error in place of one whose values are none, as text that is not UTF-8."""
    try:
        return list(_samples(table, features))
    except damage() as error:
        if table.num_rows == 1:
            return [error]
    return [samples_of(table.slice(row, 1), features)[0] for row in range(table.num_rows)]


def damage() -> tuple[type[Exception], ...]:
    """What pyarrow raises for bytes that are not what they should be: a day far away, a time zone that is none."""
    import pyarrow as pa

    return pa.ArrowException, OSError, ValueError, ArithmeticError, LookupError, EOFError


def rows_of(table: Any, offsets: I64) -> Any:
    """A table of those rows; without a copy where they are few, or lie one after the other."""
    import pyarrow as pa

    first = int(offsets[0])
    if len(offsets) == 1 or (np.diff(offsets) == 1).all():
        return table.slice(first, len(offsets))
    if len(offsets) <= _FEW:
        return pa.concat_tables([table.slice(offset, 1) for offset in offsets.tolist()])
    return table.take(offsets)


def _samples(table: Any, features: dict[str, Any]) -> list[Sample]:
    names = table.column_names
    if not names:
        return [{} for _ in range(table.num_rows)]
    columns = [
        values_of(column, features.get(name)) for name, column in zip(names, table.columns, strict=True)
    ]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def values_of(column: Any, feature: Any = None) -> Sequence[Any]:
    """The values of a chunked column; `feature` is what `datasets` says of it."""
    import pyarrow as pa

    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        return [value for chunk in array.chunks for value in values_of(pa.chunked_array([chunk]), feature)]
    if isinstance(array.type, pa.FixedShapeTensorType):
        return _spread(list(np.array(array.drop_null().to_numpy_ndarray())), array)
    if isinstance(array.type, pa.ExtensionType):
        array = array.storage  # a type of Python's, which is only there where its module was imported
    kind = array.type
    if isinstance(feature, dict) and str(feature.get("_type")).startswith("Array") and "shape" in feature:
        return [None if v is None else np.array(v, feature.get("dtype")) for v in array.to_pylist()]
    if (pa.types.is_timestamp(kind) or pa.types.is_duration(kind)) and kind.unit == "ns":
        return _spread(list(array.drop_null().to_numpy(zero_copy_only=False)), array)
    if _is_list(kind) and _is_number(kind.value_type):
        return _arrays(array)
    values: list[Any] = array.to_pylist()
    return values


def _arrays(array: Any) -> Sequence[Any]:
    """Lists of numbers, as parts of one new array; one with a missing number is a list."""
    import pyarrow as pa
    import pyarrow.compute as pc

    array_there = array.drop_null()
    flat = array_there.flatten()
    is_number = None
    if flat.null_count:
        is_number = flat.is_valid().to_numpy(zero_copy_only=False)
        flat = flat.fill_null(pa.scalar(0).cast(flat.type))
    values = np.array(flat.to_numpy(zero_copy_only=False))
    ends = np.cumsum(pc.list_value_length(array_there).to_numpy(zero_copy_only=False)).tolist()
    bounds = list(zip([0, *ends], ends, strict=False))
    lists: list[Any] = [values[start:stop] for start, stop in bounds]
    if is_number is not None:
        for row, (start, stop) in enumerate(bounds):
            if not is_number[start:stop].all():
                lists[row] = array_there[row].as_py()
    return _spread(lists, array)


def _spread(values: list[Any], array: Any) -> list[Any]:
    """The values that are there, and None for each that is not."""
    if not array.null_count:
        return values
    coming = iter(values)
    return [next(coming) if is_there else None for is_there in array.is_valid().to_pylist()]


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_number(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def features_of(metadata: Any) -> dict[str, Any]:
    """What Hugging Face `datasets` has written into a schema about its columns; empty if it did not."""
    try:
        said = msgspec.json.decode((metadata or {})[b"huggingface"])
        features = said["info"]["features"]
    except (KeyError, TypeError, msgspec.DecodeError):
        return {}
    return features if isinstance(features, dict) else {}
