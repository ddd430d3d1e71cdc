"""Writing whole files through a mount. Pure.

What is written lies on this machine until it is whole: the origin gets it when whoever opened it closes it, or at each
fsync, and both return when the origin has it, or fail. Others see it from then on, and what was there until then. A
file that was there can be written anew, not changed: to change bytes of it is refused (EOPNOTSUPP).

A copy of the descriptor in another process that is closed does not make a file whole: a shell that starts a program
closes its own.
"""

from __future__ import annotations

import errno
import sys

from stoker.cache.mount import answers
from stoker.cache.mount.answers import Open
from stoker.cache.mount.names import path_to_change
from stoker.cache.mount.nodes import Node
from stoker.cache.mount.putting import Putting
from stoker.cache.mount.questions import Effect, Remember, Stage, StageDrop, StageRead, StageSize
from stoker.cache.mount.records import FileOpened, Record, packed
from stoker.cache.mount.requests import RESENT, Changing, Creating, Header, Reading, Writing
from stoker.cache.mount.staged import Staged
from stoker.cache.mount.state import MountState, done, refused, remembered
from stoker.cache.mount.waiting import Failed

EXCLUSIVE = 0o200
"""In the flags of CREATE: nobody else may have made it."""
SIZE, HANDLE = 1 << 3, 1 << 6
"""In SETATTR: the size is to be another; it says by whose handle."""


class WritingFiles:
    """Answers CREATE, OPEN for writing, WRITE, SETATTR, FLUSH, FSYNC and RELEASE of files that are written."""

    def __init__(self, state: MountState, putting: Putting) -> None:
        self._state = state
        self._putting = putting

    def create(self, header: Header, asked: Creating, now: float) -> list[Effect]:
        """A file that is not there yet."""
        path = path_to_change(self._state, header.node, asked.name)
        if isinstance(path, int):
            return [refused(header.unique, path)]
        state, unique = self._state, header.unique
        again = state.handles.opened_by(unique)
        if again is not None and (made := state.nodes.get(again[1].node)) is not None:
            return [done(unique, self._created(made, again[0]))]
        # Who does not insist on making it looks again, and opens it.
        is_there = errno.EEXIST if asked.flags & EXCLUSIVE else errno.ESTALE
        if state.staged.at(path) is not None:
            return [refused(unique, is_there)]
        stage = state.staged.next_stage()

        def then(answer: object, at: float) -> list[Effect]:
            if isinstance(answer, Failed):
                return [refused(header.unique, answer.code)]
            if state.staged.at(path) is not None:
                return self._refused_late(unique, is_there, stage, at)
            node, _ = state.nodes.look_up(path, version=f"staged {stage}", modified_ns=state.wall_ns(at))
            staged = state.staged.add(stage, node.number, path, header.pid, is_new=True)
            handle, effects = self._open(unique, node, staged, header.pid)
            return [Remember(packed(node.named())), *effects, done(unique, self._created(node, handle))]

        return state.waiting.ask(unique, StageSize(stage, 0), then, now, is_patient=True)

    def _refused_late(self, unique: int, code: int, stage: int, now: float) -> list[Effect]:
        """While a place was made for what is written, something else has come."""
        return [refused(unique, code), *self._state.waiting.ask_alone(StageDrop(stage), now)]

    def _created(self, node: Node, handle: int) -> bytes:
        return answers.entry(node.number, self._state.attr(node), 0.0, 0.0) + answers.opened(handle, 0)

    def open(self, header: Header, node: Node, *, truncates: bool, now: float) -> list[Effect]:
        """One that is there, to be written anew, or perhaps to have no more than its times changed."""
        state, unique = self._state, header.unique
        if state.handles.backing_of(node.number):
            return [refused(unique, errno.ETXTBSY)]
        again = state.handles.opened_by(unique)
        if again is not None:
            return [done(unique, answers.opened(again[0], 0))]
        staged = self._written_as(node)
        if staged is not None and staged.node != node.number:
            return [refused(unique, errno.EBUSY)]
        if staged is None and not truncates:
            handle = state.handles.open_file(node.number, 0, request=unique & ~RESENT)
            return [
                Remember(packed(FileOpened(handle, node.number, 0, unique & ~RESENT))),
                done(unique, answers.opened(handle, Open.KEEP_CACHE)),
            ]
        # Not the file that is being put, or about to be.
        stage = state.staged.next_stage() if truncates or staged is None else staged.stage

        def then(answer: object, at: float) -> list[Effect]:
            if isinstance(answer, Failed):
                return [refused(unique, answer.code)]
            found = self._written_as(node)
            if state.handles.backing_of(node.number) or (found and found.node != node.number):
                return self._refused_late(unique, errno.EBUSY if found else errno.ETXTBSY, stage, at)
            if found is None and state.known.get(node.path, at) == (True, None):
                # It was removed before it was opened: the kernel looks again by itself.
                return self._refused_late(unique, errno.ESTALE, stage, at)
            if truncates and found and found.waiting:
                # Or what is not whole yet would be put for those who wait, or theirs never.
                found.after.append(lambda later: then(answer, later))
                return []
            found = found or state.staged.add(stage, node.number, node.path, header.pid)
            dropped: list[Effect] = []
            if truncates:
                if found.stage != stage:
                    state.staged.restage(found, stage)
                    dropped = [] if found.is_putting else self._putting.drop_superseded(found, at)
                found.size_bytes, found.revision, found.process = 0, found.revision + 1, header.pid
                found.is_abandoned = found.is_killed = found.is_closed = False
                found.failure = 0
            handle, effects = self._open(unique, node, found, header.pid)
            return [*effects, done(unique, answers.opened(handle, 0)), *dropped]

        if not truncates:
            return then(None, now)
        return state.waiting.ask(unique, StageSize(stage, 0), then, now, is_patient=True)

    def _written_as(self, node: Node) -> Staged | None:
        """What somebody writes as this node, also where it has no name any more; else under its name."""
        staged = self._state.staged
        return staged.of_node(node.number) or staged.at(node.path)

    def write(self, header: Header, asked: Writing, now: float) -> list[Effect]:
        """Bytes of a file that is written. As in local files no signal ends that, or what was written would not be
        known. What lies elsewhere by then, written anew by another one, gets it there."""
        state, unique = self._state, header.unique
        staged, size_bytes = state.staged.of(asked.handle), len(asked.data)
        if staged is None:
            return [refused(unique, errno.EOPNOTSUPP)]
        stage = staged.stage
        # From now on what is being put is not what is there.
        staged.begun += 1

        def then(answer: object, at: float) -> list[Effect]:
            if staged.stage != stage and not staged.is_ended:
                return self.write(header, asked, at)
            if isinstance(answer, Failed):
                # Who does not look at what a write says is not to publish half of a file by closing it.
                staged.fails(asked.offset, answer.code)
                news = remembered(state.staged.records_of(staged))
                return [news, refused(unique, answer.code)]
            staged.heals(asked.offset, asked.offset + size_bytes)
            changed = self._changed(
                staged, max(staged.size_bytes, asked.offset + size_bytes), asked.handle, at
            )
            return [changed, done(unique, answers.size(size_bytes))]

        question = Stage(stage, asked.offset, asked.data)
        return state.waiting.ask(unique, question, then, now, is_patient=True)

    def change(self, header: Header, node: Node, asked: Changing, now: float) -> list[Effect]:
        """Attributes. All belongs to whom the mount says, and has the rights and times that it says: to set those
        changes nothing, and is no error to programs that do it with all they write."""
        state, unique = self._state, header.unique

        def told(at: float) -> list[Effect]:
            return [done(unique, answers.attributes(state.attr(node), state.attr_valid_s(node)))]

        staged = state.staged.of_node(node.number)
        if staged is None and asked.valid & SIZE and asked.valid & HANDLE and not asked.size_bytes:
            return self._empty(header, node, asked, now)
        if not asked.valid & SIZE or (asked.size_bytes == node.size_bytes and staged is None):
            return told(now)
        if staged is None:
            return [refused(unique, errno.EOPNOTSUPP)]
        stage = staged.stage
        staged.begun += 1

        def then(answer: object, at: float) -> list[Effect]:
            if staged.stage != stage and not staged.is_ended:
                return self.change(header, node, asked, at)
            if isinstance(answer, Failed):
                return [refused(unique, answer.code)]
            staged.heals(asked.size_bytes, sys.maxsize)
            return [self._changed(staged, asked.size_bytes, 0, at), *told(at)]

        return state.waiting.ask(unique, StageSize(stage, asked.size_bytes), then, now, is_patient=True)

    def _empty(self, header: Header, node: Node, asked: Changing, now: float) -> list[Effect]:
        """Whoever has opened it to write empties it: it is written anew from here on, as if it had been opened so."""
        state, unique = self._state, header.unique
        if state.handles.backing_of(node.number):
            return [refused(unique, errno.ETXTBSY)]
        stage = state.staged.next_stage()

        def then(answer: object, at: float) -> list[Effect]:
            if isinstance(answer, Failed):
                return [refused(unique, answer.code)]
            found = self._written_as(node)
            if (
                found is not None
                or state.handles.file(asked.handle) is None
                or state.handles.backing_of(node.number)
            ):
                return self._refused_late(unique, errno.EBUSY, stage, at)
            found = state.staged.add(stage, node.number, node.path, header.pid)
            state.staged.open(asked.handle, found, header.pid)
            state.is_written(found)
            changed = self._changed(found, 0, asked.handle, at)
            return [changed, done(unique, answers.attributes(state.attr(node), state.attr_valid_s(node)))]

        return state.waiting.ask(unique, StageSize(stage, 0), then, now, is_patient=True)

    def read(self, header: Header, staged: Staged, asked: Reading, now: float) -> list[Effect]:
        """Bytes of what is written so far."""
        unique, stop = header.unique, min(asked.offset + asked.size_bytes, staged.size_bytes)
        if asked.offset >= stop:
            return [done(unique)]
        stage = staged.stage

        def then(answer: object, at: float) -> list[Effect]:
            if staged.stage != stage and not staged.is_ended:
                return self.read(header, staged, asked, at)
            if isinstance(answer, Failed):
                return [refused(unique, answer.code)]
            assert isinstance(answer, bytes)
            return [done(unique, answer)]

        return self._state.waiting.ask(unique, StageRead(stage, asked.offset, stop), then, now)

    def flush(self, header: Header, handle: int, now: float) -> list[Effect]:
        """Somebody has closed it. Only who opened it makes it whole by that; what has no bytes may get some yet. Below
        0: of a process that was killed, and has not come to the end of what it wrote."""
        staged = self._state.staged.of(handle)
        if staged is None or not self._state.staged.makes_whole(handle, abs(header.pid)):
            return [done(header.unique)]
        is_killed = header.pid < 0 and not staged.is_put
        if is_killed:
            staged.is_abandoned = staged.is_killed = True
        else:
            staged.is_closed = True
        closed = remembered(self._state.staged.records_of(staged))
        if is_killed or not staged.size_bytes:
            return [closed, done(header.unique)]
        return [closed, *self._putting.put(header.unique, staged, now)]

    def sync(self, header: Header, handle: int, now: float) -> list[Effect]:
        """The origin is to have what is there so far."""
        staged = self._state.staged.of(handle)
        return [done(header.unique)] if staged is None else self._putting.put(header.unique, staged, now)

    def close(self, handle: int, now: float) -> list[Effect]:
        """Nobody has it open under this number any more; before what is told of that."""
        staged = self._state.staged.close(handle)
        return [] if staged is None or staged.handles else self._putting.finish(staged, now)

    def _open(self, unique: int, node: Node, staged: Staged, process: int) -> tuple[int, list[Effect]]:
        state, request = self._state, unique & ~RESENT
        state.is_written(staged)
        handle = state.handles.open_file(node.number, 0, request=request)
        state.staged.open(handle, staged, process)
        news: list[Record] = [FileOpened(handle, node.number, 0, request), *state.staged.records_of(staged)]
        return handle, [remembered(news)]

    def _changed(self, staged: Staged, size_bytes: int, handle: int, now: float) -> Effect:
        staged.size_bytes, staged.revision = size_bytes, staged.revision + 1
        # Who goes on after a failure wants it tried again. What is not whole does not become so.
        staged.is_abandoned, staged.is_closed = staged.is_killed, False
        node = self._state.nodes.get(staged.node)
        if node is not None:
            node.size_bytes, node.modified_ns = size_bytes, self._state.wall_ns(now)
        return Remember(packed(self._state.staged.record(staged, handle)))
