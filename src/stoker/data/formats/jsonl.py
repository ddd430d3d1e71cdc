"""Records that are lines of JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec

from stoker.data.formats.ranges import RangeFormat
from stoker.data.framing import lines
from stoker.data.framing.scan import Malformed, Scan, Spans
from stoker.data.index_build import Part


@dataclass(frozen=True)
class Jsonl(RangeFormat):
    """A sample is what a line says. Empty lines are no records."""

    name = "jsonl"
    suffixes = (".jsonl", ".ndjson")

    def scan(self, size_bytes: int, part: Part, spans: Spans) -> Scan:
        return lines.scan(size_bytes, spans, keeps_empty=False)

    def sample(self, record: bytes, common: str) -> Any:
        try:
            return msgspec.json.decode(record)
        except (msgspec.DecodeError, RecursionError):
            pass
        try:
            return json.loads(record)  # which knows NaN and Infinity
        except json.JSONDecodeError as error:
            raise Malformed(f"it is no JSON: {error.msg}", error.pos) from None
        except (ValueError, RecursionError) as error:
            raise Malformed(f"it is no JSON: {error}") from None
