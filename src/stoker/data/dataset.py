"""`stoker.Dataset`: records behind the cache, by number."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from stoker.data.attach import Served
from stoker.data.corrupt import REASONS_MAX, Corrupt, Tally
from stoker.data.formats.choose import AUTO, Format, choose, is_database, make_format, shown
from stoker.data.formats.port import Reads, Records
from stoker.data.formats.source import Report, Source
from stoker.data.loader_spent import spent
from stoker.errors import BadRecord, ConfigError, EmptyDataset
from stoker.settings import CacheSettings

log = logging.getLogger("stoker.data")

OnCorrupt = Literal["error", "skip", "replace"]


class Dataset:
    """The records under a URL, by number. Works as a map-style dataset of PyTorch, also in forked and spawned
    DataLoader workers. Nothing is read before it is needed.

    `url`: `stoker://bucket/prefix`, an origin's own URL, or that of a database. `format` says how records lie in
    objects: a name ("objects", "folder", "tar", "tfrecord", "recordio", "lines", "jsonl", "csv", "mds", "parquet",
    "arrow", "sql") whose `options` follow, a format such as `Csv(delimiter=";")`, or "auto", which looks at objects'
    names: one record in each object if they tell nothing. Where several records are in an object, an index of them is
    built on first use, once on each node, and kept in the cache's folder until the objects change; that of tables is
    built of their footers by each process that opens the dataset, and travels to its loader processes.

    `decode` maps a record to a sample. By default the record, as its format has it (bytes; a dict; …), is the sample.
    `on_corrupt`: what to do with records that are damaged, or that `decode` rejects: "error" raises BadRecord; "skip"
    leaves them out of what `__getitems__` returns; "replace" gives the next good record for each. `corrupt` counts
    them.

    `cache`: where the cache is, if not where the environment says. `ca`: a file of certificates of who signed that of
    an `https://` cache server, in place of STOKER_CACHE_CA; for all who read the dataset, loaders and their processes
    among them. `on_progress` is called while an index is built.

    Raises EmptyDataset when it is first used and there is nothing under the URL; ConfigError for a format that is
    unknown, or when names tell several.
    """

    def __init__(
        self,
        url: str,
        *,
        decode: Callable[[Any], Any] | None = None,
        format: str | Format = AUTO,
        on_corrupt: OnCorrupt = "error",
        cache: CacheSettings | None = None,
        ca: str | None = None,
        on_progress: Report | None = None,
        **options: Any,
    ) -> None:
        if on_corrupt not in ("error", "skip", "replace"):
            raise ConfigError(f"on_corrupt={on_corrupt!r} must be 'error', 'skip' or 'replace'")
        self.url = url
        self.decode = decode
        self.on_corrupt: OnCorrupt = on_corrupt
        self._options = options
        self._format: Format | None = None
        if not isinstance(format, str):
            if options:
                raise ConfigError(
                    f"options ({', '.join(options)}) go with a format's name, or into the format"
                )
            self._format = format
        elif format != AUTO or is_database(url):
            self._format = make_format("sql" if format == AUTO else format, options)
        self._source = Source(url, cache, on_progress, ca)
        self._records: Records | None = None
        self._tally = Tally()

    @property
    def keys(self) -> Sequence[str]:
        """Keys of the objects that have records: those of the records, in their order, if each object is one."""
        found: Sequence[str] | None = getattr(self.records, "keys", None)
        if found is None:
            raise ConfigError(f"the records of {shown(self.url)!r} are not in objects with keys")
        return found

    @property
    def classes(self) -> list[str]:
        """Names of the classes, by number. Raises ConfigError where there are none: only "folder" has them."""
        found: list[str] | None = getattr(self.records, "classes", None)
        if found is None:
            raise ConfigError(
                f"the records of {shown(self.url)!r} have no classes: those of format='folder' do"
            )
        return found

    @property
    def format(self) -> str:
        """The name of the format; the one that was chosen, if it was "auto"."""
        self._opened()
        assert self._format is not None
        return self._format.name

    @property
    def records(self) -> Records:
        """The records as the format gives them."""
        return self._records if self._records is not None else self._opened()

    @property
    def served(self) -> Served:
        """The cache that it is read through, and its bucket there. Raises ConfigError for a database."""
        if not self.is_cached:
            raise ConfigError(f"{shown(self.url)!r} is not read through a cache")
        return self._source.served

    @property
    def is_cached(self) -> bool:
        """Whether it is read through the cache: rows of a database are not."""
        return bool(getattr(self._format, "is_cached", True))

    @property
    def fingerprint(self) -> str:
        """Changes when the set of records does."""
        return self.records.fingerprint

    @property
    def corrupt(self) -> Corrupt:
        """What was corrupt and passed over so far, in this process and its loader processes: how often, and the
        first few reasons. A part of an object in which no records could be found counts once."""
        told = self._tally.read()
        lost = [str(damage) for damage in self._damage(self.records)]
        return Corrupt(told.count + len(lost), (lost + told.reasons)[:REASONS_MAX])

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, record: int) -> Any:
        """One sample. Raises BadRecord for a corrupt one, unless it is replaced; CacheError."""
        found = self._samples([record])[0]
        if isinstance(found, BadRecord):
            found = self._passed(record, found)
        if isinstance(found, BadRecord):
            raise found
        return found

    def __getitems__(self, records: Sequence[int]) -> list[Any]:
        """Samples of several records with one request; fewer where corrupt ones are skipped. Raises BadRecord,
        DatasetChanged, CacheError."""
        return [sample for _, sample in self.placed(records)]

    def placed(self, records: Sequence[int]) -> list[tuple[int, Any]]:
        """As `__getitems__`, each sample with the place of its record in `records`."""
        samples = []
        for place, (record, found) in enumerate(zip(records, self._samples(records), strict=True)):
            if isinstance(found, BadRecord):
                found = self._passed(record, found)
            if not isinstance(found, BadRecord):
                samples.append((place, found))
        return samples

    def groups(self) -> npt.NDArray[np.int64]:
        """The number of the first record of each group that lies together, ascending from 0: of each row group of
        Parquet, each shard. Raises ConfigError where each record lies by itself."""
        tell = getattr(self.records, "groups", None)
        if tell is None:
            raise ConfigError(
                f"the records of {shown(self.url)!r} (format {self.format!r}) have no groups, as each is an object "
                "of its own: shuffle=True shuffles them"
            )
        found: npt.NDArray[np.int64] = tell()
        return found

    def expect_groups(self, in_use: int) -> None:
        """Records of so many groups will be read in turn: where they cannot all be kept decoded, it is said once."""
        expect = getattr(self.records, "expect_groups", None)
        if expect is not None:
            expect(in_use)

    def reads(self, numbers: npt.NDArray[np.int64]) -> Reads | None:
        """Which bytes of which objects those records are read from; None if not through the cache."""
        return self.records.reads(numbers)

    def _passed(self, record: int, bad: BadRecord) -> Any | BadRecord:
        """What stands for a corrupt record: itself where it is left out. Raises it where that is an error."""
        if self.on_corrupt == "error":
            raise bad
        self._tally.add(str(bad))
        if self.on_corrupt == "skip":
            return bad
        first = self._number(record)
        for further in range(1, len(self)):
            found = self._samples([(first + further) % len(self)])[0]
            if not isinstance(found, BadRecord):
                return found
        raise BadRecord(f"no record of {shown(self.url)!r} is good; the first: {bad}") from bad

    def _samples(self, records: Sequence[int]) -> list[Any | BadRecord]:
        numbers = [self._number(record) for record in records]
        with spent().reading():
            found = self.records.read(numbers)
        if self.decode is None:
            return found
        return [
            body if isinstance(body, BadRecord) else self._decoded(number, body)
            for number, body in zip(numbers, found, strict=True)
        ]

    def _decoded(self, number: int, body: Any) -> Any | BadRecord:
        assert self.decode is not None
        try:
            return self.decode(body)
        except Exception as error:  # noqa: BLE001 (whatever a user's function raises)
            bad = BadRecord(
                f"record {self._place(number)} of {shown(self.url)!r}{_size(body)}: decode raised "
                f"{type(error).__name__}: {error}"
            )
            bad.__cause__ = error
            return bad

    def _place(self, number: int) -> str:
        reads = self.records.reads(np.array([number], np.int64))
        if reads is None:
            return str(number)
        key = reads.keys[int(reads.objects[0])]
        if self.format == "objects":
            return repr(key)
        return f"{number} (bytes {int(reads.starts[0])} to {int(reads.stops[0])} of {key!r})"

    def _number(self, record: int) -> int:
        number = operator.index(record)
        if not -len(self) <= number < len(self):
            raise IndexError(f"{shown(self.url)!r} has {len(self)} records: there is no record {number}")
        return number % len(self)

    def _opened(self) -> Records:
        if self._records is None:
            if self._format is None:
                choice = choose(self.url, self._source.listing().keys)
                log.info("%s is read in format %r: %s", shown(self.url), choice.name, choice.why)
                self._format = make_format(choice.name, self._options)
            records = self._format.open(self._source)
            self._source.forget()
            damage = self._damage(records)
            if damage and self.on_corrupt == "error":
                raise BadRecord(
                    f"{damage[0]}{f' ({len(damage) - 1} more objects are damaged)' if len(damage) > 1 else ''}; "
                    "on_corrupt='skip' goes on without what is behind that"
                )
            if not len(records):
                raise EmptyDataset(f"there are no records in the objects under {shown(self.url)!r}")
            self._records = records
        return self._records

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None and self.is_cached:
            self._source.share()
        return self.__dict__

    @staticmethod
    def _damage(records: Records) -> Sequence[BadRecord]:
        found: Sequence[BadRecord] = getattr(records, "damage", ())
        return found


def _size(body: Any) -> str:
    return f" ({len(body)} bytes)" if isinstance(body, bytes) else ""
