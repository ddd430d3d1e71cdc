"""What a mount answers: requests of the kernel in, replies and effects out. Pure.

Whoever carries the effects out gives one request, answer or tick of time at a time, and does the effects of each in
their order. Nothing here waits: what is not known is asked for, and answered when it is found out.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator

from stoker.cache.mount import answers
from stoker.cache.mount.files import Files
from stoker.cache.mount.folders import Folders
from stoker.cache.mount.moving import Moving
from stoker.cache.mount.names import KNOWN_S, Names
from stoker.cache.mount.nodes import Node, PlainFiles
from stoker.cache.mount.putting import Putting
from stoker.cache.mount.questions import (
    Agreed,
    Back,
    CloseOtherBackings,
    Effect,
    Find,
    Held,
    List,
    Remember,
    Room,
)
from stoker.cache.mount.records import (
    Began,
    Closed,
    FileOpened,
    FileStaged,
    FolderRead,
    Forgotten,
    LookedUp,
    NodeNamed,
    Record,
    packed,
)
from stoker.cache.mount.requests import (
    MINOR_MIN,
    ROOT,
    Attribute,
    Changing,
    Closing,
    Creating,
    Forget,
    Init,
    InitRequest,
    Name,
    Opcode,
    Opening,
    Reading,
    Renaming,
    Request,
    Writing,
)
from stoker.cache.mount.source_port import Found, Page
from stoker.cache.mount.state import MountSettings, MountState, child, done, refused
from stoker.cache.mount.waiting import Failed
from stoker.cache.mount.writing import WritingFiles

READAHEAD_BYTES = 1024 * 1024
BACKGROUND_MAX = 64
_WANTED = (
    Init.ASYNC_READ | Init.BIG_WRITES | Init.DO_READDIRPLUS | Init.READDIRPLUS_AUTO | Init.PARALLEL_DIROPS
    | Init.MAX_PAGES | Init.INIT_EXT | Init.HAS_RESEND
)  # fmt: skip
_ATTRIBUTES = b"user.stoker."
_VERSION, _HELD = _ATTRIBUTES + b"version", _ATTRIBUTES + b"held_bytes"
_QUIET = frozenset({Opcode.FORGET, Opcode.BATCH_FORGET, Opcode.INTERRUPT})
"""Which have no answer."""


class MountCore:
    """Decides for one mount. `restore` before all else where a daemon before left something. `plain`: where it says of
    which files whoever reads requests may open them as number 0, and close that, in its place."""

    def __init__(self, settings: MountSettings, plain: PlainFiles | None = None) -> None:
        self.state = MountState(settings, plain)
        self._names = Names(self.state)
        self._folders = Folders(self.state)
        self._putting = Putting(self.state)
        self._writing = WritingFiles(self.state, self._putting)
        self._moving = Moving(self.state)
        self._files = Files(self.state, self._writing)
        self._number = 0
        self._room: tuple[int, int] | None = None

    # -- from one daemon to the next -------------------------------------------------------------------------------

    def restore(self, records: Iterable[Record]) -> None:
        """What was written down before."""
        state = self.state
        for record in records:
            match record:
                case Began(number, flags, started_ns):
                    self._number, state.started_ns = number, started_ns
                    state.agree(flags)
                case FileStaged():
                    ended = None if record.node else state.staged.get(record.stage)
                    if (staged := state.staged.restore(record)) is not None:
                        state.is_written(staged)
                    elif ended is not None:
                        state.settle(ended)
                case FileOpened() | FolderRead() | Closed():
                    state.handles.restore(record)
                    if isinstance(record, Closed):
                        state.staged.close(record.handle)
                case NodeNamed() | LookedUp() | Forgotten():
                    state.nodes.restore(record)
                    of_node = state.staged.of_node(record.node) if isinstance(record, NodeNamed) else None
                    if of_node is not None:
                        of_node.before = None
                        state.is_written(of_node)
        for node in state.nodes:
            state.nodes.mark(node)

    def end(self, now: float) -> list[Effect]:
        """It is unmounted: what was written is put."""
        return self._putting.finish_all(now)

    def begin(self, now_ns: int, now: float) -> list[Effect]:
        """A daemon begins, or goes on in place of the one before. `now_ns`: since 1970."""
        state = self.state
        self._number += 1
        state.started_ns = state.started_ns or now_ns
        state.wall_offset_ns = now_ns - int(now * 1e9)
        state.handles.begin(self._number)
        state.staged.begin(now_ns)
        left = [staged for staged in state.staged.all() if not staged.handles]
        finished = [effect for staged in left for effect in self._putting.finish(staged, now)]
        effects: list[Effect] = [self._began()]
        if self.is_taken_over and state.flags & Init.PASSTHROUGH:
            effects.append(CloseOtherBackings(state.handles.backings()))
        return [*effects, *finished]

    @property
    def is_taken_over(self) -> bool:
        """Whether there was a daemon before, which may have read what it did not live to answer."""
        return self._number > 1

    @property
    def is_agreed(self) -> bool:
        """Whether the kernel has had its answer to INIT, which is asked once."""
        return bool(self.state.flags)

    @property
    def attributes(self) -> bytes:
        """How the names of all extended attributes begin that a file can have; empty: the kernel is to be told that
        there are none."""
        return _ATTRIBUTES if self.state.settings.has_xattrs else b""

    def facts(self) -> dict[str, object]:
        """For who looks after the mount."""
        state = self.state
        return {
            "daemon": self._number,
            "passthrough": "yes" if state.flags & Init.PASSTHROUGH else "no",
            "names_of_the_kernel": len(state.nodes) - 1,
            "names_known": len(state.known),
            "open": len(state.handles),
            "waiting": len(state.waiting),
            "being_written": len(state.staged),
        }

    def snapshot(self) -> Iterator[bytes]:
        """All that the next daemon has to know, as records."""
        state = self.state
        yield packed(Began(self._number, state.flags, state.started_ns))
        for node in state.nodes:
            if node.number != ROOT:
                yield packed(state.named(node))
        for record in state.handles.records():
            yield packed(record)
        for one in state.staged.records():
            yield packed(one)

    # -- what comes ------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Effect]:
        """Time goes by."""
        return self.state.waiting.tick(now)

    def interrupt(self, unique: int) -> list[Effect]:
        """Whoever asked that is to end: see Signals."""
        return self.state.waiting.interrupt(unique)

    def answered(self, number: int, answer: object, now: float) -> list[Effect]:
        """A question has an answer: what it was asked for, or Failed."""
        question, asked_at, waiting = self.state.waiting.answered(number)
        known = self.state.known
        if isinstance(question, Find) and not isinstance(answer, Failed):
            assert answer is None or isinstance(answer, Found)
            known.put(question.path, answer, asked_at)
        if isinstance(question, List) and isinstance(answer, Page):
            for name, found in answer.entries:
                known.put(child(question.path, name), found, asked_at)
        effects = [effect for then in waiting for effect in then(answer, now)]
        if isinstance(question, Back) and isinstance(answer, int):
            effects += self._files.backed(question, answer)
        return effects

    def step(self, request: Request, now: float) -> list[Effect]:
        """The kernel asks for something."""
        header, body = request
        unique = header.unique
        match header.opcode, body:
            case Opcode.LOOKUP, Name(name):
                return self._names.look_up(header, name, now)
            case Opcode.GETATTR, _:
                return self._names.attributes(header, now)
            case _, Forget(lookups):
                self._names.forget(lookups)
                return [Remember(packed(Forgotten(list(lookups))))]
            case ((Opcode.OPEN | Opcode.FLUSH), _) if self.state.is_without_opens:
                return [refused(unique, errno.ENOSYS)]
            case Opcode.OPEN, Opening(flags):
                return self._files.open(header, flags, now)
            case Opcode.READ, Reading() as asked:
                return self._files.read(header, asked, now)
            case ((Opcode.RELEASE | Opcode.RELEASEDIR), Closing(handle)):
                return self._files.close(unique, handle, now)
            case Opcode.OPENDIR, _:
                return self._folders.open(header, now)
            case ((Opcode.READDIR | Opcode.READDIRPLUS), Reading() as asked):
                return self._folders.read(header, asked, now, is_plus=header.opcode == Opcode.READDIRPLUS)
            case _, Attribute() as attribute:
                return self._attribute(unique, self.state.nodes.get(header.node), attribute, now)
            case Opcode.STATFS, _:
                return self._statfs(unique, now)
            case Opcode.INIT, InitRequest() as asked_init:
                return self._init(unique, asked_init)
            case Opcode.FLUSH, Closing(handle):
                return self._writing.flush(header, handle, now)
            case Opcode.FSYNC, Closing(handle):
                return self._writing.sync(header, handle, now)
            case ((Opcode.FSYNCDIR | Opcode.ACCESS | Opcode.DESTROY), _):
                return [done(unique)]
        if self.state.settings.is_writable and header.opcode in _WRITES:
            return self._write(request, now)
        return self._unknown(header.opcode, unique)

    def _write(self, request: Request, now: float) -> list[Effect]:
        header, body = request
        match header.opcode, body:
            case Opcode.WRITE, Writing() as asked:
                return self._writing.write(header, asked, now)
            case Opcode.CREATE, Creating() as creating:
                return self._writing.create(header, creating, now)
            case Opcode.MKDIR, Creating(name=name):
                return self._moving.make_folder(header, name, now)
            case ((Opcode.UNLINK | Opcode.RMDIR), Name(name)):
                return self._moving.remove(header, name, now, is_folder=header.opcode == Opcode.RMDIR)
            case ((Opcode.RENAME | Opcode.RENAME2), Renaming() as renaming):
                return self._moving.rename(header, renaming, now)
            case Opcode.SETATTR, Changing() as changing:
                node = self.state.nodes.get(header.node)
                if node is None:
                    return [refused(header.unique, errno.ESTALE)]
                return self._writing.change(header, node, changing, now)
        return [refused(header.unique, errno.EOPNOTSUPP)]

    # -- the rest --------------------------------------------------------------------------------------------------

    def _unknown(self, opcode: int, unique: int) -> list[Effect]:
        if opcode in _QUIET:
            return []
        if opcode in _LINKS and self.state.settings.is_writable:
            return [refused(unique, errno.EPERM)]
        return [refused(unique, errno.EROFS if opcode in _WRITES else errno.ENOSYS)]

    def _init(self, unique: int, asked: InitRequest) -> list[Effect]:
        state = self.state
        if asked.major != 7 or asked.minor < MINOR_MIN:
            return [refused(unique, errno.EPROTO)]
        wanted = _WANTED | (Init.PASSTHROUGH if state.settings.wants_passthrough else Init(0))
        wanted |= Init.ATOMIC_O_TRUNC | Init.HANDLE_KILLPRIV_V2 if state.settings.is_writable else Init(0)
        if not (wanted & asked.flags & Init.PASSTHROUGH or state.settings.is_writable):
            wanted |= Init.NO_OPEN_SUPPORT
        state.agree(int(wanted) & asked.flags)
        body = answers.init(
            asked, wanted, write_bytes_max=state.settings.read_bytes_max, readahead_bytes=READAHEAD_BYTES,
            background_max=BACKGROUND_MAX,
        )  # fmt: skip
        return [self._began(), done(unique, body), Agreed(READAHEAD_BYTES)]

    def _began(self) -> Remember:
        return Remember(packed(Began(self._number, self.state.flags, self.state.started_ns)))

    def _statfs(self, unique: int, now: float) -> list[Effect]:
        def then(answer: object, _: float) -> list[Effect]:
            if isinstance(answer, tuple):
                self._room = answer
            elif isinstance(answer, Failed) and self._room is None:
                return [refused(unique, answer.code)]
            assert self._room is not None
            capacity_bytes, held_bytes = self._room
            return [done(unique, answers.statfs(capacity_bytes, max(capacity_bytes - held_bytes, 0), 0))]

        timeout_s = self.state.settings.timeout_s
        patience_s = timeout_s if self._room is None else min(KNOWN_S, timeout_s)
        return self.state.waiting.ask(unique, Room(), then, now, patience_s=patience_s)

    def _attribute(self, unique: int, node: Node | None, asked: Attribute, now: float) -> list[Effect]:
        if not self.state.settings.has_xattrs:
            return [refused(unique, errno.ENOSYS)]
        if node is None:
            return [refused(unique, errno.ESTALE)]
        has_any = not node.is_folder and not node.kind
        if not asked.name:
            return [_sized(unique, b"%b\0%b\0" % (_VERSION, _HELD) if has_any else b"", asked.size_bytes)]
        if not has_any or asked.name not in (_VERSION, _HELD):
            return [refused(unique, errno.ENODATA)]
        if asked.name == _VERSION:
            return [_sized(unique, node.version.encode(), asked.size_bytes)]

        def then(answer: object, _: float) -> list[Effect]:
            if isinstance(answer, Failed):
                return [refused(unique, answer.code)]
            return [_sized(unique, str(answer).encode(), asked.size_bytes)]

        return self.state.waiting.ask(unique, Held(node.path, node.version), then, now)


def _sized(unique: int, value: bytes, size_bytes: int) -> Effect:
    """To who asks how long it is first, and then for so much."""
    if not size_bytes:
        return done(unique, answers.size(len(value)))
    return done(unique, value) if len(value) <= size_bytes else refused(unique, errno.ERANGE)


_LINKS = frozenset({Opcode.SYMLINK, Opcode.LINK, Opcode.MKNOD})
"""There are no such files here."""
_WRITES = frozenset({
    Opcode.SETATTR, Opcode.MKDIR, Opcode.UNLINK, Opcode.RMDIR, Opcode.RENAME, Opcode.RENAME2, Opcode.WRITE,
    Opcode.CREATE, Opcode.REMOVEXATTR,
})  # fmt: skip
