"""Records in tar files, as WebDataset has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stoker.data.formats.ranges import RangeFormat
from stoker.data.framing import tar
from stoker.data.framing.scan import Scan, Spans
from stoker.data.index_build import Part


@dataclass(frozen=True)
class Tar(RangeFormat):
    """A sample is a dict: what follows the first dot of each file's name, in lower case, to the file's bytes; and
    `__key__`, the name before it."""

    name = "tar"
    suffixes = (".tar",)

    def scan(self, size_bytes: int, part: Part, spans: Spans) -> Scan:
        return tar.scan(size_bytes, spans)

    def sample(self, record: bytes, common: str) -> Any:
        return tar.sample(record)
