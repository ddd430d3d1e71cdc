"""Records that lie together, read group by group through a real cache server, by worlds that change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import stoker
from stoker.cache.client import orders
from stoker.data.formats import ranges
from stoker.data.formats.parquet import Parquet
from stoker.data.loader import Loader
from stoker.data.session import Session, session
from stoker.errors import ConfigError, DatasetChanged
from tests.e2e.data_helpers import Behind, behind, write_tar
from tests.e2e.run_helpers import SCRIPTS, ledger, run, wait_for

pytestmark = [
    pytest.mark.real,
    # From Python 3.12 on, to fork beside threads is warned of.
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]
FILES, GROUPS, ROWS = 4, 6, 25
RECORDS = FILES * GROUPS * ROWS


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Behind]:
    with behind(tmp_path) as found:
        yield found


@pytest.fixture
def live() -> Iterator[Session]:
    """Of a process of its own, whose world a test may set."""
    session.cache_clear()
    yield session()
    session.cache_clear()


def write(folder: Path) -> None:
    for number in range(FILES):
        ids = np.arange(GROUPS * ROWS) + number * GROUPS * ROWS
        table = pa.table({"id": ids, "x": [[i / 7, 1.0, -i / 9, 0.5] for i in ids], "label": ids % 2})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=ROWS)


def id_of(row: dict[str, Any]) -> int:
    return int(row["id"])


def numbers(batch: Any) -> list[int]:
    return [int(number) for number in batch]


def grouped(dataset: Any, **more: Any) -> Loader:
    return stoker.Loader(
        dataset, **{"global_batch_size": 20, "shuffle": "groups", "shuffle_window": 4, "seed": 2, **more}
    )


@pytest.mark.parametrize(("before", "after"), [((0, 1), (2, 3)), ((2, 4), (0, 1)), ((1, 2), (3, 5))])
def test_an_epoch_goes_on_at_another_world_size_and_worker_count(
    data: Behind, live: Session, before: tuple[int, int], after: tuple[int, int]
) -> None:
    write(data.folder)
    read: Counter[int] = Counter()
    batches: dict[int, list[int]] = {}
    positions = []
    for (workers, world_size), stop in ((before, 11), (after, None)):
        live.world_size = world_size
        for live.rank in range(world_size):
            loader = grouped(data.dataset(decode=id_of), num_workers=workers)
            with loader:
                if stop is None:
                    loader.load_state_dict(positions[0])
                for step, batch in enumerate(loader):
                    assert live.share is not None
                    mine = numbers(batch)[: live.share.records]
                    read.update(mine)
                    batches.setdefault(loader.cursor, []).extend(mine)
                    if step + 1 == stop:
                        positions.append(loader.state_dict())
                        break
    assert read == Counter(range(RECORDS))
    assert len({str(position) for position in positions}) == 1
    live.rank, live.world_size = 0, 1
    alone = grouped(data.dataset(decode=id_of))
    for batch in alone:
        assert sorted(numbers(batch)) == sorted(batches[alone.cursor])


def test_each_group_is_decoded_once_and_by_few_ranks(
    data: Behind, live: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(data.folder)
    decoded: list[tuple[int, int]] = []
    inner = stoker.data.formats.parquet.ParquetLayout.decode

    def decode(self: Any, head: Any, place: Any, columns: Any, file: Any) -> Any:
        decoded.append((live.rank, place.within))
        return inner(self, head, place, columns, file)

    monkeypatch.setattr(stoker.data.formats.parquet.ParquetLayout, "decode", decode)
    # Room for what is known of the four files, and some ten groups.
    held = Parquet(columns=["id", "x"], held_bytes=40_000)
    for world_size, per_group in ((1, 1.0), (2, 1.6)):
        live.world_size = world_size
        decoded.clear()
        for live.rank in range(world_size):
            loader = grouped(data.dataset(format=held, decode=id_of), global_batch_size=40)
            assert sum(len(numbers(batch)) for batch in loader) == RECORDS // world_size
        assert len(decoded) <= per_group * FILES * GROUPS
    decoded.clear()
    live.rank, live.world_size = 0, 1
    list(grouped(data.dataset(format=held, decode=id_of), shuffle=True, shuffle_window=None))
    assert len(decoded) > 5 * FILES * GROUPS, "what an order of all records costs"


def test_the_cache_is_told_the_order_of_groups(data: Behind) -> None:
    write(data.folder)
    with grouped(data.dataset(decode=id_of)) as loader:
        read = [number for batch in loader for number in numbers(batch)]
        assert sorted(read) == list(range(RECORDS))
        next(iter(loader))
        wait_for(lambda: [one.stop >= RECORDS for one in orders.orders(data.client, "b").streams] == [True])


def test_shards_are_groups_and_large_ones_are_several(data: Behind, monkeypatch: pytest.MonkeyPatch) -> None:
    for shard in range(5):
        write_tar(
            data.folder / "t" / f"{shard}.tar",
            [(f"{shard}-{n}.x", b"%d" % (shard * 30 + n)) for n in range(30)],
        )
    dataset = data.dataset("t/")
    assert dataset.groups().tolist() == [0, 30, 60, 90, 120]
    read = [numbers(batch["x"]) for batch in grouped(dataset, shuffle_window=2, collate_fn=by_name)]
    assert sorted(chain(*read)) == list(range(150))
    assert all(len({number // 30 for number in batch}) <= 4 for batch in read)
    monkeypatch.setattr(ranges, "GROUP_BYTES", 10 * 1024)
    monkeypatch.setattr(ranges, "_LOOKED_AT", 7)
    small = data.dataset("t/").groups().tolist()
    assert small == [30 * shard + first for shard in range(5) for first in (0, 10, 20)]


def by_name(samples: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {"x": [sample["x"] for sample in samples]}


def test_what_has_no_groups_and_what_does_not_go_together(data: Behind) -> None:
    (data.folder / "o").mkdir()
    for number in range(3):
        (data.folder / "o" / str(number)).write_bytes(b"x")
    with pytest.raises(
        ConfigError, match=r"'stoker://b/o/' \(format 'objects'\) have no groups.*shuffle=True"
    ):
        next(iter(grouped(data.dataset("o/"))))
    with pytest.raises(ConfigError, match=r"range has no groups\(\)"):
        grouped(range(5))
    with pytest.raises(ConfigError, match="it goes with shuffle='groups'"):
        Loader(range(5), global_batch_size=2, shuffle=True, shuffle_window=3)
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        grouped(data.dataset("o/"), shuffle_window=0)
    with pytest.raises(ConfigError, match="must be False, True or 'groups'"):
        grouped(range(5), shuffle="rows")


def test_a_position_belongs_to_its_groups_and_window(data: Behind) -> None:
    write(data.folder)
    position = grouped(data.dataset()).state_dict()
    grouped(data.dataset()).load_state_dict(position)
    for other in ({"shuffle_window": 5}, {"shuffle": True, "shuffle_window": None}):
        with pytest.raises(DatasetChanged):
            grouped(data.dataset(), **other).load_state_dict(position)


@pytest.mark.parametrize("workers", ["2"])
def test_a_world_that_shrinks_in_the_middle_of_an_epoch(tmp_path: Path, workers: str) -> None:
    origin = tmp_path / "origin" / "train"
    origin.mkdir(parents=True)
    write(origin)
    done = run(tmp_path, "run", "--nproc-per-node", "3", "--max-restarts", "0", "--audit", "--bucket",
               f"rows=file://{tmp_path / 'origin'}", str(SCRIPTS / "read_table.py"), "stoker://rows/train/",
               timeout_s=240, NW=workers)  # fmt: skip
    assert done.code == 0, done.text
    assert "records missed 0, repeated 0" in done.err, done.text
    assert {entry["world_size"] for entry in ledger(tmp_path, "world")} == {3, 2}
    assert f"trained {2 * -(-RECORDS // 16)} steps in a world of 2" in done.out
