"""The last words of real failures, by the installed PyTorch, NumPy and Python: do the patterns still fit them?"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.agent.exits import ExitFactsReader
from stoker.job.relaunch import classify

pytestmark = pytest.mark.real

FAILURES = """
import json, os, signal, sqlite3, traceback
from concurrent.futures import ProcessPoolExecutor
import numpy, torch
from torch.utils.data import DataLoader, Dataset


class Failing(Dataset):
    def __init__(self, fail):
        self.fail = fail

    def __len__(self):
        return 4

    def __getitem__(self, index):
        self.fail()


def die(number):
    os.kill(os.getpid(), number)


def no_space():
    with open("/dev/full", "w") as file:
        file.write("x" * 100_000)


def load(fail):
    list(DataLoader(Failing(fail), num_workers=1))


def pool():
    with ProcessPoolExecutor(1) as executor:
        executor.submit(die, signal.SIGKILL).result()


def full_database():
    database = sqlite3.connect(":memory:")
    database.execute("pragma max_page_count = 2")
    database.execute("create table t (c)")
    database.execute("insert into t values (zeroblob(100000))")


class Killed:
    def __call__(self):
        die(signal.SIGKILL)


class BusError:
    def __call__(self):
        die(signal.SIGBUS)


class NoSpace:
    def __call__(self):
        no_space()


FAILURES = {
    "python memory": lambda: bytearray(1 << 60),
    "numpy memory": lambda: numpy.empty(1 << 55),
    "torch memory": lambda: torch.empty(1 << 50),
    "python disk": no_space,
    "torch.save disk": lambda: torch.save(torch.ones(1 << 20), "/dev/full"),
    "numpy.save disk": lambda: numpy.save(open("/dev/full", "wb"), numpy.ones(1 << 20)),
    "tofile disk": lambda: numpy.ones(1 << 20).tofile("/dev/full"),
    "sqlite disk": full_database,
    "loader disk": lambda: load(NoSpace()),
    "loader shared memory": lambda: load(BusError()),
    "loader killed": lambda: load(Killed()),
    "pool killed": pool,
    "a bug": lambda: torch.ones(2) @ torch.ones(3),
}

if __name__ == "__main__":
    for name, fail in FAILURES.items():
        try:
            fail()
        except BaseException:
            print(json.dumps([name, traceback.format_exc()]), flush=True)
"""

REASONS = {
    "python memory": "oom",
    "numpy memory": "oom",
    "torch memory": "oom",
    "python disk": "disk-full",
    "torch.save disk": "disk-full",
    "numpy.save disk": "disk-full",
    "tofile disk": "disk-full",
    "sqlite disk": "disk-full",
    "loader disk": "disk-full",
    "loader shared memory": "disk-full",
    "loader killed": "crashed",
    "pool killed": "crashed",
    "a bug": "user-error",
}


def test_words_of_real_failures(tmp_path: Path) -> None:
    script = tmp_path / "failures.py"
    script.write_text(FAILURES)
    done = subprocess.run(
        [sys.executable, str(script)], check=True, capture_output=True, text=True, timeout=120
    )
    told = dict(json.loads(line) for line in done.stdout.splitlines())
    reader = ExitFactsReader()
    found = {name: classify(reader.read(1, None, said=words, now=1.0)) for name, words in told.items()}
    assert found == REASONS, told


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import ctypes; ctypes.string_at(0)", "crashed"),
        ("import os; os.abort()", "crashed"),
        ("import os; os.kill(os.getpid(), 15)", "evicted"),
        ("import os; os.kill(os.getpid(), 2)", "evicted"),
        (
            "import signal, sys; signal.signal(15, lambda *_: sys.exit(143)); signal.raise_signal(15)",
            "evicted",
        ),
        ("raise MemoryError", "oom"),
        ("open('/dev/full', 'w').write('x'); import sys; sys.exit(0)", "finished"),
        ("import os; f = open('/dev/full', 'w'); f.write('x'); f.flush()", "disk-full"),
        ("raise SystemExit(7)", "user-error"),
        ("assert 1 == 2", "user-error"),
    ],
)
def test_ends_of_real_processes(program: str, reason: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60
    )
    code = done.returncode
    facts = ExitFactsReader().read(
        code if code >= 0 else None, -code if code < 0 else None, tail=done.stderr, now=1.0
    )
    assert classify(facts) == reason, facts
