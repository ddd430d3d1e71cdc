"""What goes from a place for checkpoints: what dead writers have left, and those that are too old."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping

from stoker.errors import CheckpointDamaged, EnvironmentProblem
from stoker.train.checkpoints.manifest import MANIFEST, commits_of
from stoker.train.checkpoints.places import Place
from stoker.train.checkpoints.reader import read_manifest

log = logging.getLogger("stoker.checkpoint")
_LEFT = re.compile(r"^\.(step-\d{12})\.[A-Za-z0-9_-]+\.part$")


class Clearing:
    """Of one place. Nothing of more commits than the writer's own is touched: the run did not come from it, because it
    could not be read or somebody wanted it so."""

    def __init__(self, place: Place, keep: int) -> None:
        self._place = place
        self._keep = keep

    def clean(self, commits: int) -> None:
        """What writers have left that were killed in the middle, each as large as the state. A run has one writer, so
        none of them is at work; where another node has just become that, the one before is made to fail.

        Raises EnvironmentProblem.
        """
        for directory, files in self._place.list().items():
            of = attempted_commits_of(directory, files)
            if of is None or of > commits:
                continue
            log.warning(
                "removing what a writer that broke off has left at %s: %s", self._place.shown, directory
            )
            self.remove(directory, files)

    def forget_old(self, commits: int, others: Collection[str]) -> None:
        """Keep the newest, counted back from the one of so many commits that was just written; `others` of the same
        commit, which were there before it, go. Damaged ones do not count: whoever comes back needs one to read."""
        try:
            self.clean(commits)
            listed = self._place.list()
            found = [
                (of, one) for one, of in _published(listed).items() if of <= commits and one not in others
            ]
            kept: set[int] = set()
            for of, one in sorted(found, reverse=True):
                if len(kept) == self._keep:
                    break
                if self._is_whole(one, listed[one]):
                    kept.add(of)
        except EnvironmentProblem as error:
            log.warning("older checkpoints are not removed: %s", error)
            return
        if commits not in kept:
            return  # something else has taken away what was just written
        old = [one for of, one in sorted(found) if len(kept) == self._keep and of < min(kept)]
        for one in [*(one for one in others if one in listed), *old]:
            self.remove(one, listed[one])

    def remove_older(self, commits: int) -> None:
        """What is of fewer commits than that, whole or not, and nobody writes to any more."""
        try:
            listed = self._place.list()
        except EnvironmentProblem as error:
            log.warning("older checkpoints are not removed: %s", error)
            return
        for directory, files in listed.items():
            of = commits_of(directory)
            of = attempted_commits_of(directory, files) if of is None else of
            if of is not None and of < commits:
                self.remove(directory, files)

    def remove(self, directory: str, files: Collection[str]) -> None:
        """`files`: that were there just now."""
        try:
            if MANIFEST in files:
                self._place.remove(directory)
            else:
                self._place.remove_torn(directory)
        except FileNotFoundError:
            log.debug("%s at %s is gone already", directory, self._place.shown)
        except EnvironmentProblem as error:
            log.warning("%s at %s is not removed: %s", directory, self._place.shown, error)

    def _is_whole(self, directory: str, files: Mapping[str, int]) -> bool:
        try:
            read_manifest(self._place, directory, files)
        except (CheckpointDamaged, FileNotFoundError):
            return False
        return True


def attempted_commits_of(directory: str, files: Collection[str]) -> int | None:
    """The commits of a directory that is no checkpoint, or not yet; None: it is one, or something else."""
    left = _LEFT.match(directory)
    if left is not None:
        return commits_of(left[1])
    return None if MANIFEST in files else commits_of(directory)


def others_of(listed: Mapping[str, Collection[str]], commits: int) -> list[str]:
    """Checkpoints of that commit."""
    return [one for one, of in _published(listed).items() if of == commits]


def _published(listed: Mapping[str, Collection[str]]) -> dict[str, int]:
    return {
        one: of for one, files in listed.items() if MANIFEST in files and (of := commits_of(one)) is not None
    }
