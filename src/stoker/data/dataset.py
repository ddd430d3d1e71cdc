"""`stoker.Dataset`: records behind the cache, by number."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from stoker.data.attach import Served, attach
from stoker.errors import BadRecord, EmptyDataset


class Dataset:
    """The objects under a URL, one record each, numbered in the order of their keys.

    `url`: `stoker://bucket/prefix` or an origin's own URL. `decode` maps a record's bytes to a sample (by
    default the bytes themselves are the sample). Nothing is read before it is needed. Works as a map-style
    dataset of PyTorch, also in forked and spawned DataLoader workers.

    Raises EmptyDataset when it is first used and there is nothing under the URL.
    """

    def __init__(self, url: str, *, decode: Callable[[bytes], Any] | None = None) -> None:
        self.url = url
        self.decode = decode
        self._served: Served | None = None
        self._keys: list[str] | None = None

    @property
    def keys(self) -> Sequence[str]:
        """The records' keys, in record order."""
        if self._keys is None:
            served = self._attached()
            objects = served.client.list_objects(served.bucket, served.prefix)
            self._keys = [o.key for o in objects if not o.key.endswith("/")]
            if not self._keys:
                raise EmptyDataset(
                    f"there are no objects under {self.url!r}: check the bucket and the prefix (it is a plain prefix: "
                    "a folder ends in '/')"
                )
        return self._keys

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def fingerprint(self) -> str:
        """Changes when the set of records does."""
        digest = hashlib.sha256()
        for key in self.keys:
            digest.update(key.encode() + b"\0")
        return digest.hexdigest()[:16]

    def __getitem__(self, record: int) -> Any:
        return self.__getitems__([record])[0]

    def __getitems__(self, records: Sequence[int]) -> list[Any]:
        """Samples of several records with one request. Raises BadRecord, CacheError."""
        keys = [self.keys[record] for record in records]
        served = self._attached()
        bodies = served.client.read_many(served.bucket, keys)
        if self.decode is None:
            return list(bodies)
        return [self._decoded(key, body) for key, body in zip(keys, bodies, strict=True)]

    def _decoded(self, key: str, body: bytes) -> Any:
        assert self.decode is not None
        try:
            return self.decode(body)
        except Exception as error:
            raise BadRecord(
                f"record {key!r} of {self.url!r} ({len(body)} bytes): decode raised "
                f"{type(error).__name__}: {error}"
            ) from error

    def _attached(self) -> Served:
        if self._served is None:
            self._served = attach(self.url)
        return self._served

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_served": None}
