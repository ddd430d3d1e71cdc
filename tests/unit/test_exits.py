"""From a worker's last words to what they point to. The words are those of real programs, cut short."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.agent.exits import CLAIM_S, ExitFactsReader, OomCounter
from stoker.agent.exits_signs import find_sign, last_words, shortened, spoken_lines
from stoker.job.relaunch import classify
from stoker.platform.memory_cgroup import MemoryGroup, number_after, own_group
from stoker.wire.exits import Sign

FRAMES = 'Traceback (most recent call last):\n  File "/job/train.py", line 7, in <module>\n    {}\n'
NOTES = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
BUS_ERROR = (
    "RuntimeError: DataLoader worker (pid 23781) is killed by signal: Bus error. It is possible that dataloader's "
    "workers are out of shared memory. Please try to raise your shared memory limit."
)
CAUSE = "\n\nThe above exception was the direct cause of the following exception:\n\n"
HANDLING = "\n\nDuring handling of the above exception, another exception occurred:\n\n"
LOADER_GONE = "RuntimeError: DataLoader worker (pid(s) 23781) exited unexpectedly"


def raised(words: str, source: str = "step()") -> str:
    return FRAMES.format(source) + words


def watchdog(error: str) -> str:
    """How a process ends that NCCL's watchdog takes down."""
    return (
        f"[rank12]:[E817 17:40:34.227531918 ProcessGroupNCCL.cpp:1515] [PG 0 (default_pg) Rank 12] Process group "
        f"watchdog thread terminated with exception: {error}{NOTES}\n"
        "Exception raised from c10_cuda_check_implementation at ../c10/cuda/CUDAException.cpp:43 (most recent call "
        "first):\n" + "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96\n" * 40
    )


WORDS: list[tuple[Sign, str]] = [
    ("hardware", raised("RuntimeError: CUDA error: uncorrectable ECC error encountered" + NOTES)),
    ("hardware", watchdog("CUDA error: uncorrectable ECC error encountered")),
    ("hardware", raised("torch.AcceleratorError: CUDA error: no CUDA-capable device is detected" + NOTES)),
    ("hardware", raised("RuntimeError: No CUDA GPUs are available")),
    ("hardware", "node7:90:120 [0] enqueue.cc:1290 NCCL WARN Cuda failure 'uncorrectable NVLink error detected'"),
    ("hardware", raised("RuntimeError: CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error")),
    ("hardware", raised("RuntimeError: CUDA error: system not yet initialized")),
    ("hardware", raised("pynvml.NVMLError_GpuIsLost: GPU is lost")),
    ("device-oom", raised("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total")),
    ("device-oom", raised("torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB")),
    ("device-oom", raised("RuntimeError: CUDA error: out of memory" + NOTES)),
    ("device-oom", raised("RuntimeError: MPS backend out of memory (MPS allocated: 9.05 GB, other allocations")),
    ("device-oom", raised("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")),
    ("device-oom", "node7:90:120 [0] include/alloc.h:205 NCCL WARN Cuda failure 2 'out of memory'"),
    ("device-error", raised("RuntimeError: CUDA error: device-side assert triggered" + NOTES)),
    ("device-error", raised("torch.AcceleratorError: CUDA error: an illegal memory access was encountered" + NOTES)),
    ("device-error", raised("RuntimeError: CUDA error: unspecified launch failure" + NOTES)),
    ("device-error", raised("RuntimeError: CUDA error: misaligned address" + NOTES)),
    ("device-error", raised("RuntimeError: cuda runtime error (30) : unknown error at THCStorage.c:113")),
    ("device-error", raised("RuntimeError: HIP error: an illegal memory access was encountered")),
    ("device-error", raised("RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(")),
    ("device-error", raised("RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED")),
    ("device-error", raised("torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled "
                            "cuda error, NCCL version 2.21.5\nncclUnhandledCudaError: Call to CUDA function failed.")),
    ("device-error", raised("torch.distributed.DistBackendError: NCCL communicator was aborted on rank 3.")),
    ("device-error", watchdog("NCCL error: remote process exited or there was a network error")),
    ("device-error", "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: device-side "
                     "assert triggered" + NOTES + "frame #1: <unknown function> + 0xe32e33\n" * 40),
    ("disk-full", raised("OSError: [Errno 28] No space left on device: '/ckpt/step-100.pt'")),
    ("disk-full", raised("OSError: [Errno 122] Disk quota exceeded")),
    ("disk-full", raised("sqlite3.OperationalError: database or disk is full")),
    ("disk-full", raised("OSError: 1048576 requested and 0 written")),
    ("disk-full", raised("RuntimeError: basic_ios::clear: iostream error") + HANDLING
     + raised("RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")),
    ("disk-full", raised("RuntimeError: [enforce fail at inline_container.cc:603] . PytorchStreamWriter failed writing "
                         "file data/0: file write failed")),
    ("disk-full", raised("OSError: [Errno 28] No space left on device") + HANDLING
     + raised("FileNotFoundError: [Errno 2] No such file or directory: '/ckpt/tmp'")),
    ("disk-full", raised(BUS_ERROR) + CAUSE + raised(LOADER_GONE)),
    ("disk-full", raised("RuntimeError: unable to write to file </torch_9_12_0>: No space left on device (28)")),
    ("oom", raised("MemoryError")),
    ("oom", raised("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 256. PiB for an array with shape")),
    ("oom", raised("RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
                   "memory: you tried to allocate 4503599627370496 bytes. Error code 12 (Cannot allocate memory)")),
    ("oom", raised("OSError: [Errno 12] Cannot allocate memory")),
    ("oom", "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc"),
    ("child-killed", raised("RuntimeError: DataLoader worker (pid 23608) is killed by signal: Killed. ") + CAUSE
     + raised(LOADER_GONE)),
    ("child-killed", raised("concurrent.futures.process.BrokenProcessPool: A process in the process pool was "
                            "terminated abruptly while the future was running or pending.")),
    ("child-killed", raised("torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal "
                            "SIGKILL")),
    ("", raised("ValueError: batch of 3 records, not 4")),
    ("", raised("AssertionError: Torch not compiled with CUDA enabled")),
    ("", raised("RuntimeError: CUDA error: invalid device ordinal")),
    ("", raised("KeyError: 'MemoryError'")),
    ("", raised("ValueError: a MemoryError is no reason to stop")),
    ("", raised("ValueError: bad", source='raise OSError("No space left on device")  # CUDA error: unknown error')),
    ("", ""),
]  # fmt: skip


@pytest.mark.parametrize(("sign", "words"), WORDS, ids=lambda value: value[-50:].strip() or "-")
@pytest.mark.parametrize("prefix", ["", "[rank3]: ", "  | "])
def test_words(sign: Sign, words: str, prefix: str) -> None:
    found = find_sign("\n".join(prefix + line for line in words.splitlines()))
    assert found.sign == sign, found.line
    assert bool(found.line) == bool(sign)


def test_a_loader_process_that_fails_by_itself_is_read_through() -> None:
    words = (
        raised(
            "OSError: Caught OSError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        )
        + '  File "ds.py", line 24, in __getitem__\n    read()\nOSError: [Errno 28] No space left on device\n'
    )
    assert find_sign(words).line == "OSError: [Errno 28] No space left on device"
    assert last_words(f"starting\n{words}") == words.strip()


def test_the_whole_chain_is_kept_and_what_was_logged_before_is_not() -> None:
    logged = raised("OSError: [Errno 28] No space left on device") + "\nbut it goes on\n"
    chain = raised("KeyError: 1") + CAUSE + raised("ValueError: 2") + HANDLING + raised("TypeError: 3")
    assert last_words(logged + chain) == chain
    assert find_sign(last_words(logged + chain)).sign == ""


def test_source_lines_say_nothing() -> None:
    said = spoken_lines(raised("ValueError: one\ntwo\n    three", source="raise MemoryError"))
    assert said == ["ValueError: one", "two", "    three"]


@given(st.text(alphabet=st.sampled_from("Tracebk (mostn l)|+-[0]: \n\tFile\"CUDAo'é\x00"), max_size=400))
def test_any_text_may_come(text: str) -> None:
    assert find_sign(text).sign in {sign for sign, _ in WORDS}
    assert len(last_words(text)) <= len(text)


# -- the kernel's count ---------------------------------------------------------------------------------------


class Counted:
    """A control group's folder as a kernel shows it, in which the count can be raised."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.group = MemoryGroup(folder, 2, folder)
        self.kills(0)

    def kills(self, count: int) -> None:
        (self.folder / "memory.events").write_text(f"low 0\nhigh 0\nmax 7\noom 3\noom_kill {count}\n")


@pytest.fixture
def counted(tmp_path: Path) -> Counted:
    return Counted(tmp_path)


def reader(counted: Counted, *watched: Path) -> ExitFactsReader:
    return ExitFactsReader(OomCounter(counted.group), watched)


def test_a_kill_that_the_kernel_has_counted_is_the_end_of_one_worker(counted: Counted) -> None:
    exits = reader(counted)
    counted.kills(1)
    reasons = [classify(exits.read(None, signal.SIGKILL, now=float(now))) for now in (1, 2)]
    assert reasons == ["oom", "evicted"]


def test_an_old_kill_is_not_a_later_workers_end(counted: Counted) -> None:
    exits = reader(counted)
    counted.kills(1)
    exits.tick(1.0)
    assert not exits.read(None, signal.SIGKILL, now=1.0 + CLAIM_S).oom_killed


def test_a_killed_loader_process_is_want_of_memory_if_the_kernel_did_it(counted: Counted) -> None:
    exits = reader(counted)
    words = raised(LOADER_GONE)
    assert classify(exits.read(1, None, said=words, now=1.0)) == "crashed"
    counted.kills(1)
    assert classify(exits.read(1, None, said=words, now=2.0)) == "oom"


def test_an_error_of_the_script_leaves_the_count_to_others(counted: Counted) -> None:
    exits = reader(counted)
    counted.kills(1)
    assert classify(exits.read(1, None, said=raised("ValueError: 1"), now=1.0)) == "user-error"
    assert classify(exits.read(137, None, now=2.0)) == "oom", "a shell's way to say SIGKILL"


def test_the_machines_count_serves_where_there_is_no_group(tmp_path: Path) -> None:
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("pgfault 12\noom_kill 4\n")
    counter = OomCounter(MemoryGroup(tmp_path / "none", 1, tmp_path), vmstat)
    assert not counter.claim(1.0)
    vmstat.write_text("pgfault 12\noom_kill 5\n")
    assert counter.claim(2.0)
    vmstat.unlink()
    assert not counter.claim(3.0)


class Limited:
    """A worker's own memory limit, at which it was killed."""

    limit_bytes = 100

    def oom_killed(self) -> bool:
        return True

    def peak_bytes(self) -> int:
        return 99


def test_a_workers_own_limit_knows_best(counted: Counted) -> None:
    facts = reader(counted).read(None, signal.SIGKILL, memory=Limited(), now=1.0)
    assert (facts.oom_killed, facts.memory_limit_bytes, facts.memory_peak_bytes) == (True, 100, 99)


# -- the facts ------------------------------------------------------------------------------------------------


def test_an_exception_that_pytorch_turns_into_an_abort_is_an_exception(counted: Counted) -> None:
    words = raised("ValueError: 1")
    facts = reader(counted).read(
        None, signal.SIGABRT, said=words, tail=words + "\nterminate called\n", now=1.0
    )
    assert (facts.code, facts.signal, facts.message, classify(facts)) == (1, None, words, "user-error")


def test_an_abort_is_read_from_the_end_of_standard_error(counted: Counted) -> None:
    facts = reader(counted).read(None, signal.SIGABRT, tail=watchdog("CUDA error: unknown error"), now=1.0)
    assert (classify(facts), facts.code) == ("device-error", None)


def test_words_of_a_worker_that_was_killed_or_finished_say_nothing(counted: Counted) -> None:
    words = raised("OSError: [Errno 28] No space left on device")
    exits = reader(counted)
    assert [exits.read(None, number, tail=words, now=1.0).sign for number in (9, 15)] == ["", ""]
    assert exits.read(0, None, tail=words, now=1.0).message == ""


def test_a_bus_error_with_room_on_every_disk_is_hardware(counted: Counted, tmp_path: Path) -> None:
    assert classify(reader(counted, tmp_path).read(None, signal.SIGBUS, now=1.0)) == "hardware"


# -- finding the group ----------------------------------------------------------------------------------------

V1_MOUNTS = (
    "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n"
    "35 31 0:32 {root} {mount} rw,relatime shared:9 - cgroup cgroup rw,memory\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
)
V2_MOUNTS = "30 23 0:26 {root} {mount} rw,nosuid,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


@pytest.mark.parametrize(
    ("version", "root", "member", "below"),
    [
        (1, "/", "/jobs/a", "jobs/a"),
        (1, "/docker/12ab", "/docker/12ab", ""),
        (1, "/docker/12ab", "/docker/12ab/b", "b"),
        (2, "/", "/user.slice/run-1.scope", "user.slice/run-1.scope"),
        (2, "/", "/", ""),
    ],
)
def test_the_own_group_is_found(tmp_path: Path, version: int, root: str, member: str, below: str) -> None:
    mount = tmp_path / "with space" / "memory"
    (mount / below).mkdir(parents=True)
    (mount / below / "cgroup.controllers").write_text("cpu memory\n")
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    mounts = V1_MOUNTS if version == 1 else V2_MOUNTS
    (proc / "self/mountinfo").write_text(mounts.format(root=root, mount=str(mount).replace(" ", "\\040")))
    lines = f"4:memory:{member}\n0::/elsewhere\n" if version == 1 else f"0::{member}\n"
    (proc / "self/cgroup").write_text(lines)
    group = own_group(proc)
    assert group is not None
    assert (group.path, group.version) == (mount / below, version)


@pytest.mark.parametrize(
    "lines",
    ["", "rubbish", "0::/../../outside\n", "4:cpu:/a\n", "4:memory:/not/here\n", "0::/no/memory/here\n"],
)
def test_no_group_is_found(tmp_path: Path, lines: str) -> None:
    mount = tmp_path / "cgroup"
    (mount / "no/memory/here").mkdir(parents=True)
    (mount / "no/memory/here/cgroup.controllers").write_text("cpu io\n")
    (tmp_path / "self").mkdir()
    (tmp_path / "self/mountinfo").write_text(
        V1_MOUNTS.format(root="/", mount=mount) + V2_MOUNTS.format(root="/", mount=mount) + "rubbish\n"
    )
    (tmp_path / "self/cgroup").write_text(lines)
    assert own_group(tmp_path) is None


def test_the_least_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    own = tmp_path / "pod" / "box"
    own.mkdir(parents=True)
    group = MemoryGroup(own, 2, tmp_path)
    assert group.limit_bytes() == 0
    (own / "memory.max").write_text("max\n")
    (tmp_path / "pod/memory.max").write_text("5000\n")
    assert group.limit_bytes() == 5000
    (own / "memory.max").write_text("4000\n")
    assert group.limit_bytes() == 4000


@pytest.mark.parametrize(
    ("text", "number"),
    [("a 1\noom_kill 5\n", 5), ("oom_kill", None), ("oom_kill x", None), ("oom_killer 5", None)],
)
def test_numbers_of_the_kernel(text: str, number: int | None) -> None:
    assert number_after(text, "oom_kill") == number


def test_a_long_message_keeps_its_beginning_and_its_end() -> None:
    """An exception whose text is a dump of data: what it is stands in front, what it is about may be at the end."""
    message = raised("torch.OutOfMemoryError: " + "x" * 5_000_000 + "\nNo space left on device")
    facts = ExitFactsReader(OomCounter(own_group())).read(1, None, said=message, now=0.0)
    assert len(facts.message) < 17_000
    assert facts.message.startswith("Traceback (most recent call last):")
    assert "\ntorch.OutOfMemoryError: xxx" in facts.message
    assert "characters left out" in facts.message
    assert facts.message.endswith("No space left on device")
    assert find_sign(shortened(raised("E\n", "x()\n    " * 9000), 4096)).sign == "", (
        "what is left out is in frames"
    )


@given(st.text(alphabet=st.sampled_from("ab \n"), max_size=400), st.integers(2, 300))
def test_no_more_is_kept_than_asked_for(text: str, most: int) -> None:
    kept = shortened(text, most)
    if len(text) <= most:
        assert kept == text
    else:
        head, _, rest = kept.partition("  ... ")
        count, _, tail = rest.partition(" characters left out ...\n")
        assert text.startswith(head.removesuffix("\n"))
        assert text.endswith(tail)
        assert len(head.removesuffix("\n")) + len(tail) <= most
        assert int(count) >= len(text) - most
