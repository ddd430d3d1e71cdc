"""What a worker's last words point to: one table of patterns, and how the words that count are found."""

from __future__ import annotations

import re
from typing import NamedTuple

from stoker.wire.exits import Sign

TAIL_LINES = 60
"""Lines from the end that are looked at where there is no traceback; C++ stack traces are about as long."""
LINE_CHARACTERS = 300
LINE_END_CHARACTERS = 1000
"""A line that is cut within so many characters of its end is left out as a whole."""

_START = re.compile(r"\s*(?:Exception Group |Original )?Traceback \(most recent call last\):\s*$")
_PREFIX = re.compile(r"^(?:\[(?:default|rank)?\d+\]:\s?)*(?:\s*[|+](?:-[-+]*)?\s?)*")
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)


class Pattern(NamedTuple):
    """One row: words of a library, a driver or the kernel, and what they mean."""

    sign: Sign
    words: re.Pattern[str]


def _row(sign: Sign, *expressions: str) -> Pattern:
    return Pattern(sign, re.compile("|".join(expressions)))


def _device(sign: Sign, *texts: str) -> Pattern:
    """Texts of cudaGetErrorString and hipGetErrorString, as PyTorch and NCCL quote them."""
    quoted = "|".join(re.escape(text) for text in texts)
    start = r"(?i:cuda|hip) (?:driver |runtime )?(?i:error|failure)"
    return Pattern(sign, re.compile(f"{start}.{{0,80}}?(?:{quoted})"))


PATTERNS: tuple[Pattern, ...] = (
    # The device, its link or its driver is broken or gone.
    _device(
        "hardware", "uncorrectable ECC error", "uncorrectable NVLink error", "nvlink or a hardware error"
    ),
    _device("hardware", "no CUDA-capable device is detected", "no ROCm-capable device is detected"),
    _device(
        "hardware", "system not yet initialized", "unsupported display driver", "version is insufficient"
    ),
    _row("hardware", r"No (?:CUDA|HIP) GPUs are available", r"NVIDIA driver on your system is too old"),
    _row("hardware", r"fallen off the bus", r"GPU is lost", r"GpuIsLost", r"NVRM: Xid"),
    _row("hardware", r"Failed to initialize NVML", r"Unable to determine the device handle for GPU"),
    # Memory of the device. Before the errors below: it leaves the context as it was.
    _row("device-oom", r"(?:CUDA|HIP|XPU|MPS) (?:error: )?(?:backend )?out of memory", r"'out of memory'"),
    _row("device-oom", r"^(?:[\w.]+\.)?OutOfMemoryError\b", r"cudaErrorMemoryAllocation"),
    _row("device-oom", r"(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE|HIPBLAS)_STATUS_ALLOC_FAILED"),
    # The context is lost with the error: whatever the process does next fails too. A new one gets a new context.
    _device("device-error", "device-side assert", "an illegal memory access", "unspecified launch failure"),
    _device("device-error", "an illegal instruction", "misaligned address", "invalid program counter"),
    _device("device-error", "on global/shared address space", "hardware stack error", "the launch timed out"),
    _device(
        "device-error", "unknown error", "initialization error", "startup failure", "context is destroyed"
    ),
    _device("device-error", "busy or unavailable", "device not ready", "MPS client", "tensor memory not"),
    _device("device-error", "an async error has occured in external entity"),
    _row("device-error", r"(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR)"),
    _row("device-error", r"Memory access fault by GPU node", r"HSA_STATUS_ERROR"),
    _row(
        "device-error", r"nccl(?:UnhandledCuda|System|Internal|Remote)Error", r"NCCL communicator was aborted"
    ),
    _row("device-error", r"[Ww]atchdog (?:thread terminated with exception|caught collective operation)"),
    # The file system: errno 28 and 122, and how libraries say it that lose the number.
    _row("disk-full", r"No space left on device", r"Disk quota exceeded", r"\[Errno (?:28|122)\]"),
    _row("disk-full", r"database or disk is full", r"\d+ requested and \d+ written"),
    _row("disk-full", r"inline_container\.cc:\d+\] \. unexpected pos", r"PytorchStreamWriter failed writing"),
    _row("disk-full", r"basic_ios::clear: iostream error"),
    _row("disk-full", r"out of shared memory", r"insufficient shared memory \(shm\)"),
    # Memory of the host.
    _row("oom", r"^(?:[\w.]+\.)?(?:_Array)?MemoryError(?::|$)", r"std::bad_alloc", r"\[Errno 12\]"),
    _row("oom", r"DefaultCPUAllocator: (?:can't allocate|not enough) memory", r"Cannot allocate memory"),
    # A loader process or one of a pool: what killed it, only the kernel can say.
    _row("child-killed", r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (?:is killed by|exited unexpected)"),
    _row("child-killed", r"process pool was terminated abruptly", r"terminated with signal SIG"),
)
"""The first row that fits counts."""


class Found(NamedTuple):
    """What the words point to, and the line that says so."""

    sign: Sign = ""
    line: str = ""


def find_sign(message: str) -> Found:
    """Look the words up. Only what an exception says counts, not the source lines that its traceback quotes."""
    said = spoken_lines(message)
    for pattern in PATTERNS:
        for line in said:
            if pattern.words.search(line):
                return Found(pattern.sign, line.strip()[:LINE_CHARACTERS])
    return Found()


def spoken_lines(message: str) -> list[str]:
    """The lines of a traceback that are not frames; all lines where there is none.

    An exception's own text begins where the indentation ends, and may have several lines.
    """
    said: list[str] = []
    in_frames = False
    for raw in message.splitlines():
        line = _PREFIX.sub("", raw)
        if _START.match(line):
            in_frames = True
            continue
        if in_frames and (line.startswith(" ") or not line.strip()):
            continue
        in_frames = False
        if line.strip() and line.strip() not in _CHAINED:
            said.append(line)
    return said


def shortened(text: str, most: int) -> str:
    """Its beginning, which names the exception, and its end, together at most so many characters, and how many are left
    out in between."""
    if len(text) <= most:
        return text
    head, tail = text[: most // 2], text[-(most // 2) :]
    cut = head.rfind("\n") + 1
    if cut > 0 and len(head) - cut < LINE_END_CHARACTERS:
        head = head[:cut]
    cut = tail.find("\n") + 1
    if 0 < cut < min(LINE_END_CHARACTERS, len(tail)):
        tail = tail[cut:]
    left_out = len(text) - len(head) - len(tail)
    between = "" if head.endswith("\n") else "\n"
    return f"{head}{between}  ... {left_out} characters left out ...\n{tail}"


def last_words(tail: str) -> str:
    """The last traceback with all that led to it, and what follows; the last lines where there is none."""
    lines = tail.splitlines()
    starts = [
        number
        for number, line in enumerate(lines)
        if _START.match(_PREFIX.sub("", line)) and not line.startswith("Original")
    ]
    if not starts:
        return "\n".join(lines[-TAIL_LINES:]).strip()
    first = starts.pop()
    while starts and any(_PREFIX.sub("", line).strip() in _CHAINED for line in lines[starts[-1] : first]):
        first = starts.pop()
    return "\n".join(lines[first:]).strip()
