"""The Unix socket of a server: who comes after it keeps its own."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from stoker.cache.server.listening import listen_unix
from stoker.errors import ConfigError, EnvironmentProblem


def test_a_server_that_ends_leaves_the_socket_of_the_next_one(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    first = listen_unix(path)
    second = listen_unix(path)
    first.listener.close()
    first.remove()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
    second.listener.close()
    second.remove()
    assert not os.path.exists(path)
    second.remove()


def test_one_that_got_the_inode_of_the_last_one_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "socket")
    first = listen_unix(path)
    first.listener.close()
    second = listen_unix(path)
    os.utime(path, (1, 1))  # not within the same tick of the clock
    monkeypatch.setattr(os.path, "samestat", lambda *_: True)
    first.remove()
    assert os.path.exists(path)
    second.listener.close()


def test_where_it_cannot_listen_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at most 100 bytes"):
        listen_unix(f"/tmp/{'x' * 100}")
    with pytest.raises(EnvironmentProblem, match="none/socket: No such file"):
        listen_unix(str(tmp_path / "none" / "socket"))
