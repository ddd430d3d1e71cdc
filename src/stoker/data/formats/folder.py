"""Image folders: one image in each object, and the folder that it is in is its class."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.data.formats.objects import ObjectRecords, listed
from stoker.data.formats.source import Source
from stoker.data.record_index import Listing, RecordIndex, StringTable
from stoker.errors import BadRecord, ConfigError, EmptyDataset

IMAGE_SUFFIXES = (
    ".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".jp2", ".avif",
)  # fmt: skip


@dataclass(frozen=True)
class Folder:
    """A sample is a pair: an image, and the number of its class. The image is its file's bytes; with `image="pil"`
    it is an image of Pillow in RGB, with `image="array"` an array (height, width, 3) of uint8.

    Classes are the folders right below the URL, numbered in the order of their names. What does not end in one of
    `suffixes`, or is in no folder, is left out.
    """

    name = "folder"
    image: str = "bytes"
    suffixes: tuple[str, ...] = IMAGE_SUFFIXES

    def __post_init__(self) -> None:
        if self.image not in ("bytes", "pil", "array"):
            raise ConfigError(f"image={self.image!r} must be 'bytes', 'pil' or 'array'")

    @property
    def options(self) -> dict[str, Any]:
        """What changes which objects there are."""
        return {"suffixes": list(self.suffixes)}

    def open(self, source: Source) -> FolderRecords:
        """The records under a URL. Raises EmptyDataset, CacheError."""
        listing = source.listing()
        base = base_of(source.prefix, listing.keys)
        suffixes = tuple(suffix.lower() for suffix in self.suffixes)
        chosen: list[int] = []
        names: list[str] = []
        for number, key in enumerate(listing.keys):
            name, slash, _ = key[len(base) :].partition("/")
            if slash and key.lower().endswith(suffixes):
                chosen.append(number)
                names.append(name)
        if not chosen:
            raise EmptyDataset(
                f"there are no images in folders under {source.url!r}: one folder is one class, and images end in "
                f"{', '.join(self.suffixes)}; suffixes=(…) names others"
            )
        classes = sorted(set(names))
        numbers = {name: number for number, name in enumerate(classes)}
        kept = Listing(listing.keys.some(chosen), listing.versions, listing.sizes[np.array(chosen)])
        index = listed(source, self, kept)
        return FolderRecords(source, index, self, classes, np.array([numbers[n] for n in names], np.uint32))


def base_of(prefix: str, keys: StringTable) -> str:
    """Where the folders begin: a prefix that ends without a slash may be a folder, or the beginning of several."""
    if prefix and not prefix.endswith("/") and all(key.startswith(f"{prefix}/") for key in keys):
        return f"{prefix}/"
    return prefix[: prefix.rfind("/") + 1]


class FolderRecords(ObjectRecords):
    """Images and their classes."""

    def __init__(
        self,
        source: Source,
        index: RecordIndex,
        form: Folder,
        classes: list[str],
        class_of: npt.NDArray[np.uint32],
    ) -> None:
        super().__init__(source, index)
        self.format = form
        self.classes = classes
        self._class_of = class_of

    def read(self, numbers: Sequence[int]) -> list[Any | BadRecord]:
        """Pairs of image and class. Raises CacheError."""
        found: list[Any | BadRecord] = []
        for number, body in zip(numbers, self.bodies(numbers), strict=True):
            try:
                found.append((self._image(body), int(self._class_of[number])))
            except Exception as error:
                if isinstance(error, ConfigError):
                    raise
                found.append(
                    BadRecord(
                        f"record {number} of {self._source.url!r} ({self.keys[number]!r}, {len(body)} bytes) is no "
                        f"image that can be read: {type(error).__name__}: {error}"
                    )
                )
        return found

    def _image(self, body: bytes) -> Any:
        if self.format.image == "bytes":
            return body
        try:
            pillow = import_module("PIL.Image")
        except ImportError:
            raise ConfigError(
                f"image={self.format.image!r} needs Pillow: pip install 'stoker[images]', or decode the bytes yourself"
            ) from None
        with pillow.open(io.BytesIO(body)) as opened:
            image = opened.convert("RGB")
        return image if self.format.image == "pil" else np.asarray(image)
