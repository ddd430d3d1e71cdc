"""Objects that change, and a fleet that knows of it later, for tests of the mount's core."""

from __future__ import annotations

import errno
from bisect import bisect_right

import xxhash

from stoker.base.rng import Rng
from stoker.cache.mount.questions import Back, Fetch, Find, Held, List, Question, Read, Refresh, Room, Status
from stoker.cache.mount.source_port import Found, Page
from stoker.cache.mount.waiting import Failed
from tests.mount.kernel import FakeKernel

SIZES = (5, 40, 100, 300)


class FakeSource:
    """`now_is`: what the objects are, by path; `seen`: what the fleet takes them for, until it is told to ask, or reads
    a version that is gone. `history`: what each path was, by the number of the change; "": nothing."""

    def __init__(self, rng: Rng, kernel: FakeKernel) -> None:
        self._rng = rng
        self._kernel = kernel
        self.changes = 0
        self.now_is: dict[str, str] = {}
        self.seen: dict[str, str] = {}
        self.history: dict[str, list[tuple[int, str]]] = {}
        self.contents: dict[tuple[str, str], bytes] = {}
        self.view_changes: list[str] = []
        self.refreshed: list[str] = []
        self.asked: list[Question] = []
        """What was asked, in the order in which it was found out."""
        self.held: set[tuple[str, str]] = set()
        """Versions that are read also when they are gone."""

    # -- what happens ----------------------------------------------------------------------------------------------

    def write(self, path: str, size_bytes: int | None = None) -> str:
        """A new version; no two of a path are equally long."""
        version = f"v{len(self.history.get(path, ())) + 1}"
        if size_bytes is None:
            size_bytes = self._rng.choice(SIZES)
        while any(one == path and len(held) == size_bytes for (one, _), held in self.contents.items()):
            size_bytes += 1
        self.contents[path, version] = content_of(path, version, size_bytes)
        self._note(path, version)
        if self._rng.chance(0.3):
            self.held.add((path, version))
        return version

    def remove(self, path: str) -> None:
        """It is there no more."""
        if path in self.now_is:
            self._note(path, "")

    def notice(self, path: str) -> None:
        """The fleet sees what is there, and below."""
        for one in {*self.now_is, *self.seen}:
            if not path or one == path or one.startswith(f"{path}/"):
                self._see(one)

    def states_since(self, path: str, change: int) -> set[str]:
        """What a path was from that change on until now."""
        history = self.history.get(path, [])
        first = bisect_right(history, change, key=lambda one: one[0]) - 1
        return {version for _, version in history[max(first, 0) :]} | ({""} if first < 0 else set())

    def size_bytes(self, path: str, version: str) -> int:
        """Of one version."""
        return len(self.contents[path, version])

    def version_of(self, path: str, size_bytes: int) -> str:
        """Which version of it is so long; empty: none."""
        of_path = (one for (name, one) in self.contents if name == path)
        return next((one for one in of_path if self.size_bytes(path, one) == size_bytes), "")

    # -- what is asked ---------------------------------------------------------------------------------------------

    def answer(self, question: Question) -> object:
        """As the shell finds it out."""
        self.asked.append(question)
        match question:
            case Find(path):
                return self._found(path)
            case List(path, after, limit):
                return self._page(path, after, max(1, limit - self._rng.below(limit)))
            case Read(path, version, start, stop):
                if not self._is_readable(path, version):
                    return Failed(errno.ESTALE)
                return memoryview(self.contents[path, version])[start:stop]
            case Back(_, path, version):
                if not self._is_readable(path, version):
                    return Failed(errno.ESTALE) if self._rng.chance(0.5) else None
                if self._rng.chance(0.2):
                    return None
                return self._kernel.open_backing(self.contents[path, version])
            case Refresh(path):
                self.refreshed.append(path)
                self.notice(path)
                return 1
            case Room():
                return 1 << 30, 1 << 20
            case Held(path, version):
                return len(self.contents.get((path, version), b""))
            case Status(path):
                return f"folder: /{path}\n".encode()
            case Fetch():
                return None
        raise AssertionError(question)

    def _found(self, path: str) -> Found | None:
        version = self.seen.get(path)
        if version is not None:
            return Found(False, self.size_bytes(path, version), version, 1.5e9)
        if not path or any(one.startswith(f"{path}/") for one in self.seen):
            return Found(True)
        return None

    def _page(self, path: str, after: str | None, limit: int) -> Page:
        names = names_in(self.seen, path)
        first = 0 if after is None else bisect_right(names, after)
        last = min(first + limit, len(names))
        entries: list[tuple[str, Found]] = []
        for one in names[first:last]:
            name = one.rstrip("/")
            found = self._found(f"{path}/{name}" if path else name)
            assert found is not None
            entries.append((name, found))
        return Page(entries, names[last - 1] if last < len(names) else None)

    def _is_readable(self, path: str, version: str) -> bool:
        if self.now_is.get(path) == version or (path, version) in self.held:
            return True
        self._see(path)
        return False

    def _note(self, path: str, version: str) -> None:
        self.changes += 1
        self.history.setdefault(path, []).append((self.changes, version))
        if version:
            self.now_is[path] = version
        else:
            del self.now_is[path]

    def _see(self, path: str) -> None:
        if self.seen.get(path) == self.now_is.get(path):
            return
        self.view_changes.append(path)
        if path in self.now_is:
            self.seen[path] = self.now_is[path]
        else:
            del self.seen[path]


def names_in(paths: dict[str, str], folder: str) -> list[str]:
    """What is right in a folder, sorted as keys are; folders end with a slash."""
    prefix = f"{folder}/" if folder else ""
    below = [one[len(prefix) :] for one in paths if one.startswith(prefix) and one not in (folder, prefix)]
    files = {name for name in below if "/" not in name}
    folders = {name[: name.index("/") + 1] for name in below if "/" in name}
    return sorted(files | {one for one in folders if one[:-1] not in files})


def content_of(path: str, version: str, size_bytes: int) -> bytes:
    """No two versions of anything look alike anywhere."""
    blocks = [
        xxhash.xxh3_128_digest(f"{path}@{version}", seed=block) for block in range(-(-size_bytes // 16))
    ]
    return b"".join(blocks)[:size_bytes]
