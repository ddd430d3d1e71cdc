"""Tensors, arrays and images on a mount, read by the frameworks themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import mount_tensors as tensors
from tests.e2e import mount_tree as tree
from tests.e2e.mounting import MOUNT_MARKS, Mount, mounted
from tests.e2e.run_helpers import wait_for

pytestmark = MOUNT_MARKS
EPOCHS = 4
STEPS = EPOCHS * tree.CLASSES * tree.IMAGES // 4


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("origin")
    tensors.make(folder / "tensors")
    tree.make_images(folder / "images")
    return folder


@pytest.fixture(scope="module")
def mount(origin: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mount]:
    with mounted(tmp_path_factory.mktemp("m"), origin) as made:
        yield made


def test_tensors_and_arrays_are_mapped(mount: Mount, origin: Path) -> None:
    there = tensors.sums(str(origin / "tensors"))
    for _ in range(2):
        # The first time by requests, then, where the cache has it all, from its file.
        assert mount.call(tensors.sums, mount.folder / "tensors") == there
        mount.sh("cat $0/tensors/* > /dev/null")


def test_sixteen_workers_see_what_none_sees(mount: Mount, origin: Path) -> None:
    there = tensors.seen(str(origin / "images"), 0)
    assert len(there) == tree.CLASSES * tree.IMAGES
    assert mount.call(tensors.seen, mount.folder / "images", 16) == there


def test_a_training_survives_the_daemon_in_mid_epoch(mount: Mount, origin: Path, tmp_path: Path) -> None:
    there = mount.call(tensors.train, origin / "images", 0, EPOCHS, tmp_path / "local")
    assert len(there) == STEPS
    assert len(set(there)) > STEPS // 2, "each step counts"
    # Nothing is left in the kernel from the tests before: what is read is asked for.
    mount.sh("echo 2 > /proc/sys/vm/drop_caches")
    said = tmp_path / "said"
    with mount.look(tensors.train, mount.folder / "images", 4, EPOCHS, said) as training:
        for steps in (3, STEPS // 2):
            wait_for(lambda: said.exists() and len(said.read_text().splitlines()) >= steps, why="steps")  # noqa: B023
            mount.kill_daemon()
        done = training.finish()
    assert done.code == 0, done.text
    assert done.out.strip() == str(there)
