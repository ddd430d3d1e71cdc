"""How many workers a node runs, and on what: `--nproc-per-node` and `--accelerator`, without PyTorch in the agent.

Device nodes, drivers' own tools and the *_VISIBLE_DEVICES variables decide; only where they cannot, a short-lived
process asks PyTorch.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from stoker.agent.resources import available_cores
from stoker.errors import ConfigError

AUTO, CPU, GPU = "auto", "cpu", "gpu"
TOOL_TIMEOUT_S = 20.0
PROBE_TIMEOUT_S = 120.0
INTEL, HABANA = "0x8086", "0x1da3"
"""PCI vendors: render nodes and /dev/accel are shared by many."""
PROBE = """
import json, sys, torch
found = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
kind = sys.argv[1] if sys.argv[1] != "auto" else found.type if found is not None else "cpu"
module = getattr(torch, kind, None)
has = [getattr(module, name, None) for name in ("is_available", "device_count")]
count = has[1]() if kind != "cpu" and all(has) and has[0]() else 0
print(json.dumps({"kind": kind, "count": count, "torch": torch.__version__}))
"""
_KIND = re.compile(r"^[a-z][a-z0-9_]*$")
_GPU_LINE = re.compile(r"^GPU \d+: .*\(UUID: (GPU-[^)]+)\)")
_MIG_LINE = re.compile(r"^\s+MIG .*\(UUID: (MIG-[^)]+)\)")


@dataclass(frozen=True)
class Devices:
    """The devices of one kind that workers of this node may use."""

    kind: str
    count: int
    why: str
    each: tuple[str, ...] = ()
    """`CUDA_VISIBLE_DEVICES` for each worker, where a process sees one device at most: MIG."""


class Workers(NamedTuple):
    """What this node runs."""

    slots: int
    accelerator: str
    """For the workers: `auto`, `cpu` or a kind of device."""
    why: str
    environments: tuple[dict[str, str], ...] = ()
    """More variables for the worker of each slot; empty: none needs any."""


class Gpu(NamedTuple):
    """One line of `nvidia-smi -L` and the indented ones under it."""

    uuid: str
    migs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Machine:
    """This node as counting sees it. What it is asked once is remembered, so make one for each run."""

    env: Mapping[str, str]
    root: Path = Path("/")
    python: str = sys.executable
    """The interpreter that is asked for its PyTorch."""

    def nodes(self, pattern: str, folder: str = "dev") -> list[str]:
        """Names in a folder that match the whole pattern, in order of their numbers."""
        with contextlib.suppress(OSError):
            names = [n for n in os.listdir(self.root / folder) if re.fullmatch(pattern, n)]
            return sorted(names, key=lambda n: (len(n), n))
        return []

    def read(self, path: str) -> str:
        """A small file's text, stripped; empty where it cannot be read."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return (self.root / path).read_text().strip()
        return ""

    @functools.cached_property
    def gpus(self) -> list[Gpu] | None:
        """What nvidia-smi lists; None: it is not there, or fails."""
        tool = shutil.which("nvidia-smi", path=self.env.get("PATH"))
        text = self._output([tool, "-L"], TOOL_TIMEOUT_S) if tool else None
        return None if text is None else parse_gpu_list(text)

    def ask_torch(self, kind: str) -> tuple[str, int, str] | None:
        """Kind, count and PyTorch's version, from a process of its own; None: there is no PyTorch."""
        text = self._output([self.python, "-c", PROBE, kind], PROBE_TIMEOUT_S)
        with contextlib.suppress(ValueError, KeyError, IndexError):
            answer = json.loads((text or "").splitlines()[-1])
            return str(answer["kind"]), int(answer["count"]), str(answer["torch"])
        return None

    def _output(self, command: Sequence[str], timeout_s: float) -> str | None:
        try:
            done = subprocess.run(
                command, env=dict(self.env), capture_output=True, text=True, timeout=timeout_s, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout


def plan_workers(nproc: str, accelerator: str, machine: Machine) -> Workers:
    """What `--nproc-per-node` and `--accelerator` ask for on this node.

    `nproc`: a number; `gpu`: one worker for each device; `cpu`: one for each core; `auto`: `gpu` where there is a
    device, else `cpu`; or, as torchrun has it, a kind of device. Raises ConfigError for what cannot be.
    """
    for flag, text in (("--accelerator", accelerator), ("--nproc-per-node", nproc)):
        if not (_KIND.match(text) or (flag != "--accelerator" and text.isdigit())):
            raise ConfigError(f"{flag} {text!r}: {_choices(flag)}")
    if nproc.isdigit():
        return _plan_number(int(nproc), accelerator, machine)
    if nproc not in (AUTO, CPU, GPU):
        if accelerator not in (AUTO, nproc):
            raise ConfigError(f"--nproc-per-node {nproc} and --accelerator {accelerator} do not go together")
        accelerator = nproc
        nproc = GPU
    if nproc == CPU or accelerator == CPU:
        if nproc == GPU:
            raise ConfigError(
                "--nproc-per-node gpu and --accelerator cpu do not go together: give cpu or a number"
            )
        cores, why = count_cores(machine)
        return Workers(cores, accelerator, why)
    devices = count_devices(accelerator, machine)
    if devices.count > 0:
        return Workers(devices.count, accelerator, devices.why, _environments(devices, devices.count))
    if nproc == AUTO and accelerator == AUTO:
        cores, why = count_cores(machine)
        return Workers(cores, accelerator, f"{devices.why}; {why}")
    told = f"--nproc-per-node {nproc}" if accelerator == AUTO else f"--accelerator {accelerator}"
    raise ConfigError(f"{told}: {devices.why}; give a number of workers, or --accelerator cpu")


def count_devices(kind: str, machine: Machine) -> Devices:
    """How many devices of a kind this node's workers may use, and how that is known. `auto`: of whichever is there."""
    if kind == CPU:
        return Devices(CPU, 0, "the CPU is no accelerator")
    if kind == AUTO:
        return _find(machine)
    if kind == "cuda":
        return _count_cuda(machine)
    if kind in _BY_NODES:
        return _count_by_nodes(kind, machine)
    return _probe(kind, machine)


def may_have_devices(kind: str, machine: Machine) -> bool:
    """Whether there is any sign of a device of this kind, without asking a tool that may hang."""
    if kind != AUTO:
        return kind != CPU
    folders = (
        ("dev", r"nvidia\d+|nvidiactl|dxg|kfd|nvhost-gpu|nvgpu|davinci\d+"),
        ("dev/accel", r"accel\d+"),
    )
    return any(machine.nodes(names, folder) for folder, names in (*folders, ("dev/dri", r"renderD\d+")))


def count_cores(machine: Machine) -> tuple[int, str]:
    """Cores that this process may use, by its affinity and its control group's quota."""
    cores = max(1, math.ceil(available_cores(machine.root / "proc")))
    by_quota = " by the control group's quota" if cores < len(os.sched_getaffinity(0)) else ""
    return cores, f"{cores} CPU cores{by_quota}"


# -- kinds -----------------------------------------------------------------------------------------------------


class _Nodes(NamedTuple):
    """A kind of device that has one device node for each."""

    folder: str
    pattern: str
    variable: str
    vendor: str = ""
    """PCI vendor that the node must have, for folders that several kinds share."""


_BY_NODES = {
    "npu": _Nodes("dev", r"davinci\d+", "ASCEND_RT_VISIBLE_DEVICES"),
    "hpu": _Nodes("dev/accel", r"accel\d+", "HABANA_VISIBLE_MODULES", HABANA),
}


def _find(machine: Machine) -> Devices:
    """The accelerator of this node, cheapest sign first; PyTorch is asked only where something of Intel's is."""
    found = _count_cuda(machine)
    if found.count > 0 or _has_nvidia(machine) or machine.nodes("kfd"):
        return found
    for kind in _BY_NODES:
        devices = _count_by_nodes(kind, machine)
        if devices.count > 0:
            return devices
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        return Devices("mps", 1, "Apple silicon has one device")
    renders = machine.nodes(r"renderD\d+", "dev/dri")
    if any(machine.read(f"sys/class/drm/{name}/device/vendor") == INTEL for name in renders):
        return _probe(AUTO, machine)
    return Devices(
        CPU,
        0,
        "this node shows no GPU or other accelerator: no device nodes of CUDA, ROCm, NPU, HPU or XPU in /dev",
    )


def _has_nvidia(machine: Machine) -> bool:
    return bool(machine.nodes(r"nvidia\d+|nvidiactl|dxg"))


def _count_cuda(machine: Machine) -> Devices:
    if machine.nodes(r"nvhost-gpu|nvgpu"):  # Tegra: other device nodes, no nvidia-smi
        return _probe("cuda", machine)
    if not _has_nvidia(machine):
        if machine.nodes("kfd"):
            return _count_rocm(machine)
        return Devices(
            "cuda", 0, "no CUDA device is visible: there are no NVIDIA or ROCm device nodes in /dev"
        )
    gpus, nodes = machine.gpus, machine.nodes(r"nvidia\d+")
    if gpus is None:
        gpus = [Gpu(name) for name in nodes]
        source = f"{len(gpus)} device nodes /dev/nvidia* (nvidia-smi does not answer)"
    else:
        source = f"{len(gpus)} in nvidia-smi -L"
    chosen = visible_gpus(machine.env.get("CUDA_VISIBLE_DEVICES"), gpus)
    if "CUDA_VISIBLE_DEVICES" in machine.env:
        source += f", CUDA_VISIBLE_DEVICES={machine.env['CUDA_VISIBLE_DEVICES']}"
    if not chosen:
        return Devices("cuda", 0, f"no CUDA device is visible: {source}")
    if any(name.startswith("MIG-") for name in chosen):
        return Devices(
            "cuda", len(chosen), f"{len(chosen)} CUDA devices, some of them MIG: {source}", tuple(chosen)
        )
    return Devices("cuda", len(chosen), f"{len(chosen)} CUDA devices: {source}")


def _count_rocm(machine: Machine) -> Devices:
    """Every node of the driver's topology with a `gpu_id` is a GPU; a container cannot read those it was not given."""
    topology = "sys/class/kfd/kfd/topology/nodes"
    gpus = [
        n for n in machine.nodes(r"\d+", topology) if machine.read(f"{topology}/{n}/gpu_id") not in ("", "0")
    ]
    count, why = len(gpus), f"{len(gpus)} ROCm devices by /{topology}"
    for variable in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        if variable in machine.env:
            count = len(visible(machine.env[variable], count))
            why += f", {variable}={machine.env[variable]}"
    return Devices("cuda", count, why if count else f"no ROCm device is visible: {why}")


def _count_by_nodes(kind: str, machine: Machine) -> Devices:
    spec = _BY_NODES[kind]
    nodes = machine.nodes(spec.pattern, spec.folder)
    if spec.vendor:
        nodes = [n for n in nodes if machine.read(f"sys/class/accel/{n}/device/vendor") == spec.vendor]
    chosen = visible(machine.env.get(spec.variable), len(nodes))
    why = f"{len(nodes)} device nodes /{spec.folder}/{spec.pattern.split(chr(92))[0]}*"
    if spec.variable in machine.env:
        why += f", {spec.variable}={machine.env[spec.variable]}"
    return Devices(kind, len(chosen), why if chosen else f"no {kind} device is visible: {why}")


def _probe(kind: str, machine: Machine) -> Devices:
    answer = machine.ask_torch(kind)
    if answer is None:
        return Devices(
            kind, 0, f"no {kind} device is visible: {machine.python} cannot import PyTorch to look for one"
        )
    found, count, version = answer
    if count == 0:
        return Devices(kind, 0, f"no {found} device is visible to PyTorch {version}")
    return Devices(found, count, f"{count} {found} devices in PyTorch {version}")


# -- lists -----------------------------------------------------------------------------------------------------


def parse_gpu_list(text: str) -> list[Gpu]:
    """`nvidia-smi -L`."""
    gpus: list[Gpu] = []
    for line in text.splitlines():
        if gpu := _GPU_LINE.match(line):
            gpus.append(Gpu(gpu[1]))
        elif (mig := _MIG_LINE.match(line)) and gpus:
            gpus[-1] = gpus[-1]._replace(migs=(*gpus[-1].migs, mig[1]))
    return gpus


def visible(text: str | None, count: int) -> list[int]:
    """Indices that a *_VISIBLE_DEVICES variable leaves of so many devices.

    As drivers read it: the list ends at the first entry that is no device, and one that repeats itself shows none. An
    entry that is no number (a UUID) stands for a device of its own.
    """
    if text is None:
        return list(range(count))
    chosen: list[int] = []
    names: list[str] = []
    for entry in (part.strip() for part in text.split(",")):
        if entry in names:
            return []
        names.append(entry)
        index = int(entry) if entry.isdigit() else len(chosen) if "-" in entry[1:] else -1
        if not 0 <= index < count:
            break
        chosen.append(index)
    return chosen


def visible_gpus(text: str | None, gpus: Sequence[Gpu]) -> list[str]:
    """UUIDs of what CUDA_VISIBLE_DEVICES leaves, a GPU with MIG devices standing for these.

    Entries are indices, or UUIDs of GPUs or MIG devices, or beginnings of such; the list ends at the first that is
    none, and shows nothing if one repeats itself.
    """
    if text is None:
        picked = list(gpus)
    else:
        picked = []
        for entry in (part.strip() for part in text.split(",")):
            gpu = _gpu_named(entry, gpus)
            if gpu in picked:
                return []
            if gpu is None:
                break
            picked.append(gpu)
    return [uuid for gpu in picked for uuid in (gpu.migs or (gpu.uuid,))]


def _gpu_named(entry: str, gpus: Sequence[Gpu]) -> Gpu | None:
    if entry.isdigit():
        return gpus[int(entry)] if int(entry) < len(gpus) else None
    if not entry.startswith(("GPU-", "MIG-")):
        return None
    everything = [*gpus, *(Gpu(uuid) for gpu in gpus for uuid in gpu.migs)]
    return next((gpu for gpu in everything if gpu.uuid.startswith(entry)), None)


# -- numbers of workers ----------------------------------------------------------------------------------------


def _plan_number(slots: int, accelerator: str, machine: Machine) -> Workers:
    if slots < 1:
        raise ConfigError(f"--nproc-per-node '{slots}': {_choices('--nproc-per-node')}")
    why = f"--nproc-per-node {slots}"
    if accelerator == CPU or (accelerator == AUTO and not _has_nvidia(machine)):
        return Workers(slots, accelerator, why)
    devices = count_devices(accelerator, machine)
    if accelerator != AUTO and devices.count == 0:
        raise ConfigError(
            f"--accelerator {accelerator}: {devices.why}; give --accelerator cpu to train without"
        )
    if accelerator != AUTO and slots > devices.count:
        raise ConfigError(
            f"--nproc-per-node {slots} with --accelerator {accelerator}: {devices.why}, and each worker needs one of "
            f"its own; give {devices.count} at most, or --accelerator cpu"
        )
    return Workers(slots, accelerator, why, _environments(devices, slots))


def _environments(devices: Devices, slots: int) -> tuple[dict[str, str], ...]:
    """With MIG each worker sees its own device only, for CUDA shows a process no more than one."""
    if not devices.each:
        return ()
    return tuple({"CUDA_VISIBLE_DEVICES": devices.each[slot % len(devices.each)]} for slot in range(slots))


def _choices(flag: str) -> str:
    if flag == "--accelerator":
        return "give auto, cpu or a kind of device such as cuda, xpu, mps, npu, hpu"
    return "give a number of at least 1, or auto, gpu, cpu or a kind of device"
