"""`stoker_reader.py LAYOUT JSON`: epochs of `stoker.Loader`, through the cache server that the environment names."""

from __future__ import annotations

from collections.abc import Iterable

from _epochs import Asked, collate, run

import stoker
import stoker.data.loader  # imports do not count: the names of `stoker` import what they need when they are used


def objects(asked: Asked) -> Iterable[list[int]]:
    return _loader(stoker.Dataset(f"stoker://{asked.bucket}/objects/"), asked)


def tar(asked: Asked) -> Iterable[list[int]]:
    return _loader(stoker.Dataset(f"stoker://{asked.bucket}/tar/", format="tar", decode=_member), asked)


def _member(sample: dict[str, bytes]) -> bytes:
    return sample["bin"]


def _loader(data: stoker.Dataset, asked: Asked) -> stoker.Loader:
    return stoker.Loader(
        data,
        global_batch_size=asked.batch,
        shuffle=True,
        seed=1,
        num_workers=asked.workers,
        collate_fn=collate,
    )


if __name__ == "__main__":
    run({side.__name__: side for side in (objects, tar)})
