"""`stoker.Checkpointer`: snapshots in the node's memory every minute or so, and where a run goes on from."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stoker.errors import ConfigError, EnvironmentProblem
from stoker.platform.shared_folders import make_owned_folder, remove_folder, shared_base
from stoker.settings import WorkerSettings
from stoker.train.checkpoints.due import Due
from stoker.train.checkpoints.image import Image, image_of
from stoker.train.checkpoints.memory import MemorySlots
from stoker.train.checkpoints.nearest import nearest_in_memory
from stoker.train.checkpoints.storage import KEEP
from stoker.train.checkpoints.storage_port import Loaded, RunStorage, ask_saver
from stoker.train.sealed import Sealed
from stoker.wire.saving import StorageWanted

log = logging.getLogger("stoker.checkpoint")
EVERY_S = 60.0
EXTRA_STATE = "_extra_state"
"""As torch names what a module's `get_extra_state` gives, in its `state_dict`."""
LAST_AGAIN_S = 0.2
"""Between two tries to take a run's last snapshot."""


class Checkpointer:
    """Keeps copies of a `stoker.State` to go on from where no worker has it any more.

        state = stoker.State(model=model, optimizer=opt, checkpointer=stoker.Checkpointer("/shared/ckpt", every_s=30))

    Each node's first worker (local rank 0) takes a snapshot into the node's shared memory, `every_s` seconds or
    `every_commits` commits after the last one, whichever comes first; None: not by that. It is copied while the next
    step goes forward and backward; only the optimizer waits for the rest. Of two slots one is whole at any time, so
    that a process may be killed at any point. State is the same on all ranks (DistributedDataParallel), so that each
    node holds a copy of its own, which is every other node's replica: it is there as long as one node is left. Where
    all workers of a run are gone, those that the agents start in their places go on from the newest snapshot, without
    reading from a storage. Snapshots go with their agent, or with the process where a script runs alone.

    `url`: where the last `keep` checkpoints are kept as well, for when all nodes are gone: a folder that all nodes
    share, s3://bucket/prefix, or what else fsspec opens; by default what `stoker run --checkpoint-dir` says. A process
    beside the workers of rank 0's node writes snapshots there, behind the training; without snapshots, and where a
    script runs alone, rank 0 does so itself while the training waits. `in_memory=False` takes no snapshots.
    `overlap=False` has the training wait while one is copied: for scripts that change parameters in other ways than by
    an optimizer's `step()`, such as through `.data` or by a CUDA graph that holds the step.

    The node's memory must have room for two copies of the state. Where it has not, the run goes on without, and says
    so.

    Raises ConfigError for numbers that cannot be.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        every_s: float | None = EVERY_S,
        every_commits: int | None = None,
        keep: int = KEEP,
        in_memory: bool = True,
        overlap: bool = True,
    ) -> None:
        if every_s is not None and not every_s > 0:
            raise ConfigError(f"Checkpointer(every_s=…) must be above 0 seconds, not {every_s}")
        if every_commits is not None and every_commits < 1:
            raise ConfigError(f"Checkpointer(every_commits=…) must be at least 1 commit, not {every_commits}")
        if every_s is None and every_commits is None:
            raise ConfigError("Checkpointer needs every_s or every_commits: neither says when to take one")
        if keep < 1:
            raise ConfigError(f"Checkpointer(keep=…) must be at least 1, not {keep}")
        self.storage = RunStorage(url, keep) if url is not None else None
        """What rank 0 writes to; None: checkpoints are in memory alone."""
        self.may_be_behind = True
        """Whether the node's saver may write snapshots to the storage in place of rank 0's training thread."""
        self._url = url
        self._has_saver = False
        self.slots: MemorySlots | None = None
        """This worker's own snapshots, once it takes some."""
        self._keep = keep
        self._in_memory = in_memory
        self._overlaps = overlap
        self._due = Due(every_s, every_commits, time.monotonic())
        self._owes = False
        """A snapshot was due while the last one was still under way."""
        self.source = ""
        """What the state was loaded from; empty: from nothing."""
        self._is_room_made = False
        self._shared: Path | None = None
        self._run_id = ""
        self._told = ""

    # -- for the runtime ----------------------------------------------------------------------------------

    def connect(self, settings: WorkerSettings) -> None:
        """Take over what the agent says. Raises ConfigError."""
        self._run_id = settings.run_id
        self._shared = Path(settings.snapshot_dir) if settings.snapshot_dir is not None else None
        if self._shared is not None and settings.agent_socket is None:  # an agent makes its folder itself
            with contextlib.suppress(OSError):  # which is told when it is written to
                self._shared.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._url is None and settings.checkpoint_dir is not None:
            self._url = settings.checkpoint_dir
            self.storage = RunStorage(self._url, self._keep)
        if settings.has_saver and self.may_be_behind and self._in_memory and self._shared is not None:
            self._call_saver(self._shared)

    @property
    def is_behind(self) -> bool:
        """Whether the node's saver writes to the storage. Where there are no snapshots it cannot."""
        return self._has_saver and self._in_memory and not (self.slots is not None and self.slots.problem)

    def load_newest(self, take: Callable[[Loaded], None]) -> None:
        """Have `take` take over the newest state that can be read here, if any: of this node's memory, or the storage.

        Raises EnvironmentProblem where the storage has checkpoints of which none can be read, and memory has none.
        """
        saved, problem = -1, None
        try:
            # Before a snapshot is locked, without which workers would be until the storage answers.
            found = self.storage.newest_commits() if self.storage is not None else None
            saved = -1 if found is None else found
        except EnvironmentProblem as error:
            problem = error
        held = self._take_from_memory(take, at_least=saved)
        if problem is not None:
            if held < 0:
                raise problem
            log.warning("going on from this node's memory: %s", problem)
        if held < saved and not self._load_saved(held, take):
            self._take_from_memory(take)

    def _load_saved(self, beyond: int, take: Callable[[Loaded], None]) -> bool:
        """Of the storage, where what it has can be read and is of more commits. Raises EnvironmentProblem where nothing
        can be read and no snapshot was found either."""
        assert self.storage is not None
        try:
            saved = self.storage.newest(beyond)
        except EnvironmentProblem as error:
            if beyond < 0:
                raise
            log.warning("going on from this node's memory: %s", error)
            return False
        if saved is None or saved.commits <= beyond:
            return False
        self._say_source(f"the checkpoint of commit {saved.commits} in {self.storage.shown}")
        take(saved)
        return True

    def _take_from_memory(self, take: Callable[[Loaded], None], at_least: int = -1) -> int:
        """The newest snapshot of this node's, where it is of so many commits. Its commits, taken or not; -1: none."""
        if self._shared is None:
            return -1
        with nearest_in_memory(self._shared, self._run_id) as image:
            commits = image.commits if image is not None else -1
            if image is not None and commits >= at_least:
                self._say_source(f"the snapshot of commit {commits} in this node's memory")
                take(Loaded(commits, kept(image).state(), image.fingerprint))
            del image  # with its tensors, before the memory goes
        return commits

    def is_due(self, commits: int) -> bool:
        """Whether a checkpoint is due at this commit. Asked once at each commit."""
        return self._due.is_due(commits, time.monotonic())

    def snapshot(self, commits: int, state: Sealed, *, is_due: bool) -> None:
        """At a commit of a worker that takes snapshots: take one if it is due, else see that there is room for it."""
        if not self._in_memory:
            return
        self._owes = self._owes or is_due
        if not self._owes and self._is_room_made:
            return
        slots = self._open()
        if slots is None:
            self._owes = False
            return
        image = image_of(commits, state.export())
        if not self._is_room_made:
            self._is_room_made = True
            slots.prepare(image)
        if self._owes:
            self._owes = not slots.take(image, _stable(state, image))

    def snapshot_last(
        self, commits: int, exported: dict[str, Any], state: Sealed, limit_s: float, wait: Callable[[], None]
    ) -> None:
        """At the end of a run: its last state, unless there is a snapshot of it. Waits until the one under way is done
        and a slot is free, which may be read by a saver, no longer than `limit_s`; and until it is whole. `wait` is
        called in between, and may raise."""
        deadline = time.monotonic() + limit_s
        slots = self._open()
        if slots is None:
            return
        image = image_of(commits, exported)
        while True:
            slots.finish()
            wait()
            if slots.whole_at == commits:
                return
            if time.monotonic() >= deadline:
                log.warning(
                    "the last state, of commit %d, is not kept: no slot was free for %g s", commits, limit_s
                )
                return
            failed = slots.failed
            slots.take(image, _stable(state, image))
            slots.finish()
            if slots.failed != failed:
                return
            if slots.whole_at != commits:
                time.sleep(LAST_AGAIN_S)

    def settle(self) -> None:
        """Parameters are about to be changed, by an optimizer or by a state that is loaded."""
        if self.slots is not None:
            self.slots.settle()

    def news(self) -> tuple[str, bool] | None:
        """What to remark: why there is no snapshot, or (True) that there is one again; None: nothing new."""
        problem = self.slots.problem if self.slots is not None else ""
        before, self._told = self._told, problem
        if bool(problem) == bool(before):
            return None
        return problem, not problem

    def close(self) -> None:
        """No step will come any more. Snapshots stay as long as their folder does."""
        if self.slots is not None:
            self.slots.close()

    # -- helpers ------------------------------------------------------------------------------------------

    def _say_source(self, source: str) -> None:
        self.source = source
        log.info("state loaded from %s", source)

    def _call_saver(self, shared: Path) -> None:
        if self.storage is None:
            return
        try:
            ask_saver(shared, StorageWanted(self.storage.url, self._keep))
            self._has_saver = True
        except EnvironmentProblem as error:
            log.warning("checkpoints are written by rank 0 itself: %s", error)

    def _open(self) -> MemorySlots | None:
        """The slots, in the agent's folder or one that is removed with this process; None: it cannot be made."""
        if self.slots is None:
            try:
                folder = self._shared or _private_folder(self._run_id)
            except EnvironmentProblem as error:
                log.error("no snapshots are taken: %s", error)
                self._in_memory = False
                return None
            self.slots = MemorySlots(folder, self._run_id, 0, overlaps=self._overlaps)
            atexit.register(self.slots.close)
        return self.slots


def _stable(state: Sealed, image: Image) -> set[int]:
    """Storages of what only an optimizer's step changes."""
    kept = [piece.tensor for piece in image.pieces if piece.name.startswith("optimizers.")]
    return {_storage(tensor) for tensor in [*state.stable_tensors(), *kept]}


def kept(image: Image) -> Image:
    """With copies of what would be kept as it is: modules copy what they load, their extra state excepted, and
    optimizers take the very tensors."""
    pieces = [
        piece if _is_copied(piece.name.split(".")) else piece._replace(tensor=piece.tensor.clone())
        for piece in image.pieces
    ]
    return image._replace(pieces=pieces)


def _is_copied(way: list[str]) -> bool:
    return way[0] == "modules" and EXTRA_STATE not in way


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _private_folder(run_id: str) -> Path:
    folder = make_owned_folder(shared_base(), run_id or "alone")
    atexit.register(_remove_own, folder, os.getpid())
    return folder


def _remove_own(folder: Path, owner: int) -> None:
    """Not in a process that was forked from the owner."""
    if os.getpid() == owner:
        remove_folder(folder)
