"""What a commit does beside sealing the state: counted, told, noted, kept, measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from stoker.data.ledger import Ledger
from stoker.data.session import HandedOut, Session
from stoker.errors import ConfigError, EnvironmentProblem
from stoker.settings import WorkerSettings
from stoker.train.accumulation import Accumulation
from stoker.train.checkpoints.checkpointer import Checkpointer
from stoker.train.checkpoints.storage_port import Loaded, RunStorage
from stoker.train.confirm import ConfirmedExchange
from stoker.train.member_link import MemberLink, WorldChanged
from stoker.train.sealed import Sealed
from stoker.train.sharded_parts import ShardedParts
from stoker.train.sharded_storage import StoredParts
from stoker.train.time_spent import time_spent
from stoker.train.tuning import Alone, GroupExchange, Tuning
from stoker.train.tuning_start import bounds_of, start_tuning
from stoker.wire.job import WorldView
from stoker.wire.remarks import Remark


class Steps:
    """This worker's steps, from batch to commit."""

    def __init__(self, settings: WorkerSettings, live: Session, link: MemberLink) -> None:
        self._live = live
        self._link = link
        self._tunes = settings.auto_tune
        self.tuning: Tuning | None = None
        """None: what the script asks for is run as it is."""
        self.confirm: Callable[[], None] = lambda: None
        """Raises RuntimeError where what collectives have brought cannot be believed."""
        self.accumulation = Accumulation()
        self.sharded = ShardedParts()
        self._settings = settings
        self._checkpointer: Checkpointer | None = None
        self._local_rank = settings.local_rank
        self._unreadable: EnvironmentProblem | None = None
        """No checkpoint could be read: that matters unless a peer has the state."""
        self._loaded_from = ""
        self._ledger = Ledger(settings.audit_dir, settings.worker) if settings.audit_dir else None
        self._began = 0.0
        self._written_at = -1
        """Commits of the newest checkpoint that this worker has written itself."""
        self._saving_s = 0.0
        self._waited_s = 0.0
        """Of the session's waiting, what tuning knows of."""

    # -- checkpoints --------------------------------------------------------------------------------------

    def checkpoint_to(
        self,
        checkpoint_dir: str | None,
        checkpoint_every: int | None,
        checkpointer: Checkpointer | None = None,
    ) -> None:
        """Where a State's checkpoints go and how often; None leaves it to the settings.

        Raises ConfigError for a number below 1, and for both a checkpointer and a folder.
        """
        every = checkpoint_every if checkpoint_every is not None else self._settings.checkpoint_every
        if every < 1:
            source = "STOKER_CHECKPOINT_EVERY" if checkpoint_every is None else "State(checkpoint_every=…)"
            raise ConfigError(
                f"{source} must be at least 1 commit, not {every}: to write no checkpoints, name no folder for them"
            )
        folder = checkpoint_dir or self._settings.checkpoint_dir
        if checkpointer is None and folder is not None:
            checkpointer = Checkpointer(folder, every_s=None, every_commits=every)
            checkpointer.may_be_behind = False  # each is there as soon as its commit is over
        elif checkpointer is not None and (checkpoint_dir is not None or checkpoint_every is not None):
            raise ConfigError(
                "State(checkpointer=…) says where checkpoints go and when: leave checkpoint_dir and checkpoint_every "
                "out"
            )
        if checkpointer is not None:
            if not isinstance(checkpointer, Checkpointer):
                raise ConfigError(
                    f"State(checkpointer=…) takes a stoker.Checkpointer, not a {type(checkpointer).__name__}"
                )
            checkpointer.connect(self._settings)
            if checkpointer.storage is not None:
                self.sharded.store_in(StoredParts(checkpointer.storage.url, checkpointer.storage.keep))
            elif not self.sharded.is_empty:
                raise ConfigError(
                    "the parts of a stoker.Sharded are kept with two workers each, and in checkpoints that last: give "
                    "the Checkpointer a folder that all nodes share, or a URL such as s3://bucket/prefix"
                )
        self._checkpointer = checkpointer

    def load_checkpoint(self, state: Sealed) -> None:
        """Start from the newest checkpoint, if there is one."""

        def take(saved: Loaded) -> None:
            state.load(saved.state)
            state.restore_random(saved.state)
            # In exact mode workers see whether they are alike when they copy.
            was_exact = bool(saved.state.get("world", {}).get("exact"))
            is_exact = was_exact or self._live.virtual_ranks > 0
            self._link.core.loaded(saved.commits, "" if is_exact else saved.fingerprint)

        if self._checkpointer is not None:
            try:
                self._checkpointer.load_newest(take)
            except EnvironmentProblem as error:
                self._unreadable = error
            self._loaded_from = self._checkpointer.source
        state.seal()

    def settle(self) -> None:
        """The state is about to change otherwise than by a commit."""
        if self._checkpointer is not None:
            self._checkpointer.settle()

    def _checkpoint_all(self, commits: int, state: Sealed) -> None:
        """With the pieces of sharded models, which all ranks write together, before the State's own."""
        live, storage = self._live, self._checkpointer.storage if self._checkpointer is not None else None

        def wrote() -> None:
            live.progress += 1

        progress, began = live.progress, time.perf_counter()
        is_written = self.sharded.save(commits, wrote)
        live.progress = progress
        self._saving_s += time.perf_counter() - began
        if (
            is_written
            and live.rank == 0
            and storage is not None
            and self._save(storage, commits, state.export())
        ):
            self.sharded.remove_older(storage)

    def _checkpoint(self, checkpointer: Checkpointer, commits: int, state: Sealed) -> None:
        is_due = checkpointer.is_due(commits)
        writes = self._live.rank == 0 and not checkpointer.is_behind
        if is_due and writes and checkpointer.storage is not None:
            self._save(checkpointer.storage, commits, state.export())
        if self._local_rank == 0:
            began = time.perf_counter()
            checkpointer.snapshot(commits, state, is_due=is_due)
            self._saving_s += time.perf_counter() - began
            self._tell_news(checkpointer, commits)

    def _tell_news(self, checkpointer: Checkpointer, commits: int) -> None:
        if (news := checkpointer.news()) is not None:
            text, is_good = news
            words = f"at commit {commits}" if is_good else text
            self._link.remark(Remark("snapshot-taken-again" if is_good else "snapshot-failed", words))

    def _save(self, storage: RunStorage, commits: int, exported: dict[str, Any]) -> bool:
        """A checkpoint that cannot be written is in the event log: who needs it may have to come from far back."""
        before = storage.problem
        live, progress = self._live, self._live.progress

        def wrote() -> None:
            live.progress += 1  # a beat says so, else a rank that writes for minutes would be taken for hung

        began = time.perf_counter()
        written = storage.save(commits, exported, wrote)
        self._saving_s += time.perf_counter() - began
        live.progress = progress  # comparable with the other ranks' again
        if written:
            self._written_at = commits
        if not written:
            self._link.remark(Remark("checkpoint-failed", storage.problem))
        elif before:
            self._link.remark(Remark("checkpoint-written-again", f"at commit {commits}"))
        return written

    def tell_time_spent(self) -> None:
        """Have the job know where this worker's time went, as far as its loaders and checkpoints know."""
        remark = time_spent(self._live.rank, self._saving_s)
        if remark is not None:
            self._link.remark(remark)

    # -- a world's steps ----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Steps are about to begin, in a new world."""
        self._began = time.perf_counter()
        self.accumulation.forget()

    def entered(self, world: WorldView, rank: int, *, copied: bool, device: torch.device) -> None:
        """The world is there. With auto-tune this is a collective, which raises RuntimeError when a peer dies.

        Raises EnvironmentProblem where the state was to come from checkpoints of which none can be read.
        """
        unreadable, self._unreadable = self._unreadable, None
        if unreadable is not None and not copied:
            raise unreadable
        if self._loaded_from and rank == world.source:
            self._link.remark(Remark("state-loaded", f"state loaded from {self._loaded_from}"))
        self._loaded_from = ""
        if self._ledger is not None:
            self._ledger.entered(world, rank, copied=copied)
        member = world.member(self._link.core.worker)
        assert member is not None
        self._local_rank = member.local_rank
        if not self._tunes:
            return
        bounds = bounds_of(device, member.local_world_size)
        if self.tuning is None:
            self.tuning = start_tuning(self._live, device, bounds)
        exchange = ConfirmedExchange(GroupExchange(device), self.confirm) if world.size > 1 else Alone()
        self.tuning.enter(exchange, bounds)
        self._waited_s = self._live.waited_s

    def commit(self, state: Sealed) -> None:
        """Seal the step; leave the world here if it is to change. Raises RuntimeError for a step that is void."""
        self.confirm()
        self.accumulation.forget()
        is_due = self.sharded.commit(self._link.core.commits + 1, self.confirm, wants=self._wants_parts())
        state.seal()
        must_stop = self._link.commit(self._own_work_s())
        live, commits = self._live, self._link.core.commits
        if self._ledger is not None:
            self._ledger.committed(live.generation, commits, live.rank)
        if not self.sharded.is_empty and is_due:
            self._checkpoint_all(commits, state)
        elif self._checkpointer is not None and self.sharded.is_empty:
            self._checkpoint(self._checkpointer, commits, state)
        if must_stop:
            raise WorldChanged
        if self.tuning is not None:
            self._tune(self.tuning)

    def _wants_parts(self) -> bool:
        """Whether a checkpoint with the pieces of sharded models is due at the commit under way, by rank 0's clock."""
        if self._checkpointer is None or self.sharded.is_empty or self._live.rank != 0:
            return False
        return self._checkpointer.is_due(self._link.core.commits + 1)

    def note_batch(self, batch: HandedOut) -> None:
        """A loader hands out a batch. Raises ConfigError where gradients of the one before are not reduced."""
        self.accumulation.on_batch()
        self._live.progress += 1
        if self._ledger is not None:
            self._ledger.read(self._live, self._link.core.commits + 1, batch)

    def keep_last(self, state: Sealed) -> None:
        """The function has returned: the state of its last commit is kept where there is a storage, whether one was due
        or not. Raises WorldChanged where it is to be called again."""
        checkpointer, commits = self._checkpointer, self._link.core.commits
        if checkpointer is None or checkpointer.storage is None or not self.sharded.is_empty:
            return
        if commits in (0, self._written_at) or (self._local_rank != 0 and self._live.rank != 0):
            return
        exported = state.export_committed()
        if exported is None:
            return
        if checkpointer.is_behind and self._local_rank == 0:
            live, progress = self._live, self._live.progress

            def wait() -> None:
                live.progress += 1  # who waits for a saver is not hung
                self._link.check()

            try:
                checkpointer.snapshot_last(commits, exported, state, self._settings.timeout_s, wait)
            finally:
                live.progress = progress
            self._tell_news(checkpointer, commits)
        if not checkpointer.is_behind and self._live.rank == 0 and not checkpointer.storage.has(commits):
            self._save(checkpointer.storage, commits, exported)

    def close(self) -> None:
        """No step will come any more."""
        if self._ledger is not None:
            self._ledger.close()
        if self._checkpointer is not None:
            self._checkpointer.close()

    def _own_work_s(self) -> float:
        """The step's own work ended when its gradients were ready; what came then was waiting for others."""
        ready_at, began = self._live.ready_at, self._began
        self._began = time.perf_counter()
        parts = self._live.micro_batch.parts if self._live.micro_batch is not None else 1
        return max(0.0, ready_at - began) / parts  # others may have more or fewer

    def _tune(self, tuning: Tuning) -> None:
        waited_s, share = self._live.waited_s, self._live.share
        tuning.waited(waited_s - self._waited_s)
        self._waited_s = waited_s
        tuning.commit(share.records if share is not None else 0)
