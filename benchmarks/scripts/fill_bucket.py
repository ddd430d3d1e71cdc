"""`fill_bucket.py JSON`: the same records in each reader's own layout, in a bucket. Runs where the peers are installed.

The JSON has: url, bucket, folder (for the way there), records, record_bytes, records_per_shard.
"""

from __future__ import annotations

import io
import json
import logging
import shutil
import sys
import tarfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path

import boto3
import numpy as np

UPLOADS = 8
NUMBER_BYTES = 8


def record(number: int, size_bytes: int) -> bytes:
    """Its number, then what nothing can compress."""
    rest = np.random.default_rng(number).bytes(size_bytes - NUMBER_BYTES)
    return number.to_bytes(NUMBER_BYTES, "big") + rest


def objects(records: int, size_bytes: int) -> Iterator[tuple[str, bytes]]:
    for number in range(records):
        yield f"objects/{number:07}", record(number, size_bytes)


def write_tar(folder: Path, records: int, size_bytes: int, per_shard: int) -> None:
    for shard, first in enumerate(range(0, records, per_shard)):
        with tarfile.open(folder / f"{shard:05}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for number in range(first, min(first + per_shard, records)):
                info = tarfile.TarInfo(f"{number:07}.bin")
                info.size = size_bytes
                tar.addfile(info, io.BytesIO(record(number, size_bytes)))


def write_mds(folder: Path, records: int, size_bytes: int, per_shard: int) -> None:
    from streaming import MDSWriter

    shard_bytes = (
        per_shard * (size_bytes + 8) + 4096
    )  # each has an offset and a length; then the shard's own head
    with MDSWriter(out=str(folder), columns={"data": "bytes"}, size_limit=shard_bytes) as out:
        for number in range(records):
            out.write({"data": record(number, size_bytes)})


def write_litdata(folder: Path, records: int, size_bytes: int, per_shard: int) -> None:
    from litdata import optimize

    optimize(
        fn=partial(record, size_bytes=size_bytes), inputs=list(range(records)), output_dir=str(folder),
        chunk_size=per_shard, num_workers=1, verbose=False,
    )  # fmt: skip


def main() -> None:
    asked = json.loads(sys.argv[1])
    sizes = asked["records"], asked["record_bytes"]
    s3 = boto3.client("s3", endpoint_url=asked["url"])
    deadline = time.monotonic() + 60
    while True:
        try:  # seaweedfs answers before it can take anything
            s3.create_bucket(Bucket=asked["bucket"])
            s3.put_object(Bucket=asked["bucket"], Key="first", Body=b"x")
            break
        except Exception:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)

    def put(named: tuple[str, bytes]) -> None:
        s3.put_object(Bucket=asked["bucket"], Key=named[0], Body=named[1])

    with ThreadPoolExecutor(UPLOADS) as pool:
        made = objects(*sizes)
        while some := list(islice(made, 256)):
            list(pool.map(put, some))
        for name, write in (("tar", write_tar), ("mds", write_mds), ("litdata", write_litdata)):
            folder = Path(asked["folder"]) / name
            folder.mkdir(parents=True)
            write(folder, *sizes, asked["records_per_shard"])
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            for path in files:
                put((f"{name}/{path.relative_to(folder)}", path.read_bytes()))
            shutil.rmtree(folder)


if __name__ == "__main__":
    logging.disable(logging.INFO)
    main()
