"""Flags, endpoints and tokens of `stoker run`."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from stoker.agent.environment import interface_of
from stoker.agent.output import StreamChoice
from stoker.cli import endpoint as endpoints
from stoker.cli.endpoint import (
    FAR_AWAY,
    Endpoint,
    Nodes,
    address_towards,
    endpoint_of,
    is_loopback,
    listen_here,
    nodes_of,
    source_towards,
    token_of,
)
from stoker.cli.main import build_parser
from stoker.cli.run import launch_of
from stoker.errors import ConfigError, EnvironmentProblem
from stoker.settings import Timeouts, runtime_dir, worker_settings


def test_nodes_and_endpoints() -> None:
    assert nodes_of("3") == Nodes(3, 3)
    assert nodes_of("1:4") == Nodes(1, 4)
    none = {"rdzv_endpoint": None, "master_addr": None, "master_port": None}
    assert endpoint_of(Nodes(1, 1), **none) == Endpoint("127.0.0.1", 0)
    assert endpoint_of(Nodes(1, 2), **none) == Endpoint("127.0.0.1", 29400)
    assert endpoint_of(Nodes(1, 2), **{**none, "rdzv_endpoint": "h"}) == Endpoint("h", 29400)
    assert endpoint_of(Nodes(1, 2), **{**none, "rdzv_endpoint": "[::1]:5"}) == Endpoint("::1", 5)
    assert endpoint_of(Nodes(1, 2), **{**none, "master_addr": "h", "master_port": 7}) == Endpoint("h", 7)


def test_agents_of_one_user_share_a_token_through_a_private_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("STOKER_JOB_TOKEN", raising=False)
    first, second = token_of(Endpoint("127.0.0.1", 5), None), token_of(Endpoint("localhost", 5), None)
    assert first.value == second.value
    assert first.value != token_of(Endpoint("127.0.0.1", 6), None).value
    assert first.shared is not None
    assert stat.S_IMODE(first.shared.stat().st_mode) == 0o600
    first.forget()
    assert token_of(Endpoint("127.0.0.1", 5), None).value != first.value


def test_a_runtime_folder_that_others_may_enter_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("STOKER_JOB_TOKEN", raising=False)
    (tmp_path / "stoker").mkdir(mode=0o777)
    (tmp_path / "stoker").chmod(0o777)
    with pytest.raises(ConfigError, match="chmod 700"):
        token_of(Endpoint("127.0.0.1", 5), None)


@pytest.mark.parametrize("xdg", ["gone", "file", ""])
def test_without_a_runtime_folder_of_ones_own_the_temporary_one_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, xdg: str
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_RUNTIME_DIR", xdg and str(tmp_path / xdg))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    folder = runtime_dir()
    assert folder == tmp_path / "tmp" / f"stoker-{os.getuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_runtime_folder_that_is_a_link_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / f"stoker-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="a folder of your own"):
        runtime_dir()


def test_a_runtime_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "file" / "below"))
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match="see TMPDIR"):
        runtime_dir()


@pytest.mark.parametrize("port", [99999, 65536, -1])
def test_a_master_port_that_cannot_be(port: int) -> None:
    with pytest.raises(ConfigError, match=f"--master-port {port}"):
        endpoint_of(Nodes(1, 2), rdzv_endpoint=None, master_addr=None, master_port=port)


def test_across_hosts_a_token_must_be_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STOKER_JOB_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="export STOKER_JOB_TOKEN="):
        token_of(Endpoint("host1", 29400), None)
    (tmp_path / "token").write_text("from-file\n")
    assert token_of(Endpoint("host1", 29400), str(tmp_path / "token")).value == "from-file"
    monkeypatch.setenv("STOKER_JOB_TOKEN", "from-env")
    assert token_of(Endpoint("host1", 29400), None).value == "from-env"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"\xff\xfe\x00", "it is not text"),
        (b" \n", "is empty"),
        ("schlüssel".encode(), "printable ASCII"),
        (b"two\nlines", "one line"),
        (None, "No such file"),
    ],
)
def test_a_token_that_could_not_be_sent_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, complaint: str
) -> None:
    if content is not None:
        (tmp_path / "token").write_bytes(content)
    with pytest.raises(ConfigError, match=complaint):
        token_of(Endpoint("host1", 29400), str(tmp_path / "token"))
    monkeypatch.setenv("STOKER_JOB_TOKEN", "schlüssel")
    with pytest.raises(ConfigError, match="STOKER_JOB_TOKEN holds no token"):
        token_of(Endpoint("host1", 29400), None)


def test_torchruns_spellings_are_understood(tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.write_text("")
    arguments = build_parser().parse_args(
        ["run", "--nproc_per_node=2", "--nnodes=1:3", "--node_rank", "1", "--master_addr", "h", "--master_port", "9",
         "--max_restarts", "4", "-t", "3", "-r", "0:1", "--log_dir", "l", str(script), "--lr", "1", "--nnodes", "x"]
    )  # fmt: skip
    launch = launch_of(arguments)
    assert (launch.slots, launch.nodes, launch.node_rank, launch.relaunch.max_restarts) == (
        2,
        Nodes(1, 3),
        1,
        4,
    )
    assert launch.endpoint == Endpoint("h", 9)
    assert launch.command[-4:] == ["--lr", "1", "--nnodes", "x"], "what follows the script is the script's"
    assert launch.redirects.has(0, "stdout")
    assert not launch.redirects.has(1, "stdout")


@pytest.mark.parametrize("text", ["4", "x", "0:9", "0:"])
def test_wrong_stream_choices(text: str) -> None:
    with pytest.raises(ConfigError, match="--tee"):
        StreamChoice("--tee", text)


def test_timeouts_derive_from_the_one_and_are_in_order() -> None:
    for user_s in (1.0, 5.0, 60.0, 3600.0):
        timeouts = Timeouts.from_user_timeout(user_s)
        assert timeouts.beat_interval_s < timeouts.beat_timeout_s <= timeouts.park_s <= timeouts.user_s
        assert timeouts.park_s >= user_s / 2, (
            "a healthy worker in a long step is not killed for the others' sake"
        )
    with pytest.raises(ConfigError, match="too short"):
        Timeouts.from_user_timeout(0.5)
    with pytest.raises(ConfigError, match="out of order"):
        Timeouts(beat_timeout_s=0.1)


def test_a_number_in_the_environment_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ConfigError, match="RANK='first' is not a number"):
        worker_settings()


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("localhost") == "lo"
    assert interface_of("203.0.113.77") is None
    assert interface_of("no such host") is None


@pytest.fixture
def hosts_file(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Names that this machine knows besides."""
    known: dict[str, list[str]] = {}
    resolve = socket.getaddrinfo

    def with_file(host: Any, port: Any, *how: Any, **more: Any) -> Any:
        return [
            found for address in known.get(host, [host]) for found in resolve(address, port, *how, **more)
        ]

    monkeypatch.setattr(socket, "getaddrinfo", with_file)
    return known


@pytest.mark.parametrize(
    ("addresses", "bound"),
    [
        (["127.0.1.1"], "0.0.0.0"),
        (["127.0.1.1", "127.0.0.1"], "0.0.0.0"),
        (["::1", "127.0.1.1"], "0.0.0.0"),
        (["::1"], "::"),
    ],
)
def test_a_machine_whose_own_name_is_a_loopback_address_listens_for_the_others_too(
    hosts_file: dict[str, list[str]], addresses: list[str], bound: str
) -> None:
    hosts_file["host1"] = addresses
    with listen_here("host1", 0) as listener:
        assert listener.getsockname()[0] == bound


@pytest.mark.parametrize(
    ("host", "bound"), [("localhost", "127.0.0.1"), ("127.0.1.1", "127.0.1.1"), ("::1", "::1")]
)
def test_who_means_the_loopback_interface_gets_it(host: str, bound: str) -> None:
    with listen_here(host, 0) as listener:
        assert listener.getsockname()[0] == bound


def test_a_node_whose_masters_name_is_a_loopback_address_tells_the_others_of_another(
    hosts_file: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts_file["host1"] = ["127.0.1.1"]
    outward = source_towards(FAR_AWAY)
    address = address_towards(Endpoint("host1", 29400))
    assert address is not None
    assert address == outward if outward is not None else is_loopback(address)
    assert address_towards(Endpoint("localhost", 29400)) == "127.0.0.1"
    monkeypatch.setattr(endpoints, "FAR_AWAY", "nowhere")
    hosts_file["nowhere"] = []
    assert is_loopback(address_towards(Endpoint("host1", 29400)) or ""), "there is no other"
    hosts_file["host1"] = []
    assert address_towards(Endpoint("host1", 29400)) is None
