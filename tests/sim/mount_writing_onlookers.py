"""Programs that look at what others write through a mount."""

from __future__ import annotations

import contextlib
import errno
from collections import Counter

from stoker.base.rng import Rng
from tests.mount.writing_calls import split
from tests.sim.mount_writing_truth import PATHS, Content, Draft, Program, WritingTruth


class Onlookers(WritingTruth):
    """What they see is compared with what is there."""

    rng: Rng

    def reads(self, path: str) -> Program[None]:
        """All of a file. Some have it open for longer, while others write it."""
        is_alone, touched, data = not self.touching[path], self.touched[path], b""
        found: Content = None
        try:
            file = yield from self.calls.open(path)
        except OSError as error:
            self.excuse(path, error)
            if error.errno != errno.ENOENT:
                return
        else:
            try:
                data = yield from self.calls.read(file, 0, 1000)
                found = data
            except OSError as error:
                self.excuse(path, error)
                is_alone = False
            for _ in range(self.rng.below(30) if self.rng.chance(0.3) else 0):
                with contextlib.suppress(OSError):
                    yield from self.calls.fsync(file)
            yield from self.calls.close(file)
        if is_alone and self.touched[path] == touched and not self.kernel.lost_opens:
            self.kernel.seen["read by who knows"] += 1
            self.check_state(path, found, "a reader sees")

    def makes_a_folder(self, path: str) -> Program[None]:
        for call in (self.calls.mkdir(path), self.calls.unlink(path, is_folder=True)):
            try:
                yield from call
            except OSError as error:
                self.excuse(path, error)

    def lists(self, folder: str) -> Program[None]:
        """A folder, from its beginning to its end: what is being written all the while is in it, once."""
        try:
            opened = yield from self.calls.opendir(folder)
        except OSError as error:
            self.excuse(folder, error)
            return
        is_quiet = {path: not self.touching[path] for path in PATHS}
        drafts, touched, deaths = self.drafts_in(folder), Counter(self.touched), self.driver.deaths
        names: list[str] = []
        cookie, is_plus, is_whole = 0, self.rng.chance(0.5), False
        with contextlib.suppress(OSError):
            while listed := (yield from self.calls.readdir(opened, cookie, 400, is_plus=is_plus)):
                names += [one.name.decode() for one in listed]
                cookie = listed[-1].cookie
            is_whole = True
        yield from self.calls.closedir(opened)
        if not is_whole or self.driver.deaths != deaths:
            return
        here = [path for path in PATHS if split(path)[0] == folder and is_quiet[path]]
        for path in [path for path in here if self.touched[path] == touched[path]]:
            may_be, count = self.may_be[path], names.count(split(path)[1].decode())
            if may_be is not None and not self.kernel.lost_opens:
                self.kernel.seen["listed by who knows"] += 1
                may_count = {int(content is not None) for content in may_be}
                self.check(count in may_count, f"{folder!r} has {names}, and {path} is {may_be}")
        for draft, path in drafts.items():
            if self.drafts_in(folder).get(draft) == path and self.touched[path] == touched[path]:
                self.kernel.seen["listed while it is written"] += 1
                name = path.rpartition("/")[2]
                self.check(
                    names.count(name) == 1, f"{draft.process} is writing {path}, and {folder!r} has {names}"
                )

    def drafts_in(self, folder: str) -> dict[Draft, str]:
        """What is being written there, and nobody doubts as what."""
        return {
            draft: draft.path
            for draft in self.drafts
            if draft.path is not None
            and split(draft.path)[0] == folder
            and draft.is_open
            and draft.is_active
            and not draft.is_loose
        }
