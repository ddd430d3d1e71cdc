"""What records look like in shards of each format that Stoker writes."""

from __future__ import annotations

import io
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np

from stoker.data.framing import example, mds, recordio, tar, tfrecord
from stoker.data.framing.scan import Malformed


class Packed(NamedTuple):
    """A record to be written: its number, its sample, and the end of its object's name, if it is one for itself."""

    number: int
    sample: Any
    kind: str = ""


class Shard(NamedTuple):
    """A shard that was written: its file, and the sizes of its records."""

    name: str
    sizes: list[int]
    size_bytes: int


class ShardWriter(ABC):
    """Writes one format. Every method may raise Malformed for what the format cannot hold."""

    suffix: ClassVar[str]

    def name(self, shard: int) -> str:
        """Of a shard's file."""
        return f"shard-{shard:05d}.{self.suffix}"

    def frame(self, packed: Packed) -> bytes:
        """A record as it stands in a shard."""
        raise NotImplementedError

    def head(self, sizes: Sequence[int]) -> bytes:
        """What stands before the records of a shard."""
        return b""

    def tail(self) -> bytes:
        """What stands behind them."""
        return b""

    def beside(self, shards: Sequence[Shard]) -> dict[str, bytes]:
        """Files that stand beside the shards."""
        return {}


class TarWriter(ShardWriter):
    """What is no bytes is written as text (`.txt`), as an array (`.npy`), or as JSON. Records without a `__key__` are
    named by their numbers."""

    suffix = "tar"

    def __init__(self) -> None:
        self._last = ""

    def frame(self, packed: Packed) -> bytes:
        if isinstance(packed.sample, bytes):
            files = {packed.kind or "bin": packed.sample}
        elif _is_image(packed.sample):
            files = {packed.kind or "image": packed.sample[0], "cls": str(packed.sample[1]).encode()}
        else:
            files = dict(_file(*pair) for pair in fields(packed).items() if pair[0] != "__key__")
        named = packed.sample.get("__key__") if isinstance(packed.sample, Mapping) else None
        key = named if isinstance(named, str) else f"{packed.number:09d}"
        if key == self._last:  # two of one name in a row would be read as one
            key = f"{key}_{packed.number}"
        self._last = key
        parts: list[bytes] = []
        for kind, data in files.items():
            name = f"{key}.{kind}"
            if tar.key_of(name) != (key, kind) or "\0" in name:
                raise Malformed(f"{name!r} cannot be the name of a file of a record in a tar file")
            parts += (tar.head(name, len(data)), data, bytes(-len(data) % tar.BLOCK))
        if not parts:
            raise Malformed("there is nothing in it")
        return b"".join(parts)

    def tail(self) -> bytes:
        return tar.END


class TFRecordWriter(ShardWriter):
    """Bytes and text are records as they are; what has names becomes a `tf.train.Example`."""

    suffix = "tfrecord"

    def frame(self, packed: Packed) -> bytes:
        sample = packed.sample
        if isinstance(sample, str):
            sample = sample.encode()
        return tfrecord.framed(sample if isinstance(sample, bytes) else example.build(fields(packed)))


class RecordIOWriter(ShardWriter):
    """Bytes and text only."""

    suffix = "rec"

    def frame(self, packed: Packed) -> bytes:
        sample = packed.sample
        if isinstance(sample, str):
            sample = sample.encode()
        if not isinstance(sample, bytes):
            raise Malformed(f"a record of RecordIO is bytes, this one is of type {type(sample).__name__}")
        return recordio.framed(sample)


class JsonlWriter(ShardWriter):
    """Bytes are written if they are JSON; within other samples they are written as base64."""

    suffix = "jsonl"

    def frame(self, packed: Packed) -> bytes:
        sample = packed.sample
        try:
            if isinstance(sample, bytes):
                sample = msgspec.json.decode(sample)
            elif isinstance(sample, str) or _is_image(sample):
                sample = fields(packed)
            return msgspec.json.encode(sample, enc_hook=_plain) + b"\n"
        except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
            raise Malformed(f"it cannot be written as JSON: {error}") from None


class MdsWriter(ShardWriter):
    """The first record says which columns there are, and of which encoding."""

    suffix = "mds"

    def __init__(self) -> None:
        self._columns: mds.Columns | None = None

    def name(self, shard: int) -> str:
        return f"shard.{shard:05d}.mds"

    def frame(self, packed: Packed) -> bytes:
        sample = fields(packed)
        if self._columns is None:
            names = sorted(sample)
            encodings = [mds.encoding_of(sample[name]) for name in names]
            self._columns = mds.Columns(names, encodings, [mds.size_of(encoding) for encoding in encodings])
        if sorted(sample) != self._columns.names:
            raise Malformed(
                f"its columns are {sorted(sample)}, those of the first record {self._columns.names}"
            )
        return mds.framed(sample, self._columns)

    def head(self, sizes: Sequence[int]) -> bytes:
        return mds.shard_head(sizes)

    def beside(self, shards: Sequence[Shard]) -> dict[str, bytes]:
        assert self._columns is not None
        said = {
            "shards": [
                {
                    "column_encodings": self._columns.encodings,
                    "column_names": self._columns.names,
                    "column_sizes": self._columns.sizes,
                    "compression": None,
                    "format": "mds",
                    "hashes": [],
                    "raw_data": {"basename": shard.name, "bytes": shard.size_bytes, "hashes": {}},
                    "samples": len(shard.sizes),
                    "size_limit": None,
                    "version": 2,
                    "zip_data": None,
                }
                for shard in shards
            ],
            "version": 2,
        }
        return {"index.json": msgspec.json.encode(said)}


WRITERS: Mapping[str, Callable[[], ShardWriter]] = {
    "tar": TarWriter,
    "tfrecord": TFRecordWriter,
    "recordio": RecordIOWriter,
    "jsonl": JsonlWriter,
    "mds": MdsWriter,
}


def fields(packed: Packed) -> dict[str, Any]:
    """A sample as values with names."""
    sample = packed.sample
    if isinstance(sample, Mapping):
        if not all(isinstance(name, str) for name in sample):
            raise Malformed("its values have names that are no text")
        return dict(sample)
    if _is_image(sample):
        return {"image": sample[0], "label": sample[1]}
    name = "data" if isinstance(sample, bytes) else "text" if isinstance(sample, str) else "value"
    return {name: sample}


def _is_image(sample: Any) -> bool:
    """Whether it is one of an image folder."""
    return (
        isinstance(sample, tuple)
        and len(sample) == 2
        and isinstance(sample[0], bytes)
        and isinstance(sample[1], int)
    )


def _file(name: str, value: Any) -> tuple[str, bytes]:
    kind = name.lower()
    if isinstance(value, bytes):
        return kind, value
    if isinstance(value, str):
        return f"{kind}.txt", value.encode()
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        out = io.BytesIO()
        np.save(out, value, allow_pickle=False)
        return f"{kind}.npy", out.getvalue()
    try:
        return f"{kind}.json", msgspec.json.encode(value, enc_hook=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise Malformed(f"{name!r} cannot be written as JSON: {error}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"there is no JSON for {type(value).__name__}")
