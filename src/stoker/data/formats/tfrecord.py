"""Records in TFRecord files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stoker.data.formats.ranges import RangeFormat
from stoker.data.framing import example, tfrecord
from stoker.data.framing.scan import Scan, Spans
from stoker.data.index_build import Part
from stoker.errors import ConfigError


@dataclass(frozen=True)
class TFRecord(RangeFormat):
    """A sample is a record's bytes; with `parse="example"` it is a dict of the features of a `tf.train.Example`: lists
    of bytes, and arrays of float32 and int64."""

    name = "tfrecord"
    suffixes = (".tfrecord", ".tfrecords", ".tfrec")
    parse: str | None = None

    def __post_init__(self) -> None:
        if self.parse not in (None, "example"):
            raise ConfigError(f"parse={self.parse!r}: of TFRecord only parse='example' is known")

    @property
    def options(self) -> dict[str, Any]:
        return {}

    def scan(self, size_bytes: int, part: Part, spans: Spans) -> Scan:
        return tfrecord.scan(size_bytes, spans)

    def sample(self, record: bytes, common: str) -> Any:
        body = tfrecord.payload(record)
        return example.parse(body) if self.parse else body
