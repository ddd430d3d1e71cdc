"""What a saver does about snapshots and commands: one save after the other, the newest snapshot each time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from stoker.base.backoff import backoff_s
from stoker.base.rng import Rng
from stoker.errors import ConfigError, EnvironmentProblem, WireError
from stoker.train.checkpoints.image import Image
from stoker.train.checkpoints.patience import Patience
from stoker.train.checkpoints.storage import CheckpointStorage
from stoker.wire.saving import Result

log = logging.getLogger("stoker.saver")
PROGRESS_EVERY_S = 1.0
RETRY_FIRST_S = 2.0
RETRY_MOST_S = 60.0
GIVE_WAY_S = 30.0
"""Beside others that may be writing as well: their attempt is believed to be a dead one's when it has not grown for so
long."""
LOOK_AGAIN_S = 2.0
"""Between two looks at what they write."""


class SnapshotSource(Protocol):
    """Where snapshots of this node's state appear."""

    def newest_commits(self) -> int | None:
        """Of the newest whole snapshot; None: there is none. It is asked often, and must be cheap."""
        ...

    def newest(self) -> AbstractContextManager[Image | None]:
        """The newest whole snapshot, which nobody changes within the context. Raises WireError for a damaged one."""
        ...


class Saver:
    """Writes the snapshots of a source to a storage. Nothing that it meets is raised: `say` is told.

    `now` are seconds of a clock that only goes forward.
    """

    def __init__(
        self,
        source: SnapshotSource,
        storage: CheckpointStorage,
        *,
        say: Callable[[Result], None],
        now: Callable[[], float],
        rng: Rng,
        every_s: float = 0.0,
        patience: Patience | None = None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._source = source
        self._storage = storage
        self._say = say
        self._now = now
        self._rng = rng
        self._every_s = every_s
        self._patience = patience if patience is not None else Patience(now)
        self._pause = pause
        self.beside_others = False
        """Other nodes may be writing as well: nothing is written unless asked for, nor where it is there already."""
        self._saved: int | None = None
        self._has_looked = False
        self._next_at = 0.0
        """When the next one may begin, unless it is asked for."""
        self._failures = 0

    def look(self) -> None:
        """Write the newest snapshot if it is due."""
        if not self.beside_others and self._now() >= self._next_at:
            self.save()

    def save(self) -> None:
        """Write the newest snapshot now, unless it is written."""
        commits = self._source.newest_commits()
        if commits is None or commits == self._saved or self._is_there(commits):
            return
        if self.beside_others and self._gives_way(commits):
            return
        began_at = self._now()
        try:
            with self._source.newest() as image:
                if image is None or image.commits == self._saved:
                    return
                commits = image.commits
                size_bytes = sum(piece.tensor.nbytes for piece in image.pieces)
                progress = self._progress_of(commits, size_bytes, began_at)
                what = f"writing the checkpoint of commit {commits} to {self._storage.shown}"
                with self._patience.asking(what, commits, size_bytes):
                    manifest = self._storage.write(image, progress, beside_others=self.beside_others)
        except (EnvironmentProblem, ConfigError, WireError, MemoryError) as error:
            self._failures += 1
            pause_s = backoff_s(self._failures, self._rng, first_s=RETRY_FIRST_S, limit_s=RETRY_MOST_S)
            self._next_at = self._now() + pause_s
            self._say(
                Result(failed=f"checkpoint at commit {commits} is not written: {error}", commits=commits)
            )
            return
        self._failures = 0
        self._saved = commits
        self._next_at = began_at + self._every_s
        took_s = round(self._now() - began_at, 3)
        self._say(Result(saved=commits, took_s=took_s, size_bytes=manifest.size_bytes))

    def _is_there(self, commits: int) -> bool:
        """Whether the storage has that one already: of the run that this one goes on with, from its memory; or of
        another node, which may also have a newer one."""
        if self._has_looked and not self.beside_others:
            return False
        try:
            with self._patience.asking(f"looking for checkpoints in {self._storage.shown}", commits):
                found = self._storage.newest(below=None if self.beside_others else commits + 1)
        except EnvironmentProblem as error:
            log.debug("not known what lies in %s: %s", self._storage.shown, error)
            return False
        self._has_looked = True
        if found is None or found[0] < commits:
            return False
        self._saved = commits
        return True

    def _gives_way(self, commits: int) -> bool:
        """Wait while another node's attempt at this state, or a newer one, grows: a storage that many write to has
        none of it sooner. Whether there is a checkpoint now; not where the attempt stands still, as that of a dead
        writer does."""
        seen: dict[str, dict[str, int]] = {}
        grown_at = self._now()
        while True:
            try:
                with self._patience.asking(f"looking what others write to {self._storage.shown}", commits):
                    attempts = self._storage.attempts(commits)
            except EnvironmentProblem as error:
                log.debug("not known what others write to %s: %s", self._storage.shown, error)
                return False
            if not attempts:
                return self._is_there(commits)
            if attempts != seen:
                if not seen:
                    log.info("waiting for another node, which writes %s to the storage", min(attempts))
                seen, grown_at = attempts, self._now()
            elif self._now() - grown_at >= GIVE_WAY_S:
                return False
            self._pause(LOOK_AGAIN_S)
            if self._is_there(commits):
                return True

    def _progress_of(self, commits: int, size_bytes: int, began_at: float) -> Callable[[int], None]:
        done_bytes = 0
        said_at = began_at

        def wrote(count: int) -> None:
            nonlocal done_bytes, said_at
            done_bytes += count
            self._patience.went_on(done_bytes)
            if self._now() - said_at >= PROGRESS_EVERY_S:
                said_at = self._now()
                self._say(Result(commits=commits, done_bytes=done_bytes, size_bytes=size_bytes))

        return wrote
