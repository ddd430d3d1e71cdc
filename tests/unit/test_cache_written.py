"""What operators told a server is written down, and what cannot be read is not overwritten."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stoker.cache.server.written import read_file, write_file
from stoker.wire.cache_api import BucketSpec

SPECS = {"b": BucketSpec("/data")}
KIND = dict[str, BucketSpec]


def test_what_is_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, notes = tmp_path / "buckets.json", list[str]()
    done: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda number: (done.append("fsync"), fsync(number)))
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append("replace"), replace(*paths)))
    assert read_file(path, KIND, notes, "none") is None
    for specs in (SPECS, SPECS | {"c": BucketSpec("/more")}):
        write_file(path, specs)
        assert read_file(path, KIND, notes, "none") == specs
    assert done == ["fsync", "replace", "fsync"] * 2
    assert path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert notes == []


def test_what_cannot_be_read_is_put_aside(tmp_path: Path) -> None:
    path, notes = tmp_path / "buckets.json", list[str]()
    newer = b'{"b":{"origin_url":"/data","of_a_later_version":1}}'
    for number, content in enumerate((newer, b"{half")):
        path.write_bytes(content)
        assert read_file(path, KIND, notes, "nothing is there") is None
        assert not path.exists()
        write_file(path, SPECS)
        kept = tmp_path / f"buckets.json.damaged{number or ''}"
        assert kept.read_bytes() == content
        assert "nothing is there" in notes[number]
        assert notes[number].endswith(f"the file is kept as {kept.name}")


def test_a_folder_in_its_place_is_said_and_put_aside(tmp_path: Path) -> None:
    path, notes = tmp_path / "pins.json", list[str]()
    path.mkdir()
    assert read_file(path, dict[str, list[str]], notes, "nothing is pinned") is None
    write_file(path, {"b": ["p/"]})
    assert read_file(path, dict[str, list[str]], notes, "nothing is pinned") == {"b": ["p/"]}
    assert len(notes) == 1
