"""Removing and renaming through a mount, and folders of one's own. Pure.

A folder is what keys have in common: its name can only be changed by writing all that is in it anew, which is left to
whoever wants that (EXDEV: programs then copy).
"""

from __future__ import annotations

import errno

from stoker.cache.mount.names import path_to_change
from stoker.cache.mount.nodes import Node
from stoker.cache.mount.questions import (
    Effect,
    Find,
    MakeFolder,
    Question,
    Remove,
    RemoveFolder,
    Rename,
    Tell,
)
from stoker.cache.mount.records import Record
from stoker.cache.mount.requests import RESENT, Header, Renaming
from stoker.cache.mount.source_port import Found
from stoker.cache.mount.staged import Staged
from stoker.cache.mount.state import MountState, done, refused, remembered
from stoker.cache.mount.waiting import Failed

NO_REPLACE = 1


class Moving:
    """Answers UNLINK, MKDIR, RMDIR and RENAME."""

    def __init__(self, state: MountState) -> None:
        self._state = state

    def remove(self, header: Header, name: bytes, now: float, *, is_folder: bool) -> list[Effect]:
        """A file, or an empty folder."""
        path = path_to_change(self._state, header.node, name)
        if isinstance(path, int):
            return [refused(header.unique, path)]
        state = self._state
        if is_folder and state.staged.has_below(path):
            return [refused(header.unique, errno.ENOTEMPTY)]
        # What is being put the origin would have again, and so it would what is put before this is done.
        if not state.busy.take([path], lambda at: self.remove(header, name, at, is_folder=is_folder)):
            return []
        question: Question = RemoveFolder(path) if is_folder else Remove(path)

        def then(answer: object, at: float) -> list[Effect]:
            if isinstance(answer, Failed):
                state.may_be_changed(path, at)
                return [refused(header.unique, answer.code), *state.busy.leave([path], at)]
            state.is_now(path, None, at)
            gone = self._folder_is_removed(path) if is_folder else self._is_removed(path)
            return [*gone, done(header.unique), *state.busy.leave([path], at)]

        return state.waiting.ask(header.unique, question, then, now, is_patient=True)

    def _is_removed(self, path: str) -> list[Effect]:
        """What is being written has no name any more: those who have it open go on, and nobody else gets it."""
        staged = self._state.staged.at(path)
        if staged is None:
            return []
        staged.is_removed = True
        self._state.staged.forget_path(staged)
        return [remembered(self._state.staged.records_of(staged))]

    def _folder_is_removed(self, path: str) -> list[Effect]:
        """Linux has nothing made in it any more."""
        node = self._state.nodes.removed(path)
        return [] if node is None else [remembered([node.named()])]

    def make_folder(self, header: Header, name: bytes, now: float) -> list[Effect]:
        """An empty one."""
        path = path_to_change(self._state, header.node, name)
        if isinstance(path, int):
            return [refused(header.unique, path)]
        state = self._state

        def then(answer: object, at: float) -> list[Effect]:
            if isinstance(answer, Failed):
                return [refused(header.unique, answer.code)]
            found = Found(True)
            state.is_now(path, found, at)
            (node,), effects = state.told([(path, found)])
            return [*effects, done(header.unique, state.entry(node, now))]

        return state.waiting.ask(header.unique, MakeFolder(path), then, now)

    def rename(self, header: Header, asked: Renaming, now: float) -> list[Effect]:
        """A file is to be called otherwise, as one step for who looks: first it is there, then the old name is not."""
        state, unique = self._state, header.unique
        path = path_to_change(state, header.node, asked.name)
        to = path_to_change(state, asked.to_node, asked.to_name)
        if isinstance(path, int) or isinstance(to, int):
            return [refused(unique, path if isinstance(path, int) else to if isinstance(to, int) else 0)]
        if asked.flags & ~NO_REPLACE:
            return [refused(unique, errno.EINVAL)]
        is_known, known = state.known.get(path, now)
        if is_known and known is not None and known.is_folder:
            return [refused(unique, errno.EXDEV)]
        replaces = not asked.flags & NO_REPLACE
        if not state.busy.take([path, to], lambda at: self.rename(header, asked, at)):
            return []
        written = self._written(unique, path, to, now)
        if written is not None:
            return [*written, *state.busy.leave([path, to], now)]

        def then(answer: object, at: float) -> list[Effect]:
            if isinstance(answer, Failed):
                state.may_be_changed(path, at)
                state.may_be_changed(to, at)
                if answer.code == errno.ENOENT and unique & RESENT:
                    if (there := state.staged.at(to)) is not None and there.is_new:
                        # A daemon before has renamed it, and the origin is yet to be told of it.
                        return [done(unique), *state.busy.leave([path, to], at)]
                    return state.waiting.ask(unique, Find(to), found_out, at, is_patient=True)
                return [refused(unique, answer.code), *state.busy.leave([path, to], at)]
            assert isinstance(answer, tuple)
            before, after = answer
            return [*self._renamed(unique, path, to, before, after, at), *state.busy.leave([path, to], at)]

        def found_out(there: object, at: float) -> list[Effect]:
            """What a daemon before did not live to answer it has done, if that is there."""
            effects: list[Effect] = [refused(unique, errno.ENOENT)]
            if isinstance(there, Found):
                effects = self._renamed(unique, path, to, None, there, at)
            return [*effects, *state.busy.leave([path, to], at)]

        return state.waiting.ask(unique, Rename(path, to, replaces), then, now, is_patient=True)

    def _written(self, unique: int, path: str, to: str, now: float) -> list[Effect] | None:
        """What a rename comes to where files are being written, and none of them is being put; None: that does not
        matter."""
        staged, replaced = self._state.staged.at(path), self._state.staged.at(to)
        if staged is not None and staged.is_unknown:
            return self._rename_staged(unique, staged, to, now)
        # What nobody has open any more is put when this is done, under the name that it then has.
        is_open = any(one is not None and not one.is_put and one.handles for one in (staged, replaced))
        # What a daemon before may have begun is done to its end.
        return [refused(unique, errno.EBUSY)] if is_open and not unique & RESENT else None

    def _rename_staged(self, unique: int, staged: Staged, to: str, now: float) -> list[Effect]:
        """The origin knows nothing of it yet: it will be put under its new name."""
        state = self._state
        effects = self._is_removed(to)
        state.is_now(staged.path, None, now)
        state.may_be_changed(to, now)
        state.staged.move(staged, to)
        news: list[Record] = list(state.staged.records_of(staged))
        if (node := state.nodes.get(staged.node)) is not None:
            node.path = to
            news.insert(0, state.named(node))
        return [*effects, remembered(news), done(unique)]

    def _renamed(
        self, unique: int, path: str, to: str, before: Found | None, after: Found, now: float
    ) -> list[Effect]:
        """The kernel moves the name with its node: what is read of that is what lies there now. `before`: None where
        nobody knows any more what it was that was moved; if there is more than one that it may have been, the kernel
        is to look."""
        state = self._state
        state.is_now(path, None, now)
        state.is_now(to, after, now)
        effects = self._is_removed(to)
        if (staged := state.staged.at(path)) is not None:
            state.staged.move(staged, to)
            effects.append(remembered(state.staged.records_of(staged)))
        moved = [
            node
            for node in state.nodes
            if node.path == path and not node.is_folder and not node.kind and _was(node, before, after)
        ]
        if before is None and len(moved) > 1:
            names = state.stale_path(path), state.stale_path(to)
            return [*effects, done(unique), *state.waiting.ask_alone(Tell(names), now)]
        for node in moved:
            node.path, node.version = to, after.version
        if moved:
            effects.append(remembered(map(state.named, moved)))
        return [*effects, done(unique)]


def _was(node: Node, before: Found | None, after: Found) -> bool:
    return node.size_bytes == after.size_bytes if before is None else node.version == before.version
