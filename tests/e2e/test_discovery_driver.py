"""The driver with real processes: hosts come, go and fail, and agents are told so. The job is a stand-in."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stoker import __version__
from stoker.cli.endpoint import Nodes
from stoker.errors import EXIT_NO_WORLD
from stoker.wire.hosts import AgentEnd, AgentLeave, AgentStart, decode_line, encode_line
from tests.e2e.discovery_world import AGENT, SECRET, SOURCE, TIMEOUT_S, command_lines, world

pytestmark = pytest.mark.real


def test_hosts_come_and_go(tmp_path: Path) -> None:
    async def story() -> None:
        async with world(tmp_path, hosts=("h1:2",)) as w:
            await w.until(lambda: w.job.hosts == {"h1": 2}, "h1")
            first = w.job.on("h1")
            w.write_hosts("h1:2", "h2:3  # the new one")
            await w.until(lambda: w.job.hosts == {"h1": 2, "h2": 3}, "h2")
            assert w.job.on("h2")["order"] == 1
            w.write_hosts("h2:3")
            await w.until(lambda: w.job.hosts == {"h2": 3}, "h1 to leave")
            await w.until(
                lambda: "h1 stdout: asked to leave: h1 is no longer listed" in w.printed, "h1's last words"
            )
            assert "h1 stdout: hello from h1" in w.printed
            assert "host-blacklisted" not in w.kinds(), "to leave when asked is no failure"
            w.write_hosts("h2:3", "h1:2")
            await w.until(lambda: w.job.hosts == {"h1": 2, "h2": 3}, "h1 again")
            assert w.job.on("h1")["pid"] != first["pid"]

    asyncio.run(story())


def test_what_an_agent_gets_and_where_the_secret_is_not(tmp_path: Path) -> None:
    flags = ("--lr", "0.5", "--forward-env", "SPECIAL", "--forward-env", "GIVEN=a b'c")
    environment = {"SPECIAL": "äö $x", "NCCL_DEBUG": "INFO", "UNRELATED": "1", "STOKER_JOB_TOKEN": "another",
                   "STOKER_WORKER_ID": "mine", "STOKER_X": "x"}  # fmt: skip

    async def story() -> None:
        async with world(tmp_path, *flags, hosts=("h1:2",), environment=environment) as w:
            await w.until(lambda: w.job.nodes, "h1")
            about = w.job.on("h1")
            assert about["token"] == SECRET
            assert about["cwd"] == str(tmp_path)
            assert about["options"]["lr"] == "0.5"
            assert about["options"]["log_dir"] == "logs/h1"
            assert not {"hosts", "remote_shell", "host_discovery_script"} & about["options"].keys()
            there = about["environment"]
            assert (there["SPECIAL"], there["GIVEN"], there["NCCL_DEBUG"]) == ("äö $x", "a b'c", "INFO")
            assert (there["STOKER_X"], there["STOKER_JOB_TOKEN"]) == ("x", SECRET)
            lines = command_lines()
            assert any("--from-stdin" in line or "discovery_agent" in line for line in lines)
            assert not [line for line in lines if SECRET in line or "äö" in line]

    asyncio.run(story())


def test_other_slots_replace_the_agent(tmp_path: Path) -> None:
    async def story() -> None:
        async with world(tmp_path, hosts=("h1:2", "h2:2")) as w:
            await w.until(lambda: len(w.job.nodes) == 2, "both")
            w.write_hosts("h1:2", "h2:4")
            await w.until(lambda: w.job.hosts == {"h1": 2, "h2": 4}, "h2 with 4 slots")
            w.write_hosts("h1:1", "h2:4")
            await w.until(lambda: w.job.hosts == {"h1": 1, "h2": 4}, "h1 with 1 slot")
            assert w.job.joined.count("h1") == w.job.joined.count("h2") == 2

    asyncio.run(story())


def test_a_host_whose_agent_dies_comes_back_after_a_while(tmp_path: Path) -> None:
    async def story() -> None:
        async with world(tmp_path, hosts=("h1", "h2")) as w:
            await w.until(lambda: len(w.job.nodes) == 2, "both")
            os.kill(w.job.on("h2")["pid"], 9)
            await w.until(lambda: w.job.hosts == {"h1": 1}, "h2 to be gone")
            await w.until(lambda: "host-blacklisted" in w.kinds(), "the blacklist")
            await w.until(lambda: len(w.job.nodes) == 2, "h2 again")
            why = dict(w.said)["host-blacklisted"]
            assert (
                why
                == "h2 is blacklisted for 1.0 s: its agent could not go on: its remote shell was killed by signal 9"
            )

    asyncio.run(story())


def test_agents_that_end_together(tmp_path: Path) -> None:
    async def story() -> None:
        async with world(tmp_path, "--hosts", "h1,h2", "--blacklist-cooldown-range", "100s", "100s") as w:
            await w.until(lambda: len(w.job.nodes) == 2, "both")
            w.job.answers.clear()
            for host in ("h1", "h2"):
                os.kill(w.job.on(host)["pid"], 9)
            await w.until(lambda: not w.driver.pids, "the end of both")
            assert "host-blacklisted" not in w.kinds(), (
                "the job may have ended: nobody is blamed before that is known"
            )
            w.job.answers.set()
            await w.until(lambda: w.kinds().count("host-blacklisted") == 2, "both on the blacklist")

    asyncio.run(story())


def test_a_broken_host_is_given_up_and_a_spare_takes_its_place(tmp_path: Path) -> None:
    flags = ("--blacklist-limit", "2", "--blacklist-cooldown-range", "300ms", "300ms")

    async def story() -> None:
        async with world(tmp_path, *flags, hosts=("h1", "h2"), nodes=Nodes(1, 1), mood="h1:broken") as w:
            await w.until(lambda: w.job.hosts == {"h2": 1}, "the spare")
            os.kill(w.job.on("h2")["pid"], 9)
            await w.until(lambda: w.kinds().count("host-blacklisted") == 3, "three failures")
            await w.until(lambda: w.job.hosts == {"h2": 1}, "h2 again")
            assert "for good, after 2 failures: its agent exited with code 7: this host is broken" in str(
                w.said
            )

    asyncio.run(story())


def test_all_hosts_blacklisted(tmp_path: Path) -> None:
    flags = ("--hosts", "h1:2,h2", "--blacklist-cooldown-range", "100s", "100s")

    async def story() -> None:
        async with world(tmp_path, *flags, mood="h1:broken,h2:broken") as w:
            await w.until(lambda: "all-blacklisted" in w.kinds(), "said so")
            assert w.job.stopped is None, "a host may still come back"
            w.clock.ahead_s += TIMEOUT_S
            await w.until(lambda: w.job.stopped, "an end")
            why, exit_code = w.job.stopped or ("", 0)
            assert exit_code == EXIT_NO_WORLD
            assert why.startswith(
                "all hosts are blacklisted: h1 (its agent exited with code 7: this host is broken), h2"
            )

    asyncio.run(story())


def test_the_minimum_does_not_come_together(tmp_path: Path) -> None:
    async def story() -> None:
        async with world(tmp_path, "--hosts", "h1,h2", nodes=Nodes(2, 2), mood="h2:silent") as w:
            await w.until(lambda: "h2 stdout: waiting" in w.printed and w.job.nodes, "both")
            w.clock.ahead_s += TIMEOUT_S / 2
            await w.until(lambda: "host-blacklisted" in w.kinds(), "the blacklist")
            w.clock.ahead_s += TIMEOUT_S / 2
            await w.until(lambda: w.job.stopped, "an end")
            why, exit_code = w.job.stopped or ("", 0)
            assert exit_code == EXIT_NO_WORLD
            assert why.startswith("1 of at least 2 hosts are here: h2 ")
            assert "its agent did not join the job within 30 s" in dict(w.said)["host-blacklisted"]

    asyncio.run(story())


def test_one_that_does_not_leave_is_killed(tmp_path: Path) -> None:
    async def story() -> None:
        async with world(tmp_path, hosts=("h1", "h2"), mood="h2:stubborn") as w:
            await w.until(lambda: len(w.job.nodes) == 2, "both")
            w.write_hosts("h1")
            await w.until(lambda: any("asked to leave" in line for line in w.printed), "h2 to be asked")
            assert len(w.job.nodes) == 2
            w.clock.ahead_s += w.driver.book.policy.leave_grace_s
            await w.until(lambda: w.job.hosts == {"h1": 1}, "h2 to be gone")
            await w.until(lambda: "h2 stdout: ended" in w.printed, "its last words")

    asyncio.run(story())


def test_a_script_that_fails_later_changes_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        async with world(tmp_path, hosts=("h1", "h2")) as w:
            await w.until(lambda: len(w.job.nodes) == 2, "both")
            (tmp_path / "hosts").unlink()
            await w.until(lambda: "script-failed" in w.kinds(), "said so")
            w.write_hosts("h1", "h2:many")
            await w.until(lambda: w.kinds().count("script-failed") == 2, "said so")
            await asyncio.sleep(1.0)
            assert w.kinds().count("script-failed") == 2, "each reason is told once"
            assert len(w.job.nodes) == 2
            w.write_hosts("h1")
            await w.until(lambda: w.job.hosts == {"h1": 1}, "the new list")

    asyncio.run(story())


def test_without_any_list_the_job_ends(tmp_path: Path) -> None:
    async def story() -> None:
        async with world(tmp_path) as w:
            await w.until(lambda: "script-failed" in w.kinds(), "said so")
            w.clock.ahead_s += TIMEOUT_S
            await w.until(lambda: w.job.stopped, "an end")
            why, exit_code = w.job.stopped or ("", 0)
            assert exit_code == EXIT_NO_WORLD
            assert "the host discovery script has given no list of hosts; the last try: exit code 1" in why

    asyncio.run(story())


def test_too_many_changes_of_the_world(tmp_path: Path) -> None:
    async def story() -> None:
        async with world(tmp_path, "--reset-limit", "1", hosts=("h1",)) as w:
            await w.until(lambda: len(w.job.nodes) == 1, "h1")
            w.write_hosts("h1", "h2")
            await w.until(lambda: len(w.job.nodes) == 2, "h2")
            assert w.job.stopped is None
            w.write_hosts("h1", "h2", "h3")
            await w.until(lambda: w.job.stopped, "an end")
            assert w.job.stopped == ("the world has changed more than 1 times (--reset-limit)", 1)

    asyncio.run(story())


def test_this_machine_needs_no_remote_shell(tmp_path: Path) -> None:
    async def story() -> None:
        async with world(
            tmp_path, "--hosts", "localhost,127.0.0.2,h1", "--remote-shell", "env REMOTE={host}"
        ) as w:
            await w.until(lambda: len(w.job.nodes) == 3, "all")
            remote = {host: w.job.on(host)["environment"].get("REMOTE") for host in w.job.hosts}
            assert remote == {"localhost": None, "127.0.0.2": None, "h1": "h1"}

    asyncio.run(story())


def agent_by_hand(folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", AGENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        cwd=folder,
    )


def start_line(folder: Path, **changed: Any) -> AgentStart:
    values: dict[str, Any] = {
        "version": __version__, "host": "h1", "slots": 1, "order": 0, "master_host": "127.0.0.1", "master_port": 1,
        "token": SECRET, "directory": str(folder), "environment": {"MOOD": "h1:silent"}, "options": {}, "grace_s": 0.5,
    }  # fmt: skip
    return AgentStart(**{**values, **changed})


@pytest.mark.parametrize(
    ("mood", "sent", "said"),
    [
        ("silent", encode_line(AgentLeave("soon")), ["asked to leave: soon"]),
        ("silent-stubborn", encode_line(AgentLeave("soon")) + encode_line(AgentEnd("now")),
         ["asked to leave: soon", "asked to leave: now", "ended"]),
        ("silent", b"nonsense\n" + encode_line(AgentLeave("soon")), ["asked to leave: soon"]),
        ("silent", None, ["asked to leave: the driver is gone"]),
        ("silent-stubborn", None, ["asked to leave: the driver is gone", "ended"]),
    ],
    ids=["leave", "end", "nonsense", "gone", "gone-stubborn"],
)  # fmt: skip
def test_what_an_agent_does_when_told(tmp_path: Path, mood: str, sent: bytes | None, said: list[str]) -> None:
    agent = agent_by_hand(tmp_path)
    assert agent.stdin is not None
    assert agent.stdout is not None
    grace_s = 0.5 if "stubborn" in mood else 60.0
    first = encode_line(start_line(tmp_path, environment={"MOOD": f"h1:{mood}"}, grace_s=grace_s))
    agent.stdin.write(first[:10])
    agent.stdin.flush()
    agent.stdin.write(first[10:])
    agent.stdin.flush()
    assert agent.stdout.readline() == b"waiting\n"
    if sent is None:
        agent.stdin.close()
        agent.stdin = None
    else:
        agent.stdin.write(sent)
        agent.stdin.flush()
    assert agent.wait(30) == 0
    out, _ = agent.communicate()
    assert out.decode().splitlines() == said


def test_what_is_said_before_the_agent_is_there_reaches_it(tmp_path: Path) -> None:
    agent = agent_by_hand(tmp_path)
    out, _ = agent.communicate(
        encode_line(start_line(tmp_path)) + encode_line(AgentLeave("at once")), timeout=30
    )
    assert out.decode().splitlines() == ["asked to leave: at once", "waiting"]
    assert agent.returncode == 0


@pytest.mark.parametrize("state", ["runs", "is stopped"])
def test_a_newer_agent_ends_the_older_one(tmp_path: Path, state: str) -> None:
    def begin(host: str) -> subprocess.Popen[bytes]:
        agent = agent_by_hand(tmp_path)
        assert agent.stdin is not None
        assert agent.stdout is not None
        agent.stdin.write(
            encode_line(start_line(tmp_path, host=host, environment={"MOOD": f"{host}:silent"}))
        )
        agent.stdin.flush()
        assert agent.stdout.readline() == b"waiting\n"
        return agent

    older, elsewhere = begin("h1"), begin("h2")
    if state == "is stopped":
        older.send_signal(signal.SIGSTOP)
    newer = begin("h1")
    assert older.wait(30) == (-signal.SIGTERM if state == "runs" else -signal.SIGKILL)
    assert elsewhere.poll() is newer.poll() is None
    for agent in (older, elsewhere, newer):
        agent.communicate(timeout=30)
    assert not list(tmp_path.glob("*.lock"))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"", b"a driver starts this command"),
        (b"no json\n", b"not understood"),
        (encode_line(AgentLeave("first")), b"must be of type start"),
        ("version", b"install the same on both"),
        ("directory", b"h1 has no working directory /nowhere"),
    ],
)
def test_lines_that_no_agent_takes(tmp_path: Path, line: bytes | str, complaint: bytes) -> None:
    changed = {"version": {"version": "0.0.0"}, "directory": {"directory": "/nowhere"}}
    sent = line if isinstance(line, bytes) else encode_line(start_line(tmp_path, **changed[line]))
    agent = agent_by_hand(tmp_path)
    _, err = agent.communicate(sent, timeout=30)
    assert agent.returncode != 0
    assert complaint in err
    assert SECRET.encode() not in err


def test_lines_hold_what_was_put_in(tmp_path: Path) -> None:
    for message in (start_line(tmp_path), AgentLeave("a\nb"), AgentEnd("ä")):
        assert decode_line(encode_line(message).removesuffix(b"\n")) == message
        assert encode_line(message).count(b"\n") == 1
