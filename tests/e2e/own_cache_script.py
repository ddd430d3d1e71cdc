"""Processes that read a dataset where no cache is known: `own_cache_script.py HOW URL`."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import sys
from typing import Any

from torch.utils.data import DataLoader

import stoker
from stoker.data.attach import started_cache


def same(batch: list[Any]) -> list[Any]:
    return batch


def endpoint_of(dataset: stoker.Dataset) -> str:
    """In another process: where it reads from."""
    assert dataset[0]
    return dataset.served.client.endpoint


def bodies(dataset: stoker.Dataset, how: str) -> list[bytes]:
    if how == "torch":
        torch: DataLoader[Any] = DataLoader(
            dataset, 8, num_workers=3, multiprocessing_context="spawn", collate_fn=same
        )
        return [body for batch in torch for body in batch]
    loader = stoker.Loader(
        dataset, global_batch_size=8, num_workers=3, multiprocessing_context="spawn", collate_fn=same
    )
    with loader:
        return [body for batch in loader for body in batch]


def main(how: str, url: str) -> dict[str, Any]:
    dataset = stoker.Dataset(url)
    if how == "pickle":
        len(dataset)
        return {"pickle": pickle.dumps(dataset).hex(), "endpoint": dataset.served.client.endpoint}
    if how == "grandchildren":
        # Nothing is known of the dataset itself, but of the cache that another one was read through.
        other = stoker.Dataset(url)
        len(other)
        with multiprocessing.get_context("spawn").Pool(2) as pool:
            return {"endpoints": pool.map(endpoint_of, [dataset] * 4), "own": other.served.client.endpoint}
    found = bodies(dataset, how)
    status = dataset.served.client.status()
    known = started_cache()
    assert known is not None
    assert known.token not in repr(known)
    return {
        "records": len(found),
        "size_bytes": sum(map(len, found)),
        "origin_bytes": status.origin_bytes,
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
