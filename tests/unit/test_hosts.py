"""The book of hosts: Horovod's elastic scenarios as transcripts, and random worlds in which its promises must hold.

Each `transcripts_hosts/*.txt` has lines `> event` and, below each, what was decided. Set STOKER_REWRITE=1 to write what
the book says now, then read the difference.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.base.rng import Rng
from stoker.errors import ConfigError
from stoker.job.hosts import HostBook
from stoker.job.hosts_events import (
    AgentExited,
    Discovered,
    Effect,
    Event,
    GiveUp,
    HostPolicy,
    JobEnded,
    KillAgent,
    LeaveAgent,
    NodeCordoned,
    NodeJoined,
    NodeLost,
    Say,
    ScriptFailed,
    StartAgent,
    Tick,
    WorldFormed,
)
from stoker.job.hosts_list import HostList, HostSlots, parse_hosts_flag, parse_script_output

FOLDER = Path(__file__).parent / "transcripts_hosts"
NUMBERS = {"min_hosts", "max_hosts", "failures_limit", "reset_limit"}


class Player:
    """Turns the lines of a transcript into events. A node has its host's name unless `node=` says otherwise."""

    def __init__(self) -> None:
        self.now = 0.0
        self.book = self.open(HostPolicy(max_hosts=4))

    def open(self, policy: HostPolicy, memory: Any = ()) -> HostBook:
        return HostBook(policy, Rng(1), self.now, memory)

    def play(self, line: str) -> list[str]:
        verb, *rest = line.split()
        words = dict(word.split("=", 1) for word in rest if "=" in word)
        names = [word for word in rest if "=" not in word]
        if verb == "policy":
            values = {k: int(v) if k in NUMBERS else float(v) for k, v in words.items()}
            policy: Any = {"max_hosts": 4, **values}
            self.book = self.open(HostPolicy(**policy))
            return []
        self.now += float(words.pop("after", 0))
        if verb == "driver-restarts":
            self.book = self.open(self.book.policy, self.book.memory(self.now))
            return [f"  remembers {m}" for m in self.book.memory(self.now)]
        said = []
        if verb == "ticks":
            for _ in range(int(names[0])):
                self.now += 1.0
                said += [f"  {line} (at {self.now:.0f} s)" for line in self.show(Tick())]
            return said
        return [f"  {line}" for line in self.show(self.event(verb, names, words))]

    def event(self, verb: str, names: list[str], words: dict[str, str]) -> Event:
        if verb == "list":
            return Discovered(parse_script_output("\n".join(names), 1))
        if verb == "script-fails":
            return ScriptFailed(" ".join(names))
        if verb == "world":
            return WorldFormed(frozenset(names))
        if verb == "job-ends":
            return JobEnded(success=bool(names))
        if verb == "tick":
            return Tick()
        host = names[0]
        node = words.get("node", host)
        if verb == "exit":
            code = words.get("code")
            return AgentExited(host, None if code is None else int(code), " ".join(names[1:]))
        if verb == "joins":
            return NodeJoined(node, host)
        if verb == "lost":
            return NodeLost(node, "no sign of life")
        assert verb == "cordon", verb
        return NodeCordoned(node, " ".join(names[1:]))

    def show(self, event: Event) -> list[str]:
        return [line for effect in self.book.step(event, self.now) if (line := describe(effect))]


def describe(effect: Effect) -> str:
    match effect:
        case StartAgent(host, slots, age):
            return f"-> start {host} with {slots} slots, {age} in order"
        case LeaveAgent(host, why):
            return f"-> ask {host} to leave: {why}"
        case KillAgent(host, why):
            return f"-> kill {host}: {why}"
        case GiveUp(why, exit_code):
            return f"-> GIVE UP, exit code {exit_code}: {why}"
        case Say("agent-started" | "host-leaves"):
            return ""
        case Say(kind, why):
            return f"[{kind}] {why}"
    raise AssertionError(effect)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda p: p.stem)
def test_transcript(path: Path) -> None:
    player = Player()
    written = path.read_text().splitlines()
    told: list[str] = []
    for line in written:
        if line.startswith("> "):
            told += [line, *player.play(line[2:])]
        elif not line.startswith("  "):
            told.append(line)
    if os.environ.get("STOKER_REWRITE"):
        path.write_text("\n".join(told) + "\n")
    assert told == written


def test_there_are_transcripts() -> None:
    assert len(list(FOLDER.glob("*.txt"))) >= 12


# -- random worlds ----------------------------------------------------------------------------------------

HOSTS = ("h0", "h1", "h2", "h3")
POLICY = HostPolicy(
    min_hosts=1,
    max_hosts=3,
    timeout_s=100.0,
    start_s=50.0,
    rejoin_s=20.0,
    leave_grace_s=60.0,
    backoff_first_s=10.0,
    backoff_limit_s=80.0,
    good_after_s=60.0,
    failures_limit=3,
)


class RandomWorld:
    """Remote shells and a master as they may behave, and what the book promises about them."""

    def __init__(self, policy: HostPolicy) -> None:
        self.policy = policy
        self.now = 0.0
        self.book = HostBook(policy, Rng(7), 0.0)
        self.slots: dict[str, int] = {}
        self.running: dict[str, int] = {}
        self.asked: set[str] = set()
        self.nodes: dict[str, str] = {}
        self.members: set[str] = set()
        self.blocked_until: dict[str, float] = {}
        self.over = False
        self.made = 0
        self.done: list[Effect] = []

    def feed(self, event: Event) -> None:
        for effect in self.book.step(event, self.now):
            self.check(effect)
            if not isinstance(effect, Say):
                self.done.append(effect)

    def check(self, effect: Effect) -> None:
        match effect:
            case StartAgent(host, slots, _):
                assert not self.over
                assert host not in self.running, f"two agents on {host}"
                assert host not in self.nodes.values(), f"{host} still is a node of the job"
                assert slots == self.slots[host] > 0, f"{host} is not listed so"
                assert self.now >= self.blocked_until.get(host, 0.0), f"{host} is blacklisted"
                self.running[host] = slots
                assert (
                    len(self.running.keys() | set(self.nodes.values()) & set(HOSTS)) <= self.policy.max_hosts
                )
            case LeaveAgent(host, _):
                assert host in self.running
                assert host not in self.asked
                self.asked.add(host)
                if self.slots.get(host):
                    have = {h for n, h in self.nodes.items() if n in self.members and h in self.running}
                    assert host not in have or have - self.asked, "the last one with the state was sent away"
            case KillAgent(host, _):
                assert host in self.running
                self.asked.add(host)
            case Say("host-blacklisted", _, details):
                pause_s = details.get("pause_s", float("inf"))
                assert pause_s >= self.policy.backoff_first_s
                self.blocked_until[details["host"]] = self.now + pause_s - 0.001
            case GiveUp():
                assert not self.over, "given up twice"
                self.over = True
            case _:
                pass

    def listed(self, slots: dict[str, int]) -> None:
        self.slots = slots
        self.feed(Discovered(HostList(tuple(HostSlots(h, n) for h, n in slots.items()))))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.feed(Tick())

    def end_agent(self, host: str, code: int | None) -> None:
        if self.running.pop(host, None) is not None:
            self.asked.discard(host)
            self.feed(AgentExited(host, code, "so it goes"))

    def join(self, host: str) -> None:
        if host in self.running and host not in self.nodes.values():
            self.made += 1
            self.nodes[f"node-{self.made}"] = host
            self.feed(NodeJoined(f"node-{self.made}", host))

    def lose(self, host: str) -> None:
        for node in [n for n, h in self.nodes.items() if h == host]:
            del self.nodes[node]
            self.members.discard(node)
            self.feed(NodeLost(node, "silence"))

    def cordon(self, host: str) -> None:
        for node in [n for n, h in self.nodes.items() if h == host]:
            self.feed(NodeCordoned(node, "broken"))

    def form_world(self) -> None:
        self.members = set(self.nodes)
        if self.members:
            self.feed(WorldFormed(frozenset(self.members)))

    def settle(self) -> None:
        for host in list(self.running):
            self.join(host)
        self.form_world()

    def calm(self, seconds: int) -> None:
        """Everything works: agents join, those asked to leave do, and nothing breaks."""
        for _ in range(seconds):
            for host in [h for h in self.running if h in self.asked]:
                self.end_agent(host, 0)
            for host in set(self.nodes.values()) - self.running.keys():
                self.lose(host)
            self.settle()
            self.pass_time(1.0)


hosts = st.sampled_from(HOSTS)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("listed"), st.dictionaries(hosts, st.integers(1, 3))),
        st.tuples(st.just("pass_time"), st.floats(0.0, 100.0)),
        st.tuples(st.just("end_agent"), hosts, st.sampled_from([0, 1, 255, None])),
        st.tuples(st.sampled_from(["join", "join", "lose", "cordon"]), hosts),
        st.tuples(st.sampled_from(["form_world", "settle"])),
        st.tuples(st.just("feed"), st.sampled_from([ScriptFailed("no"), JobEnded()])),
    ),
    max_size=60,
)


def play(random: RandomWorld, steps: list[tuple[Any, ...]]) -> None:
    random.listed(dict.fromkeys(HOSTS, 2))
    random.settle()
    for name, *arguments in steps:
        random.over |= arguments == [JobEnded()]
        getattr(random, name)(*arguments)


@settings(max_examples=400, deadline=None)
@given(operations)
def test_never_two_agents_on_a_host_nor_one_on_a_blacklisted_host(steps: list[tuple[Any, ...]]) -> None:
    play(RandomWorld(POLICY), steps)


@settings(max_examples=150, deadline=None)
@given(operations, st.dictionaries(hosts, st.integers(1, 3), min_size=1))
def test_when_all_is_well_again_every_host_works(
    steps: list[tuple[Any, ...]], finally_listed: dict[str, int]
) -> None:
    random = RandomWorld(dataclasses.replace(POLICY, timeout_s=1e9, failures_limit=1000))
    play(random, [step for step in steps if step[-1] != JobEnded()])
    random.listed(finally_listed)
    random.calm(400)
    random.done.clear()
    random.calm(100)
    assert not random.done, "it does not come to rest"
    assert len(random.running) == min(len(finally_listed), POLICY.max_hosts)
    wrong = [h for h, n in random.running.items() if finally_listed.get(h) != n]
    assert not wrong or (len(random.running) == 1 and wrong[0] in finally_listed), (
        "only the last may keep its slots"
    )


# -- lists ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("h1\nh2:4\n", [("h1", 2), ("h2", 4)]),
        ("\n  # all of them\nh1:3 # the fast one\n\n", [("h1", 3)]),
        ("h1:0\nh2:1", [("h2", 1)]),
        ("h1:2\r\nh2:4\r\n", [("h1", 2), ("h2", 4)]),
        ("me@gpu-1.example:8", [("me@gpu-1.example", 8)]),
        ("[fd00::2]:4\n10.0.0.1", [("fd00::2", 4), ("10.0.0.1", 2)]),
        ("h1:2\nh1:2", [("h1", 2)]),
    ],
)
def test_what_a_script_may_print(text: str, hosts: list[tuple[str, int]]) -> None:
    listed = parse_script_output(text, 2)
    assert list(listed.hosts) == hosts
    assert listed.remarks == ()


@pytest.mark.parametrize(
    "line",
    ["h1:two", "h1:-1", "h1:", "h1:1.5", "h1:99999", "-oProxyCommand=evil:1", "@h:1", "h 1", "h1:2:3", "fd00::2:4",
     "h1;reboot", "h1:\u0663", "\x00", "h" * 300, "$(reboot)", "{host}", "me@-h:1"],
)  # fmt: skip
def test_what_no_host_is(line: str) -> None:
    with pytest.raises(ConfigError, match="line 2"):
        parse_script_output(f"good:1\n{line}\n", 1)


def test_too_many_hosts() -> None:
    with pytest.raises(ConfigError, match="more than 10000"):
        parse_script_output("\n".join(f"h{n}" for n in range(10_001)), 1)


@given(st.text())
def test_any_text_is_a_list_or_an_error(text: str) -> None:
    try:
        listed = parse_script_output(text, 1)
    except ConfigError:
        return
    assert all(slots > 0 and not host.startswith("-") for host, slots in listed.hosts)


def test_hosts_flag() -> None:
    assert parse_hosts_flag("h1:2, h2", 4).hosts == (("h1", 2), ("h2", 4))
    for text in ("", ",", "h1:x"):
        with pytest.raises(ConfigError, match="--hosts"):
            parse_hosts_flag(text, 1)


@pytest.mark.parametrize(
    "wrong",
    [{"min_hosts": 0}, {"min_hosts": 3, "max_hosts": 2}, {"backoff_first_s": 9.0, "backoff_limit_s": 1.0},
     {"backoff_first_s": 0.0}, {"failures_limit": 0}, {"reset_limit": -1}],
)  # fmt: skip
def test_limits_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        HostPolicy(**wrong)
