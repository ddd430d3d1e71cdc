"""What is written through a mount lies on this machine first, and stays there if nobody takes it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stoker.cache.mount.staging import Staging

STAGE = 0x18EADF4FBDABBC02


@pytest.fixture
def staging(tmp_path: Path) -> Staging:
    made = Staging(tmp_path / "staging")
    made.resize(STAGE, 4)
    made.write(STAGE, 0, b"half")
    return made


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("model.pt", "model.pt"),
        ("run 1/100%/ü", "run 1%2F100%25%2Fü"),
        ("a\nb/\x1b[2J\u202e", "a%0Ab%2F%1B[2J%E2%80%AE"),
    ],
)
def test_what_is_kept_says_what_it_was(staging: Staging, path: str, said: str) -> None:
    kept = staging.keep(STAGE, path)
    assert kept == staging.folder / f"18eadf4fbdabbc02-{said}"
    assert kept.read_bytes() == b"half"
    assert staging.left() == [kept.name]


def test_of_a_long_path_its_end_is_said(staging: Staging) -> None:
    path = "/".join(["ü" * 120] * 8) + "/" + "x" * 60 + ".pt"
    kept = staging.keep(STAGE, path)
    assert kept is not None
    assert 250 < len(os.fsencode(kept.name)) <= 255
    assert kept.name.startswith("18eadf4fbdabbc02-…ü")
    assert kept.name.endswith("ü%2F" + "x" * 60 + ".pt")
    assert kept.read_bytes() == b"half"


def test_who_reads_what_is_kept_meanwhile_reads_on(staging: Staging) -> None:
    staging.resize(STAGE + 1, 5)
    staging.keep(STAGE, "a")
    assert staging.read(STAGE, 1, 3) == b"al"
    with pytest.raises(FileNotFoundError):
        staging.read(STAGE + 2, 0, 1)


def test_of_what_is_not_there_nothing_is_kept(staging: Staging) -> None:
    assert staging.keep(STAGE + 1, "a") is None
    assert staging.left() == ["18eadf4fbdabbc02"]


def test_where_a_name_is_refused_it_stays_as_it_is(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems have shorter names."""

    def refuse(*_: object) -> None:
        raise OSError(36, "File name too long")

    monkeypatch.setattr(os, "rename", refuse)
    monkeypatch.setattr(Path, "rename", refuse)
    assert staging.keep(STAGE, "a") == staging.path(STAGE)
    assert staging.read(STAGE, 0, 4) == b"half"
