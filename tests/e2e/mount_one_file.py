"""A daemon whose mount has two files, to see what the kernel understands: MOUNTPOINT BACKING DATA."""

from __future__ import annotations

import errno
import os
import select
import stat
import sys
from pathlib import Path

from stoker.cache.mount import answers, device
from stoker.cache.mount.places import mounted_on
from stoker.cache.mount.requests import (
    ROOT,
    Attribute,
    Closing,
    Forget,
    Header,
    Init,
    InitRequest,
    Interrupt,
    Name,
    Opcode,
    Opening,
    Reading,
    parse,
)

FOLDER, FILE = stat.S_IFDIR | 0o755, stat.S_IFREG | 0o444
VALID_S = 60.0


class OneFile:
    """A daemon whose mount has one file, which a file elsewhere backs, and another one that it answers itself."""

    def __init__(self, fd: int, folder: str, backing: str, data: bytes) -> None:
        self.fd = fd
        self.folder = folder
        self.backing = os.open(backing, os.O_RDONLY)
        self.nodes = {b"backed": (2, os.path.getsize(backing)), b"answered": (3, len(data))}
        self.data = data
        self.backing_id = 0

    def run(self) -> None:
        while True:
            select.select([self.fd], [], [])
            try:
                data = os.read(self.fd, 1 << 21)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return  # it was unmounted
                raise
            request = parse(data)
            print(request.header.opcode, request.header.node, flush=True)
            said = self.answer(request.header, request.body)
            if said:
                os.write(self.fd, said)
            if self.backing_id:
                device.close_backing(self.fd, self.backing_id)  # what is open goes on
                self.backing_id = 0
            if request.header.opcode == Opcode.INIT:
                there = mounted_on(self.folder)
                assert there is not None
                device.set_readahead(there.number, 1 << 20)

    def attr(self, node: int) -> answers.Attr:
        sizes = dict(self.nodes.values())
        return answers.Attr(
            node, sizes.get(node, 0), 1_500_000_000_123_456_789, FOLDER if node == ROOT else FILE, 7, 8
        )

    def answer(self, header: Header, body: object) -> bytes:
        unique, node = header.unique, header.node
        match header.opcode, body:
            case Opcode.INIT, InitRequest() as asked:
                wanted = (
                    Init.ASYNC_READ | Init.DO_READDIRPLUS | Init.MAX_PAGES | Init.INIT_EXT | Init.PASSTHROUGH
                )
                print(Opcode.INIT, int(wanted & asked.flags), flush=True)
                said = answers.init(
                    asked, wanted, write_bytes_max=1 << 20, readahead_bytes=1 << 20, background_max=64
                )
            case Opcode.LOOKUP, Name(name):
                if name not in self.nodes:
                    return answers.refusal(unique, errno.ENOENT)
                said = answers.entry(self.nodes[name][0], self.attr(self.nodes[name][0]), VALID_S, VALID_S)
            case Opcode.GETATTR, _:
                said = answers.attributes(self.attr(node), VALID_S)
            case Opcode.OPEN, Opening():
                if node == 2:
                    said = answers.opened(
                        9, answers.Open.PASSTHROUGH, device.open_backing(self.fd, self.backing)
                    )
                else:
                    said = answers.opened(9, answers.Open.KEEP_CACHE)
            case Opcode.READ, Reading(9, offset, size_bytes):
                said = self.data[offset : offset + size_bytes]
            case Opcode.OPENDIR, Opening():
                said = answers.opened(5, 0)
            case ((Opcode.READDIR | Opcode.READDIRPLUS), Reading(5, offset, size_bytes)):
                listed = [
                    answers.DirEntry(
                        name, number, at + 1, stat.S_IFREG >> 12, number, self.attr(number), VALID_S
                    )
                    for at, (name, (number, _)) in enumerate(sorted(self.nodes.items()))
                ]
                is_plus = header.opcode == Opcode.READDIRPLUS
                said, _ = answers.directory(listed[offset:], size_bytes, is_plus=is_plus)
            case Opcode.STATFS, _:
                said = answers.statfs(10 << 30, 3 << 30, 2)
            case Opcode.GETXATTR, Attribute(size_bytes, name):
                if name != b"user.one":
                    return answers.refusal(unique, errno.ENODATA)
                said = b"value" if size_bytes else answers.size(5)
            case Opcode.LISTXATTR, Attribute(size_bytes, _):
                said = b"user.one\0" if size_bytes else answers.size(9)
            case ((Opcode.RELEASE | Opcode.RELEASEDIR | Opcode.FLUSH), Closing()):
                said = b""
            case _, Forget() | Interrupt():
                return b""
            case _:
                return answers.refusal(unique, errno.ENOSYS)
        return answers.answer(unique, said)


def main() -> None:
    folder, backing, data = sys.argv[1:]
    fd = device.open_device()
    device.mount(fd, folder, "test", is_writable=False, lets_others=True)
    OneFile(fd, folder, backing, Path(data).read_bytes()).run()


if __name__ == "__main__":
    main()
