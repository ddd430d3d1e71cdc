"""`peer_reader.py PEER JSON`: epochs of one peer's loader, as its own documentation would set it up for this origin.

What was chosen, and why: docs/decisions/2026-11-22-loader-peers.md.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable
from operator import itemgetter
from typing import Any

import boto3
import fsspec
from _epochs import Asked, collate, run
from torch.utils.data import DataLoader, Dataset


class Objects(Dataset[bytes]):
    """Objects by fsspec, a batch with one `cat`: all its downloads at once."""

    def __init__(self, asked: Asked, cache_folder: str | None) -> None:
        self._prefix = f"{asked.bucket}/objects/"
        self._target = {"endpoint_url": asked.url, "config_kwargs": {"max_pool_connections": asked.batch}}
        self._cache_folder = cache_folder
        self._opened: dict[int, tuple[Any, list[str]]] = {}

    def __len__(self) -> int:
        return len(self._files()[1])

    def __getitems__(self, numbers: list[int]) -> list[bytes]:
        files, known = self._files()
        keys = [known[number] for number in numbers]
        found = files.cat(keys)
        return [found[key] for key in keys]

    def _files(self) -> tuple[Any, list[str]]:
        """Of each process, for it has a loop and connections; with its list, or it would ask for each key again."""
        if os.getpid() not in self._opened:
            if self._cache_folder is None:
                files = fsspec.filesystem("s3", **self._target)
            else:
                files = fsspec.filesystem(
                    "filecache",
                    target_protocol="s3",
                    target_options=self._target,
                    cache_storage=self._cache_folder,
                )
            self._opened[os.getpid()] = files, sorted(files.find(self._prefix))
        return self._opened[os.getpid()]


def s3fs(asked: Asked) -> Iterable[list[int]]:
    return _map_style(Objects(asked, None), asked)


def filecache(asked: Asked) -> Iterable[list[int]]:
    return _map_style(Objects(asked, asked.folder), asked)


def _map_style(data: Objects, asked: Asked) -> Iterable[list[int]]:
    return DataLoader(
        data, batch_size=asked.batch, shuffle=True, num_workers=asked.workers, collate_fn=collate,
        persistent_workers=True,
    )  # fmt: skip


def mosaicml(asked: Asked) -> Iterable[list[int]]:
    from streaming import StreamingDataset

    os.environ["S3_ENDPOINT_URL"] = asked.url
    data = StreamingDataset(
        remote=f"s3://{asked.bucket}/mds", local=asked.folder, shuffle=True, batch_size=asked.batch
    )
    # It read its index by a connection that forked workers would share, each taking the other's answers: often
    # a minute of waiting for one that never comes. Its users must fork without it, so that is not what is timed.
    for stream in data.streams:
        stream._downloader.clean_up()
    return DataLoader(
        data,
        batch_size=asked.batch,
        num_workers=asked.workers,
        collate_fn=_of_column,
        persistent_workers=True,
    )


def _of_column(samples: list[dict[str, bytes]]) -> list[int]:
    return collate([sample["data"] for sample in samples])


def litdata(asked: Asked) -> Iterable[list[int]]:
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming import downloader

    # Its obstore takes nothing but https, and there is no option for that; without obstore it is slower.
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = "true"
    data = StreamingDataset(
        f"s3://{asked.bucket}/litdata", cache_dir=asked.folder, shuffle=True, max_cache_size="25GB",
        storage_options={"endpoint_url": asked.url},
    )  # fmt: skip
    return StreamingDataLoader(
        data, batch_size=asked.batch, num_workers=asked.workers, shuffle=True, collate_fn=_of_views,
        persistent_workers=True,
    )  # fmt: skip


def _of_views(samples: list[bytes | memoryview]) -> list[int]:
    """Some are views of a mapped file: what is not read yet is no record."""
    return collate([bytes(sample) for sample in samples])


def webdataset(asked: Asked) -> Iterable[list[int]]:
    import webdataset as wds

    # Signed beforehand: `aws s3 cp`, which its documentation names first, starts a Python for each shard.
    s3 = boto3.client("s3", endpoint_url=asked.url)
    shards = range(-(-asked.records // asked.records_per_shard))
    names = [{"Bucket": asked.bucket, "Key": f"tar/{shard:05}.tar"} for shard in shards]
    urls = [s3.generate_presigned_url("get_object", Params=name) for name in names]
    data = (
        wds.WebDataset(urls, shardshuffle=len(urls), cache_dir=asked.folder)
        .shuffle(1000)
        .map(itemgetter("bin"))
        .batched(asked.batch, collation_fn=collate)
    )
    return wds.WebLoader(data, batch_size=None, num_workers=asked.workers, persistent_workers=True)


IMPORTED = {"s3fs": "s3fs", "filecache": "s3fs", "mosaicml": "streaming"}
"""What it takes to import a library is not counted."""

if __name__ == "__main__":
    importlib.import_module(IMPORTED.get(sys.argv[1], sys.argv[1]))
    run({side.__name__: side for side in (s3fs, filecache, mosaicml, litdata, webdataset)})
