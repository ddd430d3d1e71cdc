"""From `--nproc-per-node`, `--accelerator` and `--auto-tune` to the environment of each worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.agent.accelerators import Machine, count_cores
from stoker.agent.environment import worker_environment
from stoker.cli.main import build_parser
from stoker.cli.options import Launch
from stoker.cli.run import launch_of
from stoker.errors import ConfigError
from stoker.settings import worker_settings
from stoker.wire.job import WorkerSpec


def launch(tmp_path: Path, *flags: str) -> Launch:
    script = tmp_path / "s.py"
    script.write_text("")
    return launch_of(build_parser().parse_args(["run", *flags, str(script)]))


def spec(slot: int) -> WorkerSpec:
    return WorkerSpec(
        worker=f"w{slot}",
        slot=slot,
        rank=slot,
        local_rank=slot,
        world_size=3,
        local_world_size=3,
        group_rank=0,
        group_world_size=1,
        master_addr="127.0.0.1",
        master_port=1,
        restart_count=0,
        max_restarts=0,
    )


def test_flags_say_what_workers_train_on(tmp_path: Path) -> None:
    plain = launch(tmp_path)
    assert (plain.slots, plain.accelerator, plain.slot_environments, plain.auto_tune) == (
        1,
        "auto",
        (),
        False,
    )
    told = launch(tmp_path, "--nproc-per-node", "3", "--accelerator", "cpu", "--auto-tune")
    assert (told.slots, told.accelerator, told.auto_tune) == (3, "cpu", True)


def test_cpu_means_a_worker_for_each_core_that_may_be_used(tmp_path: Path) -> None:
    assert launch(tmp_path, "--nproc-per-node", "cpu").slots == count_cores(Machine({}))[0]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--nproc-per-node", "0"), "at least 1"),
        (("--nproc-per-node", "some!"), "--nproc-per-node 'some!'"),
        (("--accelerator", "cuda:1"), "--accelerator 'cuda:1'"),
        (("--nproc-per-node", "gpu", "--accelerator", "cpu"), "do not go together"),
        (("--nproc-per-node", "2", "--accelerator", "npu"), "no npu device is visible"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(
    tmp_path: Path, flags: tuple[str, ...], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        launch(tmp_path, *flags)


def test_a_driver_needs_no_device_of_its_own(tmp_path: Path) -> None:
    told = launch(tmp_path, "--hosts", "h1:2,h2", "--nproc-per-node", "4", "--accelerator", "npu")
    assert (told.slots, told.accelerator, told.slot_environments) == (4, "npu", ())


def test_the_worker_of_each_slot_gets_its_own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    each = [{"CUDA_VISIBLE_DEVICES": "MIG-a"}, {"CUDA_VISIBLE_DEVICES": "MIG-b"}]
    given = [
        worker_environment(
            {"CUDA_VISIBLE_DEVICES": "0,1"},
            spec(slot),
            run_id="r",
            address="127.0.0.1",
            agent_socket="/s",
            error_file="/e",
            timeout_s=60.0,
            extra={"STOKER_ACCELERATOR": "cuda", "STOKER_AUTO_TUNE": "1"},
            by_slot=each,
        )
        for slot in range(3)
    ]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in given] == ["MIG-a", "MIG-b", "MIG-a"]
    for name in ("STOKER_ACCELERATOR", "STOKER_AUTO_TUNE"):
        monkeypatch.setenv(name, given[0][name])
    settings = worker_settings()
    assert (settings.accelerator, settings.auto_tune) == ("cuda", True)
    for name in ("STOKER_ACCELERATOR", "STOKER_AUTO_TUNE"):
        monkeypatch.delenv(name)
    settings = worker_settings()
    assert (settings.accelerator, settings.auto_tune) == ("auto", False)
