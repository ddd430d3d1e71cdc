"""`stoker.open`, `read`, `read_many` and `prefetch`: single objects through the cache, by their URLs.

What does not belong here: records in an order (`data.dataset`, `data.loader`), and lists of objects (`stoker://` for
fsspec has them).
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterable
from typing import IO, Any

from stoker.cache.client.files import open_object
from stoker.data.attach import Place, attach_folder, attach_object, open_servers
from stoker.data.prefetch import Prefetch
from stoker.errors import ConfigError


def open(
    url: str,
    mode: str = "rb",
    *,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
    ca: str | None = None,
) -> IO[Any]:
    """Open an object for reading, as bytes (`rb`) or text (`r`, `rt`; UTF-8 if not said otherwise), with one request.

    `url`: `stoker://bucket/key`, an origin's own (`s3://bucket/key`, `https://host/name`), or a path; origins are read
    through the cache that is known, or one that is started now and ends with this process. The file is the version that
    was opened: reading raises ObjectChanged where that is to be had no longer. `ca`: a file of certificates of who
    signed that of an `https://` cache server, in place of STOKER_CACHE_CA. Raises ObjectNotFound, AccessDenied,
    OriginError, ConfigError.
    """
    if mode not in ("rb", "r", "rt"):
        raise ConfigError(
            f"mode {mode!r}: what comes through the cache is read only; open it with 'rb', or 'r' for text"
        )
    if mode == "rb" and (encoding, errors, newline) != (None, None, None):
        raise ConfigError(
            "mode 'rb' gives bytes, which have no encoding, errors and newline: open it with 'r'"
        )
    place = _object(url, ca)
    file = open_object(place.client, place.bucket, place.key)
    return file if mode == "rb" else io.TextIOWrapper(file, encoding or "utf-8", errors, newline)


def read(url: str, start: int = 0, stop: int | None = None, *, ca: str | None = None) -> bytes:
    """Bytes `[start, stop)` of an object; to its end without `stop`. URLs, `ca` and errors as of `open`."""
    place = _object(url, ca)
    return place.client.read(place.bucket, place.key, start, stop)


def read_many(urls: Iterable[str], base: str | None = None, *, ca: str | None = None) -> list[bytes]:
    """Whole objects, in the order of `urls`, by one request for each bucket. `ca`: as of `open`.

    With `base`, the URL of a folder, `urls` are keys below it. Raises the error of the first that failed.
    """
    places = _places(urls, base, ca)
    found = [b""] * len(places)
    groups: dict[str, list[int]] = defaultdict(list)
    for number, place in enumerate(places):
        groups[place.bucket].append(number)
    for bucket, numbers in groups.items():
        client = places[numbers[0]].client
        items = client.read_many(bucket, [places[number].key for number in numbers])
        for number, item in zip(numbers, items, strict=True):
            found[number] = item
    return found


def prefetch(urls: str | Iterable[str], base: str | None = None, *, ca: str | None = None) -> Prefetch:
    """Begin to bring objects into the cache, in the background; a URL that ends with a slash stands for all below it.

    Nothing is waited for: what is missing or has no room is told by what is returned. URLs, `base` and `ca` are as
    those of `read_many`; one URL may be given by itself. Raises ConfigError.
    """
    wanted: dict[str, list[str]] = defaultdict(list)
    for place in _places([urls] if isinstance(urls, str) else urls, base, ca, folders=True):
        wanted[place.bucket].append(place.key)
    return Prefetch(open_servers(ca=ca), wanted)


def _object(url: str, ca: str | None) -> Place:
    place = attach_object(url, ca)
    if not place.key or place.key.endswith("/"):
        raise ConfigError(f"{url!r} names a folder: give the URL of one object")
    return place


def _places(urls: Iterable[str], base: str | None, ca: str | None, *, folders: bool = False) -> list[Place]:
    if isinstance(urls, str):
        raise ConfigError(f"give a list of URLs, not the text {urls!r}")
    if base is None:
        return [attach_object(url, ca) if folders else _object(url, ca) for url in urls]
    served = attach_folder(base, ca)
    return [Place(served.client, served.bucket, served.prefix + key) for key in urls]
