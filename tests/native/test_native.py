"""The C++ tests of the native part, each under the sanitizers that can find what it could do wrong."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.certificates import Authority

SOURCE = Path(__file__).parents[2] / "src" / "stoker" / "_native"
HERE = Path(__file__).parent
SANITIZERS = {"address": "address,undefined", "thread": "thread"}
TESTS = {
    "http_test": ("1", "20000"),
    "sigv4_test": (),
    "index_test": (".", "1", "8"),
    "index_replay_test": (".", "1"),
    "front_test": (".", "1", "4"),
    "peers_test": (".", "3", "4"),
    "tls_test": (".", "1", "4"),
    "passing_test": (".",),
    "reads_test": ("1", "300"),
    "writer_test": (".",),
}
"""And their arguments: mutated heads, rounds, seconds."""


def compile_all(folder: Path, sanitizer: str) -> None:
    """All tests with all of the native part but its binding."""
    flags = (
        *("-std=c++17", "-g", "-O1", "-pthread", "-Wall", "-Wextra", "-Werror"),
        *(f"-fsanitize={SANITIZERS[sanitizer]}", "-fno-sanitize-recover=all"),
    )
    sources = [path for path in sorted(SOURCE.glob("*.cc")) if not path.name.startswith("module")]
    subprocess.run(["g++", *flags, "-c", *sources], cwd=folder, check=True)
    objects = [f"{path.stem}.o" for path in sources]
    for test in TESTS:
        subprocess.run(
            ["g++", *flags, HERE / f"{test}.cc", *objects, "-ldl", "-o", test], cwd=folder, check=True
        )


@pytest.mark.real
@pytest.mark.timeout(900)  # all of it is compiled first
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_the_native_part_under_a_sanitizer(tmp_path: Path, sanitizer: str) -> None:
    compile_all(tmp_path, sanitizer)
    Authority(tmp_path / "pki").server()
    for test, arguments in TESTS.items():
        done = subprocess.run(
            [tmp_path / test, *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert (done.returncode, done.stdout) == (0, "well\n"), f"{test}: {done.stderr}"
