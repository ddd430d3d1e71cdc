"""`stoker.shards()` in processes that end in the middle of a loop."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.real


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )


def test_an_uncaught_exception_ends_the_script_at_once() -> None:
    ended = run("""
import logging
logging.basicConfig(level=logging.INFO)
from stoker.train.shards import shards
for shard in shards("train", records=10, shard_size=5):
    if shard.number == 1:
        raise ValueError("bad record")
""")
    assert ended.returncode == 1
    assert (
        "shard 1 of train goes back (1 failures): an exception left the loop at <string>:7" in ended.stderr
        or ("(1 failures): ValueError('bad record') left the loop at <string>:7" in ended.stderr)
    )
    assert ended.stderr.rstrip().endswith("ValueError: bad record")


def test_a_loop_that_is_still_open_does_not_hold_up_the_end_of_the_script() -> None:
    ended = run("""
from stoker.train.shards import shards
loop = iter(shards("train", records=10, shard_size=5))
print(next(loop))
""")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "LeasedShard(0, [0, 5) of epoch 0)\n"


def test_a_forked_child_is_told_where_to_lease() -> None:
    ended = run("""
import os, sys
from stoker.train.shards import shards
source = shards("train", records=10, shard_size=5)
if os.fork() == 0:
    shards("train", records=10, shard_size=5)
else:
    os.wait()
""")
    assert "ConfigError: stoker.shards was first used in the parent of this process" in ended.stderr
