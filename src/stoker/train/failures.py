"""What an exception of a worker means, and how the worker tells of it when it ends with it."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from stoker.errors import StokerError
from stoker.train.channel import AgentChannel

_OF_DEVICE = r"(?i:cuda|hip) (?:driver |runtime )?(?i:error|failure).{0,80}?"
"""How PyTorch and NCCL begin where they quote cudaGetErrorString or hipGetErrorString."""
_LOST = (
    "device-side assert",
    "an illegal memory access",
    "an illegal instruction",
    "unspecified launch failure",
    "misaligned address",
    "invalid program counter",
    "on global/shared address space",
    "hardware stack error",
    "the launch timed out",
    "context is destroyed",
    "an async error has occured in external entity",
    "MPS client",
    "tensor memory not",
    "unknown error",
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
    "nvlink or a hardware error",
)
_DEVICE_IS_LOST = re.compile(
    "|".join(
        (
            _OF_DEVICE + "(?:" + "|".join(re.escape(words) for words in _LOST) + ")",
            r"(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR)",
            r"HSA_STATUS_ERROR",
            r"_RESULT_ERROR_DEVICE_LOST|GPU is lost|fallen off the bus",
        )
    )
)
_DIST_ERRORS = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError"})
_PEER_IS_GONE = re.compile(
    "|".join(
        re.escape(words)
        for words in (
            "Connection closed by peer",
            "Connection reset by peer",
            "Broken pipe",
            "gloo/",
            "NCCL",
            "Timed out waiting",
            "Socket closed",
            "process group has been destroyed",
            "process group has not been initialized",
        )
    )
)


def is_collective_failure(error: BaseException) -> bool:
    """Whether an exception, or one that led to it, says that a peer or the network is gone, and not that the script is
    wrong. What is no `Exception`, such as `SystemExit`, says what is to be done, whatever led to it."""
    return isinstance(error, Exception) and any(tells_of_a_lost_peer(one) for one in with_causes(error))


def is_device_lost(error: BaseException) -> bool:
    """Whether an exception, or one that led to it, leaves the device in a state that cannot be trusted.

    CUDA calls such errors sticky: from then on everything fails that the process asks of the device, and what its
    memory holds is worth nothing. Only a new process gets a new context.
    """
    return any(
        isinstance(one, RuntimeError) and _DEVICE_IS_LOST.search(str(one)) is not None
        for one in with_causes(error)
    )


def readable_traceback(error: BaseException) -> str:
    """The traceback; for our own errors without our own frames: the message says what they would."""
    told = traceback.TracebackException.from_exception(error)
    if isinstance(error, StokerError):
        ours = str(Path(__file__).parents[1]) + "/"
        part: traceback.TracebackException | None = told
        while part is not None:
            kept = [frame for frame in part.stack if not frame.filename.startswith(ours)]
            part.stack = traceback.StackSummary.from_list(kept)
            part = part.__cause__
    return "".join(told.format())


def report_exception(
    channel: AgentChannel,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """`sys.excepthook` of a worker: the agent learns the traceback, the exit code is the error's own."""
    text = readable_traceback(error)
    channel.fail(text)
    sys.stderr.write(text)
    if isinstance(error, StokerError):
        sys.stderr.flush()
        sys.exit(error.exit_code)


def with_causes(error: BaseException) -> Iterator[BaseException]:
    """An exception and those that it was raised from, in the handling of, or as a group of. Each once."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting += [one.__cause__, one.__context__]
            if isinstance(one, BaseExceptionGroup):
                waiting += one.exceptions


def tells_of_a_lost_peer(error: BaseException) -> bool:
    """Whether this very exception says that a peer or the network is gone."""
    if not isinstance(error, RuntimeError):
        return False
    # By name: a worker that only works on shards needs no PyTorch.
    names = {kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "torch.distributed"}
    return bool(names & _DIST_ERRORS) or _PEER_IS_GONE.search(str(error)) is not None
