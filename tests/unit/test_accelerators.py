"""How many workers a node runs: device trees, drivers' tools and variables, and the real PyTorch of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.agent.accelerators import (
    Gpu,
    Machine,
    Workers,
    count_cores,
    count_devices,
    parse_gpu_list,
    plan_workers,
    visible,
    visible_gpus,
)
from stoker.errors import ConfigError

TWO_GPUS = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-aaaaaaaa-0000-0000-0000-000000000001)
"""
WITH_MIG = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
  MIG 1g.5gb      Device  1: (UUID: MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-aaaaaaaa-0000-0000-0000-000000000001)
"""
MIGS = ("MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f", "MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for folder in ("dev", "sys", "bin"):
        (tmp_path / folder).mkdir()
    return tmp_path


def put(tree: Path, **files: str) -> None:
    """Files by path, with `__` for a slash."""
    for name, text in files.items():
        path = tree / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def nvidia(tree: Path, listing: str | None = TWO_GPUS, nodes: int = 2) -> None:
    put(tree, dev__nvidiactl="", **{f"dev__nvidia{n}": "" for n in range(nodes)})
    tool = tree / "bin" / "nvidia-smi"
    body = "exit 9" if listing is None else f"[ \"$1\" = -L ] || exit 2\ncat <<'EOF'\n{listing}EOF"
    tool.write_text(f"#!/bin/sh\n{body}\n")
    tool.chmod(0o755)


def machine(tree: Path, **env: str) -> Machine:
    path = f"{tree / 'bin'}:/usr/bin:/bin"
    return Machine(env={"PATH": path, **env}, root=tree, python=str(tree / "no-python"))


# -- CUDA --------------------------------------------------------------------------------------------------------


def test_gpus_are_counted_by_nvidia_smi(tree: Path) -> None:
    nvidia(tree)
    devices = count_devices("auto", machine(tree))
    assert (devices.kind, devices.count, devices.each) == ("cuda", 2, ())
    assert devices.why == "2 CUDA devices: 2 in nvidia-smi -L"


def test_device_nodes_count_where_nvidia_smi_fails(tree: Path) -> None:
    nvidia(tree, listing=None, nodes=3)
    devices = count_devices("cuda", machine(tree))
    assert (devices.count, devices.why) == (
        3,
        "3 CUDA devices: 3 device nodes /dev/nvidia* (nvidia-smi does not answer)",
    )


@pytest.mark.parametrize(
    ("variable", "count"),
    [("0", 1), ("1,0", 2), ("", 0), ("-1", 0), ("0,7,1", 1), ("0,0", 0), ("GPU-5d5b", 1), ("NoDevFiles", 0)],
)
def test_cuda_visible_devices_is_read_as_cuda_does(tree: Path, variable: str, count: int) -> None:
    nvidia(tree)
    devices = count_devices("cuda", machine(tree, CUDA_VISIBLE_DEVICES=variable))
    assert devices.count == count
    assert f"CUDA_VISIBLE_DEVICES={variable}" in devices.why


def test_each_worker_sees_its_own_mig_device_only(tree: Path) -> None:
    nvidia(tree, WITH_MIG)
    plan = plan_workers("gpu", "auto", machine(tree))
    assert (plan.slots, plan.accelerator) == (3, "auto")
    gpu = "GPU-aaaaaaaa-0000-0000-0000-000000000001"
    assert [e["CUDA_VISIBLE_DEVICES"] for e in plan.environments] == [*MIGS, gpu]
    two = plan_workers("2", "cuda", machine(tree, CUDA_VISIBLE_DEVICES=f"{MIGS[1]},{MIGS[0]}"))
    assert [e["CUDA_VISIBLE_DEVICES"] for e in two.environments] == [MIGS[1], MIGS[0]]


def test_the_list_of_nvidia_smi_is_parsed() -> None:
    gpus = parse_gpu_list(WITH_MIG)
    assert [len(gpu.migs) for gpu in gpus] == [2, 0]
    assert gpus[0].migs == MIGS
    assert parse_gpu_list("No devices were found\n") == []
    assert parse_gpu_list("  MIG 1g.5gb Device 0: (UUID: MIG-1)\n") == []
    assert visible_gpus("0", gpus) == list(MIGS)
    assert visible_gpus(f"{MIGS[1]},1", gpus) == [MIGS[1], gpus[1].uuid]
    assert visible_gpus(None, [Gpu("GPU-1")]) == ["GPU-1"]


@pytest.mark.parametrize(
    ("text", "count", "left"),
    [
        (None, 3, [0, 1, 2]),
        ("2,0", 3, [2, 0]),
        ("1, 2", 3, [1, 2]),
        ("1,x,2", 3, [1]),
        ("1,1", 3, []),
        ("", 3, []),
        ("GPU-af12,GPU-bf34", 3, [0, 1]),
        ("-1", 3, []),
    ],
)
def test_lists_of_visible_devices(text: str | None, count: int, left: list[int]) -> None:
    assert visible(text, count) == left


# -- other kinds -------------------------------------------------------------------------------------------------


def test_rocm_gpus_are_counted_by_the_drivers_topology(tree: Path) -> None:
    nodes = {
        f"sys__class__kfd__kfd__topology__nodes__{n}__gpu_id": g
        for n, g in enumerate(["0", "51", "52", "53"])
    }
    put(tree, dev__kfd="", **nodes)
    assert count_devices("auto", machine(tree)).count == 3
    some = count_devices("cuda", machine(tree, ROCR_VISIBLE_DEVICES="0,2", HIP_VISIBLE_DEVICES="1"))
    assert (some.kind, some.count) == ("cuda", 1)
    none = count_devices("cuda", machine(tree, HIP_VISIBLE_DEVICES=""))
    assert none.count == 0
    assert none.why.startswith("no ROCm device is visible: 3 ROCm devices by /sys/class/kfd")


def test_npus_and_hpus_are_counted_by_their_nodes(tree: Path) -> None:
    put(tree, dev__davinci0="", dev__davinci1="", dev__davinci_manager="")
    devices = count_devices("auto", machine(tree, ASCEND_RT_VISIBLE_DEVICES="1"))
    assert (devices.kind, devices.count) == ("npu", 1)
    assert devices.why == "2 device nodes /dev/davinci*, ASCEND_RT_VISIBLE_DEVICES=1"
    put(tree, dev__accel__accel0="", dev__accel__accel1="")
    put(
        tree,
        sys__class__accel__accel0__device__vendor="0x1da3",
        sys__class__accel__accel1__device__vendor="0x8086",
    )
    assert count_devices("hpu", machine(tree)).count == 1, "the other is a laptop's"


def test_a_node_without_any_runs_a_worker_for_each_core(tree: Path) -> None:
    plan = plan_workers("auto", "auto", machine(tree))
    cores = len(os.sched_getaffinity(0))
    assert plan == Workers(
        cores,
        "auto",
        "this node shows no GPU or other accelerator: no device nodes of CUDA, ROCm, NPU, HPU or XPU in /dev; "
        f"{cores} CPU cores",
    )
    assert plan_workers("cpu", "auto", machine(tree)).slots == cores
    assert plan_workers("auto", "cpu", machine(tree)).accelerator == "cpu"


def test_a_containers_quota_counts(tree: Path) -> None:
    mount = f"30 23 0:26 / {tree}/sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    put(tree, proc__self__cgroup="0::/pod/box\n", proc__self__mountinfo=mount)
    put(tree, **{"sys__fs__cgroup__pod__box__cpu.max": "max 100000\n"})
    put(tree, **{"sys__fs__cgroup__pod__cpu.max": "50000 100000\n"})
    assert count_cores(machine(tree)) == (1, "1 CPU cores by the control group's quota")
    put(tree, **{"sys__fs__cgroup__pod__cpu.max": "max 100000\n"})
    assert count_cores(machine(tree))[0] == len(os.sched_getaffinity(0))


# -- plans -------------------------------------------------------------------------------------------------------


def test_a_number_needs_no_tool(tree: Path) -> None:
    assert plan_workers("3", "auto", machine(tree)) == Workers(3, "auto", "--nproc-per-node 3")
    nvidia(tree, listing=None)
    assert plan_workers("3", "cpu", machine(tree)) == Workers(3, "cpu", "--nproc-per-node 3")
    assert plan_workers("2", "cuda", machine(tree)).slots == 2


@pytest.mark.parametrize(
    ("nproc", "accelerator", "complaint"),
    [
        ("0", "auto", "--nproc-per-node '0': give a number of at least 1"),
        ("-1", "auto", "--nproc-per-node '-1'"),
        ("many!", "auto", "--nproc-per-node 'many!'"),
        ("1", "cuda:0", "--accelerator 'cuda:0': give auto, cpu or a kind"),
        ("1", "4", "--accelerator '4'"),
        ("gpu", "cpu", "do not go together"),
        ("xpu", "cuda", "do not go together"),
        ("gpu", "auto", "--nproc-per-node gpu: this node shows no GPU"),
        (
            "gpu",
            "cuda",
            "--accelerator cuda: no CUDA device is visible: there are no NVIDIA or ROCm device nodes",
        ),
        ("2", "cuda", "--accelerator cuda: no CUDA device is visible"),
        ("auto", "npu", "--accelerator npu: no npu device is visible: 0 device nodes /dev/davinci"),
        ("auto", "xpu", "no-python cannot import PyTorch"),
    ],
)
def test_what_cannot_be_says_why(tree: Path, nproc: str, accelerator: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        plan_workers(nproc, accelerator, machine(tree))


def test_more_workers_than_devices_are_refused_for_a_named_accelerator(tree: Path) -> None:
    nvidia(tree)
    with pytest.raises(
        ConfigError, match=r"2 CUDA devices: .*each worker needs one of its own; give 2 at most"
    ):
        plan_workers("3", "cuda", machine(tree))


# -- the real thing ----------------------------------------------------------------------------------------------


@pytest.mark.real
def test_pytorch_itself_is_asked_where_nothing_else_tells() -> None:
    here = Machine(env=dict(os.environ))
    answer = here.ask_torch("cuda")
    assert answer is not None
    expected = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.cuda.device_count(), torch.__version__)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert (str(answer[1]), answer[2]) == tuple(expected)
    assert here.ask_torch("unheard_of") == ("unheard_of", 0, answer[2])


@pytest.mark.real
def test_this_machine_has_a_plan_and_the_agent_stays_without_pytorch() -> None:
    program = (
        "import sys\n"
        "from stoker.agent.accelerators import Machine, plan_workers\n"
        "from stoker.settings import environment\n"
        "plan = plan_workers('auto', 'auto', Machine(environment()))\n"
        "print(plan.slots, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    slots, has_torch = done.stdout.split()
    assert int(slots) >= 1
    assert has_torch == "False"
