"""On which hosts agents run: those listed, less those that keep failing. PURE.

The life of an agent, as the book sees it:

    none ──start──▶ starting ──joined──▶ joined ◀──▶ lost
      ▲                 │                   │          │
      │                 ├──── asked to ─────┴──────────┤
      │                 ▼                              ▼
      └──exited──── leaving ──after the grace time──▶ killing

A host fails when its agent ends unasked, does not join, stays lost, or is cordoned by the master. It is then on the
blacklist for a time that grows exponentially, with jitter, and comes back by itself; it is forgiven once it has worked
for a while, and banned for good after too many failures (as in Horovod Elastic, whose blacklist has a cooldown).

The state of the training lives in the workers. So the last host that has it is not sent away before another has
copied it; but one that is no longer listed goes at the latest after the user's timeout.
"""

from __future__ import annotations

from collections.abc import Iterable

from stoker.base.backoff import backoff_s
from stoker.base.rng import Rng
from stoker.errors import EXIT_FAILED, EXIT_NO_WORLD
from stoker.job.hosts_events import (
    AgentExited,
    Discovered,
    Effect,
    Event,
    GiveUp,
    HostMemory,
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
    WorldFormed,
)
from stoker.job.hosts_list import HostList
from stoker.job.hosts_roster import STAYING, Host, HostTable, names, state_of, why_away


class HostBook:
    """Decides where agents run. All time comes in as `now`, in seconds, all chance from `rng`."""

    def __init__(self, policy: HostPolicy, rng: Rng, now: float, memory: Iterable[HostMemory] = ()) -> None:
        """`memory` is what a former driver of this job knew: see `memory`."""
        self.policy = policy
        self.hosts = HostTable()
        self.over = ""
        """Why no agent is started any more; empty: the job goes on."""
        self._rng = rng
        self._effects: list[Effect] = []
        self._answered = False
        self._script_problem = ""
        self._said: dict[str, str] = {}
        self._short_since: float | None = now
        self._over_since = now
        self._may_linger = False
        self._worlds = 0
        for known in memory:
            host = self.hosts.get(known.host)
            host.failures, host.banned, host.why = known.failures, known.banned, known.why
            host.paused_until = now + known.pause_left_s

    def step(self, event: Event, now: float) -> list[Effect]:
        """Feed one event; returns what is to be done, in order."""
        self._effects = []
        match event:
            case Discovered() | ScriptFailed() if self.over:
                pass
            case Discovered(listed):
                self._on_list(listed)
            case ScriptFailed(why):
                self._on_script_failed(why)
            case AgentExited(name, code, why):
                self._on_exit(name, code, why, now)
            case NodeJoined(node, name):
                self._on_joined(node, name, now)
            case NodeLost(node, why):
                self._on_lost(node, why, now)
            case NodeCordoned(node, why):
                self._on_cordoned(node, why, now)
            case WorldFormed(nodes):
                self._on_world(nodes, now)
            case JobEnded(success):
                self._finish("the job has ended", now, success=success)
            case _:
                self._on_tick(now)
        if not self.over:
            self._send_away(now)
            self._start(now)
            self._check_enough(now)
        return self._effects

    def memory(self, now: float) -> tuple[HostMemory, ...]:
        """What a driver that is started anew should know: the failures. Its agents are none of it: they live by this
        driver's remote shells and leave when those end."""
        return tuple(
            HostMemory(h.host, h.failures, h.banned, max(0.0, h.paused_until - now), h.why)
            for h in self.hosts
            if h.failures
        )

    # -- the list -----------------------------------------------------------------------------------------

    def _on_list(self, listed: HostList) -> None:
        self._answered = True
        if self._script_problem:
            self._script_problem = ""
            self._say("script-answers", "the host discovery script answers again")
        for remark in listed.remarks:
            self._say_if_new(remark, "hosts-odd", remark)
        wanted = dict(listed.hosts)
        before = {h.host: h.slots for h in self.hosts.listed()}
        for name, slots in listed.hosts:
            self.hosts.note_listed(name, slots)
        for host in list(self.hosts):
            if host.host not in wanted:
                self.hosts.drop(host)
        if wanted != before:
            words = names(f"{h}:{n}" for h, n in wanted.items())
            self._say("hosts", f"hosts listed: {words or 'none'}", hosts=wanted)

    def _on_script_failed(self, why: str) -> None:
        if why != self._script_problem:
            self._script_problem = why
            goes_on = "; the last list stays in force" if self._answered else ""
            self._say("script-failed", f"the host discovery script failed: {why}{goes_on}")

    # -- agents -------------------------------------------------------------------------------------------

    def _on_exit(self, name: str, code: int | None, why: str, now: float) -> None:
        host = self.hosts.find(name)
        if host is None or host.agent == "none":
            return
        asked = host.agent not in STAYING
        host.enter("none", now)
        host.in_world, host.kept_since = False, None
        if asked or self.over:
            self._say("agent-left", f"{name}: its agent has ended", host=name)
        else:
            how = "could not go on" if code is None else f"exited with code {code}"
            self._blame(host, f"its agent {how}: {why}" if why else f"its agent {how}", now)

    def _on_joined(self, node: str, name: str, now: float) -> None:
        host = self.hosts.find(name)
        if host is None:
            return  # an agent that somebody started by hand
        host.nodes.add(node)
        if host.agent in ("starting", "lost"):
            host.enter("joined", now)

    def _on_lost(self, node: str, why: str, now: float) -> None:
        host = self.hosts.of_node(node)
        if host is None:
            return
        host.nodes.discard(node)
        if not host.nodes:
            host.in_world = False
            if host.agent == "joined":
                host.enter("lost", now)
                host.why = why

    def _on_cordoned(self, node: str, why: str, now: float) -> None:
        host = self.hosts.of_node(node)
        if host is not None and not host.blamed and not self.over:
            self._blame(host, why, now)

    def _on_world(self, nodes: frozenset[str], now: float) -> None:
        for host in self.hosts:
            host.in_world = not host.nodes.isdisjoint(nodes)
        self._worlds += 1
        limit = self.policy.reset_limit
        if limit is not None and self._worlds - 1 > limit:
            self._give_up(f"the world has changed more than {limit} times (--reset-limit)", EXIT_FAILED, now)

    def _on_tick(self, now: float) -> None:
        policy = self.policy
        for host in self.hosts:
            waited_s = now - host.since
            if self.over:
                late = now - self._over_since > policy.leave_grace_s
                if late and not self._may_linger and host.agent in STAYING | {"leaving"}:
                    self._kill(host, f"it is still there {policy.leave_grace_s:.0f} s after {self.over}", now)
            elif host.agent == "starting" and waited_s > policy.start_s:
                why = f"its agent did not join the job within {policy.start_s:.0f} s"
                self._blame(host, why, now)
                self._kill(host, why, now)
            elif host.agent == "lost" and waited_s > policy.rejoin_s:
                why = f"it is unreachable ({host.why}) and did not come back within {policy.rejoin_s:.0f} s"
                self._blame(host, why, now)
                self._kill(host, why, now)
            elif host.agent == "leaving" and waited_s > self._grace_s(host):
                self._kill(host, f"it did not leave within {self._grace_s(host):.0f} s", now)
            elif (
                host.agent == "joined"
                and host.failures
                and not host.blamed
                and waited_s > policy.good_after_s
            ):
                host.failures, host.paused_until = 0, 0.0
                self._say(
                    "host-good",
                    f"{host.host} has worked for {waited_s:.0f} s: its failures are forgiven",
                    host=host.host,
                )

    def _blame(self, host: Host, why: str, now: float) -> None:
        """Blacklist. Backoff never shorter than the first pause, so that the cause has a chance to pass."""
        if host.blamed:
            return
        policy = self.policy
        host.blamed, host.why = True, why
        host.failures += 1
        if host.failures >= policy.failures_limit:
            host.banned = True
            until = f"for good, after {host.failures} failures"
            details = {"host": host.host, "failures": host.failures}
        else:
            first_s = policy.backoff_first_s
            spread_s = backoff_s(
                host.failures, self._rng, first_s=first_s, limit_s=policy.backoff_limit_s - first_s
            )
            host.paused_until = now + first_s + spread_s
            until = f"for {first_s + spread_s:.1f} s"
            details = {"host": host.host, "failures": host.failures, "pause_s": round(first_s + spread_s, 3)}
        self._effects.append(Say("host-blacklisted", f"{host.host} is blacklisted {until}: {why}", details))

    def _grace_s(self, host: Host) -> float:
        """An agent that is no node of the job (any more) has no step to finish."""
        policy = self.policy
        return policy.leave_grace_s if host.nodes else min(policy.rejoin_s, policy.leave_grace_s)

    def _kill(self, host: Host, why: str, now: float) -> None:
        host.enter("killing", now)
        self._effects.append(KillAgent(host.host, why))

    # -- what follows -------------------------------------------------------------------------------------

    def _send_away(self, now: float) -> None:
        """Ask agents to leave that should not be there, the youngest first; one with the state stays until then."""
        for host in sorted(self.hosts, key=lambda h: -h.age):
            why = why_away(host)
            if not why:
                host.kept_since = None
                continue
            if host.in_world and host.agent == "joined" and not self.hosts.others_have_state(host):
                if host.kept_since is None:
                    host.kept_since = now
                    self._say(
                        "host-kept",
                        f"{host.host} {why}, and no other host has the state: it stays until one has",
                    )
                if host.slots or now - host.kept_since < self.policy.timeout_s:
                    continue  # one that is no longer listed will be taken away in any case
            host.kept_since = None
            self._say("host-leaves", f"{host.host} {why}", host=host.host)
            if host.agent == "lost":
                self._kill(host, f"it is unreachable and {why}", now)
            else:
                host.enter("leaving", now)
                self._effects.append(LeaveAgent(host.host, f"{host.host} {why}"))

    def _start(self, now: float) -> None:
        busy = sum(not host.is_free() for host in self.hosts)
        for host in sorted(self.hosts, key=lambda h: h.age):
            if busy >= self.policy.max_hosts:
                return
            if host.slots and host.is_free() and not host.is_blacklisted(now):
                busy += 1
                again = f" again, after {host.failures} failures" if host.failures else ""
                host.agent_slots, host.blamed, host.in_world = host.slots, False, False
                host.enter("starting", now)
                self._effects.append(StartAgent(host.host, host.slots, host.age))
                self._say(
                    "agent-started",
                    f"{host.host} gets an agent with {host.slots} slots{again}",
                    host=host.host,
                )

    def _check_enough(self, now: float) -> None:
        """The one timeout: so long may the job be without its least number of hosts."""
        if self.hosts.joined() >= self.policy.min_hosts:
            self._short_since = None
            self._said.pop("all-blacklisted", None)
            return
        if self._short_since is None:
            self._short_since = now
        why = self.hosts.all_blacklisted(now)
        if why:
            self._say_if_new("all-blacklisted", "all-blacklisted", why)
        if now - self._short_since >= self.policy.timeout_s:
            self._give_up(
                f"{self.explain(now)} (for {self.policy.timeout_s:.0f} s: --timeout)", EXIT_NO_WORLD, now
            )

    def explain(self, now: float) -> str:
        """Why there are not enough hosts."""
        listed = self.hosts.listed()
        if not self._answered:
            last = f"; the last try: {self._script_problem}" if self._script_problem else ""
            return f"the host discovery script has given no list of hosts{last}"
        if not listed:
            return "no hosts are listed" + (f"; {self._script_problem}" if self._script_problem else "")
        words = (f"{h.host} {state_of(h, now)}" for h in listed if h.agent != "joined")
        return self.hosts.all_blacklisted(now) or (
            f"{self.hosts.joined()} of at least {self.policy.min_hosts} hosts are here: {names(words)}"
        )

    def _give_up(self, why: str, exit_code: int, now: float) -> None:
        self._effects.append(GiveUp(why, exit_code))
        self.over, self._over_since = "the job was given up", now

    def _finish(self, why: str, now: float, *, success: bool) -> None:
        """Agents that have joined get the outcome from the master; the others would wait for it in vain."""
        self.over = self.over or why
        self._over_since, self._may_linger = now, success
        for host in self.hosts:
            if host.agent in ("starting", "lost"):
                self._kill(host, why, now)

    # -- helpers ------------------------------------------------------------------------------------------

    def _say(self, kind: str, why: str, **details: object) -> None:
        self._effects.append(Say(kind, why, details))

    def _say_if_new(self, key: str, kind: str, why: str) -> None:
        if self._said.get(key) is None:
            self._said[key] = why
            self._say(kind, why)
