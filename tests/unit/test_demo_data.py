"""The demo's flags, its pictures and how they are laid out."""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

import numpy as np
import pytest

from stoker.cli.demo import pictures
from stoker.cli.demo.layout import MARKER, lay_out, read_layout, record_name
from stoker.cli.demo.layout import test_size as size_of_test
from stoker.cli.demo.options import add_demo_parser, options_of
from stoker.cli.demo.pictures import Source, Split, choose_source, load_digits, load_fashion
from stoker.errors import ConfigError, EnvironmentProblem


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_demo_parser(parser.add_subparsers())
    return parser.parse_args(["demo", *flags])


def tiny(records: int = 1200) -> Source:
    def load() -> tuple[Split, Split]:
        numbers = np.arange(records * 4, dtype=np.uint64).astype(np.uint8).reshape(records, 2, 2)
        labels = (np.arange(records) % 10).astype(np.uint8)
        return Split(numbers, labels), Split(numbers[:100], labels[:100])

    return Source("tiny", "Tiny", 1, 8, load)


def ignore(*_: object) -> None:
    return


def test_defaults() -> None:
    options = options_of(parse())
    assert (options.workers, options.kill, options.epochs, options.json) == (3, True, None, False)
    assert options.timeout_s == 120.0


@pytest.mark.parametrize(
    "flags",
    [
        ["--workers", "1"],
        ["--workers", "5"],
        ["--epochs", "0"],
        ["--records", "5"],
        ["--global-batch-size", "2"],
        ["--origin-mbps", "0"],
        ["--origin-mbps", "nan"],
        ["--origin-latency-ms", "-1"],
        ["--timeout", "soon"],
    ],
)
def test_flags_that_cannot_be_are_refused_by_name(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match=flags[0]):
        options_of(parse(*flags))


def test_a_record_is_its_label_and_its_pixels(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    layout = lay_out(tiny(), tmp_path / "origin", None, lambda *at: seen.append(at))
    assert (layout.train_records, layout.test_records) == (1200, 100)
    assert (layout.train_bytes, layout.test_bytes) == (6000, 500)
    assert (tmp_path / "origin/train" / record_name(13)).read_bytes() == bytes([3, 52, 53, 54, 55])
    assert seen == [("train", 1000, 1200), ("train", 1200, 1200), ("test", 100, 100)]
    assert sorted(p.name for p in (tmp_path / "origin").iterdir()) == [MARKER, "test", "train"]


def test_a_whole_layout_is_used_again_and_another_is_done_anew(tmp_path: Path) -> None:
    origin = tmp_path / "origin"
    lay_out(tiny(), origin, None, ignore)
    before = (origin / "train/000000").stat().st_ino
    assert lay_out(tiny(), origin, None, ignore) == read_layout(origin)
    assert (origin / "train/000000").stat().st_ino == before
    assert lay_out(tiny(), origin, 600, ignore).train_records == 600
    assert len(list((origin / "train").iterdir())) == 600
    (origin / "test/000003").unlink()
    assert lay_out(tiny(), origin, 600, ignore).test_records == len(list((origin / "test").iterdir()))
    with pytest.raises(ConfigError, match="--records 9999"):
        lay_out(tiny(), origin, 9999, ignore)


def test_an_interrupted_layout_is_done_again(tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lay_out(tiny(), tmp_path / "origin", None, interrupt)
    assert read_layout(tmp_path / "origin") is None
    assert lay_out(tiny(), tmp_path / "origin", None, ignore).train_records == 1200
    (tmp_path / "origin" / MARKER).unlink()
    assert lay_out(tiny(), tmp_path / "origin", None, ignore) == read_layout(tmp_path / "origin")


def test_an_origin_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(EnvironmentProblem, match="--dir"):
        lay_out(tiny(), tmp_path / "file" / "origin", None, ignore)


@pytest.mark.parametrize("records", [100, 1000, 1536, 1542, 6000, 60000])
def test_no_test_batch_is_smaller_than_a_world(records: int) -> None:
    size = size_of_test(records, 10_000)
    assert 64 <= size <= 10_000
    assert size % 256 == 0 or size % 256 >= 4


def test_digits() -> None:
    train, test = load_digits()
    assert (len(train), len(test)) == (1497, 300)
    assert train.pictures.shape[1:] == (8, 8)
    assert set(test.labels.tolist()) == set(range(10))


def write_idx(path: Path, array: np.ndarray, *, cut: int = 0) -> None:
    head = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    raw = head + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(raw[: len(raw) - cut]))


def test_idx_files(tmp_path: Path) -> None:
    for part in ("train", "t10k"):
        write_idx(tmp_path / f"{part}-images-idx3-ubyte.gz", np.full((5, 28, 28), 7))
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", np.arange(5))
    train, test = load_fashion(tmp_path)
    assert train.pictures.shape == test.pictures.shape == (5, 28, 28)
    assert train.labels.tolist() == [0, 1, 2, 3, 4]
    write_idx(tmp_path / "train-labels-idx1-ubyte.gz", np.arange(5), cut=1)
    with pytest.raises(EnvironmentProblem, match="not an idx file"):
        load_fashion(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(b"plain text")
    with pytest.raises(EnvironmentProblem, match="cannot read"):
        load_fashion(tmp_path)


def test_without_fashion_mnist_the_digits_are_used_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "has_fashion", lambda: False)
    monkeypatch.setattr(pictures.os, "geteuid", lambda: 1000)
    said: list[str] = []
    assert choose_source("auto", said.append).name == "digits"
    assert len(said) == 1
    assert "digits" in said[0]
    with pytest.raises(ConfigError, match="apt-get install dataset-fashion-mnist"):
        choose_source("fashion-mnist", said.append)


def test_as_root_the_package_is_installed_and_a_failure_is_not_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(pictures, "has_fashion", lambda: False)
    monkeypatch.setattr(pictures.os, "geteuid", lambda: 0)
    monkeypatch.setattr(pictures.shutil, "which", lambda _: "/usr/bin/apt-get")
    monkeypatch.setattr(pictures, "_succeeds", lambda command: commands.append(command) or False)
    said: list[str] = []
    assert choose_source("auto", said.append).name == "digits"
    assert commands[0][-1] == "dataset-fashion-mnist"
    assert commands[1][-1] == "update"
    assert "installing" in said[0]


def test_without_scikit_learn_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sklearn", None)
    with pytest.raises(ConfigError, match=r"pip install 'stoker\[demo\]'"):
        choose_source("digits", ignore)
