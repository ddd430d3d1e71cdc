"""What `stoker mount` makes of what it is told, and how it says what it found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stoker.cache.mount import places
from stoker.cli.main import main as stoker


def test_mounts_with_any_bytes_in_their_names_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = tmp_path / "mountinfo"
    lines.write_bytes(b"30 1 0:41 / /\xff\r\x1b[2Jx rw - fuse.stoker \xc3\xbc rw,user_id=4294967294\n")
    monkeypatch.setattr(places, "_MOUNTS", str(lines))
    assert stoker(["mount"]) == 0
    assert capsys.readouterr().out == "ü on /\\xff\\r\\x1b[2Jx (another user's)\n"
    assert stoker(["mount", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["folder"], found["source"]) == ("/\\xff\r\x1b[2Jx", "ü")
