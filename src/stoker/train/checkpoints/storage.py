"""Checkpoints in a storage, each a directory that torch.distributed.checkpoint reads as well."""

from __future__ import annotations

import contextlib
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from stoker import __version__
from stoker.errors import CheckpointDamaged, ConfigError, EnvironmentProblem
from stoker.train.checkpoints.clearing import Clearing, attempted_commits_of, others_of
from stoker.train.checkpoints.growth import shown_to_grow
from stoker.train.checkpoints.hashing import HashingSink
from stoker.train.checkpoints.image import Image, Piece
from stoker.train.checkpoints.manifest import (
    FORMAT,
    MANIFEST,
    PIECES,
    PLAIN,
    REMOVAL,
    Chunk,
    File,
    Manifest,
    Part,
    Pieces,
    Written,
    commits_of,
    decode,
    encode,
    step_name,
)
from stoker.train.checkpoints.places import LocalPlace, open_place
from stoker.train.checkpoints.reader import CheckpointReader

log = logging.getLogger("stoker.checkpoint")
KEEP = 2
_ATTEMPT = re.compile(r"^[A-Za-z0-9_-]{1,64}$")
Wrote = Callable[[int], None]


class Held(NamedTuple):
    """A checkpoint that lies in a storage."""

    commits: int
    name: str
    reader: CheckpointReader | None
    """None: it cannot be read."""
    size_bytes: int
    problem: str
    """Why it cannot be read."""
    is_torn: bool = False
    """Its writer did not come to the end."""


class CheckpointStorage:
    """`step-000000000200/` and so on, at any URL that fsspec opens. One run writes there at a time."""

    def __init__(self, url: str, keep: int = KEEP) -> None:
        """Raises ConfigError."""
        if keep < 1:
            raise ConfigError(f"at least 1 checkpoint is kept, not {keep}")
        self.keep = keep
        self._place = open_place(url)
        self._clearing = Clearing(self._place, keep)
        self.shown = self._place.shown
        """The URL, without secrets."""
        self.folder = self._place.folder if isinstance(self._place, LocalPlace) else None
        """Where it is one of this machine's."""

    # -- writing ------------------------------------------------------------------------------------------

    def write(
        self, image: Image, wrote: Wrote = lambda size_bytes: None, *, beside_others: bool = False
    ) -> Manifest:
        """All of a state, by one writer. `wrote` is told the bytes of each write, by one thread at a time.

        `beside_others`: there may be other writers, also of this very commit; nothing of what lies there is removed.
        Raises EnvironmentProblem for a full, failing or unreachable storage; what was there stays.
        """
        attempt = uuid.uuid4().hex[:12]
        if not beside_others:
            self._clearing.clean(image.commits)
        directory = self._begin(image.commits, attempt)
        try:
            plain = _plain_piece(image.plain, [piece.name for piece in image.pieces])
            pieces = [*_written_ones(image.pieces), plain]
            if beside_others and self.folder is None:
                with shown_to_grow(self._place, directory, wrote) as growing:
                    written = self._write(directory, 0, pieces, growing)
            else:
                written = self._write(directory, 0, pieces, wrote)
            manifest, others = self._publish(image.commits, directory, attempt, 1, written, wrote)
        except BaseException:  # also an interrupt: what is left would take as much room again
            with contextlib.suppress(EnvironmentProblem, OSError):
                self._place.remove(directory)
            raise
        if not beside_others:
            self._clearing.forget_old(image.commits, others)
        return manifest

    def write_pieces(
        self,
        commits: int,
        rank: int,
        pieces: Sequence[Piece],
        attempt: str,
        wrote: Wrote = lambda size_bytes: None,
    ) -> Part:
        """What this rank has of a state that is divided. Every rank names the same `attempt`, which no earlier one of
        the run had: `finish` puts together what belongs to it. Raises EnvironmentProblem."""
        directory = self._begin(commits, attempt)
        written = self._write(directory, rank, _written_ones(pieces), wrote)
        part = Part(attempt, rank, written.files, written.chunks)
        self._put(directory, _part_name(rank), encode(part), wrote)
        return part

    def finish(
        self,
        commits: int,
        world_size: int,
        plain: Any,
        names: Sequence[str],
        attempt: str,
        wrote: Wrote = lambda size_bytes: None,
        *,
        forgets: bool = True,
    ) -> Manifest:
        """By one of the ranks, when all have written their pieces: makes them one checkpoint.

        `plain` and `names` of the pieces are those of the image whose pieces they are; where it `forgets`, older ones
        go as after `write`. Raises EnvironmentProblem, also
        where a rank's pieces are missing.
        """
        directory = self._begin(commits, attempt)
        written = Written([], [])
        for rank in range(world_size):
            try:
                raw = self._place.read(directory, _part_name(rank))
            except FileNotFoundError:
                raw = b""
            part = decode(raw, Part, f"{directory}/{_part_name(rank)}") if raw else None
            if part is None or part.attempt != attempt:
                raise EnvironmentProblem(
                    f"rank {rank} has not written its pieces of the checkpoint at commit {commits} to {self.shown}"
                )
            written.files.extend(part.files)
            written.chunks.extend(part.chunks)
        plain_piece = _plain_piece(plain, list(names))
        last = self._write(directory, world_size, [plain_piece], wrote)
        chunks = {(c.name, c.offsets): c for c in [*written.chunks, *last.chunks]}  # replicated ones once
        written = Written([*written.files, *last.files], list(chunks.values()))
        _check_wholes(written.chunks, names)
        for rank in range(world_size):
            self._place.drop(directory, _part_name(rank))
        manifest, others = self._publish(commits, directory, attempt, world_size, written, wrote)
        if forgets:
            self._clearing.forget_old(commits, others)
        return manifest

    def give_up(self, commits: int, attempt: str) -> None:
        """Remove what ranks have written of an attempt that failed; none of them is at work."""
        try:
            self._place.remove(self._begin(commits, attempt))
        except (EnvironmentProblem, FileNotFoundError) as error:
            log.warning("what was written of commit %d to %s is not removed: %s", commits, self.shown, error)

    def attempts(self, commits: int) -> dict[str, dict[str, int]]:
        """Directories of at least so many commits that are no checkpoints yet, each with its files' sizes: a writer is
        at work there, and they grow, or was. Raises EnvironmentProblem."""
        return {
            directory: files
            for directory, files in self._place.list().items()
            if (of := attempted_commits_of(directory, files)) is not None and of >= commits
        }

    def remove_older(self, commits: int) -> None:
        """Remove what is of fewer commits than that, whole or not, and nobody writes to any more."""
        self._clearing.remove_older(commits)

    def _write(self, directory: str, rank: int, pieces: Sequence[Piece], wrote: Wrote) -> Written:
        from stoker.train.checkpoints.dcp_write import write_pieces

        return write_pieces(self._place, directory, rank, pieces, wrote)

    def _begin(self, commits: int, attempt: str) -> str:
        if not _ATTEMPT.match(attempt):
            raise ConfigError(f"{attempt!r} is no name of an attempt: letters, digits, _ and - only")
        return self._place.begin(step_name(commits), attempt)

    def _publish(
        self, commits: int, directory: str, attempt: str, world_size: int, written: Written, wrote: Wrote
    ) -> tuple[Manifest, list[str]]:
        """The manifest, and what other checkpoints of this commit there were before.

        Raises EnvironmentProblem where another writer has removed files, which took this one for dead.
        """
        from stoker.train.checkpoints.dcp_write import write_metadata

        metadata = write_metadata(self._place, directory, written.chunks, wrote)
        pieces = self._put(directory, PIECES, encode(Pieces(written.chunks)), wrote)
        manifest = Manifest(
            format=FORMAT,
            commits=commits,
            world_size=world_size,
            written_at=time.time(),
            stoker=__version__,
            torch=str(torch.__version__),
            files=[*written.files, *metadata, pieces],
        )
        listed = self._place.list()
        self._check_there(listed, directory, manifest.files)
        last = self._put(directory, MANIFEST, encode(manifest), wrote)
        name = self._place.publish(directory, step_name(commits), attempt)
        try:
            listed_now = self._place.list()
        except EnvironmentProblem as error:
            log.warning("whether all of %s is at %s cannot be seen: %s", name, self.shown, error)
            return manifest, others_of(listed, commits)
        try:
            self._check_there(listed_now, name, [*manifest.files, last])
        except EnvironmentProblem:
            with contextlib.suppress(EnvironmentProblem, FileNotFoundError):
                self._place.drop(name, MANIFEST)
            raise
        return manifest, others_of(listed, commits)

    def _check_there(
        self, listed: Mapping[str, Mapping[str, int]], directory: str, files: list[File]
    ) -> None:
        held = listed.get(directory, {})
        bad = next((file for file in files if held.get(file.name) != file.size_bytes), None)
        if bad is not None or REMOVAL in held:
            what = f"{directory}/{bad.name}" if bad is not None else directory
            raise EnvironmentProblem(
                f"{what} was removed from {self.shown} before it was a checkpoint: has another node become the one "
                "that writes, or does another run write there"
            )

    def _put(self, directory: str, name: str, data: bytes, wrote: Wrote) -> File:
        with self._place.create(directory, name) as sink:
            stream = HashingSink(sink, wrote)
            stream.write(data)
        return stream.file(name)

    # -- reading ------------------------------------------------------------------------------------------

    def held(self) -> list[Held]:
        """All that lie there, oldest first. Raises EnvironmentProblem."""
        found = []
        for name, files in sorted(self._place.list().items()):
            commits = commits_of(name)
            if commits is None:
                continue
            size_bytes = sum(files.values())
            if MANIFEST not in files:
                found.append(
                    Held(commits, name, None, size_bytes, "its writer did not come to the end", is_torn=True)
                )
                continue
            try:
                found.append(Held(commits, name, CheckpointReader(self._place, name, files), size_bytes, ""))
            except CheckpointDamaged as error:
                found.append(Held(commits, name, None, size_bytes, str(error)))
            except FileNotFoundError:
                continue  # it is being removed
        if not found:
            self._refuse_older()
        return found

    def reader(self, commits: int) -> CheckpointReader:
        """Of the checkpoint at that commit, of several the last to be written.

        Raises EnvironmentProblem where there is no whole one.
        """
        problem, found = None, []
        listed = self._place.list()
        for name in others_of(listed, commits):
            try:
                found.append(CheckpointReader(self._place, name, listed[name]))
            except FileNotFoundError:
                continue  # it was removed just now
            except CheckpointDamaged as error:
                problem = error
        if found:
            return max(found, key=lambda one: one.manifest.written_at)
        raise problem or EnvironmentProblem(f"there is no checkpoint at commit {commits} in {self.shown}")

    def read(self, commits: int) -> Image:
        """The checkpoint at that commit. Raises EnvironmentProblem, CheckpointDamaged."""
        return self.reader(commits).read()

    def newest(self, below: int | None = None) -> tuple[int, CheckpointReader] | None:
        """The newest whole one, of those with fewer commits than `below`: its manifest, sizes and small files are as
        they were written. Tensors are checked as they are read: `read_newest` does so.

        None: there is none. Raises EnvironmentProblem where there are some and none is whole, or the storage cannot be
        reached: to start afresh would throw away what was trained.
        """
        return next(self._whole_ones(below), None)

    def read_newest(self) -> Image | None:
        """The newest one that can be read. None: there is none. Raises EnvironmentProblem as `newest` does."""
        problem = ""
        for _, reader in self._whole_ones():
            try:
                return reader.read()
            except CheckpointDamaged as error:
                log.warning("skipping a checkpoint at %s: %s", self.shown, error)
                problem = problem or str(error)
        if problem:
            raise self._none_can_be_read(problem)
        return None

    def _whole_ones(self, below: int | None = None) -> Iterator[tuple[int, CheckpointReader]]:
        """Newest first. Each time it is looked anew what lies there: a run that is writing removes old ones."""
        tried: set[str] = set()
        problem, found = "", False
        while True:
            listed = self._place.list()
            named = {name: c for name in listed if (c := commits_of(name)) is not None and name not in tried}
            fitting = [(c, name) for name, c in named.items() if below is None or c < below]
            if not fitting:
                break
            commits = max(fitting)[0]
            readers: list[CheckpointReader] = []
            for name in sorted(name for of, name in fitting if of == commits):
                tried.add(name)
                if MANIFEST not in listed[name]:
                    # Who asks for what is older may well know that this one is being written.
                    level = logging.WARNING if below is None else logging.DEBUG
                    log.log(
                        level, "skipping %s at %s, whose writer did not come to the end", name, self.shown
                    )
                    continue
                try:
                    readers.append(CheckpointReader(self._place, name, listed[name]))
                except FileNotFoundError:
                    continue  # a run that is writing them has put a newer one in its place: look again
                except CheckpointDamaged as error:
                    log.warning("skipping a checkpoint at %s: %s", self.shown, error)
                    problem = problem or str(error)
            # A run that came to a commit again may have come there with another state: what it wrote last counts.
            for reader in sorted(readers, key=lambda one: one.manifest.written_at, reverse=True):
                found = True
                yield commits, reader
        if problem and not found:
            raise self._none_can_be_read(problem)
        if not tried and below is None:
            self._refuse_older()

    def _refuse_older(self) -> None:
        """Before it is taken for a folder without checkpoints."""
        if self.folder is not None and any(self.folder.glob("commit-*.pt")):
            raise EnvironmentProblem(
                f"{self.shown} holds checkpoints of an older kind (commit-….pt), which this Stoker does not read: to "
                "begin anew, name another place for checkpoints (--checkpoint-dir)"
            )

    def _none_can_be_read(self, problem: str) -> EnvironmentProblem:
        return EnvironmentProblem(
            f"no checkpoint in {self.shown} can be read, so the run does not know where to go on: bring back a whole "
            f"one, or name another place for checkpoints (--checkpoint-dir) to begin anew. The newest: {problem}"
        )


def _part_name(rank: int) -> str:
    return f"part-{rank:05d}.json"


def _plain_piece(plain: Any, names: list[str]) -> Piece:
    raw = msgspec.msgpack.encode([plain, names])
    tensor = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return Piece(PLAIN, (len(raw),), (0,), tensor)


def _written_ones(pieces: Sequence[Piece]) -> list[Piece]:
    """Without the empty ones that the last ranks have of a tensor with fewer rows than ranks."""
    return [piece for piece in pieces if piece.is_whole or piece.tensor.numel()]


def _check_wholes(chunks: Sequence[Chunk], names: Sequence[str]) -> None:
    """Raises ConfigError where the ranks' pieces are not the tensors."""
    held: dict[str, int] = {}
    wholes: dict[str, int] = {}
    for chunk in chunks:
        held[chunk.name] = held.get(chunk.name, 0) + torch.Size(chunk.sizes).numel()
        wholes[chunk.name] = torch.Size(chunk.shape).numel()
    for name in names:
        if held.get(name) != wholes.get(name, 0):
            raise ConfigError(
                f"the ranks' pieces of {name} hold {held.get(name, 0)} of its {wholes.get(name, 0)} elements"
            )
