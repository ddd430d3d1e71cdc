"""`stoker data head, index, pack` as a person runs them."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from stoker.cli.main import main
from stoker.data.framing import tfrecord
from tests.e2e.data_helpers import Behind, behind, write_tar
from tests.e2e.run_helpers import wait_for
from tests.tables import parquet_bytes

pytestmark = pytest.mark.real
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def stoker(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """`stoker data ARGUMENTS` in this process: exit code, output, errors."""
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path / "own"))

    def run(data: Behind, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setenv("STOKER_CACHE_ENDPOINT", data.server.url)
        capsys.readouterr()
        try:
            code = main(["data", *arguments])
        except SystemExit as left:
            code = int(left.code or 0)
        return (code, *capsys.readouterr())

    return run


def started(data: Behind, *arguments: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "STOKER_CACHE_ENDPOINT": data.server.url,
        "STOKER_CACHE_DIR": str(data.settings.directory),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "stoker.cli.main", "data", *arguments],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def read(data: Behind, folder: Path, **more: Any) -> list[Any]:
    """What is in a folder, by a cache of its own bucket."""
    from stoker.data.dataset import Dataset

    return list(Dataset(f"file://{folder}/", cache=data.settings, **more))


def test_index_and_head(tmp_path: Path, stoker: Run) -> None:
    with behind(tmp_path) as data:
        write_tar(
            data.folder / "a.tar", [("k/1.txt", b"one"), ("k/1.bin", bytes(100)), ("k/2.txt", b"\x1b[31m")]
        )
        code, out, err = stoker(data, "index", "stoker://b/", "--json")
        found = json.loads(out)
        assert (code, found["records"], found["objects"], found["format"]) == (0, 2, 1, "tar")
        assert Path(found["index"]).stat().st_size >= found["index_bytes"]
        assert err == ""
        code, out, _ = stoker(data, "index", "stoker://b/")
        assert code == 0
        assert "2 records in 1 objects" in out
        code, out, _ = stoker(data, "head", "stoker://b/", "-n", "9")
        assert code == 0
        assert out.splitlines() == [
            "stoker://b/: 2 records, format tar",
            "0: __key__='k/1', txt=b'one', bin=<100 bytes>",
            r"1: __key__='k/2', txt=b'\x1b[31m'",
        ]
        code, out, _ = stoker(data, "head", "stoker://b/", "-n", "1", "--json", "--format", "objects")
        assert json.loads(out)["object"] == "a.tar"


def test_tables(tmp_path: Path, stoker: Run) -> None:
    with behind(tmp_path) as data:
        body = parquet_bytes(pa.table({"id": [1, 2, 3], "word": ["a", "\x1b[31m", None]}))
        (data.folder / "a.parquet").write_bytes(body)
        (data.folder / "b.parquet").write_bytes(body)
        code, out, err = stoker(data, "index", "stoker://b/", "--json")
        found = json.loads(out)
        assert (code, err, found["format"], found["index"]) == (0, "", "parquet", None)
        assert (found["records"], found["objects"], found["size_bytes"]) == (6, 2, 2 * len(body))
        assert "6 records in 2 objects of" in stoker(data, "index", "stoker://b/")[1]
        code, out, _ = stoker(data, "head", "stoker://b/", "-n", "2", "--option", 'columns=["word","id"]')
        assert code == 0
        assert out.splitlines() == [
            "stoker://b/: 6 records, format parquet",
            "0: word='a', id=1",
            r"1: word='\x1b[31m', id=2",
        ]
        code, out, _ = stoker(data, "pack", "stoker://b/", str(tmp_path / "out"), "--format", "jsonl")
        assert code == 0
        assert read(data, tmp_path / "out")[4:] == [{"id": 2, "word": "\x1b[31m"}, {"id": 3, "word": None}]


def test_a_database(tmp_path: Path, stoker: Run) -> None:
    with sqlite3.connect(tmp_path / "x.db") as connection:
        connection.execute("create table words (id integer primary key, word text)")
        connection.executemany("insert into words values (?, ?)", [(n, f"w{n}") for n in range(9)])
    connection.close()
    with behind(tmp_path) as data:
        url = f"sqlite://me:secret@/{tmp_path}/x.db"
        code, out, err = stoker(data, "head", url, "--option", "table=words", "-n", "1")
        assert (code, "secret" in out + err) == (2, False), "SQLite takes no user"
        url = f"sqlite:///{tmp_path}/x.db"
        code, out, err = stoker(data, "head", url, "--option", "table=words", "-n", "1")
        assert (code, err) == (0, "")
        assert out.splitlines() == [f"{url}: 9 records, format sql", "0: id=0, word='w0'"]
        code, out, _ = stoker(data, "index", url, "--option", "table=words")
        assert (code, f"{url}: 9 records, format sql" in out) == (0, True)


@pytest.mark.parametrize(("arguments", "code", "words"), [
    (("head", "stoker://b/absent/"), 4, "no objects under"),
    (("head", "stoker://absent/"), 4, "absent"),
    (("head", "stoker://b/", "--option", "x"), 2, "NAME=VALUE"),
    (("head", "stoker://b/", "--format", "csv", "--option", "colour=1"), 2, "colour"),
    (("head", "stoker://b/", "--format", "nosuch"), 2, "nosuch"),
    (("index", "stoker://b/", "--format", "tfrecord"), 4, "object 'a.csv' of"),
    (("pack", "stoker://b/", "{tmp}/o", "--format", "zip"), 2, "zip"),
    (("pack", "stoker://b/", "{tmp}/o", "--format", "tar", "--shard-size", "0"), 2, "1 byte"),
    (("pack", "stoker://b/", "{tmp}/origin", "--format", "tar"), 2, "is not empty"),
    (("pack", "stoker://b/", "{tmp}/origin", "--format", "tar", "--force"), 2, "which is no shard"),
    (("pack", "stoker://b/", "{tmp}/o", "--format", "recordio"), 4, "record 0 of 'stoker://b/' cannot be packed"),
    (("pack", "stoker://b/", "/proc/o", "--format", "tar"), 5, "/proc/o"),
])  # fmt: skip
def test_what_cannot_be(
    tmp_path: Path, stoker: Run, arguments: tuple[str, ...], code: int, words: str
) -> None:
    with behind(tmp_path) as data:
        (data.folder / "a.csv").write_text("x,y\n1,2\n")
        done, out, err = stoker(data, *(part.replace("{tmp}", str(tmp_path)) for part in arguments))
    assert words in err
    assert (done, out) == (code, "")
    assert not (tmp_path / "o").exists()


PACKED = ["tar", "tfrecord", "jsonl", "mds"]


@pytest.mark.parametrize("form", PACKED)
def test_pack_and_read_again(tmp_path: Path, stoker: Run, form: str) -> None:
    with behind(tmp_path) as data:
        (data.folder / "t.csv").write_text("name,text\n" + "".join(f"n{n},é{n}\n" for n in range(500)))
        folder = tmp_path / "out"
        arguments = ("pack", "stoker://b/", str(folder), "--format", form, "--shard-size", "4KiB", "--json")
        code, out, _ = stoker(data, *arguments)
        said = json.loads(out)
        assert (code, said["records"], said["skipped"]) == (0, 500, 0)
        assert sorted(said["files"]) == sorted(os.listdir(folder))
        assert len(said["files"]) > 2
        assert said["size_bytes"] == sum(path.stat().st_size for path in folder.iterdir())
        rows = read(data, folder, **({"format": form, "parse": "example"} if form == "tfrecord" else {}))
        wanted = [{"name": f"n{n}", "text": f"é{n}"} for n in range(500)]
        if form == "tfrecord":
            rows = [{key: value[0].decode() for key, value in row.items()} for row in rows]
        if form == "tar":
            rows = [{kind: row[f"{kind}.txt"].decode() for kind in ("name", "text")} for row in rows]
            with tarfile.open(folder / "shard-00001.tar") as archive:
                assert archive.getmembers()[0].name.endswith(".name.txt")
        assert rows == wanted

        code, _, err = stoker(data, *arguments)
        assert code == 2
        assert "--force" in err
        code, out, _ = stoker(data, *arguments[:5], "--json", "--force")
        assert code == 0
        assert sorted(json.loads(out)["files"]) == sorted(os.listdir(folder)), "no shard of before is left"


@pytest.mark.parametrize("form", [*PACKED, "recordio"])
def test_objects_and_images_are_packed(tmp_path: Path, stoker: Run, form: str) -> None:
    with behind(tmp_path) as data:
        for name in ("a/1.jpg", "b/2.jpg"):
            (data.folder / name).parent.mkdir()
            (data.folder / name).write_bytes(b'{"jpeg": "%b"}' % name.encode())
        code, _, _ = stoker(
            data, "pack", "stoker://b/", str(tmp_path / "o"), "--format", form, "--from", "objects"
        )
        assert code == 0
        first = read(data, tmp_path / "o")[0]
        body = b'{"jpeg": "a/1.jpg"}'
        assert first == {
            "tar": {"__key__": "000000000", "jpg": body},
            "mds": {"data": body},
            "jsonl": {"jpeg": "a/1.jpg"},
        }.get(form, body)
        if form in ("tar", "mds"):
            code, _, _ = stoker(data, "pack", "stoker://b/", str(tmp_path / "f"), "--format", form)
            second = read(data, tmp_path / "f")[1]
            image = b'{"jpeg": "b/2.jpg"}'
            assert (
                second
                == {
                    "tar": {"__key__": "000000001", "jpg": image, "cls": b"1"},
                    "mds": {"image": image, "label": 1},
                }[form]
            )


def test_damaged_records_are_left_out_if_asked(tmp_path: Path, stoker: Run) -> None:
    with behind(tmp_path) as data:
        records = [bytearray(tfrecord.framed(b"%d" % n)) for n in range(600)]
        records[300][-1] ^= 1
        (data.folder / "a.tfrecord").write_bytes(b"".join(records))
        folder = tmp_path / "o"
        code, _, err = stoker(data, "pack", "stoker://b/", str(folder), "--format", "recordio")
        assert code == 4
        assert "record 300" in err
        assert not folder.exists(), "nothing is left of it"
        code, _, err = stoker(
            data, "pack", "stoker://b/", str(folder), "--format", "recordio", "--on-corrupt", "skip"
        )
        assert code == 0
        assert "1 damaged records were left out" in err
        assert read(data, folder) == [b"%d" % n for n in range(600) if n != 300]


def test_ctrl_c_leaves_nothing_half_done(tmp_path: Path) -> None:
    with behind(
        tmp_path, "?stoker_mbps=8"
    ) as data:  # it reads for 20 s, and writes a quarter of all at a time
        for n in range(1024):
            (data.folder / f"{n:04}.bin").write_bytes(os.urandom(20_000))
        folder = tmp_path / "o"
        command = started(data, "pack", "stoker://b/", str(folder), "--format", "tar", "--shard-size", "1MB")
        wait_for(lambda: any((folder / ".packing").glob("*")) if folder.exists() else False)
        command.send_signal(signal.SIGINT)
        _, err = command.communicate(timeout=60)
        assert command.returncode == 130
        assert "interrupted" in err
        assert not folder.exists()


def test_ctrl_c_while_an_index_is_built(tmp_path: Path) -> None:
    with behind(tmp_path, "?stoker_mbps=4") as data:  # it is at work for 17 s
        for n in range(8):
            (data.folder / f"{n}.txt").write_bytes(b"0123456789\n" * 100_000)
        command = started(data, "index", "stoker://b/", "--format", "lines")
        wait_for(lambda: data.origin_bytes > 0)
        time.sleep(0.3)
        command.send_signal(signal.SIGINT)
        _, err = command.communicate(timeout=60)
        assert command.returncode == 130
        assert "interrupted" in err
        assert not data.indexes
        assert not list(data.settings.directory.rglob("*.partial"))
    with behind(tmp_path) as data:
        again = started(data, "index", "stoker://b/", "--format", "lines", "--json")
        out, err = again.communicate(timeout=120)
        assert json.loads(out)["records"] == 800_000
        assert err == ""


def test_a_file_by_its_path(tmp_path: Path, stoker: Run) -> None:
    path = tmp_path / "a b.jsonl"
    path.write_text('{"a": 1}\n')
    with behind(tmp_path) as data:
        code, out, err = stoker(data, "head", str(path))
    assert (code, err) == (0, "")
    assert out.splitlines()[1] == "0: a=1"
