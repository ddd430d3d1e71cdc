"""Labelled pictures that a machine has or can get without a download of ours."""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.errors import ConfigError, EnvironmentProblem

FASHION_FOLDER = Path("/usr/share/datasets/fashion-mnist")
PACKAGE = "dataset-fashion-mnist"
APT_TIMEOUT_S = 120.0
Bytes = npt.NDArray[np.uint8]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Split:
    """Pictures (n, side, side) and their labels (n)."""

    pictures: Bytes
    labels: Bytes

    def __len__(self) -> int:
        return len(self.labels)

    def first(self, records: int) -> Split:
        """The first `records` of them."""
        return Split(self.pictures[:records], self.labels[:records])


@dataclass(frozen=True)
class Source:
    """A dataset and how it is loaded; nothing is read before."""

    name: str
    title: str
    epochs: int
    """How many suit a demo."""
    global_batch_size: int
    load: Callable[[], tuple[Split, Split]]
    """Returns the training and the test records."""


def choose_source(wanted: str, say: Say) -> Source:
    """Find the dataset: `auto`, `fashion-mnist` or `digits`; installs where it may, and says so.

    Raises ConfigError when there is none, naming what to install.
    """
    if wanted in ("auto", "fashion-mnist"):
        if has_fashion() or _install_fashion(say):
            return Source("fashion-mnist", "Fashion-MNIST", 2, 256, load_fashion)
        if wanted == "fashion-mnist":
            raise ConfigError(
                f"Fashion-MNIST is not at {FASHION_FOLDER}: run `apt-get install {PACKAGE}`, or --dataset digits"
            )
        say(
            f"Fashion-MNIST is not here (Debian's package {PACKAGE}): using the digits that scikit-learn ships"
        )
    try:
        import sklearn  # noqa: F401
    except ImportError:
        raise ConfigError(
            "there is no dataset: the digits come with scikit-learn, which is missing: run `pip install 'stoker[demo]'`"
        ) from None
    return Source("digits", "scikit-learn digits", 20, 32, load_digits)


def has_fashion(folder: Path = FASHION_FOLDER) -> bool:
    """Whether Fashion-MNIST's four files are there."""
    return all(
        (folder / f"{part}-{kind}-ubyte.gz").is_file()
        for part in ("train", "t10k")
        for kind in ("images-idx3", "labels-idx1")
    )


def load_fashion(folder: Path = FASHION_FOLDER) -> tuple[Split, Split]:
    """60,000 and 10,000 pictures of 28 x 28. Raises EnvironmentProblem for files that are not what they should be."""
    train, test = (
        Split(
            _idx(folder / f"{part}-images-idx3-ubyte.gz", 3), _idx(folder / f"{part}-labels-idx1-ubyte.gz", 1)
        )
        for part in ("train", "t10k")
    )
    return train, test


def load_digits() -> tuple[Split, Split]:
    """1,497 and 300 pictures of 8 x 8: every sixth record is for testing."""
    from sklearn import datasets

    raw: Any = datasets.load_digits()
    pictures = np.minimum(raw.images * 16, 255).astype(np.uint8)
    labels = raw.target.astype(np.uint8)
    is_test = np.arange(len(labels)) % 6 == 5
    is_test[-1] = True
    return Split(pictures[~is_test], labels[~is_test]), Split(pictures[is_test], labels[is_test])


def _idx(path: Path, dimensions: int) -> Bytes:
    """An array of the idx format: two zero bytes, the type (8: bytes), the number of dimensions, their sizes."""
    try:
        with gzip.open(path) as file:
            raw = file.read()
    except (OSError, EOFError) as error:
        raise EnvironmentProblem(
            f"cannot read {path}: {error}; reinstall {PACKAGE}, or use --dataset digits"
        ) from None
    start = 4 + 4 * dimensions
    shape = tuple(int.from_bytes(raw[at : at + 4], "big") for at in range(4, start, 4))
    if raw[:4] != bytes([0, 0, 8, dimensions]) or len(raw) != start + int(np.prod(shape)):
        raise EnvironmentProblem(
            f"{path} is not an idx file of bytes; reinstall {PACKAGE}, or use --dataset digits"
        )
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def _install_fashion(say: Say) -> bool:
    """As root on Debian: install the package. Whatever goes wrong, the digits are still there."""
    apt = shutil.which("apt-get")
    if apt is None or os.geteuid() != 0:
        return False
    limits = ["-o", "Acquire::Retries=0", "-o", "Acquire::http::Timeout=10", "-o", "DPkg::Lock::Timeout=10"]
    install = [apt, *limits, "install", "-y", "--no-install-recommends", PACKAGE]
    say(f"installing Debian's package {PACKAGE} (31 MB): apt-get install {PACKAGE}")
    if _succeeds(install) and has_fashion():
        return True
    say("that did not work; once more after apt-get update")
    return _succeeds([apt, *limits, "update"]) and _succeeds(install) and has_fashion()


def _succeeds(command: list[str]) -> bool:
    environment = {**_environment(), "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=APT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _environment() -> dict[str, str]:
    from stoker.settings import environment

    return dict(environment())
