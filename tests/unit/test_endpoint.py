"""Flags, endpoints and tokens of `stoker run`."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from stoker.agent.environment import interface_of
from stoker.agent.output import StreamChoice, WorkerOutput
from stoker.cli.endpoint import Endpoint, Nodes, endpoint_of, nodes_of, token_of
from stoker.cli.main import build_parser
from stoker.cli.run import launch_of
from stoker.errors import ConfigError
from stoker.settings import Timeouts, worker_settings


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


def test_across_hosts_a_token_must_be_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STOKER_JOB_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="export STOKER_JOB_TOKEN="):
        token_of(Endpoint("host1", 29400), None)
    (tmp_path / "token").write_text("from-file\n")
    assert token_of(Endpoint("host1", 29400), str(tmp_path / "token")).value == "from-file"
    monkeypatch.setenv("STOKER_JOB_TOKEN", "from-env")
    assert token_of(Endpoint("host1", 29400), None).value == "from-env"


def test_torchruns_spellings_are_understood(tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.write_text("")
    arguments = build_parser().parse_args(
        ["run", "--nproc_per_node=2", "--nnodes=1:3", "--node_rank", "1", "--master_addr", "h", "--master_port", "9",
         "--max_restarts", "4", "-t", "3", "-r", "0:1", "--log_dir", "l", str(script), "--lr", "1", "--nnodes", "x"]
    )  # fmt: skip
    launch = launch_of(arguments)
    assert (launch.slots, launch.nodes, launch.node_rank, launch.max_restarts) == (2, Nodes(1, 3), 1, 4)
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


def test_worker_output_is_cut_into_lines_and_kept(tmp_path: Path) -> None:
    shown: list[tuple[str, bytes]] = []
    output = WorkerOutput(tmp_path / "w", 0, lambda stream, line: shown.append((stream, line)))
    output.feed("stdout", b"one\ntw")
    output.feed("stdout", b"o\n10%\r20%\r\nrest")
    output.feed(
        "stderr",
        b"x\nTraceback (most recent call last):\n  a\nTraceback (most recent call last):\n  b\nE: no\n",
    )
    output.close()
    assert shown[:3] == [("stdout", b"one"), ("stdout", b"two"), ("stdout", b"10%\r20%")]
    assert ("stdout", b"rest") in shown
    assert (tmp_path / "w" / "stdout.log").read_bytes() == b"one\ntwo\n10%\r20%\r\nrest"
    assert output.last_traceback() == "Traceback (most recent call last):\n  b\nE: no"


def test_output_on_a_full_disk_costs_the_file_and_not_the_run(tmp_path: Path) -> None:
    (tmp_path / "w").write_text("not a folder")
    shown: list[bytes] = []
    output = WorkerOutput(tmp_path / "w", 0, lambda _, line: shown.append(line))
    output.feed("stdout", b"still shown\n")
    output.close()
    assert shown == [b"still shown"]
    assert "not kept" in output.lost


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("localhost") == "lo"
    assert interface_of("203.0.113.77") is None
    assert interface_of("no such host") is None
