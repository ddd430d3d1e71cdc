"""A mount over a fleet of cache servers: who reads it notices neither which of them answer, nor which are gone."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import mmap
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from stoker.cache.origin.port import STAGING
from tests.chaos.storm_origin import content
from tests.e2e import mount_readers as readers
from tests.e2e import mount_tree as tree
from tests.e2e.mount_fleet import SERVERS, SteadyFleet, steady_fleet
from tests.e2e.mount_origin import SlowOrigin
from tests.e2e.mounting import MOUNT_MARKS, Looking, Mount, mounted, stop, wait_until_all_held
from tests.e2e.run_helpers import wait_for
from tests.e2e.s3_helpers import CountingProxy
from tests.http_servers import running
from tests.s3_server import BUCKET, s3_client, s3_server

pytestmark = MOUNT_MARKS
TIMEOUT_S = 10.0
"""Longer than this test may stand still while it holds readers up."""
TIMEOUT = f"--timeout={TIMEOUT_S:g}s"
LATE_S = 30.0
"""So much later than its time something may end on a busy machine."""
LONG = ("--kernel-ttl=1h", "--ttl=1h", "--absent-ttl=1h")
FAILS = {"EIO", "ETIMEDOUT"}
SMALL = [f"s/{number:04}" for number in range(60)]
WRITTEN_BYTES = 120_000_000
"""More than is written, most times, before the test has seen by whom."""


@pytest.fixture
def origin() -> Iterator[SlowOrigin]:
    made = SlowOrigin()
    with running(made):
        yield made
        made.release()


@pytest.fixture
def fleet(origin: SlowOrigin, tmp_path: Path) -> Iterator[SteadyFleet]:
    with steady_fleet(tmp_path, origin.url) as made:
        yield made


def sums(origin: SlowOrigin, names: Sequence[str]) -> list[str]:
    return [readers.sha256(content(name, origin.versions[name])) for name in names]


def seen(mount: Mount, names: Sequence[str]) -> list[str]:
    found: list[str] = mount.call(readers.outcomes, mount.folder, names)
    return found


def timed(folder: str, names: Sequence[str]) -> list[list[Any]]:
    return [readers.outcome(f"{folder}/{name}") for name in names]


def mapped(path: str) -> None:
    """Says what is in a file, and for a line that comes on stdin once more. What is mapped nobody takes from memory."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for _ in range(2):
            print(hashlib.sha256(data).hexdigest(), flush=True)
            sys.stdin.readline()


def held_up(origin: SlowOrigin) -> str:
    """The origin takes its time from now on: the key for which a reader waits for it."""
    wait_for(lambda: len(origin.asked) > 10, why="reads")
    origin.hold()
    before = len(origin.asked)
    wait_for(lambda: len(origin.asked) > before, why="question that is not answered")
    return origin.asked[before]


def test_two_mounts_cost_the_origin_each_byte_once(tmp_path: Path) -> None:
    """One after the other, and at the same time."""
    (tmp_path / "weed").mkdir()
    sizes = {"a/b/c": 10, "a/d": 70_000, "empty": 0, "page": 4096, "two words +%41": 300_000, "ü": 1}
    sizes |= {f"many/{number:02}": 5000 + number for number in range(40)} | {"large": 9_000_000 + 7}
    data = {f"{half}/{name}": os.urandom(size) for half in ("one", "two") for name, size in sizes.items()}
    with contextlib.ExitStack() as stack:
        endpoint = stack.enter_context(s3_server(tmp_path / "weed"))
        with contextlib.closing(s3_client(endpoint)) as client:
            client.put_object(Bucket=BUCKET, Key="other", Body=b"not to be seen")
            for key, body in data.items():
                client.put_object(Bucket=BUCKET, Key=f"set/{key}", Body=body)
                (tmp_path / "set" / key).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / "set" / key).write_bytes(body)
        proxy = CountingProxy(endpoint)
        stack.enter_context(running(proxy))
        url = f"s3://{BUCKET}?endpoint={proxy.url}&access_key_id=AK&secret_access_key=SK"
        fleet = stack.enter_context(steady_fleet(tmp_path, url))
        first, second = (
            stack.enter_context(mounted(tmp_path / name, "stoker://b/set", *fleet.at(at), cache=False))
            for name, at in (("m", "xyz"), ("n", "zyx"))
        )
        expected = {half: tree.summary(str(tmp_path / "set" / half)) for half in ("one", "two")}
        cost = {
            half: Counter({f"set/{half}/{name}": size for name, size in sizes.items()}) for half in expected
        }

        assert sorted(first.sh("ls $0").split()) == ["one", "two"]
        assert first.call(tree.summary, first.folder / "one") == expected["one"]
        assert proxy.sent_bytes == cost["one"]
        assert second.call(tree.summary, second.folder / "one") == expected["one"]
        assert proxy.sent_bytes == cost["one"], "the fleet has it"
        at_once = [
            stack.enter_context(mount.look(tree.summary, mount.folder / "two")) for mount in (first, second)
        ]
        for looking in at_once:
            assert json.loads(looking.finish().out) == expected["two"]
        assert proxy.sent_bytes == cost["one"] + cost["two"]


@pytest.mark.parametrize("is_near", [False, True])
def test_reads_go_on_without_one_and_again_after_all_were_gone(
    origin: SlowOrigin, fleet: SteadyFleet, tmp_path: Path, *, is_near: bool
) -> None:
    """With the kernel's pages alone, and with a cache in front of the fleet, in whose files the kernel reads."""
    names = [*SMALL, "big/00"]
    with (
        mounted(tmp_path / "m", "stoker://b", *fleet.at(), TIMEOUT, *LONG, cache=is_near) as mount,
        contextlib.ExitStack() as stack,
    ):
        mount.sh("ls -l $0/s $0/big > /dev/null")
        with mount.look(timed, mount.folder, names) as looking:
            fleet.kill(fleet.owner(held_up(origin)))
            assert looking.process.poll() is None
            origin.release()
            outcomes = json.loads(looking.finish().out)
        assert [said for said, _ in outcomes] == sums(origin, names)
        assert max(seconds for _, seconds in outcomes) < TIMEOUT_S + LATE_S

        if is_near:
            wait_until_all_held(mount, {name: len(content(name, 0)) for name in names})
        reader = stack.enter_context(mount.look(mapped, mount.folder / "big/00"))
        there = sums(origin, ["big/00"])[0]
        assert reader.line() == there
        fleet.kill("".join(fleet.servers))
        mount.sh("echo 3 > /proc/sys/vm/drop_caches")
        assert reader.tell() == there
        assert not is_near or seen(mount, names) == sums(origin, names), "all of it is here"
        # Of the first the name is known: what the kernel reads ahead it asks for once more.
        tries = {"s/0100": 2, "none": 1}
        at_once = {name: stack.enter_context(mount.look(timed, mount.folder, [name])) for name in tries}
        for name, times in tries.items():
            ((said, seconds),) = json.loads(at_once[name].finish().out)
            assert said in FAILS, (name, said)
            assert seconds < times * TIMEOUT_S + LATE_S, (name, seconds)

        fleet.begin()
        missing = [*sums(origin, ["s/0100", "big/05"]), "ENOENT"]
        wait_for(
            lambda: seen(mount, ["s/0100", "big/05", "other"]) == missing, 120, "fleet that is there again"
        )
        assert seen(mount, names) == sums(origin, names)


def test_a_server_that_falls_silent_costs_nobody_an_error(
    origin: SlowOrigin, fleet: SteadyFleet, tmp_path: Path
) -> None:
    names = [*SMALL, "big/00"]
    with mounted(tmp_path / "m", "stoker://b", *fleet.at(), "--timeout=20s", cache=False) as mount:
        assert seen(mount, SMALL[:1]) == sums(origin, SMALL[:1])
        stop(psutil.Process(fleet.servers[fleet.owner(SMALL[1])].child.pid))
        assert seen(mount, names) == sums(origin, names)


@pytest.mark.parametrize("is_near", [False, True])
def test_a_refresh_reaches_every_server(
    origin: SlowOrigin, fleet: SteadyFleet, tmp_path: Path, *, is_near: bool
) -> None:
    """Also one that was away."""
    names, new = [*SMALL[:12], "big/00"], "s/0200"
    assert {fleet.owner(name) for name in names} == set(SERVERS)
    del origin.versions[new]
    with mounted(tmp_path / "m", "stoker://b", *fleet.at("x"), *LONG, cache=is_near) as mount:

        def everywhere() -> list[list[str]]:
            """Who was told by another one is asked first: at once."""
            return [*(fleet.seen(name, names) for name in sorted(fleet.servers)[::-1]), seen(mount, names)]

        before = sums(origin, names)
        assert everywhere() == [before] * 4
        assert seen(mount, [new]) == ["ENOENT"]
        assert new[2:] not in mount.sh("ls $0/s").split()
        origin.versions |= dict.fromkeys([*names, new], 1)
        assert everywhere() == [before] * 4, "it is believed for an hour"
        assert seen(mount, [new]) == ["ENOENT"]

        mount.sh("stat $0/.stoker-refresh > /dev/null")
        assert everywhere() == [sums(origin, names)] * 4
        assert seen(mount, [new]) == sums(origin, [new])
        assert new[2:] in mount.sh("ls $0/s").split()

        fleet.kill("z")
        origin.versions |= dict.fromkeys(names, 2)
        mount.sh("stat $0/.stoker-refresh > /dev/null")
        assert everywhere() == [sums(origin, names)] * 3
        fleet.begin("z")
        newest = [sums(origin, names)] * 4
        wait_for(lambda: everywhere() == newest, 120, "server that is told; what is on its disk is older")


def written(path: str, name: str, size_bytes: int, there: str) -> list[Any]:
    """How it goes to write a file, and whether the origin has it at once."""
    data = readers.content(name, size_bytes)
    try:
        with open(path, "wb", buffering=0) as file:
            assert file.write(data) == size_bytes
    except OSError as error:
        return [errno.errorcode[error.errno or 0], False]
    return ["closed", Path(there).read_bytes() == data]


def who_writes(fleet: SteadyFleet) -> str | None:
    """The server that has begun to write a new file of the origin."""
    for name, server in fleet.servers.items():
        for descriptor in Path(f"/proc/{server.child.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if f"/{STAGING}/new/" in os.readlink(descriptor):
                    return name
    return None


def test_what_is_written_is_at_the_origin_and_outlives_its_server(tmp_path: Path) -> None:
    there = tmp_path / "origin"
    there.mkdir()
    (there / "old").write_bytes(b"as it was")
    with contextlib.ExitStack() as stack:
        fleet = stack.enter_context(steady_fleet(tmp_path, str(there), "--writable", "b"))
        ours, late, soon = (
            stack.enter_context(mounted(tmp_path / name, "stoker://b", *options, cache=False))
            for name, options in {
                "ours": (*fleet.at(), "--writable"),
                "late": (*fleet.at("y"), *LONG),
                "soon": (*fleet.at("z"), "--kernel-ttl=0s", "--ttl=0s", "--absent-ttl=0s"),
            }.items()
        )

        def write(name: str, size_bytes: int) -> list[Any]:
            return [written, ours.folder / name, name, size_bytes, there / name]

        before = [readers.sha256(b"as it was"), "ENOENT"]
        names = ["old", "new"]
        assert [seen(mount, names) for mount in (ours, late, soon)] == [before] * 3
        for name in names:
            assert ours.call(*write(name, 9_000_000)) == ["closed", True]
        now = [readers.sha256(readers.content(name, 9_000_000)) for name in names]
        assert [seen(mount, names) for mount in (ours, late, soon)] == [now, before, now]
        late.sh("stat $0/.stoker-refresh > /dev/null")
        assert seen(late, names) == now

        def is_stopped_in_the_midst(looking: Looking) -> str | None:
            """The server that has begun to write it and goes on no more; None: it was through with it."""
            inode = (there / "old").stat().st_ino
            name = wait_for(lambda: who_writes(fleet) or looking.has_ended(), why="server that writes")
            if name is True:
                return None
            server = psutil.Process(fleet.servers[name].child.pid)
            stop(server)
            if (there / "old").stat().st_ino == inode:
                return str(name)
            server.resume()
            return None

        name = None
        while name is None:
            with ours.look(*write("old", WRITTEN_BYTES)) as looking:
                name = is_stopped_in_the_midst(looking)
                if name is not None:
                    fleet.kill(name)
                said = json.loads(looking.finish(120).out)
                assert said == ["closed", True], f"{name} is gone, and another one has written it"
        theirs = soon if name != "z" else late
        theirs.sh("stat $0/.stoker-refresh > /dev/null")
        whole = [readers.sha256(readers.content("old", WRITTEN_BYTES))]
        assert [seen(mount, ["old"]) for mount in (ours, theirs)] == [whole] * 2
        assert ours.sh("ls $0").split() == theirs.sh("ls $0").split() == ["new", "old"]


def test_the_daemon_is_killed_while_a_server_is_gone(
    origin: SlowOrigin, fleet: SteadyFleet, tmp_path: Path
) -> None:
    """The next one knows of no server but by what it is told: the first is not there."""
    with mounted(tmp_path / "m", "stoker://b", *fleet.at(), "--timeout=120s", cache=False) as mount:
        with mount.look(readers.outcomes, mount.folder, SMALL) as looking:
            held_up(origin)
            fleet.kill("x")
            mount.kill_daemon()
            assert looking.process.poll() is None
            origin.release()
            assert json.loads(looking.finish().out) == sums(origin, SMALL)
        more = [name.replace("s/00", "s/01") for name in SMALL] + ["big/01"]
        mount.kill_daemon()
        assert seen(mount, more) == sums(origin, more)
        assert mount.log.count("the daemon of the mount has ended (signal 9)") == 2
        assert mount.end() == 0
