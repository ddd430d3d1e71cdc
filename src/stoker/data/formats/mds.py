"""Records in the shards of MosaicML's MDS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from stoker.data.formats.ranges import RangeFormat
from stoker.data.framing import mds
from stoker.data.framing.scan import Compressed, Malformed, Scan, Spans
from stoker.data.index_build import Part, Selected
from stoker.data.record_index import Damage, Listing
from stoker.errors import ConfigError

INDEX = "index.json"


@dataclass(frozen=True)
class Mds(RangeFormat):
    """A sample is a dict of values by the names of columns; images stay bytes. Every `index.json` under the URL
    counts."""

    name = "mds"
    suffixes = (".mds",)

    def select(self, url: str, listing: Listing, read: Callable[[int], bytes]) -> Selected:
        places = {key: number for number, key in enumerate(listing.keys)}
        indexes = [key for key in places if key.rpartition("/")[2] == INDEX]
        if not indexes:
            raise ConfigError(f"there is no {INDEX} under {url!r}, which says what is in the shards of MDS")
        parts: list[Part] = []
        damage: list[Damage] = []
        for key in indexes:
            try:
                shards = mds.parse_index(read(places[key]))
            except Malformed as error:
                damage.append(Damage(places[key], error.offset, str(error)))
                continue
            except Compressed as error:
                raise ConfigError(
                    f"{key!r} of {url!r}: {error}, so that their samples cannot be read at random. Write them anew "
                    "without compression (`stoker data pack --format mds` does), or decompress them"
                ) from None
            folder = key[: -len(INDEX)]
            for shard in shards:
                number = places.get(folder + shard.raw_data.basename)
                if number is None or listing.sizes[number] != shard.raw_data.bytes:
                    there = "is not there" if number is None else f"has {listing.sizes[number]} bytes"
                    why = f"the shard {shard.raw_data.basename!r} of {shard.raw_data.bytes} bytes {there}"
                    damage.append(Damage(places[key], 0, why))
                    continue
                columns = mds.Columns(shard.column_names, shard.column_encodings, shard.column_sizes)
                parts.append(Part(number, msgspec.json.encode(columns).decode(), shard.samples))
        return Selected(parts, damage)

    def scan(self, size_bytes: int, part: Part, spans: Spans) -> Scan:
        return mds.scan(size_bytes, part.samples, spans)

    def sample(self, record: bytes, common: str) -> Any:
        return mds.sample(record, msgspec.json.decode(common, type=mds.Columns))
