"""Names of a mount: what there is, what it looks like, and the files that are none. Pure.

Each folder has two files that no list shows. To look at `.stoker-refresh` makes what is in the folder, and in its
folders, to be asked for anew: in the kernel, in the daemon and in the fleet; content that is still that of its version
stays. `.stoker-status` says how things are.
"""

from __future__ import annotations

import errno

from stoker.cache.mount import answers
from stoker.cache.mount.answers import NAME_BYTES_MAX
from stoker.cache.mount.nodes import Node
from stoker.cache.mount.questions import Effect, Find, Refresh, Remember, Tell
from stoker.cache.mount.records import LookedUp, packed
from stoker.cache.mount.requests import Header
from stoker.cache.mount.source_port import Found
from stoker.cache.mount.state import MountState, child, done, refused
from stoker.cache.mount.waiting import Failed

REFRESH, STATUS = ".stoker-refresh", ".stoker-status"
_SPECIAL = (REFRESH.encode(), STATUS.encode())
PATH_BYTES_MAX = 1024
KNOWN_S = 2.0
"""So long one waits to hear whether what was there is there still. Who comes after some that have waited in vain
does not."""
OUT_OF_REACH = frozenset({errno.EIO, errno.ETIMEDOUT})
REFRESHED = b"What lies here was asked for anew.\n"
_STATUS_BYTES = 4096
"""As which its size is told; it ends where it ends."""


class Names:
    """Answers LOOKUP and GETATTR."""

    def __init__(self, state: MountState) -> None:
        self._state = state

    def look_up(self, header: Header, name: bytes, now: float) -> list[Effect]:
        """What there is of a name in a folder."""
        state, unique = self._state, header.unique
        path = checked_path(state, header.node, name)
        if isinstance(path, int):
            return [refused(unique, errno.ENOENT if path == errno.EINVAL else path)]
        folder, _, text = path.rpartition("/")
        if text in (REFRESH, STATUS):
            return self._special(unique, folder, text, now)
        staged = state.staged.at(path)
        if staged is not None and (writing := state.nodes.get(staged.node)) is not None:
            writing.lookups += 1
            record = Remember(packed(LookedUp([writing.number])))
            return [record, done(unique, answers.entry(writing.number, state.attr(writing), 0.0, 0.0))]
        is_known, found = state.known.get(path, now)
        if is_known:
            return self._found(unique, path, found, now, now)
        last = state.known.last(path)
        if code := state.known.failing(path, now):
            return self._not_found_out(unique, path, code, now)
        if last is not None and state.known.reach.is_away(path, now):
            return [*self._found(unique, path, last, now, now), *self._try(path, now)]

        def then(answer: object, at: float) -> list[Effect]:
            if isinstance(answer, Failed):
                if answer.code in OUT_OF_REACH:
                    state.known.failed(path, answer.code, at)
                    state.known.reach.failed(path, now, at)
                return self._not_found_out(unique, path, answer.code, at)
            assert answer is None or isinstance(answer, Found)
            return self._found(unique, path, answer, now, at)

        patience_s = state.settings.timeout_s if last is None else min(KNOWN_S, state.settings.timeout_s)
        return state.waiting.ask(unique, Find(path), then, now, patience_s=patience_s)

    def attributes(self, header: Header, now: float) -> list[Effect]:
        """What a node looks like."""
        state, unique = self._state, header.unique
        node = state.nodes.get(header.node)
        if node is None:
            return [refused(unique, errno.ESTALE)]
        if node.kind == REFRESH:
            return self._refresh(unique, node, now)
        return [done(unique, answers.attributes(state.attr(node), state.attr_valid_s(node)))]

    def forget(self, lookups: tuple[tuple[int, int], ...]) -> None:
        """The kernel has let go of nodes."""
        for number, count in lookups:
            self._state.nodes.forget(number, count)

    def _found(
        self, unique: int, path: str, found: Found | None, asked_at: float, now: float
    ) -> list[Effect]:
        state = self._state
        if found is None:
            return [refused(unique, errno.ENOENT)]
        (node,), effects = state.told([(path, found)])
        return [*effects, done(unique, state.entry(node, asked_at)), *state.let_go(now)]

    def _not_found_out(self, unique: int, path: str, code: int, now: float) -> list[Effect]:
        """What was there last is taken to be there still while nobody can be asked."""
        last = self._state.known.last(path)
        return (
            [refused(unique, code)]
            if last is None or code not in OUT_OF_REACH
            else self._found(unique, path, last, now, now)
        )

    def _try(self, path: str, now: float) -> list[Effect]:
        """Whether there is an answer again: nobody waits for it."""
        reach = self._state.known.reach
        if not reach.tries(now):
            return []

        def tried(answer: object, at: float) -> list[Effect]:
            reach.tried()
            if isinstance(answer, Failed) and answer.code in OUT_OF_REACH:
                reach.failed(path, now, at)
            return []

        return self._state.waiting.ask_alone(Find(path), now, tried)

    def _stale_below(self, path: str) -> tuple[bytes, ...]:
        """What the kernel keeps of the names in a folder, and in its folders."""
        nodes = self._state.nodes
        own = nodes.get(nodes.number_of(path, is_folder=True))
        notices: list[bytes] = []
        for node in [*nodes.below(path), *([] if own is None else [own])]:
            if node.is_folder:
                node.listed_at = float("-inf")
                notices.append(answers.stale_content(node.number))
            if node is not own and not node.kind:
                notices.append(self._state.stale_name(node))
        return tuple(notices)

    def _special(self, unique: int, folder: str, kind: str, now: float) -> list[Effect]:
        state = self._state
        # Of a file that is opened without asking the kernel keeps what it has read: this is another one each time.
        version = repr(now) if state.is_without_opens else ""
        size_bytes = len(REFRESHED) if kind == REFRESH else _STATUS_BYTES
        node, is_new = state.nodes.look_up(folder, size_bytes=size_bytes, version=version, kind=kind)
        record = packed(node.named() if is_new else LookedUp([node.number]))
        return [Remember(record), done(unique, state.entry(node, 0.0))]

    def _refresh(self, unique: int, node: Node, now: float) -> list[Effect]:
        """The fleet first: who asks the daemon in between is told what is new. The kernel's names go last, by who may
        wait for it; they are all gone when this is answered."""
        state, folder = self._state, node.path

        def told(answer: object, _: float) -> list[Effect]:
            if isinstance(answer, Failed):
                return [refused(unique, answer.code)]
            return [done(unique, answers.attributes(state.attr(node), 0.0))]

        def refreshed(answer: object, at: float) -> list[Effect]:
            if isinstance(answer, Failed):
                return [refused(unique, answer.code)]
            state.known.drop_below(folder, at)
            state.waiting.part()
            return state.waiting.ask(unique, Tell(self._stale_below(folder)), told, at, since=now)

        # What another one has asked for may have been done before that which this one wants to see.
        return state.waiting.ask(unique, Refresh(folder), refreshed, now, is_alone=True)


def path_to_change(state: MountState, folder: int, name: bytes) -> str | int:
    """So for a name that is to be made, removed or moved: none of the special ones."""
    return errno.EPERM if name in _SPECIAL else checked_path(state, folder, name)


def checked_path(state: MountState, folder: int, name: bytes) -> str | int:
    """The path of a name in a folder; or why there can be none, out of `errno` (EINVAL: keys are UTF-8)."""
    node = state.nodes.get(folder)
    if node is None or not node.is_folder:
        return errno.ESTALE if node is None else errno.ENOTDIR
    if len(name) > NAME_BYTES_MAX:
        return errno.ENAMETOOLONG
    try:
        path = child(node.path, name.decode())
    except UnicodeDecodeError:
        return errno.EINVAL
    return errno.ENAMETOOLONG if len(path.encode()) > PATH_BYTES_MAX else path
