"""The program of the node check: a matrix product on the device, then an all-reduce in the group, each timed.

    python -m stoker.train.node_check --rank R --world-size N --store HOST:PORT --timeout S --local-rank L

It prints one line of JSON (a `CheckResult`) and exits with 0 or 1. Whatever happens (a peer that never comes, a driver
that hangs) it ends within the timeout: a thread says how far it came and ends the process, and should that
thread never get the GIL, `faulthandler` ends it a little later. Rank 0 hosts the store at that port for the others.

Times are medians over repetitions after a warm-up, so that one interrupt does not count; an all-reduce also waits for
the slowest of its group, which is why the product is timed on its own. Results are compared as well: a device that
counts wrong is as faulty as one that does not count.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from typing import TYPE_CHECKING, NoReturn

import msgspec

from stoker.base.units import parse_size_bytes
from stoker.errors import StokerError
from stoker.wire.health import CheckResult, CheckStage

if TYPE_CHECKING:  # at run time PyTorch is imported when the clock is running: that may hang, too
    import torch
    from torch._C._distributed_c10d import Store

WARM_UPS = 2
REPETITIONS = 9
LAST_RESORT_S = 2.0
"""Seconds after the timeout in which the process ends even if Python cannot run."""
PART_S = 5.0
"""Seconds that rank 0 waits for the others to be done with its store."""
WRONG_SHARE = 0.02
"""Largest error of a product's element, in typical elements: reduced precisions (TF32) stay well below."""
MESSAGE_CHARACTERS = 500


@dataclass(frozen=True)
class CheckOptions:
    """What one process of the check is to do."""

    rank: int
    world_size: int
    store_host: str
    store_port: int
    timeout_s: float
    device: str
    local_rank: int
    """Which of the node's devices, as for a worker."""
    matrix_size: int
    """Rows and columns of the matrices; 0: what suits the device."""
    payload_bytes: int
    """Of the all-reduce; 0: what suits the device."""


class NodeCheckProgram:
    """One process's check, step by step; `stage` says how far it is."""

    def __init__(self, options: CheckOptions, began: float) -> None:
        self.options = options
        self.began = began
        self.stage: CheckStage = "start"
        self.matmul_s = 0.0
        self.allreduce_s = 0.0
        self._store: Store | None = None

    def run(self) -> CheckResult:
        """All of it. Failures are results."""
        options = self.options
        words = {
            "start": "the device cannot be used",
            "matmul": "the matrix product failed",
            "meet": f"the group of {options.world_size} did not meet at {options.store_host}:{options.store_port}",
            "allreduce": f"the all-reduce of {options.world_size} failed",
        }
        try:
            device = self._open_device()
            if self._is_anothers(device):
                self.stage = "done"
                return self.result()
            self.stage = "matmul"
            self.matmul_s = self._time_matmul(device)
            if options.world_size > 1:
                self.stage = "meet"
                self._meet(device)
                self.stage = "allreduce"
                self.allreduce_s = self._time_allreduce(device)
                self._part()
        except (ImportError, OSError, RuntimeError, ValueError, MemoryError, StokerError) as error:
            return self.result(f"{words[self.stage]}: {error}")
        self.stage = "done"
        return self.result()

    def result(self, why: str = "") -> CheckResult:
        """What is known by now."""
        return CheckResult(
            ok=not why,
            matmul_s=self.matmul_s,
            allreduce_s=self.allreduce_s,
            elapsed_s=time.monotonic() - self.began,
            why=why.strip().partition("\n")[0][:MESSAGE_CHARACTERS],
            stage=self.stage,
        )

    def left_s(self) -> float:
        """Seconds until the timeout, at least a little."""
        return max(0.1, self.began + self.options.timeout_s - time.monotonic())

    # -- device -------------------------------------------------------------------------------------------

    def _open_device(self) -> torch.device:
        from stoker.train.accelerator import AUTO, choose_device

        kind, _, number = self.options.device.partition(":")
        device = choose_device(kind or AUTO, int(number) if number else self.options.local_rank)
        if number and device.index != int(number):
            raise RuntimeError(f"PyTorch sees no such device here ({self.options.device})")
        return device

    def _is_anothers(self, device: torch.device) -> bool:
        """Whether another local rank tries this device: there are fewer of them than workers, or it is the CPU."""
        return self.options.local_rank > 0 and device.index != self.options.local_rank

    def _time_matmul(self, device: torch.device) -> float:
        import torch

        size = self.options.matrix_size or (768 if device.type == "cpu" else 8192)
        matrix = torch.randn(size, size, device=device)
        product = torch.mm(matrix, matrix)
        taken_s = _timed(lambda: torch.mm(matrix, matrix, out=product), device)
        corner = min(size, 64)
        # On the CPU, for not every kind of device has doubles.
        expected = matrix[:corner].cpu().double() @ matrix[:, :corner].cpu().double()
        wrong = (product[:corner, :corner].cpu().double() - expected).abs().max().item() / size**0.5
        if not wrong < WRONG_SHARE:  # it may be no number at all
            raise RuntimeError(f"the device counts wrong, by {wrong:.2g} of a typical element")
        return taken_s

    # -- group --------------------------------------------------------------------------------------------

    def _meet(self, device: torch.device) -> None:
        import torch.distributed as dist

        from stoker.train.accelerator import backend_of

        self._store = self._open_store()
        # The watchdog of NCCL and its kin would end the process without a word: ours comes first
        timeout_s = self.left_s() + (0.0 if device.type == "cpu" else LAST_RESORT_S + 60.0)
        dist.init_process_group(
            backend_of(device),
            store=self._store,
            rank=self.options.rank,
            world_size=self.options.world_size,
            timeout=timedelta(seconds=timeout_s),
        )

    def _open_store(self) -> Store:
        from torch._C._distributed_c10d import TCPStore

        host, port = self.options.store_host, self.options.store_port
        timeout = timedelta(seconds=self.left_s())
        if self.options.rank > 0:
            return TCPStore(host, port, is_master=False, timeout=timeout)
        listener = None
        try:  # by itself it listens on every interface
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, port), family=family, backlog=1024).detach()
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:  # an address that others know it by, and it does not
                raise
        return TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener
        )

    def _time_allreduce(self, device: torch.device) -> float:
        import torch
        import torch.distributed as dist

        size_bytes = self.options.payload_bytes or ((16 if device.type == "cpu" else 256) << 20)
        world_size = self.options.world_size
        payload = torch.ones(max(1, size_bytes // 4), device=device)
        taken_s = _timed(lambda: dist.all_reduce(payload), device, before=lambda: payload.fill_(1.0))
        if not bool(payload.eq(world_size).all()):
            raise RuntimeError("a sum over the group came out wrong")
        return taken_s

    def _part(self) -> None:
        """Nobody closes its connections while another still needs them; rank 0, with the store, goes last."""
        import torch.distributed as dist

        dist.barrier()
        assert self._store is not None
        peers = [f"stoker-parted-{rank}" for rank in range(1, self.options.world_size)]
        with contextlib.suppress(RuntimeError):
            if self.options.rank > 0:
                self._store.set(peers[self.options.rank - 1], "1")
            else:
                self._store.wait(peers, timedelta(seconds=min(PART_S, self.left_s())))
        dist.destroy_process_group()


def _timed(
    work: Callable[[], object], device: torch.device, *, before: Callable[[], object] = lambda: None
) -> float:
    """Median seconds of the work on the device, after a warm-up."""
    from stoker.train.accelerator import synchronize

    taken_s = []
    for _ in range(WARM_UPS + REPETITIONS):
        before()
        synchronize(device)
        began = time.monotonic()
        work()
        synchronize(device)
        taken_s.append(time.monotonic() - began)
    return median(taken_s[WARM_UPS:])


class _Output:
    """The one line that this process prints, whichever thread comes first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def end(self, result: CheckResult) -> NoReturn:
        """Print the result and end the process, without waiting for threads that may hang."""
        self._lock.acquire()  # and never released: the first one ends the process
        sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
        sys.stdout.flush()
        os._exit(0 if result.ok else 1)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the check and end the process with its result."""
    began = time.monotonic()
    options = parse(arguments)
    program, output = NodeCheckProgram(options, began), _Output()

    def give_up() -> None:
        output.end(
            program.result(f"it did not end within {options.timeout_s:g} s: it was at stage {program.stage}")
        )

    faulthandler.dump_traceback_later(options.timeout_s + LAST_RESORT_S, exit=True)
    timer = threading.Timer(options.timeout_s, give_up)
    timer.daemon = True
    timer.start()
    output.end(program.run())


def parse(arguments: Sequence[str] | None) -> CheckOptions:
    """The command line; it exits with 2 when it makes no sense."""
    parser = argparse.ArgumentParser(prog="python -m stoker.train.node_check", description="Check this node.")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument(
        "--store", default="127.0.0.1:0", metavar="HOST:PORT", help="where rank 0 hosts the store"
    )
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="seconds that it may take in all"
    )
    parser.add_argument(
        "--device", default="", help="cpu, cuda, xpu, cuda:N, ...; by default the accelerator that there is"
    )
    parser.add_argument(
        "--local-rank",
        type=int,
        default=0,
        help="which of the node's devices, as for a worker of this local rank",
    )
    parser.add_argument(
        "--size", type=int, default=0, help="rows of the matrices; by default 768 on the CPU, else 8192"
    )
    parser.add_argument(
        "--payload", default="0", help="of the all-reduce; by default 16MiB on the CPU, else 256MiB"
    )
    given = parser.parse_args(arguments)
    host, _, port = given.store.rpartition(":")
    try:
        payload_bytes = parse_size_bytes(given.payload)
    except ValueError as error:
        parser.error(str(error))
    if not 0 <= given.rank < given.world_size:
        parser.error(f"--rank {given.rank} is not below --world-size {given.world_size}")
    if not host or not port.isdigit() or int(port) > 65535 or (given.world_size > 1 and int(port) == 0):
        parser.error(f"--store {given.store} is no HOST:PORT")
    if not 0 < given.timeout < 1e6:
        parser.error(f"--timeout {given.timeout:g} is not a number of seconds above 0")
    return CheckOptions(
        rank=given.rank,
        world_size=given.world_size,
        store_host=host.strip("[]"),
        store_port=int(port),
        timeout_s=given.timeout,
        device=given.device,
        local_rank=max(0, given.local_rank),
        matrix_size=max(0, given.size),
        payload_bytes=payload_bytes,
    )


if __name__ == "__main__":
    main()
