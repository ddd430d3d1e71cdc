"""What torchrun's users type, and what their launchers set: taken, left aside with a word, or refused with the mend."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from stoker.cli.endpoint import Endpoint, Nodes
from stoker.cli.main import build_parser, main
from stoker.cli.options import Launch
from stoker.cli.run import idle_flags_of, launch_of
from stoker.cli.torchrun import notice_of
from stoker.errors import ConfigError
from stoker.settings import Timeouts


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)


def parsed(*flags: str) -> argparse.Namespace:
    return build_parser().parse_args(["run", *flags, __file__])


def launch(*flags: str) -> Launch:
    return launch_of(parsed(*flags))


def flags_of_torchrun() -> list[argparse.Action]:
    """As the torch that is installed has them."""
    skipped = ("help", "training_script", "training_script_args")
    return [action for action in get_args_parser()._actions if action.dest not in skipped]


@pytest.mark.parametrize("action", flags_of_torchrun(), ids=lambda action: action.dest)
def test_every_flag_of_torchrun_is_known(action: argparse.Action) -> None:
    """None may end in `unrecognized arguments`, under any of its names."""
    for name in action.option_strings:
        takes_value = action.nargs != 0
        arguments = parsed(name, *(["1"] if takes_value else []))
        assert hasattr(arguments, action.dest)


def test_variables_are_the_defaults_of_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Kubeflow's trainer sets them."""
    for name, text in {
        "PET_NNODES": "2:4",
        "PET_NPROC_PER_NODE": "3",
        "PET_NODE_RANK": "1",
        "PET_RDZV_ENDPOINT": "host1:29500",
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ID": "night",
        "PET_MAX_RESTARTS": "7",
        "PET_NO_PYTHON": "1",
        "PET_STANDALONE": "0",
        "PET_MASTER_ADDR": "",
        "PET_LOG_DIR": "logs",
        "PET_SHUTDOWN_TIMEOUT": "12",
    }.items():
        monkeypatch.setenv(name, text)
    found = launch()
    assert (found.nodes, found.slots, found.node_rank) == (Nodes(2, 4), 3, 1)
    assert found.endpoint == Endpoint("host1", 29500)
    assert (found.job, found.relaunch.max_restarts, found.log_dir) == ("night", 7, "logs")
    assert found.command == [__file__]
    assert found.timeouts.stop_grace_s == 12
    assert launch("--nnodes", "1:9", "--rdzv-id", "day").nodes == Nodes(1, 9), "a flag beats its variable"


def test_a_variable_that_cannot_be_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PET_NODE_RANK", "first")
    with pytest.raises(SystemExit) as end:
        parsed()
    assert end.value.code == 2
    assert "--node-rank" in (said := capsys.readouterr().err)
    assert "'first' is not a number (from PET_NODE_RANK)" in said
    build_parser().parse_args(["job", "ls"])  # which has nothing to do with it


@pytest.mark.parametrize("name", ["c10d", "C10D", "static", "Static"])
def test_a_backend_is_taken_however_it_is_written(name: str) -> None:
    assert launch("--rdzv-backend", name).nodes == Nodes(1, 1)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--rdzv-backend", "etcd-v2"), "--journal etcd://"),
        (("--rdzv-backend", "zeus"), "leave this flag out"),
        (("--virtual-local-rank",), "take device LOCAL_RANK"),
        (("--local-ranks-filter", "x"), "--local-ranks-filter 'x'"),
        (("--local-ranks-filter", "2", "--nproc-per-node", "2"), "local ranks are 0 to 1"),
        (("--shutdown-timeout", "soon"), "--shutdown-timeout: 'soon' is not a duration"),
        (("--timeout", "soon"), "--timeout: 'soon' is not a duration"),
        (("--cache-capacity", "much"), "--cache-capacity: 'much' is not a size"),
        (("--worker-memory", "much"), "--worker-memory: 'much' is not a size"),
        (("--forgive-after", "soon"), "--forgive-after: 'soon' is not a duration"),
        (("--hosts", "h1:2", "--worker-memory", "1GB"), "--worker-memory 1GB needs --worker-memory-max"),
        (
            ("--host-discovery-script", "./h.sh", "--worker-memory", "1GB"),
            "--worker-memory 1GB needs --worker-memory-max",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_flag_and_the_mend(flags: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        launch(*flags)
    assert words in str(refusal.value)


def test_how_much_memory_workers_may_get_on_other_machines_is_to_be_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    both = ("--worker-memory", "1GB", "--worker-memory-max", "2GB")
    assert launch("--hosts", "h1:2", *both).relaunch.memory_max_bytes == 2_000_000_000
    assert launch("--worker-memory", "1GB").relaunch.memory_max_bytes >= 1_000_000_000, "this node's"
    assert main(["master", "--listen", "127.0.0.1:0", "--worker-memory", "1GB"]) == 2
    assert "--worker-memory 1GB needs --worker-memory-max" in capsys.readouterr().err


def test_what_is_not_needed_is_left_aside_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = parsed(
        "--rdzv-conf", "timeout=900", "--role=trainer", "--start_method", "fork", "--numa-binding", "node"
    )
    notice = notice_of(arguments)
    assert "\n" not in notice
    for name in (
        "--rdzv-conf (--timeout is",
        "--role",
        "--start-method",
        "--numa-binding (bind with numactl",
    ):
        assert name in notice
    assert notice_of(parsed("--nnodes", "1")) == ""
    monkeypatch.chdir(tmp_path)
    with caplog.at_level("INFO"):
        main(["run", "--role", "trainer", "--no-python", "there-is-no-such-program"])
    assert [r.message for r in caplog.records].count(
        "not needed here and left aside: --role (all workers of a job have one)"
    ) == 1


def test_only_some_ranks_are_shown() -> None:
    found = launch("--nproc-per-node", "3", "--local-ranks-filter", "0,2", "--redirects", "2", "--tee", "1:3")
    shown = {
        (slot, stream): found.tee.has(slot, stream) or not found.redirects.has(slot, stream)
        for slot in range(3)
        for stream in ("stdout", "stderr")
    }
    assert shown == {
        (0, "stdout"): True, (0, "stderr"): False, (1, "stdout"): False,
        (1, "stderr"): False, (2, "stdout"): True, (2, "stderr"): False,
    }  # fmt: skip


def test_a_script_may_be_given_by_its_path_to_run() -> None:
    assert launch("--run-path", "--no-python").command[-2:] == ["-u", __file__]


def test_workers_have_torchruns_time_to_save_their_work(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Timeouts().stop_grace_s == launch().timeouts.stop_grace_s == 30
    assert launch("--timeout", "8s").timeouts.stop_grace_s == 8
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "45")
    assert launch().timeouts.stop_grace_s == 45
    assert launch("--timeout", "8s", "--shutdown-timeout", "2m").timeouts.stop_grace_s == 120


@pytest.mark.parametrize(
    ("flags", "idle"),
    [
        (("--reset-limit", "1", "--blacklist-limit", "10"), ["--reset-limit", "--blacklist-limit"]),
        (("--node-rank", "1", "--hosts", "h1"), ["--node-rank"]),
        (("--cache-dir", "d", "--cache-capacity", "1GB", "--no-cache"), ["--cache-dir", "--cache-capacity"]),
        (("--node-rank", "1", "--cache-dir", "d"), []),
        (("--reset-limit", "1", "--blacklist-limit", "3", "--hosts", "h1"), []),
    ],
)
def test_flags_without_effect_are_told(flags: tuple[str, ...], idle: list[str]) -> None:
    assert [text.split()[0] for text in idle_flags_of(parsed(*flags))] == idle


def test_a_cache_of_no_size_is_not_one_of_the_usual_size() -> None:
    with pytest.raises(ConfigError, match="give --no-cache"):
        launch("--cache-capacity", "0")


@pytest.mark.parametrize(
    ("where", "mend"),
    [
        ("198.51.100.7:29471", "not an address of this machine"),
        ("no.such.host.invalid:29471", "says nothing here"),
    ],
)
def test_an_address_that_is_not_here_is_not_mended_by_another_port(
    capsys: pytest.CaptureFixture[str], where: str, mend: str
) -> None:
    assert main(["master", "--listen", where]) == 5
    said = capsys.readouterr().err
    assert mend in said
    assert "another port" not in said


def test_a_discovery_script_that_is_not_there_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--host-discovery-script", "./no-such-script.sh", __file__]) == 5
    assert "no-such-script.sh" in capsys.readouterr().err
