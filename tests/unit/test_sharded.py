"""`stoker.ShardedDataset` in one process, and with several workers around one core."""

from __future__ import annotations

import contextlib
import gc
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import stoker
from stoker.data.dataset import Dataset
from stoker.errors import BadRecord, ConfigError, DatasetChanged, JobError
from stoker.train.sharded_reader import ShardReader
from stoker.train.shards_session import ServiceCaller, ShardSession
from tests.unit.test_shards_workers import Hub


class Numbers(torch.utils.data.Dataset[int]):
    """Each record is its number; `asked` holds what was read with one request."""

    def __init__(self, records: int, bad: int = -1) -> None:
        self.records = records
        self.bad = bad
        self.asked: list[list[int]] = []

    def __len__(self) -> int:
        return self.records

    def __getitem__(self, record: int) -> int:
        return self.__getitems__([record])[0]

    def __getitems__(self, records: Sequence[int]) -> list[int]:
        self.asked.append(list(records))
        if self.bad in records:
            raise BadRecord(f"record {self.bad} is damaged")
        return list(records)


class Skipping(Dataset):
    """A dataset of which only even records are good, and none above 20."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def __len__(self) -> int:
        return 30

    @property
    def fingerprint(self) -> str:
        return ""

    def placed(self, records: Sequence[int]) -> list[tuple[int, Any]]:
        return [(place, r) for place, r in enumerate(records) if r % 2 == 0 and r <= 20]


@pytest.fixture(autouse=True)
def names_are_free() -> Iterator[None]:
    """Datasets of one name must be gone, whatever a caught exception held."""
    yield
    gc.collect()


def sharded(records: Any = 25, **more: Any) -> stoker.ShardedDataset:
    dataset = Numbers(records) if isinstance(records, int) else records
    session = more.pop("session", None) or ShardSession()
    return stoker.ShardedDataset(dataset, **{"shard_size": 10, "shard_session": session, **more})


def test_all_records_of_all_epochs_are_read_in_lots() -> None:
    dataset = Numbers(25)
    data = sharded(dataset, epochs=2, shuffle=True, shuffle_records=True, read_size=4, map=str)
    assert Counter(data) == Counter([*map(str, range(25))] * 2)
    assert data.status().is_finished
    assert list(data) == []
    assert sorted(map(len, dataset.asked)) == [1, 1, *[2] * 4, *[4] * 10]


def test_a_shard_is_done_when_its_records_are_used() -> None:
    data = sharded()
    done = [data.status().done for _ in data]
    assert done == [0] * 10 + [1] * 10 + [2] * 5
    assert data.status().done == 3


@pytest.mark.parametrize("own", [False, True])
def test_batches_that_are_gathered_are_not_used_yet(own: bool) -> None:
    data = sharded()
    loader = data.loader(batch_size=4) if own else DataLoader(data, batch_size=4)
    done = [(len(batch), data.status().done) for batch in loader]
    assert done == [(4, 0), (4, 0), (4, 0), (4, 1), (4, 1), (4, 2), (1, 2)]
    assert data.status().done == 3


@pytest.mark.parametrize("own", [False, True])
def test_a_last_batch_that_raises_is_not_used(own: bool) -> None:
    data = sharded()
    loader = data.loader(batch_size=4) if own else DataLoader(data, batch_size=4)

    def train() -> None:
        for batch in loader:
            if len(batch) == 1:
                raise ValueError("cannot use it")

    with pytest.raises(ValueError, match="cannot use it"):
        train()
    status = data.status()
    assert (status.done, status.todo, status.failures) == (2, 1, 1)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_that_is_left_hands_back_what_is_not_used(workers: int) -> None:
    data = sharded(100)
    loader = data.loader(batch_size=4, num_workers=workers)
    used: list[int] = []
    for number, batch in enumerate(loader):
        if number == 12:
            break
        used += batch.tolist()
    status = data.status()
    assert (status.doing, status.failures) == (0, 0)
    whole = [s for s in range(10) if set(range(10 * s, 10 * s + 10)) <= set(used)]
    assert status.done == len(whole)
    rest = sorted(record for batch in loader for record in batch.tolist())
    assert rest == [record for record in range(100) if record // 10 not in whole]


def test_a_loader_makes_samples_without_batches_and_collates_as_it_is_told() -> None:
    data = sharded()
    assert sorted(data.loader(batch_size=None)) == list(range(25))
    data = sharded(name="other")
    assert sorted(map(len, data.loader(batch_size=10, num_workers=1, collate_fn=list))) == [5, 10, 10]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_record_fails_its_shard(workers: int) -> None:
    data = sharded(Numbers(30, bad=15), max_failures=5)
    with pytest.raises(BadRecord, match="record 15 is damaged"):
        list(data.loader(batch_size=5, num_workers=workers) if workers else data)
    assert data.status().failures in ((1, 2) if workers else (1,)), (
        "the other process may get it before the loop ends"
    )
    assert data.status().doing == 0


def test_records_that_are_left_out_count_with_those_before_them() -> None:
    reader = ShardReader(Skipping(), None, 3)
    assert list(reader.samples(range(10, 20), 1)) == [(4, 12), (6, 14), (8, 16), (10, 18)]
    assert list(reader.samples(range(18, 28), 0)) == [(2, 18), (10, 20)]
    assert list(reader.samples(range(21, 30), 0)) == []
    data = sharded(Skipping(), read_size=3)
    assert list(data) == list(range(0, 21, 2))
    assert data.status().is_finished
    data = sharded(Skipping(), read_size=3, name="exact", exactly_once=True)
    for sample in data:
        if sample == 14:
            data.commit()
            break
    data.desk.roll_back()
    assert list(data) == [16, 18, 20]
    data.commit()
    assert data.status().is_finished


def test_what_is_committed_counts_and_the_rest_is_read_again() -> None:
    data = sharded(exactly_once=True, shuffle_records=True)
    order = [*sharded(name="twin", shuffle_records=True)]
    loop = iter(data)
    assert [next(loop) for _ in range(14)] == order[:14]
    data.commit()
    assert [next(loop) for _ in range(3)] == order[14:17]
    data.desk.roll_back()
    with pytest.raises(ConfigError, match="this loop over a ShardedDataset is over"):
        next(loop)
    assert list(data) == order[14:]
    assert data.status().done == 1
    data.commit()
    assert data.status().is_finished
    assert list(data) == []


def test_a_loop_that_was_left_goes_on_where_it_was_where_records_count_at_commits() -> None:
    data = sharded(100, exactly_once=True)
    loader = data.loader(batch_size=4, num_workers=2)
    read: list[int] = []
    for number, batch in enumerate(loader):
        read += batch.tolist()
        if number == 12:
            break
    data.commit()
    read += [record for batch in loader for record in batch.tolist()]
    assert sorted(read) == list(range(100))
    data.commit()
    assert data.status().is_finished


def until(holds: Callable[[], bool]) -> None:
    """Waits for it; a minute is for ever."""
    for _ in range(3000):
        if holds():
            return
        time.sleep(0.02)
    pytest.fail("it never came to hold")


def test_a_loop_that_is_left_keeps_only_what_is_to_be_committed() -> None:
    """Loader processes have leased shards ahead: others must not wait for them until the leases end."""
    data = sharded(200, exactly_once=True)
    loader = data.loader(batch_size=4, num_workers=2, prefetch_factor=8)
    batches = iter(loader)
    read = [record for _ in range(2) for record in next(batches).tolist()]
    begun = {record // 10 for record in read}
    until(lambda: data.status().doing > len(begun))
    del batches
    until(lambda: data.status().doing == len(begun))  # a process may have been asking just then
    data.commit()
    until(lambda: data.status().doing == 0)
    assert data.status().failures == 0
    read += [record for batch in loader for record in batch.tolist()]
    assert sorted(read) == list(range(200))


@pytest.mark.parametrize("dropped", [True, False])
@pytest.mark.parametrize("workers", [0, 1])
def test_an_old_loop_leaves_a_new_one_alone(workers: int, dropped: bool) -> None:
    data = sharded(60)
    loader = data.loader(batch_size=4, num_workers=workers)
    old = iter(loader)
    next(old)
    new = iter(loader)
    read = next(new).tolist()
    if dropped:
        del old
        gc.collect()
    else:
        with pytest.raises(ConfigError, match="another one has begun"):
            next(old)
    for batch in new:
        read += batch.tolist()
    assert sorted(read) == list(range(60))
    assert data.status().is_finished


def test_a_process_that_starts_late_asks_for_no_loop_but_its_own() -> None:
    data = sharded()
    feed = data.feed()
    feed.turn = data.desk.begin()
    late = iter(feed)
    data.desk.begin()
    assert list(late) == []
    assert len(list(feed)) == 25, "asked to iterate again, it is for the newest"


def test_a_loader_waits_for_what_its_processes_lease() -> None:
    waiting: list[bool] = []

    class Session(ShardSession):
        @contextlib.contextmanager
        def in_next(self) -> Iterator[None]:
            waiting.append(True)
            yield
            waiting.append(False)

    session, hub = Session(), Hub().session("w0")
    assert isinstance(hub.caller, ServiceCaller)
    session.waiting = session.in_next
    session.caller = ServiceCaller(hub.caller._call, no_lease, ahead=hub.caller._lease)
    for _ in sharded(session=session).loader(batch_size=5):
        assert waiting.pop() is False
    assert waiting == [True] * 5 + [True, False]


def no_lease(*_: object) -> bytes:
    raise AssertionError("it is not the training loop that asks")


def test_a_state_goes_on_with_another_number_of_workers() -> None:
    hub = Hub()
    workers = [sharded(100, exactly_once=True, name="data", session=hub.session("w0"))]
    counted: list[int] = []
    loops = [iter(workers[0])]
    counted += [next(loops[0]) for _ in range(13)]
    workers[0].commit()
    saved = json.loads(json.dumps(workers[0].state_dict()))
    next(loops[0])
    del loops, workers
    gc.collect()
    other = Hub()
    one = sharded(100, exactly_once=True, name="data", session=other.session("w0"))
    one.load_state_dict(saved)
    lock, results = threading.Lock(), []

    def work(data: stoker.ShardedDataset) -> None:
        for record in data:
            with lock:
                results.append(record)
        data.commit()

    session = stoker.data.session.session()
    session._loaders.pop("shards-data")
    two = sharded(100, exactly_once=True, name="data", session=other.session("w1"))
    threads = [threading.Thread(target=work, args=(data,)) for data in (one, two)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(counted + results) == list(range(100))
    assert one.status().is_finished
    with pytest.raises(DatasetChanged, match="the records are not those"):
        one.load_state_dict({**saved, "data": "99/"})


def test_a_lease_that_is_over_commits_nothing() -> None:
    hub = Hub()
    data = sharded(30, exactly_once=True, lease_timeout_s=5, session=hub.session("w0"))
    loop = iter(data)
    read = [next(loop) for _ in range(3)]
    hub.pass_time(6)
    with pytest.raises(JobError, match="does not count, another worker reads it: shard 0 of sharded"):
        data.commit()
    assert sorted(data) == [*range(30)]
    assert read == [0, 1, 2]


def test_a_lone_worker_is_told_what_it_does_wrong() -> None:
    data = sharded()
    for context in ("fork", "spawn"):
        with pytest.raises(ConfigError, match=r"make the\s+DataLoader by data.loader"):
            list(DataLoader(data, num_workers=1, multiprocessing_context=context))
    with pytest.raises(ConfigError, match="make the dataset with exactly_once=True"):
        data.commit()
    with pytest.raises(ConfigError, match="drop_last=True would count"):
        data.loader(batch_size=4, drop_last=True)
    with pytest.raises(ConfigError, match="read_size must be at least 1"):
        sharded(name="other", read_size=0)
    loop = iter(data)
    next(loop)
    assert next(iter(data)) == 0, "what the loop before had is given back"
    with pytest.raises(ConfigError, match="another one has begun"):
        next(loop)
