"""Have many objects held: which to ask for together, what came of each, and what to do while servers come and go."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec

from stoker.cache.client.servers import Servers, SlowAnswer
from stoker.wire.cache_api import FAILED, HELD, LOADED, PASSED, LoadItem

BATCH_KEYS_MAX = 256
BATCH_BYTES_MAX = 256 * 1000 * 1000
"""So much is asked for together at most, so that progress is seen, and a lost request costs little."""
PASSED_NAMED_MAX = 20
SILENCE_S = 30.0
_SLOWEST_BYTES_PER_S = 1e6
_OBJECT_S_MIN = 600.0
_AGAIN_MAX = 100_000


class Wanted(NamedTuple):
    """An object to be held; None: its size is not known."""

    key: str
    size_bytes: int | None


class Failure(NamedTuple):
    """An object that is not held, and why."""

    key: str
    why: str


Todo = queue.SimpleQueue[list[Wanted] | None]
Done = queue.SimpleQueue[list[LoadItem] | BaseException]


@dataclass
class LoadCounts:
    """What has become of all objects so far. Sizes are in bytes.

    `held` were there before. What a request brought that was then lost, and asked again, counts as held, too.
    `passed_first` are the first PASSED_NAMED_MAX of those that were passed.
    """

    objects: int = 0
    size_bytes: int = 0
    held: int = 0
    held_bytes: int = 0
    loaded: int = 0
    loaded_bytes: int = 0
    passed: int = 0
    passed_bytes: int = 0
    passed_first: list[Failure] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether everything that was asked for is held."""
        return not self.failures and not self.passed

    def add(self, item: LoadItem) -> None:
        """Count one more object."""
        self.objects += 1
        self.size_bytes += item.size_bytes
        match item.state:
            case state if state == HELD:
                self.held += 1
                self.held_bytes += item.size_bytes
            case state if state == LOADED:
                self.loaded += 1
                self.loaded_bytes += item.size_bytes
            case state if state == PASSED:
                self.passed += 1
                self.passed_bytes += item.size_bytes
                if len(self.passed_first) < PASSED_NAMED_MAX:
                    self.passed_first.append(Failure(item.key, item.error or "there is no room"))
            case _:
                self.failures.append(Failure(item.key, item.error or item.state))

    def after(self, first: LoadCounts) -> LoadCounts:
        """These of a second pass over the same objects, told together with those of the first: what was held before the
        first was held already, whatever has become of it since."""
        there = self.objects - self.passed - len(self.failures)
        there_bytes = self.held_bytes + self.loaded_bytes
        held, held_bytes = min(first.held, there), min(first.held_bytes, there_bytes)
        return replace(
            self,
            held=held,
            held_bytes=held_bytes,
            loaded=there - held,
            loaded_bytes=there_bytes - held_bytes,
        )


def batches(
    wanted: Iterable[Wanted], keys_max: int = BATCH_KEYS_MAX, bytes_max: int = BATCH_BYTES_MAX
) -> Iterator[list[Wanted]]:
    """Objects that are asked for together; one that is larger than `bytes_max` is alone."""
    batch: list[Wanted] = []
    size_bytes = 0
    for one in wanted:
        size = one.size_bytes or 0
        if batch and (len(batch) == keys_max or size_bytes + size > bytes_max):
            yield batch
            batch, size_bytes = [], 0
        batch.append(one)
        size_bytes += size
    if batch:
        yield batch


class Loader:
    """Loads objects of one bucket with at most `jobs` requests at a time, onto `replicas` servers of the fleet each (0:
    as many as the bucket says).

    `silence_s`: how long a server may be at work on one request before it is asked again, for less.
    """

    def __init__(
        self, servers: Servers, bucket: str, *, jobs: int = 4, replicas: int = 0, silence_s: float = SILENCE_S
    ) -> None:
        if jobs < 1:
            raise ValueError(f"{jobs} requests at a time load nothing")
        self.counts = LoadCounts()
        self._servers = servers
        self._bucket = bucket
        self._jobs = jobs
        self._replicas = replicas
        self._silence_s = silence_s
        self._again: list[Wanted] = []
        self._began_at = time.monotonic()

    def run(
        self, wanted: Iterable[Wanted], on_progress: Callable[[LoadCounts], None], every_s: float = 0.5
    ) -> LoadCounts:
        """Load them all, however each ends. `on_progress` is called at least every `every_s` seconds.

        Raises CacheUnavailable when no server answers any more, and what servers say about requests as a whole
        (AccessDenied, ObjectNotFound for the bucket); `counts` then has what was done until then.
        """
        self.counts = LoadCounts()
        todo: Todo = queue.SimpleQueue()
        done: Done = queue.SimpleQueue()
        # Daemons: Ctrl-C must not wait for answers that can take minutes.
        for _ in range(self._jobs):
            threading.Thread(target=self._work, args=(todo, done), daemon=True).start()
        try:
            for answer in self._answers(batches(wanted), todo, done, on_progress, every_s):
                self._take(answer)
            self._try_again(todo, done, on_progress, every_s)
        finally:
            for _ in range(self._jobs):
                todo.put(None)
        on_progress(self.counts)
        return self.counts

    def _take(self, items: list[LoadItem]) -> None:
        for item in items:
            if item.state == PASSED and len(self._again) < _AGAIN_MAX:
                self._again.append(Wanted(item.key, item.size_bytes))
            else:
                self.counts.add(item)

    def _try_again(
        self, todo: Todo, done: Done, on_progress: Callable[[LoadCounts], None], every_s: float
    ) -> None:
        """Ask once more for what was passed: a server that was lost in the middle is no lack of room. That ends with
        the first batch of which nothing could be held: what has no room is not to be read again and again."""
        left, self._again = self._again, []
        for batch in batches(left):
            items = [
                item
                for part in self._answers(iter([batch]), todo, done, on_progress, every_s)
                for item in part
            ]
            for item in items:
                # It was not all there when it was asked for first.
                self.counts.add(msgspec.structs.replace(item, state=LOADED) if item.state == HELD else item)
            left = left[len(batch) :]
            if all(item.state == PASSED for item in items):
                break
        for one in left:
            self.counts.add(LoadItem(one.key, PASSED, one.size_bytes or 0))

    def _answers(
        self,
        all_batches: Iterator[list[Wanted]],
        todo: Todo,
        done: Done,
        on_progress: Callable[[LoadCounts], None],
        every_s: float,
    ) -> Iterator[list[LoadItem]]:
        """What came of each batch. The threads are kept at work, with one batch more than they are working on."""
        asked = 0
        while True:
            while asked <= self._jobs and (batch := next(all_batches, None)) is not None:
                todo.put(batch)
                asked += 1
            if not asked:
                return
            try:
                answer = done.get(timeout=every_s)
            except queue.Empty:
                on_progress(self.counts)
                continue
            asked -= 1
            if isinstance(answer, BaseException):
                raise answer
            yield answer
            on_progress(self.counts)

    def _work(self, todo: Todo, done: Done) -> None:
        while (batch := todo.get()) is not None:
            try:
                done.put(self._load(batch))
            except BaseException as error:  # noqa: BLE001 (raised again where the answer is awaited)
                done.put(error)
                return

    def _load(self, batch: list[Wanted]) -> list[LoadItem]:
        try:
            return self._ask([one.key for one in batch])
        except SlowAnswer:
            # What has come meanwhile stays, so that each time less is missing.
            if len(batch) == 1:
                return [self._load_slow(batch[0])]
            middle = len(batch) // 2
            return self._load(batch[:middle]) + self._load(batch[middle:])

    def _load_slow(self, one: Wanted) -> LoadItem:
        """One object that has taken long already."""
        patience_s = max(_OBJECT_S_MIN, (one.size_bytes or 0) / _SLOWEST_BYTES_PER_S)
        deadline = time.monotonic() + patience_s
        while True:
            try:
                return self._ask([one.key])[0]
            except SlowAnswer:
                if time.monotonic() >= deadline:
                    return LoadItem(one.key, FAILED, 0, f"it is not there after {patience_s:.0f} s")

    def _ask(self, keys: list[str]) -> list[LoadItem]:
        age_s = int(time.monotonic() - self._began_at) + 1
        return self._servers.call(
            lambda client: client.load(self._bucket, keys, replicas=self._replicas, age_s=age_s),
            self._silence_s,
        )
