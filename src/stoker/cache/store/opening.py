"""What a server finds when it opens its folder: the index, the files, and where they disagree.

Bytes are written before the index says so, and are removed after it does: so a file that the index does not know, and
blocks of a file that it does not know, are left over from a server that was killed. They are never served; here they
are given back to the disk, so that what is counted is what is used.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from stoker._native import Container, FileProblem, Index, Survey
from stoker.cache.segments import pages_bytes
from stoker.cache.store.containers import ContainerFiles
from stoker.errors import EnvironmentProblem

INDEX_FILE = "index"


def open_index(folder: Path, block_size_bytes: int, now_s: int, notes: list[str]) -> Index:
    """The index of a folder that is locked; begun anew where the file is none. Raises EnvironmentProblem."""
    path = folder / INDEX_FILE
    try:
        index = Index(str(path), block_size_bytes, now_s)
    except FileProblem as problem:
        if problem.errno:
            raise EnvironmentProblem(f"cannot open the cache index {path}: {problem.strerror}") from problem
        kept = path.with_name("index.damaged")
        notes.append(f"{problem.strerror}; the cache starts empty, and the file is kept as {kept.name}")
        with suppress(OSError):
            os.replace(path, kept)
        return open_index(folder, block_size_bytes, now_s, notes)
    if index.is_of_later:
        notes.append(
            "the machine's clock was set back since the last start: of all objects the origin is asked for the version"
        )
    if index.replay.damaged_bytes:
        notes.append(
            f"{index.replay.damaged_bytes} bytes of the cache index were damaged and are left out; "
            "what they told is read from the origin again"
        )
    return index


def reconcile(index: Index, files: ContainerFiles, block_size_bytes: int) -> Survey:
    """What is held, after all else is removed. Files are looked at by the native part: there may be millions."""
    named = {number for number, _ in index.buckets().values()}
    for bucket in index.figures():
        if bucket not in named:
            index.clear(bucket)  # its name was in a damaged part of the index
    found = index.survey(str(files.below))
    for number in found.unknown:
        files.unlink(number, 0)
    if missing := found.missing:
        index.lose_containers(missing)
    kept = [n for n in found.too_long if not _punch_unknown(index, files, n, block_size_bytes)]
    for number in kept:
        index.lose_container(number)
        files.unlink(number, 0)
    return index.survey(str(files.below)) if kept else found


def blocks_bytes(container: Container, block_size_bytes: int) -> int:
    """What the blocks of a large object are counted as: whole pages. All but its last are of full size."""
    full, rest = divmod(container.size_bytes, block_size_bytes)
    return full * pages_bytes(block_size_bytes) + pages_bytes(rest)


def _punch_unknown(index: Index, files: ContainerFiles, number: int, block_size_bytes: int) -> bool:
    """False where there can be no holes: readers may have the file since a server before this one."""
    held = sorted(piece.offset for piece, _ in index.pieces(number))
    at = 0
    for offset in held:
        if not files.punch(number, at, offset - at):
            return False
        at = offset + block_size_bytes
    with suppress(OSError):
        size_bytes = os.stat(files.sending.path(number)).st_size
        return files.punch(number, at, pages_bytes(size_bytes) - at)
    return True
