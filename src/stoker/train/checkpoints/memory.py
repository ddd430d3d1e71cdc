"""Snapshots of a worker's state in shared memory: two slots, of which one is whole at any time."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import weakref
from collections.abc import Container
from pathlib import Path
from typing import Any, NamedTuple

from stoker._native import crc32c
from stoker.errors import EnvironmentProblem
from stoker.train.checkpoints.copying import CUDA, Copy
from stoker.train.checkpoints.image import Image
from stoker.train.checkpoints.layout import (
    COMPLETE,
    EMPTY,
    HEADER_BYTES,
    WRITING,
    Header,
    Place,
    description_bytes_max,
    encode_description,
    place_pieces,
    run_digest,
)
from stoker.train.checkpoints.pinned import Pinned
from stoker.train.checkpoints.slots import Slot, slot_paths

log = logging.getLogger("stoker.checkpoint")
ROOM_WAIT_S = 0.5
"""How long the first snapshot waits for its room: a large state's takes minutes, in which the training goes on."""


class _Plan(NamedTuple):
    """How an image will lie in a file."""

    places: list[Place]
    data_bytes: int
    file_bytes: int
    is_on_cuda: bool

    @property
    def description_at(self) -> int:
        return HEADER_BYTES + self.data_bytes

    @classmethod
    def of(cls, image: Image) -> _Plan:
        places, data_bytes = place_pieces(image.pieces)
        description_bytes = description_bytes_max(image.plain, places)
        is_on_cuda = any(piece.tensor.device.type == CUDA for piece in image.pieces)
        return cls(places, data_bytes, HEADER_BYTES + data_bytes + description_bytes, is_on_cuda)


class MemorySlots:
    """Takes snapshots; `take` and `settle` are for the training thread.

    `overlaps`: the training goes on while a snapshot is copied. It becomes False where a script was found to change
    parameters outside of optimizers' steps.
    """

    def __init__(self, folder: Path, run_id: str, local_rank: int, *, overlaps: bool = True) -> None:
        self.folder = folder
        self.overlaps = overlaps
        self.taken = self.skipped = self.failed = self.void = 0
        """Snapshots: that are whole, for which no slot was free, that could not be written, that were changed."""
        self.whole_at = -1
        """Commits of the newest that is whole."""
        self.problem = ""
        """Why the newest snapshot is not there; empty: it is."""
        self._run = run_digest(run_id)
        self._slots = [Slot(path) for path in slot_paths(folder, local_rank)]
        self._pinned = Pinned()
        self._preparing: threading.Thread | None = None
        self._writing: threading.Thread | None = None
        self._copy: Copy | None = None
        os.register_at_fork(after_in_child=functools.partial(_forget_in_child, weakref.ref(self)))

    def prepare(self, image: Image) -> None:
        """Have room made for snapshots of this size, aside, so that the first of them need not wait for it."""

        def make_room() -> None:
            with contextlib.suppress(EnvironmentProblem):  # which is told when a snapshot lacks it
                for slot in self._slots:
                    self._make_room(slot, plan)

        plan = _Plan.of(image)
        self._preparing = threading.Thread(target=make_room, name="stoker-snapshot-room", daemon=True)
        self._preparing.start()

    def take(self, image: Image, stable: Container[int]) -> bool:
        """Begin a snapshot. False: the last one is not done yet, or there is no room yet, so that this one has to wait.

        `stable`: storages of the tensors that only an optimizer's step changes; before one, call `settle`.
        """
        if self._writing is not None and self._writing.is_alive():
            return False
        if self._preparing is not None:
            self._preparing.join(ROOM_WAIT_S)
            if self._preparing.is_alive():
                return False
            self._preparing = None
        self._copy = None
        slot = None
        try:
            slot = self._free_slot(image.commits)
            if slot is None:
                self.skipped += 1
                log.info("no snapshot at commit %d: the last but one is still being read", image.commits)
                return True
            self._begin(slot, image, _Plan.of(image), stable)
        except (OSError, RuntimeError, EnvironmentProblem) as error:
            if slot is not None:
                slot.unlock()
            self._fail(f"no snapshot at commit {image.commits}: {error}")
        return True

    def settle(self) -> None:
        """Parameters are about to be changed: wait until they are copied."""
        if self._copy is not None:
            self._copy.settle()

    def finish(self) -> None:
        """Wait until what was begun is done."""
        for thread in (self._preparing, self._writing):
            if thread is not None:
                thread.join()

    def forget_all(self) -> None:
        """This process was forked from the one that takes snapshots, without the threads that do it."""
        self._preparing = self._writing = self._copy = None
        for slot in self._slots:
            slot.forget_lock()

    def close(self) -> None:
        """No more snapshots: those that are there stay."""
        self.settle()
        self.finish()
        self._pinned.close()

    # -- helpers ------------------------------------------------------------------------------------------

    def _free_slot(self, commits: int) -> Slot | None:
        """One that nobody reads and that does not hold the newest snapshot, locked. Raises OSError."""
        for _ in self._slots:
            kept = self._newest(commits)
            # What was cut off in the middle is overwritten before what is whole.
            for slot in sorted((s for s in self._slots if s is not kept), key=self._is_whole):
                if slot.lock():
                    if self._newest(commits) is kept:
                        return slot
                    slot.unlock()  # another process has just finished it
        return None

    def _newest(self, commits: int) -> Slot | None:
        """The slot with the newest whole snapshot; one that is ahead of this state does not count as such."""
        found = [
            ((header.commits, header.sequence), slot)
            for slot in self._slots
            if (header := slot.peek()) is not None and self._is_kept(header) and header.commits <= commits
        ]
        return max(found, key=lambda one: one[0])[1] if found else None

    def _is_whole(self, slot: Slot) -> bool:
        header = slot.peek()
        return header is not None and self._is_kept(header)

    def _is_kept(self, header: Header) -> bool:
        return header.state == COMPLETE and header.run == self._run

    def _begin(self, slot: Slot, image: Image, plan: _Plan, stable: Container[int]) -> None:
        self._make_room(slot, plan)
        sequence = max((h.sequence for s in self._slots if (h := s.peek()) is not None), default=0) + 1
        header = Header(
            *(WRITING, self._run, os.getpid(), sequence, image.commits),
            *(plan.data_bytes, plan.description_at, 0, 0),
        )
        slot.write_header(header)
        assert slot.memory is not None
        copy = Copy(slot.memory, image.pieces, plan.places)
        copy.begin(stable)
        self._copy = copy
        finish = functools.partial(self._finish, slot, header, copy, image.plain, plan.places)
        self._writing = threading.Thread(target=finish, name="stoker-snapshot", daemon=True)
        self._writing.start()
        if not self.overlaps:
            copy.settle()

    def _finish(self, slot: Slot, header: Header, copy: Copy, plain: Any, places: list[Place]) -> None:
        """In the snapshot's own thread."""
        try:
            copy.run()
            if not copy.is_void:
                header = _with_description(slot, header, plain, places)
            if copy.look(settled=True):
                slot.write_header(header._replace(state=COMPLETE))
                self.taken += 1
                self.whole_at = header.commits
                self.problem = ""
                log.debug("snapshot of commit %d in %s", header.commits, slot.path)
            else:
                slot.write_header(header._replace(state=EMPTY))
                self.void += 1
                self.overlaps = False
                self._tell(
                    f"the snapshot at commit {header.commits} is void: the script changes parameters outside of an "
                    "optimizer's step. From now on training waits while a snapshot is copied"
                )
        except (OSError, RuntimeError, ValueError) as error:
            self._fail(f"no snapshot at commit {header.commits}: {error}")
        finally:
            copy.let_go()
            slot.unlock()

    def _make_room(self, slot: Slot, plan: _Plan) -> None:
        slot.make_room(plan.file_bytes)
        if plan.is_on_cuda and slot.memory is not None:
            self._pinned.pin(slot.memory)

    def _fail(self, problem: str) -> None:
        self.failed += 1
        self._tell(problem)

    def _tell(self, problem: str) -> None:
        log.log(logging.DEBUG if self.problem else logging.WARNING, "%s", problem)
        self.problem = problem


def _with_description(slot: Slot, header: Header, plain: Any, places: list[Place]) -> Header:
    """Write what stands behind the data; the header that says so."""
    memory = slot.memory
    assert memory is not None
    whole = memoryview(memory)
    begins = [HEADER_BYTES + place.position for place in places]
    places = [
        place._replace(crc=crc32c(whole[begin : begin + place.size_bytes]))
        for place, begin in zip(places, begins, strict=True)
    ]
    raw = encode_description(plain, places)
    memory[header.description_at : header.description_at + len(raw)] = raw
    return header._replace(description_bytes=len(raw), description_crc=crc32c(raw))


def _forget_in_child(slots: weakref.ref[MemorySlots]) -> None:
    held = slots()
    if held is not None:
        held.forget_all()
