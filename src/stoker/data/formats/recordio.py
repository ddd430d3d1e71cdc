"""Records in RecordIO files of dmlc and MXNet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stoker.data.formats.ranges import RangeFormat
from stoker.data.framing import recordio
from stoker.data.framing.scan import Scan, Spans
from stoker.data.index_build import Part


@dataclass(frozen=True)
class RecordIO(RangeFormat):
    """A sample is a record's bytes."""

    name = "recordio"
    suffixes = (".rec", ".recordio")

    def scan(self, size_bytes: int, part: Part, spans: Spans) -> Scan:
        return recordio.scan(size_bytes, spans)

    def sample(self, record: bytes, common: str) -> Any:
        return recordio.payload(record)
