"""Build the index of a dataset: look through its objects, several at a time, and keep what was found."""

from __future__ import annotations

import hashlib
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from stoker.data.formats.source import IndexProgress, Source
from stoker.data.framing.scan import Compressed, Malformed, ReadAhead, Scan, Spans, Want
from stoker.data.index_store import IndexName, IndexStore
from stoker.data.record_index import Columns, Damage, Listing, RecordIndex
from stoker.errors import ConfigError, DatasetChanged, ObjectChanged, ObjectNotFound

log = logging.getLogger("stoker.data")

JOBS = 8
"""So many objects are looked through at once."""
_TRIES = 3
_REPORT_EVERY_S = 0.5
_SAY_AFTER_S, _SAY_EVERY_S = 10.0, 30.0
_LAYOUT = 1
"""Of indexes: another number makes all of them anew."""


class Part(NamedTuple):
    """An object that has records, by its number in the listing; and what the format knows of it already."""

    number: int
    common: str = ""
    samples: int = 0


class Selected(NamedTuple):
    """The objects that have records, in the order of their records, and what is wrong already."""

    parts: list[Part]
    damage: list[Damage] = []  # noqa: RUF012 (never changed)


class Scanned(Protocol):
    """A format whose records are ranges of bytes."""

    @property
    def name(self) -> str: ...

    @property
    def options(self) -> dict[str, Any]: ...

    def select(self, url: str, listing: Listing, read: Callable[[int], bytes]) -> Selected: ...

    def scan(self, size_bytes: int, part: Part, spans: Spans) -> Scan: ...


@dataclass
class _Found:
    """What came of one object."""

    place: int
    spans: Spans = field(default_factory=Spans)
    common: str = ""
    damage: Damage | None = None


def opened_index(source: Source, form: Scanned) -> RecordIndex:
    """The index that is kept for the dataset as it is now, or else one that is built. Raises EmptyDataset, ConfigError,
    CacheError, and DatasetChanged for data that keeps changing."""
    store = IndexStore(source.settings.directory / "indexes")
    for attempt in range(_TRIES):
        listing = source.listing(anew=attempt > 0)
        name = index_name(source.url, form, listing)
        index = store.find(name)
        if index is not None:
            return index
        with store.building(name):
            index = store.find(name)
            if index is not None:
                return index
            try:
                return store.keep(name, build(source, form, listing))
            except (ObjectChanged, ObjectNotFound) as error:
                log.info("%r is not what its list says: %s", source.url, error)
                source.refresh()
    raise DatasetChanged(
        f"the objects under {source.url!r} keep changing: index them when nobody writes to them"
    )


def index_name(url: str, form: Scanned, listing: Listing) -> IndexName:
    """Of the index of these objects, read in this format."""
    said = json.dumps([_LAYOUT, url, form.name, form.options], sort_keys=True)
    content = hashlib.sha256(said.encode())
    for part in (listing.keys.blob, listing.versions.blob, listing.sizes):
        content.update(len(part).to_bytes(8, "big") + part.tobytes())
    return IndexName(hashlib.sha256(said.encode()).hexdigest()[:16], content.hexdigest()[:32])


def build(source: Source, form: Scanned, listing: Listing, jobs: int = JOBS) -> RecordIndex:
    """Look through all objects. Raises ConfigError for such as cannot be read at random, ObjectChanged, CacheError."""

    def read(number: int) -> bytes:
        return source.client.read(
            source.bucket, listing.keys[number], version=listing.versions[number] or None
        )

    selected = form.select(source.url, listing, read)
    work = _Work(source, form, listing, selected.parts)
    found = work.run(jobs)
    return _index(listing, selected, found)


def _index(listing: Listing, selected: Selected, found: Sequence[_Found]) -> RecordIndex:
    numbers = [part.number for part in selected.parts]
    columns = Columns(
        np.repeat(np.arange(len(found), dtype=np.uint32), [len(one.spans) for one in found]),
        _joined([one.spans.starts for one in found], np.int64),
        _joined([one.spans.stops - one.spans.starts for one in found], np.uint32),
    )
    commons: dict[str, int] = {}
    common_of = [commons.setdefault(one.common, len(commons)) for one in found]
    damage = [one.damage for one in found if one.damage is not None] + selected.damage
    # What select found is said of the listing, whose objects need not all be in the index.
    chosen = numbers + sorted({one.object for one in selected.damage} - set(numbers))
    places = {number: place for place, number in enumerate(chosen)}
    kept = Listing(
        listing.keys.some(chosen),
        listing.versions.some(chosen),
        listing.sizes[np.array(chosen, np.int64)],
    )
    return RecordIndex(
        kept,
        columns,
        list(commons) or [""],
        np.array(common_of, np.uint32),
        [one._replace(object=places[one.object]) for one in damage],
    )


def _joined(parts: list[Any], kind: Any) -> Any:
    return np.concatenate([np.empty(0, kind), *parts]).astype(kind) if parts else np.empty(0, kind)


class _Work:
    """Threads that look through objects. They are daemons: Ctrl-C must not wait for answers that can take minutes."""

    def __init__(self, source: Source, form: Scanned, listing: Listing, parts: list[Part]) -> None:
        self._source = source
        self._form = form
        self._listing = listing
        self._parts = parts
        self._todo: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[_Found | BaseException] = queue.SimpleQueue()
        self._is_over = threading.Event()
        self._under_way: dict[int, int] = {}
        """Bytes of the objects that are looked through now, by place."""

    def run(self, jobs: int) -> list[_Found]:
        """What came of each part. Raises the first error."""
        for place in range(len(self._parts)):
            self._todo.put(place)
        threads = min(jobs, len(self._parts))
        found: dict[int, _Found] = {}
        report = self._source.on_progress or _Sayer(self._source.url).report
        sizes = self._listing.sizes[np.array([part.number for part in self._parts], np.int64)]
        total, past_bytes, records = int(sizes.sum()), 0, 0
        try:
            for _ in range(threads):
                self._todo.put(None)
                threading.Thread(target=self._look, daemon=True).start()
            while len(found) < len(self._parts):
                try:
                    answer = self._done.get(timeout=_REPORT_EVERY_S)
                except queue.Empty:
                    answer = None
                if isinstance(answer, BaseException):
                    raise answer
                if answer is not None:
                    found[answer.place] = answer
                    past_bytes += int(sizes[answer.place])
                    records += len(answer.spans)
                under_way = sum(list(self._under_way.values()))
                report(IndexProgress(len(found), len(sizes), records, past_bytes + under_way, total))
        finally:
            self._is_over.set()
        return [found[place] for place in range(len(self._parts))]

    def _look(self) -> None:
        while (place := self._todo.get()) is not None and not self._is_over.is_set():
            try:
                found = self._looked_through(place)
                self._under_way.pop(place, None)
                self._done.put(found)
            except BaseException as error:  # noqa: BLE001 (raised again where the answer is awaited)
                self._done.put(error)
                return

    def _looked_through(self, place: int) -> _Found:
        part = self._parts[place]
        key = self._listing.keys[part.number]
        version = self._listing.versions[part.number] or None
        size_bytes = int(self._listing.sizes[part.number])
        client, bucket = self._source.client, self._source.bucket
        found, ahead = _Found(place, common=part.common), ReadAhead()
        scan = self._form.scan(size_bytes, part, found.spans)
        try:
            want: Want = next(scan)
            while not self._is_over.is_set():
                stop = ahead.stop(want, size_bytes)
                data = client.read(bucket, key, want.start, stop, version=version)
                if len(data) != stop - want.start:
                    raise ObjectChanged(f"{key!r} has fewer bytes than its listing says")
                self._under_way[place] = want.start
                want = scan.send(data)
        except StopIteration as done:
            found.common = done.value or part.common
        except Malformed as error:
            found.damage = Damage(part.number, error.offset, str(error))
        except Compressed as error:
            raise ConfigError(
                f"{key!r} cannot be read at random: {error}. Decompress it at the origin, or pack its records anew "
                "without compression"
            ) from None
        return found


class _Sayer:
    """Says how far it is where nobody else does, once it takes long."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._next_at = time.monotonic() + _SAY_AFTER_S

    def report(self, progress: IndexProgress) -> None:
        """A line now and then."""
        if time.monotonic() >= self._next_at:
            self._next_at = time.monotonic() + _SAY_EVERY_S
            share = progress.done_bytes / max(1, progress.size_bytes)
            log.warning(
                "finding the records of %r, which is done once: %.0f %%, %d records so far",
                self._url, 100 * share, progress.records,
            )  # fmt: skip
