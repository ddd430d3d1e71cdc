"""A folder with all that a file system has to cope with, and what programs do with it."""

from __future__ import annotations

import glob
import hashlib
import itertools
import mmap
import os
import random
import subprocess
import zlib
from pathlib import Path
from typing import Any

MANY = 20_000
CLASSES, IMAGES = 4, 40
BIG_BYTES = 5_000_001
LONG = "l" * 251 + ".txt"
WIDE = "ü" * 127 + "x"
"""255 bytes, each."""
NAMES = [
    "with space",
    "ünïcode-😀",
    "new\nline",
    "tab\tand'quote\"",
    "-dash",
    "%41",
    "a+b",
    "#?&=;*",
    LONG,
    WIDE,
]


def make_tree(folder: Path) -> None:
    """Everything but the 20,000 names is below `data`."""
    data = folder / "data"
    for path, size_bytes in {
        "a/b/c/deep": 10,
        "a/b/side": 70_000,
        "big.bin": BIG_BYTES,
        "empty": 0,
        "odd": 4097,
        "page": 4096,
    }.items():
        (data / path).parent.mkdir(parents=True, exist_ok=True)
        (data / path).write_bytes(os.urandom(size_bytes))
    (data / "names").mkdir()
    for name in NAMES:
        (data / "names" / name).write_text(name)
    make_images(data / "images")
    many = folder / "many"
    many.mkdir()
    for number in range(MANY):
        (many / f"{number:05}").touch()


def make_images(folder: Path) -> None:
    """A folder for each class."""
    for number in range(CLASSES * IMAGES):
        kind = folder / f"class{number % CLASSES}"
        kind.mkdir(parents=True, exist_ok=True)
        (kind / f"{number:04}.raw").write_bytes(random.Random(number).randbytes(3 * 32 * 32))


def make_repository(folder: Path) -> None:
    """A few commits, some of them packed."""
    folder.mkdir()
    script = """
    git init -q -b main . ; git config user.name t ; git config user.email t@t
    for n in 1 2 3; do echo $n > file$n; mkdir -p d$n; echo $n > d$n/x; git add -A; git commit -qm "commit $n"; done
    git gc -q ; echo 4 > file4; git add -A; git commit -qm "commit 4"
    """
    subprocess.run(["bash", "-euc", script], cwd=folder, check=True)


def summary(folder: str) -> dict[str, list[Any]]:
    """Of each path below a folder what it is: of a file its size and sum."""
    found: dict[str, list[Any]] = {}
    for at, folders, files in os.walk(folder, onerror=_raise):
        for name in folders:
            found[os.path.relpath(os.path.join(at, name), folder)] = ["folder"]
        for name in files:
            path = os.path.join(at, name)
            with open(path, "rb") as file:
                data = file.read()
            assert len(data) == os.stat(path).st_size
            found[os.path.relpath(path, folder)] = [len(data), zlib.crc32(data)]
    return found


def _raise(error: OSError) -> None:
    raise error


def names(folder: str) -> dict[str, list[str]]:
    """Of one folder, in each way that Python has."""
    with os.scandir(folder) as entries:
        scanned = [f"{entry.name}:{entry.inode()}" for entry in entries]
    stated = [f"{name}:{os.stat(os.path.join(folder, name)).st_ino}" for name in os.listdir(folder)]
    return {
        "listdir": sorted(os.listdir(folder)),
        "scandir": sorted(one.rpartition(":")[0] for one in scanned),
        "walk": sorted(itertools.chain(*next(os.walk(folder))[1:])),
        "glob": sorted(map(os.path.basename, glob.glob(os.path.join(glob.escape(folder), "*")))),
        "differ": sorted(set(scanned) ^ set(stated)),
    }


def facts(path: str) -> list[int]:
    """What stat says that must stay."""
    found = os.stat(path)
    return [
        found.st_ino,
        found.st_size,
        found.st_mtime_ns,
        found.st_mode,
        found.st_uid,
        found.st_gid,
        found.st_nlink,
    ]


def inodes(folder: str) -> dict[str, int]:
    """Of all below."""
    found = {}
    for at, folders, files in os.walk(folder, onerror=_raise):
        for name in (*folders, *files):
            path = os.path.join(at, name)
            found[os.path.relpath(path, folder)] = os.stat(path).st_ino
    return found


def attributes(path: str) -> dict[str, str]:
    """The extended ones."""
    return {name: os.getxattr(path, name).decode() for name in os.listxattr(path)}


def space(path: str) -> list[int]:
    """All, and what is free."""
    found = os.statvfs(path)
    return [found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize, found.f_namemax]


def mapped_sums(path: str) -> list[str]:
    """Of a file that is mapped, read from its end to its beginning, and of its pages in any order."""
    whole, pages = hashlib.sha256(), hashlib.sha256()
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        starts = list(range(0, len(data), 4096))
        random.Random(1).shuffle(starts)
        found = {start: data[start : start + 4096] for start in starts}
        for start in sorted(found):
            pages.update(found[start])
        whole.update(data)
    return [whole.hexdigest(), pages.hexdigest()]


def sha256(path: str) -> str:
    """Of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
