"""The list of this machine's jobs: private, atomic, and free of the dead."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from stoker.cli import registry
from stoker.cli.registry import JobRecord, ProcessId
from stoker.errors import ConfigError, EnvironmentProblem


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "stoker" / "jobs"


def a_record(job: str = "night-run", port: int = 29400, **more: object) -> JobRecord:
    record = registry.new_record(
        job=job, endpoint=f"127.0.0.1:{port}", token="secret", log_dir="/logs", command=["python", "t.py"]
    )
    return msgspec.structs.replace(record, **more)


def ended() -> ProcessId:
    """A process that has run and ended."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        return registry.process_id("run", process.pid)


def test_a_job_is_listed_while_it_runs(folder: Path) -> None:
    assert registry.records() == []
    record = a_record()
    with registry.register(record) as registration:
        assert registry.records() == [record]
        assert stat.S_IMODE(registration.path.stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        restarted = msgspec.structs.replace(record, log_dir="/elsewhere")
        registration.update(restarted)
        assert registry.records() == [restarted]
        assert [p.name for p in folder.iterdir()] == [f"night-run.{os.getpid()}.json"], (
            "no part is left behind"
        )
    assert registry.records() == []
    registration.remove()


def test_a_job_is_live_as_long_as_one_of_its_processes_is(folder: Path) -> None:
    dead, alive = ended(), registry.process_id("master")
    assert registry.is_alive(alive)
    assert not registry.is_alive(dead)
    registration = registry.register(a_record(processes=(dead, alive)))
    assert len(registry.records()) == 1
    registration.update(a_record(processes=(dead,)))
    assert registry.records() == []
    assert list(folder.iterdir()) == [], "the stale file was swept"


def test_a_number_that_went_to_another_process_is_not_the_job(folder: Path) -> None:
    me = registry.process_id("run")
    reused = msgspec.structs.replace(me, started_ticks=me.started_ticks - 1)
    registry.register(a_record(processes=(reused,)))
    assert registry.records() == []
    assert list(folder.iterdir()) == []


def test_a_zombie_is_dead() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        living = registry.process_id("run", process.pid)
        assert registry.is_alive(living)
        assert process.stdin is not None
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended and nobody has asked how
        assert not registry.is_alive(living)


def test_a_process_that_is_not_there() -> None:
    with pytest.raises(EnvironmentProblem, match="no process"):
        registry.process_id("run", ended().pid)


def test_commands_of_one_job_are_one_job(folder: Path) -> None:
    first = a_record(started_wall_s=1.0)
    registry.register(first)
    path = folder / "night-run.1.json"
    second = a_record(
        started_wall_s=2.0, processes=(registry.process_id("master", os.getppid()),), log_dir="/the-masters"
    )
    path.write_bytes(msgspec.json.encode(second))
    (merged,) = registry.records()
    assert set(merged.processes) == {*first.processes, *second.processes}
    assert merged.log_dir == "/the-masters", "the events are where the master runs"
    other = folder / "night-run.2.json"
    other.write_bytes(msgspec.json.encode(a_record(port=2)))
    assert [record.endpoint for record in registry.records()] == ["127.0.0.1:29400", "127.0.0.1:2"]


@pytest.mark.parametrize("job", ["../../etc/passwd", "a/b", ".", "", "none", "x" * 500, "schön\n", "a\0b"])
def test_no_name_leads_out_of_the_folder(folder: Path, job: str) -> None:
    with registry.register(a_record(job)) as registration:
        assert registration.path.parent == folder
        assert [record.job for record in registry.records()] == [job]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"job": 3}'])
def test_files_that_say_nothing_are_passed_over(folder: Path, content: bytes) -> None:
    with registry.register(a_record()):
        (folder / "odd.json").write_bytes(content)
        assert len(registry.records()) == 1
    assert (folder / "odd.json").exists(), "another version may have written it"


def test_a_record_of_a_newer_version_is_read(folder: Path) -> None:
    with registry.register(a_record()) as registration:
        said = msgspec.json.decode(registration.path.read_bytes())
        registration.path.write_bytes(msgspec.json.encode({**said, "colour": "green"}))
        assert registry.records()[0].job == "night-run"


def test_a_link_in_the_way_is_not_followed(folder: Path, tmp_path: Path) -> None:
    registry.records()
    target = tmp_path / "precious"
    target.write_text("mine")
    (folder / f"night-run.{os.getpid()}.{os.getpid()}.part").symlink_to(target)
    with registry.register(a_record()):
        assert target.read_text() == "mine"
        assert len(registry.records()) == 1


def test_tokens(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("  from-file\n")
    assert a_record().secret() == "secret"
    assert a_record(token="", token_file=str(tmp_path / "token")).secret() == "from-file"
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name, words in (("empty", "is empty"), ("bytes", "not text"), ("missing", "No such file")):
        with pytest.raises(ConfigError, match=words):
            registry.read_token(str(tmp_path / name))


def test_a_folder_that_cannot_be_written(folder: Path) -> None:
    folder.parent.mkdir(mode=0o700)
    folder.write_text("not a folder")
    with pytest.raises(EnvironmentProblem, match="jobs"):
        registry.register(a_record())


def test_what_killed_commands_have_left_is_swept(folder: Path) -> None:
    runtime = folder.parent
    registry.records()
    stale, mine, foreign = (
        runtime / f"agent-{pid}-ab.sock" for pid in (ended().pid, os.getpid(), ended().pid)
    )
    tokens = {port: runtime / f"job-{port}.token" for port in (29400, 29401, 29402)}
    for port, path in tokens.items():
        path.write_text("secret")
        if port != 29402:
            os.utime(path, (1.0, 1.0))
    with socket.socket(socket.AF_UNIX) as dead, socket.socket(socket.AF_UNIX) as also_dead:
        dead.bind(str(stale))
        also_dead.bind(str(mine))
    with socket.socket(socket.AF_UNIX) as listener, registry.register(a_record(port=29400)):
        listener.bind(str(foreign))  # of a process that another container has
        listener.listen()
        registry.sweep()
        assert [path.exists() for path in (stale, mine, foreign)] == [False, True, True]
    assert [path.exists() for path in tokens.values()] == [True, False, True]
