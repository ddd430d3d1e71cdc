"""An origin with as many objects as one likes: scripts/many_objects.py."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

_SCRIPT = str(Path(__file__).parent / "scripts" / "many_objects.py")


@contextlib.contextmanager
def many_objects(count: int, size_bytes: int, wait_s: float, bytes_per_s: float = 1e12) -> Iterator[int]:
    """Its port."""
    command = [sys.executable, _SCRIPT, str(count), str(size_bytes), str(wait_s), str(bytes_per_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            yield int(child.stdout.readline())
        finally:
            child.kill()


def taken(port: int) -> dict[str, int]:
    """Lists, other requests and bytes of objects since it was asked last."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/taken") as answer:
        found: dict[str, int] = json.loads(answer.read())
        return found
