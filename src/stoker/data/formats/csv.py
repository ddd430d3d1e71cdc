"""Records in CSV files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stoker.data.formats.ranges import RangeFormat
from stoker.data.framing import csv
from stoker.data.framing.scan import Malformed, Scan, Spans
from stoker.data.index_build import Part, Selected
from stoker.data.record_index import Listing
from stoker.errors import ConfigError


@dataclass(frozen=True)
class Csv(RangeFormat):
    """A sample is a dict of text by the names in the first line of its file; with `header=False`, where there is no
    such line, a list of text. Without `delimiter` it is a tab in files that end in `.tsv`, a comma in others;
    `quote=""`: nothing is quoted. Empty lines are no records."""

    name = "csv"
    suffixes = (".csv", ".tsv")
    delimiter: str | None = None
    quote: str = '"'
    header: bool = True

    def __post_init__(self) -> None:
        for what, value, known in (("delimiter", self.delimiter, (1,)), ("quote", self.quote, (0, 1))):
            if value is None:
                continue
            if not value.isascii() or len(value) not in known or value in ("\n", "\r", "\0"):
                raise ConfigError(f"{what}={value!r} must be one ASCII character that ends no line")
        if self.delimiter == self.quote:
            raise ConfigError(f"delimiter and quote cannot both be {self.quote!r}")

    def select(self, url: str, listing: Listing, read: Callable[[int], bytes]) -> Selected:
        chosen = super().select(url, listing, read)
        delimiters = [
            self.delimiter or ("\t" if listing.keys[part.number].lower().endswith(".tsv") else ",")
            for part in chosen.parts
        ]
        return Selected(
            [part._replace(common=mark) for part, mark in zip(chosen.parts, delimiters, strict=True)]
        )

    def scan(self, size_bytes: int, part: Part, spans: Spans) -> Scan:
        header = yield from csv.scan(size_bytes, spans, self._dialect(part.common), has_header=self.header)
        return part.common + header

    def sample(self, record: bytes, common: str) -> Any:
        dialect = self._dialect(common[:1])
        fields = csv.split(record, dialect)
        if not self.header:
            return fields
        names = csv.split(common[1:].encode(), dialect)
        if len(fields) != len(names):
            raise Malformed(f"it has {len(fields)} fields, the header has {len(names)}")
        return dict(zip(names, fields, strict=True))

    def _dialect(self, delimiter: str) -> csv.Dialect:
        return csv.Dialect(delimiter.encode(), self.quote.encode())
