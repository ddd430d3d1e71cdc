"""A mount under the programs that people use, unchanged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import mount_tree as tree
from tests.e2e.mounting import MOUNT_MARKS, Mount, lines, mounted, needs
from tests.e2e.run_helpers import wait_for

pytestmark = MOUNT_MARKS


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("origin")
    tree.make_tree(folder)
    tree.make_repository(folder / "repository")
    return folder


@pytest.fixture(scope="module")
def mount(origin: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mount]:
    with mounted(tmp_path_factory.mktemp("m"), origin) as made:
        yield made


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """For copies."""
    return tmp_path / "out"


def test_all_is_there(mount: Mount, origin: Path) -> None:
    assert mount.call(tree.summary, mount.folder / "data") == tree.summary(str(origin / "data"))


def test_the_shell_lists_and_reads(mount: Mount, origin: Path, out: Path) -> None:
    data = mount.sh(
        "cd $0/data; find . -type f | wc -l; ls -lR . > /dev/null; du -sb --apparent-size big.bin; wc -c < odd"
    )
    found = list(filter(None, tree.summary(str(origin / "data")).values()))
    files = sum(one != ["folder"] for one in found) + 1  # one name has a line's end
    assert data.split() == [str(files), str(tree.BIG_BYTES), "big.bin", "4097"]
    mount.sh(
        "cmp $0/data/big.bin $1/data/big.bin; cat $0/data/a/b/side | cmp - $1/data/a/b/side", str(origin)
    )
    mount.sh("dd if=$0/data/big.bin bs=7777 iflag=fullblock status=none | cmp - $1/data/big.bin", str(origin))
    mount.sh(
        "dd if=$0/data/big.bin of=$2 bs=1M iflag=direct status=none; cmp $2 $1/data/big.bin",
        str(origin),
        str(out),
    )
    mount.sh("tail -c 100 $0/data/big.bin | cmp - <(tail -c 100 $1/data/big.bin)", str(origin))
    mount.sh(
        "grep -rq . $0/data/names; md5sum $0/data/a/b/* 2>/dev/null || true; test -d $0/data/a; test ! -e $0/none"
    )


def test_copies_are_the_same(mount: Mount, origin: Path, out: Path) -> None:
    mount.sh("cp -a $0/data $1; diff -r $1 $2/data", str(out), str(origin))
    times = "find . -type f -printf '%p %s %T@\\n' | cut -d. -f1-2 | sort"
    assert mount.sh(f"cd $1; {times}", str(out)) == mount.sh(f"cd $0/data; {times}")


def test_tar_takes_all(mount: Mount, origin: Path, out: Path) -> None:
    out.mkdir()
    said = mount.sh(
        "tar -C $0 -cf - data | tar -C $1 -xf - 2>&1; diff -r $1/data $2/data", str(out), str(origin)
    )
    assert "changed" not in said


@needs("rsync")
def test_rsync_copies_once(mount: Mount, origin: Path, out: Path) -> None:
    mount.sh("rsync -a $0/data/ $1/; diff -r $1 $2/data", str(out), str(origin))
    again = mount.sh("rsync -ain $0/data/ $1/", str(out))
    assert [line for line in again.splitlines() if not line.startswith(".d")] == []


@needs("git")
def test_a_repository_can_be_read(mount: Mount, origin: Path, out: Path) -> None:
    git = "git -c safe.directory=* -C $0/repository"
    assert mount.sh(f"{git} log --format=%s").split("\n")[:4] == [f"commit {n}" for n in (4, 3, 2, 1)]
    assert mount.sh(f"{git} --no-optional-locks status --porcelain") == ""
    assert mount.sh(f"{git} fsck 2>&1; {git} grep -c 4 HEAD").endswith("HEAD:file4:1\n")
    mount.sh("git -c safe.directory=* clone -q $0/repository $1; diff -r -x .git $1 $0/repository", str(out))
    refused = mount.run(
        "git",
        "-c",
        "safe.directory=*",
        "-C",
        str(mount.folder / "repository"),
        "commit",
        "--allow-empty",
        "-m",
        "x",
    )
    assert refused.code != 0
    assert "Read-only file system" in refused.err


@needs("fio")
@pytest.mark.parametrize("engine", ["psync", "mmap", "libaio"])
def test_fio_reads_at_random(mount: Mount, engine: str) -> None:
    done = mount.run(
        "fio", "--name=r", f"--filename={mount.folder}/data/big.bin", "--readonly", "--rw=randread", "--bs=4k",
        "--numjobs=4", f"--ioengine={engine}", "--iodepth=8", "--io_size=1m", "--thread", "--output-format=json",
    )  # fmt: skip
    assert done.code == 0, done.text
    jobs = json.loads(done.out[done.out.index("{") :])["jobs"]
    assert [(job["error"], job["read"]["io_bytes"]) for job in jobs] == [(0, 1 << 20)] * 4


def test_a_mapped_file_is_the_file(mount: Mount, origin: Path) -> None:
    there = tree.sha256(str(origin / "data/big.bin"))
    assert mount.call(tree.mapped_sums, mount.folder / "data/big.bin") == [there, there]


@pytest.mark.parametrize("folder", ["data", "data/names", "data/images/class0", "many"])
def test_each_way_of_listing_tells_the_same(mount: Mount, origin: Path, folder: str) -> None:
    found = mount.call(tree.names, mount.folder / folder)
    there = sorted(path.name for path in (origin / folder).iterdir())
    assert found == {"differ": [], "listdir": there, "scandir": there, "walk": there, "glob": there}


def test_names_of_all_kinds_can_be_opened(mount: Mount) -> None:
    for name in tree.NAMES:
        done = mount.run("cat", f"{mount.folder}/data/names/{name}")
        assert (done.code, done.out) == (0, name), done.text


def test_twenty_thousand_names_are_listed_by_ls(mount: Mount) -> None:
    assert lines(mount.sh("ls $0/many")) == [f"{number:05}" for number in range(tree.MANY)]
    assert mount.sh("ls -U $0/many | head -3 | wc -l") == "3\n", "who ends early harms nobody"
    assert mount.sh("find $0/many -name '1999?' | wc -l") == "10\n"


def test_stat_tells_what_there_is(mount: Mount, origin: Path) -> None:
    inode, size_bytes, modified_ns, mode, uid, gid, links = mount.call(
        tree.facts, mount.folder / "data/big.bin"
    )
    there = (origin / "data/big.bin").stat()
    assert (size_bytes, modified_ns // 10**9) == (tree.BIG_BYTES, int(there.st_mtime))
    assert (oct(mode), uid, gid, links) == ("0o100444", 0, 0, 1)
    assert inode > 1
    assert oct(mount.call(tree.facts, mount.folder / "data")[3]) == "0o40555"


def test_statvfs_tells_of_the_cache(mount: Mount) -> None:
    mount.sh("cat $0/data/big.bin > /dev/null")

    def held_bytes() -> int:
        all_bytes, free_bytes, longest = mount.call(tree.space, mount.folder)
        assert (longest, all_bytes) == (255, 1_000_000_000 // 4096 * 4096)
        return int(all_bytes - free_bytes)

    wait_for(lambda: held_bytes() >= tree.BIG_BYTES, why="file that is held")


def test_attributes_tell_of_the_cache(mount: Mount) -> None:
    mount.sh("cat $0/data/odd $0/data/page > /dev/null")
    odd, page = (mount.call(tree.attributes, mount.folder / f"data/{name}") for name in ("odd", "page"))
    assert set(odd) == {"user.stoker.version", "user.stoker.held_bytes"}
    assert odd["user.stoker.version"] != page["user.stoker.version"]
    held = "user.stoker.held_bytes"
    wait_for(
        lambda: mount.call(tree.attributes, mount.folder / "data/page")[held] == "4096",
        why="block that is held",
    )
    assert mount.call(tree.attributes, mount.folder / "data") == {}


def test_the_two_special_files_are_there_and_not_listed(mount: Mount) -> None:
    assert "held_bytes" in mount.sh("cat $0/.stoker-status $0/data/a/.stoker-status")
    assert "anew" in mount.sh("cat $0/data/.stoker-refresh")
    assert mount.sh("ls -A $0 $0/data | grep stoker || true") == ""
