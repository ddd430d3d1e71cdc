"""A script that has more to do when its training is over."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.e2e.run_helpers import Stoker, run

pytestmark = pytest.mark.real

EXPORTS = """
import sys, time
from pathlib import Path
import stoker
ctx = stoker.init()
state = stoker.State(steps=0)

@stoker.elastic
def train(state):
    while state.steps < 3:
        state.steps += 1
        state.commit()

train(state)
print("the training is over", flush=True)
time.sleep(18)
Path("exported").write_text("model")
"""


def test_a_script_may_go_on_after_the_training_for_longer_than_the_master_stays(tmp_path: Path) -> None:
    (tmp_path / "exports.py").write_text(EXPORTS)
    flags = ("--nproc-per-node", "1", "--timeout", "8s", "--shutdown-timeout", "1s", "--no-cache")
    done = run(tmp_path, "run", *flags, "exports.py")
    assert done.code == 0, done.text
    assert (tmp_path / "exported").read_text() == "model"
    assert "the training has ended; waiting for a worker that still runs" in done.err, done.text
    assert "lost the master" not in done.err, done.text


@pytest.mark.parametrize(
    "handler", ["", "import signal; signal.signal(signal.SIGTERM, lambda *_: exit(0))\n"]
)
def test_a_script_that_goes_on_after_the_training_ends_with_its_node(tmp_path: Path, handler: str) -> None:
    """As with torchrun: SIGTERM is passed on."""
    (tmp_path / "exports.py").write_text(handler + EXPORTS.replace("sleep(18)", "sleep(600)"))
    flags = ("--nproc-per-node", "1", "--timeout", "8s", "--shutdown-timeout", "1s", "--no-cache")
    job = Stoker(tmp_path, "run", *flags, "exports.py")
    assert job.process.stderr is not None
    said: list[str] = []
    for line in iter(job.process.stderr.readline, ""):
        said.append(line)
        if "waiting for a worker that still runs" in line:
            break
    else:
        raise AssertionError("".join(["it has ended\n", *said]))
    job.interrupt(signal.SIGTERM)
    assert job.finish().code == 0
