"""Programs that `stoker run` cannot start: said at once, with what to do about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.run_helpers import run

pytestmark = pytest.mark.real


def test_a_program_that_is_not_there_starts_no_job(tmp_path: Path) -> None:
    done = run(tmp_path, "run", "--no-cache", "--standalone", "--timeout", "60s", "--no-python", "no-such-program",
               timeout_s=50)  # fmt: skip
    assert done.code == 5, done.text
    assert done.err == (
        "stoker: cannot start no-such-program: there is no such program on this machine's PATH; install it, or give "
        "its path\n"
    )


def test_a_program_that_the_kernel_refuses_ends_the_job(tmp_path: Path) -> None:
    """Whoever waits for a worker that was never started waits for the whole timeout, and then blames the master."""
    script = tmp_path / "train.sh"
    script.write_text("#!/nonexistent/python\nx\n")
    script.chmod(0o755)
    done = run(tmp_path, "run", "--no-cache", "--standalone", "--nproc-per-node", "2", "--timeout", "60s",
               "--no-python", str(script), timeout_s=50)  # fmt: skip
    assert done.code == 5, done.text
    assert "the run failed" in done.err, done.text
    assert f"cannot start {script}: its first line names an interpreter" in done.err, done.text
    assert "lost the master" not in done.err
