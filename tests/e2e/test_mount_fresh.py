"""What changes at the origin of a mount: seen in time, or at once where somebody asks for that, and never half."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.storm_origin import LARGE_BYTES, content
from tests.e2e import mount_readers as readers
from tests.e2e import mount_tree as tree
from tests.e2e.cache_helpers import served
from tests.e2e.mount_origin import SlowOrigin
from tests.e2e.mounting import MOUNT_MARKS, Mount, mounted, wait_until_held
from tests.e2e.run_helpers import wait_for
from tests.http_servers import running

pytestmark = MOUNT_MARKS
CHANGED, STAYS, OTHER = "s/0002", "s/0003", "big/00"
ALL = [CHANGED, STAYS, OTHER]


@pytest.fixture
def origin() -> Iterator[SlowOrigin]:
    made = SlowOrigin()
    with running(made):
        yield made


def sums(origin: SlowOrigin, names: list[str]) -> list[str]:
    return [readers.sha256(content(name, origin.versions[name])) for name in names]


def seen(mount: Mount, names: list[str]) -> list[str]:
    found: list[str] = mount.call(readers.outcomes, mount.folder, names)
    return found


@contextlib.contextmanager
def mounted_by(how: str, origin: SlowOrigin, folder: Path) -> Iterator[Mount]:
    """Through a cache of its own, through a server, or through a cache of its own before a server."""
    with contextlib.ExitStack() as stack:
        if how == "own":
            yield stack.enter_context(mounted(folder / "m", origin.url))
            return
        server = stack.enter_context(served(folder / "server", {"b": origin.url}))
        endpoint = ("--endpoint", server.url)
        yield stack.enter_context(mounted(folder / "m", "stoker://b", *endpoint, cache=how == "both"))


@pytest.mark.parametrize("how", ["own", "server", "both"])
def test_a_refresh_shows_what_is_new_and_fetches_nothing_else(
    origin: SlowOrigin, tmp_path: Path, how: str
) -> None:
    with mounted_by(how, origin, tmp_path) as mount:
        before = sums(origin, ALL)
        assert seen(mount, ALL) == before
        inodes = [mount.call(tree.facts, mount.folder / name)[0] for name in ALL]
        origin.versions[CHANGED] = origin.versions[OTHER] = 1
        assert seen(mount, ALL) == before, "they are believed for a minute"
        mount.sh("stat $0/s/.stoker-refresh > /dev/null")
        now = sums(origin, ALL)
        assert seen(mount, ALL) == [now[0], before[1], before[2]], "of that folder"
        mount.sh("ls $0/.stoker-refresh > /dev/null")
        assert seen(mount, ALL) == now
        then = [mount.call(tree.facts, mount.folder / name)[0] for name in ALL]
        assert [a == b for a, b in zip(inodes, then, strict=True)] == [False, True, False]
        assert {key: count for (key, _, _), count in origin.reads.items() if key == STAYS} == {STAYS: 1}
        assert set(origin.reads.values()) == {1}, "nothing is fetched twice"


def test_a_new_file_is_seen_and_one_that_is_gone_is_not(origin: SlowOrigin, tmp_path: Path) -> None:
    gone = origin.versions.pop("s/0007")
    with mounted(tmp_path / "m", origin.url) as mount:
        names = mount.sh("ls $0/s").split()
        assert "0007" not in names
        origin.versions["s/0007"] = gone
        del origin.versions["s/0008"]
        mount.sh("stat $0/s/.stoker-refresh > /dev/null")
        assert mount.sh("ls $0/s").split() == sorted([*(set(names) - {"0008"}), "0007"])
        assert seen(mount, ["s/0007", "s/0008"]) == [readers.sha256(content("s/0007", 0)), "ENOENT"]


def test_short_times_show_it_by_themselves(origin: SlowOrigin, tmp_path: Path) -> None:
    config = tmp_path / "server.toml"
    config.write_text(f'[buckets.b]\norigin_url = "{origin.url}"\nttl_s = 0.2\n')
    options = ("--kernel-ttl=100ms", "--ttl=100ms", "--absent-ttl=100ms")
    with (
        served(tmp_path / "server", {}, "--config", str(config)) as server,
        mounted(tmp_path / "m", "stoker://b", "--endpoint", server.url, *options, cache=False) as mount,
    ):
        assert seen(mount, ALL) == sums(origin, ALL)
        origin.versions[CHANGED] = origin.versions[OTHER] = 1
        wait_for(lambda: seen(mount, ALL) == sums(origin, ALL), why="new versions")


@pytest.mark.parametrize("is_held", [True, False])
def test_who_has_the_old_one_open_reads_no_mixture(
    origin: SlowOrigin, tmp_path: Path, *, is_held: bool
) -> None:
    name, old = "big/03", content("big/03", 0)
    with mounted(tmp_path / "m", origin.url) as mount:
        if is_held:
            mount.sh("cat $0/big/03 > /dev/null")
            wait_until_held(mount, name, LARGE_BYTES)
        with mount.look(readers.read_when_told, mount.folder / name, [1000, LARGE_BYTES]) as reader:
            assert reader.line() == "opened"
            assert reader.tell() == readers.sha256(old[:1000])
            origin.versions[name] = 1
            mount.sh("stat $0/.stoker-refresh > /dev/null")
            assert seen(mount, [name]) == sums(origin, [name])
            rest = readers.sha256(old[1000:])
            assert reader.tell() in ([rest] if is_held else [rest, "ESTALE", "EIO"])
        assert seen(mount, [name]) == sums(origin, [name])
