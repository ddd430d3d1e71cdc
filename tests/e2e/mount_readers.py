"""Readers of a mount whose files tell of their names, versions and places: none is taken for another."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import random
import sys
import time
from collections import Counter
from multiprocessing import Process
from pathlib import Path
from typing import Any

PAGE_BYTES = 4096


def content(name: str, size_bytes: int, version: int = 0) -> bytes:
    """Every 32 bytes tell of the name, the version and the page."""
    stamp = hashlib.sha256(f"{name}@{version}".encode()).digest()[:24]
    pages = range(-(-size_bytes // PAGE_BYTES))
    return b"".join((stamp + page.to_bytes(8, "big")) * (PAGE_BYTES // 32) for page in pages)[:size_bytes]


def make(folder: Path, small: int, large: int) -> None:
    """Files of some pages, and of some megabytes."""
    sizes = {f"s/{n:03}": 100 + 3001 * n for n in range(small)} | {
        f"l/{n}": 3_000_000 + n for n in range(large)
    }
    for name, size_bytes in sizes.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content(name, size_bytes))


def read_at_random(folder: str, processes: int, until: str, begun: str) -> dict[str, int]:
    """Many processes read any files in any way until a path is there. How often they read, and what went wrong."""
    names = sorted(f"{part}/{name}" for part in os.listdir(folder) for name in os.listdir(f"{folder}/{part}"))
    children = [Process(target=_read, args=(folder, names, n, until, begun)) for n in range(processes)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    found: Counter[str] = Counter()
    for number, child in enumerate(children):
        assert child.exitcode == 0, child.exitcode
        for line in Path(f"{begun}.{number}").read_text().splitlines():
            found[line] += 1
    return dict(found)


def _read(folder: str, names: list[str], seed: int, until: str, begun: str) -> None:
    chosen = random.Random(seed)
    ways = (_whole, _somewhere, _mapped, _listed)
    with open(f"{begun}.{seed}", "w", encoding="utf-8", buffering=1) as said:
        while not os.path.exists(until):
            name = chosen.choice(names)
            try:
                said.write(f"{chosen.choice(ways)(f'{folder}/{name}', name, chosen)}\n")
            except OSError as error:
                said.write(f"{errno.errorcode[error.errno or 0]} {name}\n")


def _whole(path: str, name: str, _: random.Random) -> str:
    with open(path, "rb") as file:
        data = file.read()
    return "read" if data == content(name, os.stat(path).st_size) else f"wrong bytes {name}"


def _somewhere(path: str, name: str, chosen: random.Random) -> str:
    size_bytes = os.stat(path).st_size
    start = chosen.randrange(size_bytes)
    with open(path, "rb") as file:
        data = os.pread(file.fileno(), 100_000, start)
    return "read" if data == content(name, size_bytes)[start : start + 100_000] else f"wrong bytes {name}"


def _mapped(path: str, name: str, chosen: random.Random) -> str:
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = chosen.randrange(len(data))
        there = data[start : start + 5000]
        return "read" if there == content(name, len(data))[start : start + 5000] else f"wrong bytes {name}"


def _listed(path: str, name: str, _: random.Random) -> str:
    return "read" if os.path.basename(path) in os.listdir(os.path.dirname(path)) else f"not listed {name}"


def read_when_told(path: str, sizes: list[int]) -> list[str]:
    """Opens a file, and says so; reads so many bytes for each line that comes on stdin, and says what they were."""
    with open(path, "rb", buffering=0) as file:
        sys.stdout.write("opened\n")
        sys.stdout.flush()
        for size_bytes in sizes:
            sys.stdin.readline()
            try:
                said = hashlib.sha256(_all(file.fileno(), size_bytes)).hexdigest()
            except OSError as error:
                said = errno.errorcode[error.errno or 0]
            sys.stdout.write(said + "\n")
            sys.stdout.flush()
    return []


def _all(fd: int, size_bytes: int) -> bytes:
    parts = []
    while size_bytes and (data := os.read(fd, size_bytes)):
        parts.append(data)
        size_bytes -= len(data)
    return b"".join(parts)


def outcome(path: str) -> list[Any]:
    """What comes of reading a file, and how long that took."""
    began = time.monotonic()
    try:
        with open(path, "rb") as file:
            said = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        said = errno.errorcode[error.errno or 0]
    return [said, time.monotonic() - began]


def outcomes(folder: str, names: list[str]) -> list[str]:
    """Of many files, one after the other."""
    return [outcome(f"{folder}/{name}")[0] for name in names]


def sha256(data: bytes) -> str:
    """Of bytes."""
    return hashlib.sha256(data).hexdigest()


def read_anew(path: str) -> str:
    """Of a file of which the kernel is to keep nothing for itself."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return hashlib.file_digest(file, "sha256").hexdigest()


def map_when_told(path: str) -> list[str]:
    """Maps a file, and says so; for a line that comes on stdin it says what is in it."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        data.madvise(mmap.MADV_RANDOM)
        sys.stdout.write("mapped\n")
        sys.stdout.flush()
        sys.stdin.readline()
        sys.stdout.write(hashlib.sha256(data).hexdigest() + "\n")
    return []


def held_bytes(path: str) -> int:
    """How much of a file the cache holds."""
    return int(os.getxattr(path, "user.stoker.held_bytes"))


def all_held_bytes(folder: str, names: list[str]) -> list[int]:
    """Of many files."""
    return [held_bytes(f"{folder}/{name}") for name in names]
