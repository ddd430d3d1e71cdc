"""How fast is a state written to a folder and read back, beside torch.save and torch.distributed.checkpoint?

All with one thread, and flushed to the disk when they say that they are done; reading is from the page cache. With
`--folder` the folder may be on another disk, or in memory (/dev/shm). With `--cpu` the seconds are those of the
processor, which other work on the machine changes little. `--url s3://bucket/prefix?endpoint=…` asks another question:
how fast is it written there by one file at a time, and by several at once?
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

sys.path.insert(0, str(Path(__file__).parent))

from _common import interleaved, median_ratio, parser, report

from stoker.train.checkpoints.image import image_of
from stoker.train.checkpoints.places import RemotePlace
from stoker.train.checkpoints.storage import CheckpointStorage

TENSORS = 40


def sides(
    folder: Path, size_bytes: int
) -> tuple[dict[str, Callable[[], object]], dict[str, Callable[[], object]]]:
    """Writers, and readers of what they have written."""
    tensors = tensors_of(size_bytes)
    state = {"modules": {"model": tensors}, "values": {}}
    targets = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    storage = CheckpointStorage(str(folder / "stoker"))

    def save_torch() -> None:
        torch.save(state, folder / "torch.pt")
        with open(folder / "torch.pt", "rb") as file:
            os.fsync(file.fileno())

    def save_dcp() -> None:
        save(dict(tensors), checkpoint_id=folder / "dcp", no_dist=True)

    writers: dict[str, Callable[[], object]] = {
        "torch.save": save_torch,
        "dcp.save": save_dcp,
        "stoker": lambda: storage.write(image_of(1, state)),
    }
    readers: dict[str, Callable[[], object]] = {
        "torch.load": lambda: torch.load(folder / "torch.pt", weights_only=True),
        "dcp.load": lambda: load(targets, checkpoint_id=folder / "dcp", no_dist=True),
        "stoker": storage.read_newest,
        "stoker verify": lambda: storage.reader(1).verify(),
    }
    return writers, readers


def uploads(url: str, size_bytes: int, rounds: int) -> dict[str, object]:
    """One file at a time beside several."""
    image = image_of(1, {"modules": {"model": tensors_of(size_bytes)}, "values": {}})
    several = RemotePlace.writes_at_once

    def write(count: int) -> Callable[[], None]:
        def do() -> None:
            RemotePlace.writes_at_once = count
            CheckpointStorage(url, keep=1).write(image)

        return do

    took = interleaved({str(c): timed(write(c), time.perf_counter) for c in (1, several)}, rounds)
    RemotePlace.writes_at_once = several
    figures: dict[str, object] = {"state, MB": size_bytes // 10**6, "rounds": rounds}
    for count, seconds in took.items():
        figures[f"write, files at once: {count}, GB/s"] = round(
            size_bytes / 1e9 / statistics.median(seconds), 3
        )
    figures["several, faster than one"] = round(median_ratio(took["1"], took[str(several)]), 2)
    return figures


def tensors_of(size_bytes: int) -> dict[str, torch.Tensor]:
    return {f"layer{number}": torch.randn(size_bytes // TENSORS // 4) for number in range(TENSORS)}


def timed(do: Callable[[], object], clock: Callable[[], float]) -> Callable[[], float]:
    def measure() -> float:
        began = clock()
        do()
        return clock() - began

    return measure


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--folder", type=Path, help="where to write (the folder for temporary files)")
    arguments.add_argument("--cpu", action="store_true", help="processor time in place of time")
    arguments.add_argument("--url", help="an object store to write to, in place of a folder")
    arguments.add_argument("--megabytes", type=int, help="of state (1600; with --quick 400)")
    options = arguments.parse_args()
    clock = time.process_time if options.cpu else time.perf_counter
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    size_bytes, rounds = (400_000_000, 5) if options.quick else (1_600_000_000, 5)
    size_bytes = options.megabytes * 1_000_000 if options.megabytes is not None else size_bytes
    if options.url is not None:
        report("checkpoint_storage", uploads(options.url, size_bytes, rounds), options.json)
        return
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        writers, readers = sides(folder, size_bytes)
        wrote = interleaved({name: timed(do, clock) for name, do in writers.items()}, rounds)
        read = interleaved({name: timed(do, clock) for name, do in readers.items()}, rounds)
    finally:
        shutil.rmtree(folder)
    figures: dict[str, object] = {"state, MB": size_bytes // 10**6}
    for what, times in (("write", wrote), ("read", read)):
        for name, seconds in times.items():
            figures[f"{what}, {name}, GB/s"] = round(size_bytes / 1e9 / statistics.median(seconds), 2)
    figures["written faster than by torch.save"] = round(
        median_ratio(wrote["torch.save"], wrote["stoker"]), 2
    )
    figures["written faster than by dcp.save"] = round(median_ratio(wrote["dcp.save"], wrote["stoker"]), 2)
    figures["read faster than by torch.load"] = round(median_ratio(read["torch.load"], read["stoker"]), 2)
    figures["read faster than by dcp.load"] = round(median_ratio(read["dcp.load"], read["stoker"]), 2)
    report("checkpoint_storage", figures, options.json)


if __name__ == "__main__":
    main()
