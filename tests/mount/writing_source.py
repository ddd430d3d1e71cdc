"""An origin that is written to through a mount, and the machine's disk on which that waits; and the daemons' death."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, cast

from stoker.base.rng import Rng
from stoker.cache.mount.finding import Finding
from stoker.cache.mount.questions import (
    MakeFolder,
    Put,
    Question,
    Remove,
    RemoveFolder,
    Rename,
    Stage,
    StageDrop,
    StageKeep,
    StageRead,
    StageSize,
)  # fmt: skip
from stoker.cache.mount.records import whole_bytes
from stoker.cache.mount.requests import Opcode, Request
from stoker.cache.mount.source_port import Found, Page, Source
from stoker.cache.mount.staging import Staging
from stoker.cache.mount.state import MountSettings
from stoker.cache.mount.waiting import Failed
from stoker.errors import ObjectNotFound, OriginError, OriginFull, WriteDenied
from tests.mount.driver import Died, Driver
from tests.mount.source import FakeSource
from tests.mount.writing_kernel import WritingKernel

ON_DISK = (Stage, StageSize, StageRead, StageDrop, StageKeep)
CHANGES = (*ON_DISK, Put, Remove, MakeFolder, RemoveFolder, Rename)
_ENDS = (StageDrop, StageKeep)


class WritingSource(FakeSource):
    """What is changed through the mount its fleet sees at once. What goes wrong does so before or after it is done.
    `kept`: files on the disk that nobody could put, by whose name they lie there."""

    def __init__(self, rng: Rng, kernel: WritingKernel, folder: Path) -> None:
        super().__init__(rng, kernel)
        self.staging = Staging(folder)
        self.failure_chance = 0.0
        self.full_chance = 0.0
        self.kept: set[str] = set()
        self.on_put: Callable[[str, bytes], None] = lambda *_: None
        self.begin()

    def begin(self) -> None:
        """Another daemon, which knows nothing of what the one before was doing."""
        self._finding = Finding(cast(Source, self), self.staging, -1, 0.0)

    def answer(self, question: Question) -> object:
        """As the shell finds it out, with its own steps."""
        if not isinstance(question, CHANGES):
            return super().answer(question)
        self.asked.append(question)
        if isinstance(question, StageKeep):
            kept = self.staging.keep(question.stage, question.path)
            self.kept |= set() if kept is None else {kept.name}
            return None
        if isinstance(question, Stage) and self._rng.chance(self.full_chance):
            self._finding.find(question._replace(data=question.data[: self._rng.below(len(question.data))]))
            return Failed(errno.ENOSPC)
        return self._finding.find(question)

    # -- what `Finding` needs of a source --------------------------------------------------------------------------

    def find(self, path: str) -> Found | None:
        self._may_fail()
        return self._found(path)

    def page(self, path: str, after: str | None, limit: int) -> Page:
        return self._page(path, after, limit)

    def put(self, path: str, file: BinaryIO, size_bytes: int) -> Found:
        content = file.read()
        assert len(content) == size_bytes
        self._may_fail()
        self.on_put(path, content)
        return self._wrote(path, content)

    def copy(self, path: str, to: str) -> Found:
        self._may_fail()
        if path not in self.now_is:
            raise ObjectNotFound(path)
        return self._wrote(to, self.contents[path, self.now_is[path]])

    def remove(self, path: str) -> None:
        self._may_fail()
        super().remove(path)
        self._see(path)
        self._may_fail()

    def make_folder(self, path: str) -> None:
        self._wrote(f"{path}/", b"")

    def content(self, path: str) -> bytes | None:
        """What the origin has."""
        version = self.now_is.get(path)
        return None if version is None else self.contents[path, version]

    def _wrote(self, path: str, content: bytes) -> Found:
        version = f"v{len(self.history.get(path, ())) + 1}"
        self.contents[path, version] = content
        self._note(path, version)
        self._see(path)
        self._may_fail()
        return Found(False, len(content), version, 1.5e9)

    def _may_fail(self) -> None:
        if self._rng.chance(self.failure_chance):
            raise self._rng.choice([WriteDenied, OriginError, OriginFull])("so it is")


class WritingDriver(Driver):
    """Daemons whose last wishes may come true. The disk is never late, and does not fail by itself."""

    kernel: WritingKernel
    source: WritingSource

    def __init__(
        self, kernel: WritingKernel, source: WritingSource, settings: MountSettings, rng: Rng
    ) -> None:
        super().__init__(kernel, source, settings, rng)

    def die(self) -> None:
        """What was under way at the origin may be done all the same, before the next daemon begins."""
        for job in self._jobs:
            if not job.is_found and isinstance(job.question, CHANGES) and self.rng.chance(0.3):
                self.source.answer(job.question)
        self.source.begin()
        super().die()

    def _read(self) -> Request:
        """With what the system tells of who asks."""
        request = super()._read()
        header = request.header
        if header.opcode == Opcode.FLUSH and header.pid in self.kernel.killed:
            return request._replace(header=header._replace(pid=-header.pid))
        return request

    def _remember(self, record: bytes) -> None:
        """A few records at once are written whole or not at all, or the last one in part: they lie in one page."""
        if self.death_chance and self.rng.chance(self.death_chance):
            torn = record[: self.rng.below(len(record) + 1)]
            self.log += torn if not whole_bytes(torn) or len(torn) == len(record) else b""
            raise Died
        self.log += record

    def _fails(self, question: Question) -> bool:
        return not isinstance(question, _ENDS) and super()._fails(question)

    def _delay_s(self, question: Question) -> float:
        return (
            self.rng.uniform(0.0, self.delay_s)
            if isinstance(question, ON_DISK)
            else super()._delay_s(question)
        )
