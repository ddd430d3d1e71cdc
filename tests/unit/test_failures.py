"""Which errors end a worker's process, and which only its world."""

from __future__ import annotations

import socket
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from stoker.agent.exits_signs import find_sign
from stoker.data.session import Session
from stoker.errors import BadRecord
from stoker.settings import worker_settings
from stoker.train.channel import AgentChannel
from stoker.train.failures import is_collective_failure, is_device_lost
from stoker.train.member_link import MemberLink, WorldChanged, world_of_one
from stoker.train.steps import Steps
from stoker.train.worlds import Worlds
from stoker.wire.job import Order

NCCL = "NCCL error in: ProcessGroupNCCL.cpp:3699, unhandled cuda error, NCCL version 2.27.5\nncclUnhandledCudaError: "
LOST = [
    "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported at some other call",
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: an illegal instruction was encountered",
    "CUDA error: misaligned address",
    "CUDA error: unspecified launch failure",
    "CUDA error: the launch timed out and was terminated",
    "CUDA error: uncorrectable ECC error encountered",
    "HIP error: unspecified launch failure",
    "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb, m, n, k)`",
    f"{NCCL}Call to CUDA function failed.\nLast error:\nCuda failure 700 'an illegal memory access was encountered'",
    f"{NCCL}Call to CUDA function failed.\nLast error:\nCuda failure 'device-side assert triggered'",
]
PEER_GONE = [
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:38011",
    "NCCL communicator was aborted on rank 1.",
    "NCCL error in: ProcessGroupNCCL.cpp:3699, remote process exited or there was a network error, NCCL version 2\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    "[Rank 1] Watchdog caught collective operation timeout: NCCL",
]
SCRIPT = [
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 139.72 GiB",
    "CUDA error: invalid argument",
    "CUDA error: no kernel image is available for execution on the device",
    "mat1 and mat2 shapes cannot be multiplied (4x2 and 3x2)",
    "the parser met a misaligned address",
]


@pytest.fixture
def worlds(tmp_path: Path) -> Iterator[Worlds]:
    """Of a worker that an agent has started."""
    path = str(tmp_path / "agent.sock")
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(path)
        agent.listen()
        live = Session()
        link = MemberLink("w", live)
        link.channel = AgentChannel(path, "w")
        settings = worker_settings()
        yield Worlds(settings, live, link, Steps(settings, live, link), torch.device("cpu"))
        link.channel._socket.close()


@pytest.mark.parametrize("message", LOST)
def test_a_lost_device_ends_the_process_and_its_agent_knows_why(worlds: Worlds, message: str) -> None:
    error = RuntimeError(message)
    assert is_device_lost(error)
    assert not worlds.is_broken_world(error)
    try:
        raise error
    except RuntimeError:
        words = traceback.format_exc()
    assert find_sign(words).sign in ("device-error", "hardware"), "that starts another worker in its place"


@pytest.mark.parametrize("message", PEER_GONE)
def test_a_peer_that_is_gone_breaks_the_world_alone(worlds: Worlds, message: str) -> None:
    assert not is_device_lost(RuntimeError(message))
    assert worlds.is_broken_world(RuntimeError(message))


@pytest.mark.parametrize("message", SCRIPT)
def test_what_the_script_does_wrong_is_neither(worlds: Worlds, message: str) -> None:
    assert not is_device_lost(RuntimeError(message))
    assert not worlds.is_broken_world(RuntimeError(message))


def test_a_lost_device_is_found_behind_what_came_of_it(worlds: Worlds) -> None:
    """A script that catches the error and commits, say in a `finally`, leaves the world with it still on its back."""

    def step() -> None:
        try:
            raise RuntimeError(LOST[0])
        finally:
            raise WorldChanged

    with pytest.raises(WorldChanged) as left:
        step()
    assert not worlds.is_broken_world(left.value)
    with pytest.raises(RuntimeError) as broken:
        raise RuntimeError(PEER_GONE[0]) from RuntimeError(LOST[1])
    assert not worlds.is_broken_world(broken.value)
    assert worlds.is_broken_world(WorldChanged())
    assert not worlds.is_broken_world(BadRecord(LOST[0]))


class TrainingError(Exception):
    """A script's own."""


def raised(action: Callable[[], None]) -> BaseException:
    with pytest.raises(BaseException) as left:
        action()
    return left.value


def raise_from(error: BaseException) -> None:
    raise TrainingError("step 20 failed") from error


def raise_while_handling(error: BaseException) -> None:
    try:
        raise error
    except BaseException:  # noqa: BLE001 (as scripts do)
        raise TrainingError("step 20 failed")  # noqa: B904 (that is the point)


def raise_far_from(error: BaseException) -> None:
    try:
        raise_while_handling(error)
    except TrainingError:
        raise_from(ValueError("wrapped once more"))


def raise_group_of(error: BaseException) -> None:
    raise BaseExceptionGroup("unhandled errors in a TaskGroup", [KeyError("other"), error])


WRAPS = [raise_from, raise_while_handling, raise_far_from]


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_lost_peer_is_found_in_what_a_script_makes_of_it(
    worlds: Worlds, wrap: Callable[[BaseException], None]
) -> None:
    for error in (
        RuntimeError(PEER_GONE[0]),
        dist.DistNetworkError("no words that anybody knows"),
        WorldChanged(),
    ):
        assert worlds.is_broken_world(raised(lambda error=error: wrap(error)))
    assert not worlds.is_broken_world(raised(lambda: wrap(RuntimeError(SCRIPT[3]))))
    assert not worlds.is_broken_world(raised(lambda: wrap(RuntimeError(LOST[0]))))


@pytest.mark.parametrize("wrap", WRAPS)
def test_once_the_world_is_over_any_runtime_error_is_of_the_world(
    worlds: Worlds, wrap: Callable[[BaseException], None]
) -> None:
    error = raised(lambda: wrap(RuntimeError("Tensors of the same index must be on the same device")))
    core = worlds._link.core
    core.enter(world_of_one("w", 0))
    assert not worlds.is_broken_world(error)
    core.on_order(Order(generation=2))
    assert worlds.is_broken_world(error)
    assert not worlds.is_broken_world(raised(lambda: wrap(ValueError("no such file"))))


def test_a_lost_peer_is_found_in_a_group_of_exceptions(worlds: Worlds) -> None:
    assert worlds.is_broken_world(raised(lambda: raise_group_of(RuntimeError(PEER_GONE[0]))))
    assert not worlds.is_broken_world(raised(lambda: raise_group_of(RuntimeError(SCRIPT[0]))))


def test_an_exit_that_a_script_chose_is_its_own_whatever_led_to_it(worlds: Worlds) -> None:
    def step() -> None:
        try:
            raise RuntimeError(PEER_GONE[0])
        except RuntimeError:
            raise SystemExit(3) from None

    assert not worlds.is_broken_world(raised(step))


def test_errors_of_scripts_are_no_collective_failures() -> None:
    assert not is_collective_failure(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_collective_failure(ValueError("Connection closed by peer"))
    assert is_collective_failure(RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"))


def test_causes_that_go_round_in_a_circle_are_looked_at_once() -> None:
    one, other = RuntimeError("one"), RuntimeError("other")
    one.__context__, other.__context__ = other, one
    assert not is_device_lost(one)
    assert not is_collective_failure(one)
