"""Records that are lines of text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stoker.data.formats.ranges import RangeFormat
from stoker.data.framing import lines
from stoker.data.framing.scan import Malformed, Scan, Spans
from stoker.data.index_build import Part
from stoker.errors import ConfigError


@dataclass(frozen=True)
class Lines(RangeFormat):
    """A sample is a line without its end, as text; with `encoding=None` as bytes. Empty lines are records unless
    `keep_empty=False`. Encodings are such as have ASCII's line ends."""

    name = "lines"
    suffixes = (".txt", ".text", ".lines")
    encoding: str | None = "utf-8"
    keep_empty: bool = True

    def __post_init__(self) -> None:
        try:
            is_usable = self.encoding is None or "\n".encode(self.encoding) == b"\n"
        except LookupError:
            is_usable = False
        if not is_usable:
            raise ConfigError(f"encoding={self.encoding!r} is unknown, or its line ends are not ASCII's")

    @property
    def options(self) -> dict[str, Any]:
        return {"keep_empty": self.keep_empty}

    def scan(self, size_bytes: int, part: Part, spans: Spans) -> Scan:
        return lines.scan(size_bytes, spans, keeps_empty=self.keep_empty)

    def sample(self, record: bytes, common: str) -> Any:
        if self.encoding is None:
            return record
        try:
            return record.decode(self.encoding)
        except UnicodeDecodeError as error:
            raise Malformed(f"it is not {self.encoding}: {error.reason}", error.start) from None
