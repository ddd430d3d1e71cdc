"""Files behind SSH and FTP as origins, against real servers, where these and what speaks to them are installed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec
import pytest

from stoker.cache.origin.fsspec_origin import FsspecOrigin
from stoker.cache.origin.fsspec_writing import WritableFsspecOrigin
from stoker.cache.origin.port import Origin
from stoker.cache.origin.writing_port import WritableOrigin
from stoker.errors import ConfigError
from stoker.testing.cache_origin import LARGE, OriginConformance, fails
from stoker.testing.cache_origin_uploads import UploadConformance
from stoker.testing.cache_origin_writes import WritableConformance
from tests.conformance.test_cache_origins import write_all
from tests.e2e.etcd import free_ports

CONFIG = """
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile {folder}/pid
StrictModes no
PermitRootLogin prohibit-password
Subsystem sftp internal-sftp
"""


def wait_for(port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


class Sshd:
    """A server of this machine's files, for this user."""

    def __init__(self, folder: Path) -> None:
        program = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
        if program is None or os.geteuid() != 0:
            pytest.skip("needs root and `sshd`: on Debian, apt-get install openssh-server")
        self.program = program
        self.folder = folder
        for name in ("host_key", "user_key"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True
            )
        (self.port,) = free_ports(1)
        (folder / "config").write_text(CONFIG.format(port=self.port, folder=folder))
        Path("/run/sshd").mkdir(exist_ok=True)
        self.start()

    def start(self) -> None:
        command = [self.program, "-D", "-f", str(self.folder / "config"), "-E", str(self.folder / "log")]
        self.child = subprocess.Popen(command, start_new_session=True)
        wait_for(self.port)

    def stop(self) -> None:
        """With the connections that it has."""
        children = f"/proc/{self.child.pid}/task/{self.child.pid}/children"
        for pid in (int(pid) for pid in Path(children).read_text().split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        self.child.kill()
        self.child.wait()

    def origin(self, path: Path) -> FsspecOrigin:
        return FsspecOrigin(f"sftp://127.0.0.1{path}")


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    pytest.importorskip("paramiko", reason="fsspec's SFTP needs paramiko")
    server = Sshd(tmp_path_factory.mktemp("sshd"))
    # What else is needed to connect, as a configuration file of fsspec gives it.
    options = {"port": server.port, "username": "root", "key_filename": str(server.folder / "user_key")}
    fsspec.config.conf["sftp"] = options
    yield server
    del fsspec.config.conf["sftp"]
    server.stop()


@pytest.mark.real
class TestSftp(OriginConformance):
    @pytest.fixture(autouse=True)
    def server(self, sshd: Sshd, tmp_path: Path) -> None:
        self.sshd = sshd
        self.path = tmp_path

    def open_filled(self, objects: Mapping[str, bytes]) -> Origin:
        write_all(self.path, objects)
        return self.sshd.origin(self.path)

    def overwrite(self, origin: Origin, key: str, data: bytes) -> None:
        (self.path / key).write_bytes(data)

    def test_a_server_that_is_gone_fails_and_is_found_again(self) -> None:
        async def test(origin: Origin) -> None:
            info = await origin.stat("a")
            self.sshd.stop()
            try:
                await fails(origin, "a", info.version)
                with pytest.raises(ConfigError):
                    self.sshd.origin(self.path)
            finally:
                self.sshd.start()
            assert await origin.stat("a") == info
            assert await origin.read("a", 0, 3, info.version) == b"one"

        self.run(test)


@pytest.mark.real
class TestSftpWrites(WritableConformance, UploadConformance):
    versions = 3  # it counts in seconds
    part_bytes = 100_003
    large_bytes = 6 * 1024 * 1024  # and is slow
    tick_s = 1.1

    @pytest.fixture(autouse=True)
    def server(self, sshd: Sshd, tmp_path: Path) -> None:
        self.path = tmp_path

    def open_empty(self) -> WritableOrigin:
        return WritableFsspecOrigin(f"sftp://127.0.0.1{self.path}")


def read_at_once(origin: Origin) -> Any:
    async def test() -> None:
        info = await origin.stat("dir/b")
        places = range(0, len(LARGE) - 100_000, 100_000)
        parts = await asyncio.gather(
            *(origin.read("dir/b", at, at + 100_000, info.version) for at in places for _ in range(2))
        )
        assert parts == [LARGE[at : at + 100_000] for at in places for _ in range(2)]

    return test()


@pytest.mark.real
def test_many_read_at_once_by_sftp(sshd: Sshd, tmp_path: Path) -> None:
    write_all(tmp_path, {"dir/b": LARGE})
    asyncio.run(read_at_once(sshd.origin(tmp_path)))


# -- FTP -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def ftp(tmp_path: Path) -> Iterator[str]:
    servers = pytest.importorskip("pyftpdlib.servers", reason="an FTP server to ask: pip install pyftpdlib")
    from pyftpdlib.authorizers import DummyAuthorizer
    from pyftpdlib.handlers import FTPHandler

    class Handler(FTPHandler):
        authorizer = DummyAuthorizer()
        banner = "ready"

    with warnings.catch_warnings(action="ignore"):  # that somebody without a name may write
        Handler.authorizer.add_anonymous(str(tmp_path), perm="elradfmw")
    server = servers.FTPServer(("127.0.0.1", 0), Handler)
    done = threading.Event()

    def serve() -> None:
        while not done.is_set():
            server.serve_forever(timeout=0.02, blocking=False)

    thread = threading.Thread(target=serve)
    thread.start()
    yield f"ftp://127.0.0.1:{server.address[1]}"
    done.set()
    thread.join()
    server.close_all()


@pytest.mark.real
class TestFtp(OriginConformance):
    @pytest.fixture(autouse=True)
    def server(self, ftp: str, tmp_path: Path) -> None:
        self.url = ftp
        self.path = tmp_path

    def open_filled(self, objects: Mapping[str, bytes]) -> Origin:
        write_all(self.path, objects)
        return FsspecOrigin(f"{self.url}/")

    def overwrite(self, origin: Origin, key: str, data: bytes) -> None:
        (self.path / key).write_bytes(data)


@pytest.mark.real
class TestFtpWrites(WritableConformance, UploadConformance):
    versions = 3
    part_bytes = 100_003
    tick_s = 1.1

    @pytest.fixture(autouse=True)
    def server(self, ftp: str) -> None:
        self.url = ftp

    def open_empty(self) -> WritableOrigin:
        return WritableFsspecOrigin(f"{self.url}/")


@pytest.mark.real
def test_many_read_at_once_by_ftp(ftp: str, tmp_path: Path) -> None:
    write_all(tmp_path, {"dir/b": LARGE})
    asyncio.run(read_at_once(FsspecOrigin(f"{ftp}/")))
