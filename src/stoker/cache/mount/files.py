"""Files of a mount: opened, read, closed. Pure.

Of each OPEN it is decided anew how the file is read. One that is whole in a file of its own in the cache the kernel
reads there; all else by requests, whose answers the kernel keeps for as long as it likes.
"""

from __future__ import annotations

import errno
from collections import OrderedDict
from collections.abc import Callable

from stoker.cache.mount import answers
from stoker.cache.mount.answers import Open
from stoker.cache.mount.handles import OpenFile
from stoker.cache.mount.names import OUT_OF_REACH, REFRESHED, STATUS
from stoker.cache.mount.nodes import FailedRead, Node
from stoker.cache.mount.questions import Back, CloseBacking, Effect, Fetch, Read, Remember, Status
from stoker.cache.mount.records import Closed, FileOpened, packed
from stoker.cache.mount.requests import RESENT, Header, Init, Reading
from stoker.cache.mount.state import MountState, done, refused
from stoker.cache.mount.waiting import Failed
from stoker.cache.mount.writing import WritingFiles

ACCESS_MODE, TRUNCATE = 0o3, 0o1000
"""In the flags of OPEN: not only to read; what was there goes."""
PLAIN = 0
"""The number of what is open without a number of its own."""
_FAILING_S = 1.0
"""What the kernel has tried ahead in vain it asks for again when it is read: who reads waits only once."""
_IN_A_ROW = 2
_FOLLOWED_MAX = 1024
_ABREAST_BYTES = 8 * 1024 * 1024
"""What is asked for ahead comes in any order."""


class Files:
    """Answers OPEN, READ and RELEASE."""

    def __init__(self, state: MountState, writing: WritingFiles) -> None:
        self._state = state
        self._writing = writing
        self._followed: OrderedDict[int, OpenFile] = OrderedDict()

    def open(self, header: Header, flags: int, now: float) -> list[Effect]:
        """Somebody wants to read a file, or to write it."""
        state, unique = self._state, header.unique
        node = state.nodes.get(header.node)
        if node is None:
            return [refused(unique, errno.ESTALE)]
        if node.kind:
            return self._open_special(unique, node, now)
        if flags & (ACCESS_MODE | TRUNCATE):
            if not state.settings.is_writable:
                return [refused(unique, errno.EROFS)]
            return self._writing.open(header, node, truncates=bool(flags & TRUNCATE), now=now)
        again = state.handles.opened_by(unique)
        if again is not None:
            handle, opened = again
            return [_open_answer(unique, handle, opened.backing_id)]
        if node.number in state.nodes.plain:
            return [_open_answer(unique, PLAIN, 0)]
        way = state.handles.backing_of(node.number)
        if way is not None or not self._may_be_backed(node):
            return self._opened(unique, node, way or 0)

        def then(answer: object, at: float) -> list[Effect]:
            if isinstance(answer, Failed) and answer.code == errno.ESTALE:
                # The kernel looks the name up again by itself, and opens what there is by then.
                return [*state.changed(node.path, at), refused(unique, errno.ESTALE)]
            # As those do who have opened it meanwhile.
            way = state.handles.backing_of(node.number)
            # What was written anew meanwhile is not what was asked for.
            is_still_it = node.version == question.version and self._may_be_backed(node)
            backing_id = answer if isinstance(answer, int) and is_still_it else 0
            return self._opened(unique, node, backing_id if way is None else way)

        question = Back(node.number, node.path, node.version)
        return state.waiting.ask(unique, question, then, now)

    def read(self, header: Header, asked: Reading, now: float) -> list[Effect]:
        """Bytes of a file."""
        state, unique = self._state, header.unique
        node, opened = state.nodes.get(header.node), state.handles.file(asked.handle)
        if opened is not None and opened.text is not None:
            return [done(unique, opened.text[asked.offset : asked.offset + asked.size_bytes])]
        if node is None:
            return [refused(unique, errno.ESTALE)]
        if node.kind:  # opened by way of a daemon before
            start, stop = asked.offset, asked.offset + asked.size_bytes
            return self._with_text(unique, node, lambda text: [done(unique, text[start:stop])], now)
        staged = None if node.is_settled else state.staged.of_node(node.number)
        if staged is not None:
            return self._writing.read(header, staged, asked, now)
        stop = min(asked.offset + asked.size_bytes, node.size_bytes)
        if asked.offset >= stop:
            return [done(unique)]
        failed = node.failed
        if failed and now - failed.at < _FAILING_S and failed.start <= asked.offset < failed.stop:
            return [refused(unique, failed.code)]

        def then(answer: object, at: float) -> list[Effect]:
            if isinstance(answer, Failed):
                if answer.code in OUT_OF_REACH:
                    node.failed = FailedRead(answer.code, at, asked.offset, stop)
                effects = state.changed(node.path, at) if answer.code == errno.ESTALE else []
                return [*effects, refused(unique, answer.code)]
            assert isinstance(answer, bytes | memoryview)
            return [done(unique, answer)]

        question = Read(node.path, node.version, asked.offset, stop)
        effects = state.waiting.ask(unique, question, then, now)
        followed = self._followed_node(node) if opened is None else opened
        return effects + self._follow(node, followed, asked.offset, stop, now)

    def backed(self, question: Back, backing_id: int) -> list[Effect]:
        """The kernel has a number for that file, which those who waited for it have used, or have not."""
        is_used = self._state.handles.backing_of(question.node) == backing_id
        return [] if is_used else [CloseBacking(backing_id)]

    def close(self, unique: int, handle: int, now: float) -> list[Effect]:
        """Nobody has it open under this number any more."""
        if handle == PLAIN:
            return [done(unique)]
        state = self._state
        backing_id = state.handles.close(handle)
        effects: list[Effect] = [Remember(packed(Closed(handle))), done(unique)]
        effects += self._writing.close(handle, now)
        if backing_id:
            effects.append(CloseBacking(backing_id))
        return effects

    def _may_be_backed(self, node: Node) -> bool:
        state = self._state
        is_agreed = bool(state.flags & Init.PASSTHROUGH) and node.is_settled and not node.was_plain
        return is_agreed and node.size_bytes > state.settings.packed_bytes_max

    def _opened(self, unique: int, node: Node, backing_id: int) -> list[Effect]:
        request = unique & ~RESENT
        handle = self._state.handles.open_file(node.number, backing_id, request=request)
        record = Remember(packed(FileOpened(handle, node.number, backing_id, request)))
        return [record, _open_answer(unique, handle, backing_id)]

    def _open_special(self, unique: int, node: Node, now: float) -> list[Effect]:
        """Its text is that of the moment; the kernel keeps nothing of it."""

        def then(text: bytes) -> list[Effect]:
            handle = self._state.handles.open_file(node.number, 0, text)
            return [done(unique, answers.opened(handle, Open.DIRECT_IO | Open.NOFLUSH))]

        return self._with_text(unique, node, then, now)

    def _with_text(
        self, unique: int, node: Node, then: Callable[[bytes], list[Effect]], now: float
    ) -> list[Effect]:
        def told(answer: object, _: float) -> list[Effect]:
            if isinstance(answer, Failed):
                return [refused(unique, answer.code)]
            assert isinstance(answer, bytes)
            return then(answer)

        if node.kind == STATUS:
            return self._state.waiting.ask(unique, Status(node.path), told, now)
        return then(REFRESHED)

    def _followed_node(self, node: Node) -> OpenFile:
        """How a node is read which nobody has opened."""
        followed = self._followed.pop(node.number, None) or OpenFile(node.number)
        self._followed[node.number] = followed
        if len(self._followed) > _FOLLOWED_MAX:
            self._followed.popitem(last=False)
        return followed

    def _follow(self, node: Node, opened: OpenFile, start: int, stop: int, now: float) -> list[Effect]:
        """Who reads on from where the last read ended will read it all."""
        is_next = (
            0 < opened.next_offset <= start + _ABREAST_BYTES and start <= opened.next_offset + _ABREAST_BYTES
        )
        opened.in_a_row = opened.in_a_row + 1 if is_next else 0
        opened.next_offset = max(stop, opened.next_offset if is_next else 0)
        if opened.is_fetched or opened.in_a_row < _IN_A_ROW or stop == node.size_bytes:
            return []
        opened.is_fetched = True
        return self._state.waiting.ask_alone(Fetch(node.path, node.version), now)


def _open_answer(unique: int, handle: int, backing_id: int) -> Effect:
    flags = Open.PASSTHROUGH if backing_id else Open.KEEP_CACHE
    return done(unique, answers.opened(handle, flags | Open.NOFLUSH, backing_id))
