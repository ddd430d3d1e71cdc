"""Opening many small files on a mount, and listing very many."""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from _common import interleaved, median_ratio
from _mounted import Mounted, in_time, other_mount, stoker_mount
from _s3 import KEYS, S3, s3_server
from obstore.store import S3Store

SCRIPT = str(Path(__file__).parent / "scripts" / "open_files.py")
SMALL_BYTES, SMALL_FILES = 100 * 1024, 1000
GOAL = 5.0
WAYS = {
    "read": "open, read, close",
    "python": "Python's open and read",
    "open": "open, close",
    "stat": "stat",
}
FOLDERS = 100
S3FS_MAX = 10_000
BUCKET = "names"
_TIMEOUT_S = 900.0


def opens(folder: Path, *, quick: bool) -> dict[str, object]:
    """Microseconds to open, read and close a file that the page cache holds, and what parts of it take; and requests of
    the kernel for each."""
    rounds = 3 if quick else 9
    data = folder / "data"
    data.mkdir(parents=True)
    for number in range(SMALL_FILES):
        (data / f"{number}").write_bytes(os.urandom(SMALL_BYTES))
    figures: dict[str, object] = {}
    for kind, flags in (("", ()), (" --no-small-files", ("--no-small-files",))):
        mounted = folder / f"mount{len(flags)}"
        with stoker_mount(str(data), mounted, "--cache-dir", str(folder / "cache"), *flags) as mount:
            figures |= _opens(mount, data, f"100 KiB files{kind}", rounds)
    shutil.rmtree(folder)
    return figures


def _opens(mount: Mounted, data: Path, label: str, rounds: int) -> dict[str, object]:
    figures: dict[str, object] = {}
    asked: dict[str, float] = {}

    def run(where: Path, what: str) -> float:
        before = mount.requests()
        said = in_time([sys.executable, SCRIPT, str(where), str(SMALL_FILES), what], _TIMEOUT_S)
        if where == mount.folder:
            asked[what] = (mount.requests() - before) / SMALL_FILES / 2  # each run has a first one
        return float(said)

    for what, name in WAYS.items():
        for where in (data, mount.folder):
            run(where, what)  # the first one fills caches
        sides = {"ours": partial(run, mount.folder, what), "native": partial(run, data, what)}
        found = interleaved(sides, rounds)
        goal = f" (goal {GOAL:g} at most)" if what == "read" else ""
        figures[f"{label}, warm, {name}: mount / native{goal}"] = median_ratio(found["ours"], found["native"])
        figures[f"{label}, warm, {name}: us, mount and native"] = " and ".join(
            f"{statistics.median(found[side]):.1f}" for side in ("ours", "native")
        )
        figures[f"{label}, warm, {name}: requests a file"] = round(asked[what], 2)
    return figures


def lists(folder: Path, *, quick: bool) -> dict[str, object]:
    """Seconds that `ls -lR` takes of very many files of an S3 server, over those of the local disk and of a peer."""
    count, rounds = (10_000, 2) if quick else (100_000, 5)
    folder.mkdir(parents=True)
    figures: dict[str, object] = {}
    with s3_server(folder) as server:
        _fill(folder / "data", server, count)
        url = f"s3://{BUCKET}?endpoint={server.url}"
        peers = _peers(server, folder)
        taken: dict[str, list[float]] = {}

        def timed(name: str, where: Path) -> None:
            taken.setdefault(name, []).append(_list(where, count))

        def ours(number: int) -> None:
            cache = str(folder / f"cache-{number}")
            os.environ.update(KEYS)
            for kind, flags in (("", ()), (" without xattrs", ("--no-xattrs",))):
                where = folder / f"mount-{number}{len(flags)}"
                with stoker_mount(url, where, "--cache-dir", f"{cache}{len(flags)}", *flags) as mount:
                    timed(f"cold{kind}", mount.folder)
                    timed(f"warm{kind}", mount.folder)

        for number in range(rounds):
            timed("native", folder / "data")
            ours(number)
            for name, peer in peers.items():
                # s3fs asks for each file, which takes it more than a quarter of an hour where they are 100,000.
                if number < (1 if name == "s3fs" else rounds) and (name != "s3fs" or count <= S3FS_MAX):
                    with peer(number) as mount:
                        timed(f"{name} cold", mount.folder)
                        timed(f"{name} warm", mount.folder)
    label = f"ls -lR of {count} files"

    def ratio(ours: str, theirs: str) -> float:
        return median_ratio(taken[ours], taken[theirs])

    for state in ("cold", "warm"):
        figures[f"{label}, {state}: mount / native"] = ratio(state, "native")
        figures[f"{label}, {state}: mount without xattrs / native"] = ratio(
            f"{state} without xattrs", "native"
        )
        for name in (name for name in peers if f"{name} {state}" in taken):
            figures[f"{label}, {state}: mount / {name}"] = ratio(state, f"{name} {state}")
            figures[f"{label}, {state}: mount without xattrs / {name}"] = ratio(
                f"{state} without xattrs", f"{name} {state}"
            )
    figures |= {f"{label}: seconds, {name}": statistics.median(found) for name, found in taken.items()}
    for name in ("rclone", "s3fs"):
        if name not in peers:
            figures[f"{label}: without {name}, which is not there (Debian: {name})"] = 0
    shutil.rmtree(folder)
    return figures


Peer = Callable[[int], contextlib.AbstractContextManager[Mounted]]


def _peers(server: S3, folder: Path) -> dict[str, Peer]:
    """Those that are there. Each mount is a new one, which knows nothing."""
    peers: dict[str, Peer] = {}
    remote = f":s3,provider=Other,endpoint='{server.url}',env_auth=true:{BUCKET}"
    rclone = ("rclone", "mount", remote, "--read-only", "--use-server-modtime", "--dir-cache-time", "60s")
    s3fs = ("s3fs", BUCKET, "-f", "-o", f"url={server.url},use_path_request_style,ro")

    @contextlib.contextmanager
    def by_rclone(number: int) -> Iterator[Mounted]:
        where = folder / f"rclone-{number}"
        env = KEYS | {"RCLONE_CONFIG": str(folder / "no.conf")}
        with other_mount([*rclone[:3], str(where), *rclone[3:]], where, env) as mount:
            yield mount

    @contextlib.contextmanager
    def by_s3fs(number: int) -> Iterator[Mounted]:
        where = folder / f"s3fs-{number}"
        names = {
            "AWSACCESSKEYID": KEYS["AWS_ACCESS_KEY_ID"],
            "AWSSECRETACCESSKEY": KEYS["AWS_SECRET_ACCESS_KEY"],
        }
        with other_mount([*s3fs[:2], str(where), *s3fs[2:]], where, names) as mount:
            yield mount

    if shutil.which("rclone"):
        peers["rclone"] = by_rclone
    if shutil.which("s3fs"):
        peers["s3fs"] = by_s3fs
    return peers


def _list(where: Path, count: int) -> float:
    """Seconds; that all files were listed is looked at."""
    said = in_time([sys.executable, SCRIPT, str(where), str(count), "list"], _TIMEOUT_S)
    return float(said)


def _fill(folder: Path, server: S3, count: int) -> None:
    """The same files on this disk and behind the S3 server."""
    import boto3  # type: ignore[import-untyped]
    import obstore

    made = boto3.client(
        "s3", endpoint_url=server.url, region_name="us-east-1",
        aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"], aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
    )  # fmt: skip
    made.create_bucket(Bucket=BUCKET)
    store = S3Store(
        BUCKET, endpoint=server.url, region="us-east-1", virtual_hosted_style_request=False,
        access_key_id=KEYS["AWS_ACCESS_KEY_ID"], secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
        client_options={"allow_http": True},
    )  # fmt: skip
    keys = [f"folder-{number % FOLDERS:03}/file-{number:06}" for number in range(count)]
    for number in range(FOLDERS):
        (folder / f"folder-{number:03}").mkdir(parents=True)
    for key in keys:
        (folder / key).write_bytes(b"a few bytes")
    with ThreadPoolExecutor(16) as threads:
        for _ in threads.map(lambda key: obstore.put(store, key, b"a few bytes"), keys):
            pass
