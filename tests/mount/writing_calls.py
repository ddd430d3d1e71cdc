"""System calls that write to a mount, as Linux makes requests of them."""

from __future__ import annotations

import errno
import stat
import struct
from collections.abc import Generator
from typing import TypeVar

from stoker.cache.mount.requests import Opcode
from tests.mount.calls import Calls, File, Folder, Listed, Steps
from tests.mount.kernel import Asked, Dentry, Inode, unpacked_entry
from tests.mount.writing_kernel import Locked, WritingKernel

T = TypeVar("T")
READ_WRITE, CREATE, TRUNCATE = 0o2, 0o100, 0o1000
_INVALIDATES = (errno.EINTR, errno.ENOENT)
"""Nobody knows whether it was done."""


class WritingCalls(Calls):
    """Of the programs on one machine."""

    _kernel: WritingKernel

    def __init__(self, kernel: WritingKernel) -> None:
        super().__init__(kernel)

    # -- files -----------------------------------------------------------------------------------------------------

    def open_to_write(self, path: str) -> Steps[File]:
        """O_RDWR | O_CREAT | O_TRUNC."""
        kernel, (folder, name) = self._kernel, split(path)
        for is_again in (False, True):
            parent = yield from self._walk(folder, is_again=is_again)
            try:
                yield from self._lock(parent)
                try:
                    node = yield from self._step(parent, name, is_again=is_again, is_locked=True)
                except OSError as error:
                    if error.errno != errno.ENOENT:
                        raise
                    try:
                        return (yield from self._create(parent, name))
                    except OSError as error:
                        if error.errno != errno.ESTALE or is_again:
                            raise
                        continue
                finally:
                    kernel.unlock(parent, is_alone=True)
            finally:
                kernel.unpin(parent)
            try:
                return (yield from self._truncate(node))
            except OSError as error:
                if error.errno != errno.ESTALE or is_again:
                    raise
        raise AssertionError

    def write(self, file: File, offset: int, data: bytes) -> Steps[None]:
        """All of it, or an error."""
        inode, kernel = file.inode, self._kernel
        head = struct.pack("=QQIIQII", file.handle, offset, len(data), 0, 0, 0, 0)
        said = yield from self._ask(Opcode.WRITE, inode.node, head + data)
        assert struct.unpack_from("=I", said)[0] == len(data)
        kernel.resized(inode, max(inode.size_bytes, offset + len(data)))

    def read(self, file: File, offset: int, size_bytes: int) -> Steps[bytes]:
        """Of a file that is written here nothing is kept, which is as if pages were locked while they are read."""
        if file.inode.node not in self._kernel.written or file.content is not None:
            return (yield from super().read(file, offset, size_bytes))
        if offset + size_bytes > file.inode.size_bytes:
            yield from self._look(file.inode)
        stop = min(offset + size_bytes, file.inode.size_bytes)
        if offset >= stop:
            return b""
        data = yield from self._request(file, offset, stop - offset)
        return data.ljust(min(stop, file.inode.size_bytes) - offset, b"\0")

    def fsync(self, file: File) -> Steps[None]:
        """The origin has it."""
        yield from self._ask(Opcode.FSYNC, file.inode.node, struct.pack("=QII", file.handle, 0, 0))

    def flush(self, file: File) -> Steps[None]:
        """What `close` waits for."""
        yield from self._ask(Opcode.FLUSH, file.inode.node, struct.pack("=QIIQ", file.handle, 0, 0, 0))

    # -- names -----------------------------------------------------------------------------------------------------

    def stat(self, path: str) -> Steps[Inode]:
        """What there is."""
        kernel = self._kernel
        for is_again in (False, True):
            node = 0
            try:
                node = yield from self._walk(path, is_again=is_again)
                yield from self._look(kernel.inodes[node])
                return kernel.inodes[node]
            except OSError as error:
                if error.errno != errno.ESTALE or is_again:
                    raise
            finally:
                if node:
                    kernel.unpin(node)
        raise AssertionError

    def readdir(self, folder: Folder, cookie: int, size_bytes: int, *, is_plus: bool) -> Steps[list[Listed]]:
        """Whoever reads a folder holds it, with others who do."""
        yield Locked(folder.node, is_alone=False)  # type: ignore[misc]
        try:
            return (yield from super().readdir(folder, cookie, size_bytes, is_plus=is_plus))
        finally:
            self._kernel.unlock(folder.node, is_alone=False)

    def unlink(self, path: str, *, is_folder: bool = False) -> Steps[None]:
        """Or rmdir."""
        kernel, (folder, name) = self._kernel, split(path)
        parent = yield from self._walk(folder)
        try:
            yield from self._lock(parent)
            try:
                node = yield from self._step(parent, name, is_again=False, is_locked=True)
                try:
                    if stat.S_ISDIR(kernel.inodes[node].mode) != is_folder:
                        raise OSError(errno.ENOTDIR if is_folder else errno.EISDIR, "")
                    opcode = Opcode.RMDIR if is_folder else Opcode.UNLINK
                    yield from self._naming((parent, name), opcode, parent, name + b"\0")
                    self._drop(parent, name)
                finally:
                    kernel.unpin(node)
            finally:
                kernel.unlock(parent, is_alone=True)
        finally:
            kernel.unpin(parent)

    def mkdir(self, path: str) -> Steps[None]:
        """An empty folder."""
        kernel, (folder, name) = self._kernel, split(path)
        parent = yield from self._walk(folder)
        try:
            yield from self._lock(parent)
            try:
                try:
                    node = yield from self._step(parent, name, is_again=False, is_locked=True)
                except OSError as error:
                    if error.errno != errno.ENOENT:
                        raise
                else:
                    kernel.unpin(node)
                    raise OSError(errno.EEXIST, "")
                body = struct.pack("=II", 0o755, 0) + name + b"\0"
                said = yield from self._ask(Opcode.MKDIR, parent, body)
                kernel.instantiate(parent, name, unpacked_entry(said))
            finally:
                kernel.unlock(parent, is_alone=True)
        finally:
            kernel.unpin(parent)

    def rename(self, path: str, to: str) -> Steps[None]:
        """Of a file, over whatever file is there."""
        kernel, (folder, name), (to_folder, to_name) = self._kernel, split(path), split(to)
        parent = yield from self._walk(folder)
        try:
            to_parent = yield from self._walk(to_folder)
        except OSError:
            kernel.unpin(parent)
            raise
        locked = sorted({parent, to_parent})
        for one in locked:
            yield from self._lock(one)
        try:
            yield from self._rename_locked(parent, name, to_parent, to_name)
        finally:
            for one in locked:
                kernel.unlock(one, is_alone=True)
            kernel.unpin(parent)
            kernel.unpin(to_parent)

    def _look(self, inode: Inode) -> Steps[None]:
        """What it looks like now, if that may be another than before."""
        kernel = self._kernel
        if inode.attr_until <= kernel.now:
            asked_at = kernel.changes
            body = yield from self._ask(Opcode.GETATTR, inode.node, bytes(16))
            kernel.told(inode.node, struct.unpack_from("=QIIQQ", body)[4], asked_at)

    # -- parts of them ---------------------------------------------------------------------------------------------

    def _rename_locked(self, parent: int, name: bytes, to_parent: int, to_name: bytes) -> Steps[None]:
        kernel = self._kernel
        node, there = (yield from self._step(parent, name, is_again=False, is_locked=True)), 0
        try:
            try:
                there = yield from self._step(to_parent, to_name, is_again=False, is_locked=True)
            except OSError as error:
                if error.errno != errno.ENOENT:
                    raise
            if stat.S_ISDIR(kernel.inodes[node].mode):
                raise OSError(errno.EISDIR, "")
            body = struct.pack("=Q", to_parent) + name + b"\0" + to_name + b"\0"
            yield from self._naming((parent, name, to_parent, to_name), Opcode.RENAME, parent, body)
            dentry = kernel.dentry(parent, name)
            self._drop(to_parent, to_name)
            if dentry is not None:
                kernel.drop(dentry)
                kernel.below.setdefault(to_parent, {})[to_name] = Dentry(
                    to_parent, to_name, node, dentry.until
                )
                kernel.inodes[to_parent].children += 1
                kernel.inodes[node].names += 1
        finally:
            for one in filter(None, (node, there)):
                kernel.unpin(one)

    def _naming(self, names: tuple[int | bytes, ...], opcode: int, node: int, body: bytes) -> Steps[None]:
        try:
            yield from self._ask(opcode, node, body)
        except OSError as error:
            if error.errno in _INVALIDATES:
                for parent, name in zip(names[::2], names[1::2], strict=True):
                    assert isinstance(parent, int) and isinstance(name, bytes)  # noqa: PT018
                    self._drop(parent, name)
            raise

    def _drop(self, parent: int, name: bytes) -> None:
        if (dentry := self._kernel.dentry(parent, name)) is not None:
            self._kernel.drop(dentry)

    def _lock(self, folder: int) -> Generator[Asked, tuple[int, bytes], None]:
        yield Locked(folder, is_alone=True)  # type: ignore[misc]

    def _create(self, parent: int, name: bytes) -> Steps[File]:
        kernel = self._kernel
        head = struct.pack("=IIII", READ_WRITE | CREATE | TRUNCATE, 0o644, 0, 0)
        asked_at = kernel.changes
        body = yield from self._ask(Opcode.CREATE, parent, head + name + b"\0")
        entry = unpacked_entry(body)
        kernel.written.add(entry.node)
        inode = kernel.instantiate(parent, name, kernel.as_is(entry, asked_at))
        return self._opened_to_write(kernel.pin(inode.node), struct.unpack_from("=Q", body, 128)[0])

    def _truncate(self, node: int) -> Steps[File]:
        """With a pin that becomes the file's."""
        kernel = self._kernel
        if stat.S_ISDIR(kernel.inodes[node].mode):
            kernel.unpin(node)
            raise OSError(errno.EISDIR, "")
        kernel.written.add(node)
        try:
            body = yield from self._ask(
                Opcode.OPEN, node, struct.pack("=II", 0o100000 | READ_WRITE | TRUNCATE, 0)
            )
        except OSError:
            kernel.unpin(node)
            raise
        if kernel.inodes[node].backed:
            kernel.faults.append("OPEN for writing is answered, and others read the node from a backing file")
        return self._opened_to_write(kernel.inodes[node], struct.unpack_from("=Q", body)[0])

    def _opened_to_write(self, inode: Inode, handle: int) -> File:
        inode.by_requests += 1
        inode.pages.clear()
        self._kernel.resized(inode, 0)
        inode.attr_until = 0.0
        return File(inode, handle)

    def _step(self, parent: int, name: bytes, *, is_again: bool, is_locked: bool = False) -> Steps[int]:
        """Whoever looks up what is not known holds the folder, with others who do."""
        kernel = self._kernel
        if not stat.S_ISDIR(kernel.inodes[parent].mode):
            raise OSError(errno.ENOTDIR, "")
        dentry, asked_at = kernel.dentry(parent, name), kernel.changes
        if dentry is not None:
            kernel.pin(dentry.node)
            if not is_again and kernel.now < dentry.until:
                return dentry.node
            code, body = yield Asked(Opcode.LOOKUP, parent, name + b"\0")
            entry = None if code else kernel.as_is(unpacked_entry(body), asked_at)
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
        if not is_locked:
            yield Locked(parent, is_alone=False)  # type: ignore[misc]
        try:
            asked_at = kernel.changes
            body = yield from self._ask(Opcode.LOOKUP, parent, name + b"\0")
            inode = kernel.instantiate(parent, name, kernel.as_is(unpacked_entry(body), asked_at))
            return kernel.pin(inode.node).node
        finally:
            if not is_locked:
                kernel.unlock(parent, is_alone=False)


def split(path: str) -> tuple[str, bytes]:
    """Folder and name."""
    folder, _, name = path.rpartition("/")
    return folder, name.encode()
