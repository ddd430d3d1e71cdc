"""System calls on a mount, as Linux makes requests of them. Each is a generator for `FakeKernel.start`; OSError is what
the program sees."""

from __future__ import annotations

import errno
import stat
import struct
from collections.abc import Generator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from stoker.cache.mount.answers import Open
from stoker.cache.mount.requests import ROOT, Opcode
from tests.mount.kernel import PAGE_BYTES, Answered, Asked, Entry, FakeKernel, Inode, unpacked_entry

T = TypeVar("T")
Steps = Generator[Asked, Answered, T]
ENTRY_BYTES = 128
_DIRENT = struct.Struct("=QQII")


@dataclass(slots=True)
class File:
    """An open one. `content`: what the kernel reads in the daemon's place."""

    inode: Inode
    handle: int
    content: bytes | None = None
    is_direct: bool = False


@dataclass(slots=True)
class Folder:
    """An open one."""

    node: int
    handle: int


class Listed(NamedTuple):
    """An entry of a folder. `node`: what READDIRPLUS told of it; 0: nothing."""

    name: bytes
    cookie: int
    inode: int
    kind: int
    node: int = 0


class Calls:
    """Of the programs on one machine."""

    def __init__(self, kernel: FakeKernel) -> None:
        self._kernel = kernel

    def stat(self, path: str) -> Steps[Inode]:
        """What there is; a node that was forgotten by the time it is looked at is looked up again."""
        for is_again in (False, True):
            node = 0
            try:
                node = yield from self._walk(path, is_again=is_again)
                inode = self._kernel.inodes[node]
                if inode.attr_until <= self._kernel.now:
                    yield from self._ask(Opcode.GETATTR, node, bytes(16))
                return inode
            except OSError as error:
                if error.errno != errno.ESTALE or is_again:
                    raise
            finally:
                if node:
                    self._kernel.unpin(node)
        raise AssertionError

    def open(self, path: str) -> Steps[File]:
        """What is stale by then is looked up again, once."""
        for is_again in (False, True):
            try:
                node = yield from self._walk(path, is_again=is_again)
                return (yield from self._open(node))
            except OSError as error:
                if error.errno != errno.ESTALE or is_again:
                    raise
                self._kernel.seen["ESTALE at OPEN"] += 1
        raise AssertionError

    def read(self, file: File, offset: int, size_bytes: int) -> Steps[bytes]:
        """By the way that was agreed at OPEN."""
        if file.content is not None:
            return file.content[offset : offset + size_bytes]
        if file.is_direct:
            return (yield from self._request(file, offset, size_bytes))
        inode = file.inode
        stop = min(offset + size_bytes, inode.size_bytes)
        if offset >= stop:
            return b""
        pages = range(offset // PAGE_BYTES, (stop - 1) // PAGE_BYTES + 1)
        missing = [page for page in pages if page not in inode.pages]
        while missing:
            count = next((n for n in range(1, len(missing)) if missing[n] != missing[0] + n), len(missing))
            data = yield from self._request(file, missing[0] * PAGE_BYTES, count * PAGE_BYTES)
            data = data.ljust(count * PAGE_BYTES, b"\0")  # as Linux does to what is short
            for number in range(count):
                inode.pages[missing[number]] = data[number * PAGE_BYTES : (number + 1) * PAGE_BYTES]
            del missing[:count]
        data = b"".join(inode.pages.get(page, bytes(PAGE_BYTES)) for page in pages)
        first = pages.start * PAGE_BYTES
        return data[offset - first : stop - first]

    def close(self, file: File) -> Steps[None]:
        """The kernel counts first, and tells then."""
        inode = file.inode
        if file.content is not None:
            inode.backed -= 1
        elif not file.is_direct:
            inode.by_requests -= 1
        try:
            yield from self._ask(Opcode.RELEASE, inode.node, struct.pack("=QIIQ", file.handle, 0, 0, 0))
        finally:
            self._kernel.unpin(inode.node)

    def opendir(self, path: str) -> Steps[Folder]:
        """A folder, for `readdir`."""
        node = yield from self._walk(path)
        try:
            if not stat.S_ISDIR(self._kernel.inodes[node].mode):
                raise OSError(errno.ENOTDIR, "")
            body = yield from self._ask(Opcode.OPENDIR, node, bytes(8))
        except OSError:
            self._kernel.unpin(node)
            raise
        return Folder(node, struct.unpack_from("=Q", body)[0])

    def readdir(self, folder: Folder, cookie: int, size_bytes: int, *, is_plus: bool) -> Steps[list[Listed]]:
        """Entries from there on; none: that is the end."""
        kernel = self._kernel
        opcode = Opcode.READDIRPLUS if is_plus else Opcode.READDIR
        asked = struct.pack("=QQIIQII", folder.handle, cookie, size_bytes, 0, 0, 0, 0)
        kernel.locks[folder.node] += 1
        asked_at = kernel.changes
        try:
            body = yield from self._ask(opcode, folder.node, asked)
        finally:
            kernel.locks[folder.node] -= 1
        assert len(body) <= size_bytes
        listed = list(listed_in(body, is_plus=is_plus))
        for one, entry in listed:
            if entry is not None and entry.node:
                assert one.name not in (b".", b"..")
                kernel.instantiate(folder.node, one.name, kernel.as_is(entry, asked_at))
        return [one for one, _ in listed]

    def closedir(self, folder: Folder) -> Steps[None]:
        """It is read no more."""
        try:
            yield from self._ask(Opcode.RELEASEDIR, folder.node, struct.pack("=QIIQ", folder.handle, 0, 0, 0))
        finally:
            self._kernel.unpin(folder.node)

    def getxattr(self, path: str, name: bytes, size_bytes: int) -> Steps[bytes]:
        """With size 0: how long it is."""
        node = yield from self._walk(path)
        try:
            return (
                yield from self._ask(Opcode.GETXATTR, node, struct.pack("=II", size_bytes, 0) + name + b"\0")
            )
        finally:
            self._kernel.unpin(node)

    def statfs(self) -> Steps[bytes]:
        """Of the mount."""
        return (yield from self._ask(Opcode.STATFS, ROOT))

    # -- parts of them ---------------------------------------------------------------------------------------------

    def _ask(self, opcode: int, node: int, body: bytes = b"") -> Steps[bytes]:
        code, said = yield Asked(opcode, node, body)
        if code:
            raise OSError(code, "")
        return said

    def _walk(self, path: str, *, is_again: bool = False) -> Steps[int]:
        """The node of a path, pinned. `is_again`: what is known is asked for anew."""
        kernel = self._kernel
        node = ROOT
        kernel.pin(node)
        for name in filter(None, path.encode().split(b"/")):
            try:
                following = yield from self._step(node, name, is_again=is_again)
            finally:
                kernel.unpin(node)
            node = following
        return node

    def _step(self, parent: int, name: bytes, *, is_again: bool) -> Steps[int]:
        kernel = self._kernel
        if not stat.S_ISDIR(kernel.inodes[parent].mode):
            raise OSError(errno.ENOTDIR, "")
        dentry = kernel.dentry(parent, name)
        if dentry is not None:
            kernel.pin(dentry.node)
            if not is_again and kernel.now < dentry.until:
                return dentry.node
            code, body = yield Asked(Opcode.LOOKUP, parent, name + b"\0")
            entry = None if code else unpacked_entry(body)
            if entry is not None and entry.node == dentry.node:
                kernel.counted(entry)
                dentry.until = kernel.now + entry.name_valid_s
                return dentry.node
            if entry is not None:
                kernel.forget(entry.node, 1)
            kernel.unpin(dentry.node)
            if code == errno.EINTR:
                raise OSError(code, "")
            kernel.drop(dentry)
        kernel.locks[parent] += 1
        try:
            body = yield from self._ask(Opcode.LOOKUP, parent, name + b"\0")
            inode = kernel.instantiate(parent, name, unpacked_entry(body))
            return kernel.pin(inode.node).node
        finally:
            kernel.locks[parent] -= 1

    def _open(self, node: int) -> Steps[File]:
        kernel = self._kernel
        try:
            body = yield from self._ask(Opcode.OPEN, node, struct.pack("=II", 0o100000, 0))
        except OSError:
            kernel.unpin(node)
            raise
        handle, flags, backing_id = struct.unpack("=QIi", body)
        inode = kernel.inodes[node]
        fault = ""
        if flags & Open.PASSTHROUGH:
            if backing_id not in kernel.backing:
                fault = f"OPEN is answered with backing file {backing_id}, which is closed"
            elif inode.by_requests or (inode.backed and inode.backing_id != backing_id):
                fault = "OPEN is answered with a backing file, and others read the node another way"
        elif not flags & Open.DIRECT_IO and inode.backed:
            fault = "OPEN is answered with requests, and others read the node from a backing file"
        if fault:
            kernel.faults.append(fault)
            yield Asked(Opcode.RELEASE, node, struct.pack("=QIIQ", handle, 0, 0, 0))
            kernel.unpin(node)
            raise OSError(errno.EIO, fault)
        if flags & Open.PASSTHROUGH:
            kernel.seen["opened by a backing file"] += 1
            inode.backed, inode.backing_id = inode.backed + 1, backing_id
            return File(inode, handle, kernel.backing[backing_id])
        if flags & Open.DIRECT_IO:
            return File(inode, handle, is_direct=True)
        kernel.seen["opened by requests"] += 1
        inode.by_requests += 1
        if not flags & Open.KEEP_CACHE:
            inode.pages.clear()
        return File(inode, handle)

    def _request(self, file: File, offset: int, size_bytes: int) -> Steps[bytes]:
        asked = struct.pack("=QQIIQII", file.handle, offset, size_bytes, 0, 0, 0, 0)
        data = yield from self._ask(Opcode.READ, file.inode.node, asked)
        assert len(data) <= size_bytes
        return data


def listed_in(body: bytes, *, is_plus: bool) -> Generator[tuple[Listed, Entry | None]]:
    """The entries that READDIR or READDIRPLUS was answered with."""
    at = 0
    while at < len(body):
        entry = unpacked_entry(body, at) if is_plus else None
        start = at + (ENTRY_BYTES if is_plus else 0)
        inode, cookie, length, kind = _DIRENT.unpack_from(body, start)
        end = start + _DIRENT.size + length
        name = body[end - length : end]
        yield Listed(name, cookie, inode, kind, entry.node if entry is not None else 0), entry
        at = end + -end % 8
