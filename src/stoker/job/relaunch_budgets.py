"""What the relaunch policy remembers: who failed when, and what has been forgiven since. PURE."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

PROGRESS_STEP_S = 60.0
ATTEMPTS_KEPT = 100
"""Failures of one place that are remembered: the backoff has long reached its limit by then."""


@dataclass(frozen=True)
class WorldFacts:
    """Where the run stands when a worker ends."""

    node: str
    """Whose budget it goes on: the node, or its host where a node that comes again is to be known again."""
    slot: int
    elastic: bool = True
    generation: int = 0
    """The newest world of which the worker was a member; 0: it never was in one."""
    commits: int = 0
    """The run's newest commit."""
    commits_slack: int = 0
    """Commits that may have been made since the news of the newest one: failures that close are at the same commit."""
    min_nodes: int = 1
    other_nodes: int = 0
    """Nodes besides this one that run workers or could: not cordoned, not leaving, not used up."""
    others_here: int = 0
    """Other workers of this node that run or are about to."""
    newcomers: bool = False
    """A node that is not here yet may still join."""

    @property
    def is_new(self) -> bool:
        """It was never in a world, and others have trained: its end says more about its node than about the script."""
        return self.elastic and self.generation == 0 and self.commits > 0

    @property
    def place(self) -> str:
        return f"{self.node}/{self.slot}" if self.elastic else "all"


class Cordon(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node that runs no workers."""

    why: str
    lasting_s: float | None
    """None: for ever."""
    times: int = 1


class BudgetsKept(msgspec.Struct, frozen=True, tag_field="type", tag="budgets", forbid_unknown_fields=True):
    """`Budgets` for the journal.

    Times are not among it: after a restart of the master every waiting time begins anew. It stays the same from one
    decision to the next, but for the progress, which is told by the minute.
    """

    progress_s: float = 0.0
    spent: dict[str, tuple[float, ...]] = {}
    failures: dict[str, int] = {}
    cordons: dict[str, Cordon] = {}
    memory_bytes: int = 0
    charged: dict[str, int] = {}
    stuck_commit: int = -1
    stuck_times: int = 0
    stuck_places: tuple[str, ...] = ()
    errors: dict[str, tuple[str, ...]] = {}


@dataclass
class Budgets:
    """Failures that are not forgiven yet, by account: `job`, `oom`, `node NAME`.

    A failure is forgiven after so many seconds of *progress* (time in which the newest commit rose above all
    that were before), so a run of a month survives a failure a day, and one that fails again and again at the
    same commit has nothing forgiven however long that takes.

    Several workers of one world that end together are one *incident*: it is charged once.
    """

    progress_s: float = 0.0
    highest_commit: int = 0
    spent: dict[str, list[float]] = field(default_factory=dict)
    """Account → progress at each failure."""
    failed_at: dict[str, list[float]] = field(default_factory=dict)
    """Place (node and slot) → times of its late failures, for the backoff."""
    cordons: dict[str, Cordon] = field(default_factory=dict)
    """Nodes that run no more workers, and those that did not for a time."""
    cordoned_at: dict[str, float] = field(default_factory=dict)
    memory_bytes: int = 0
    """The grown memory limit of a worker; 0: it has not grown."""
    charged: dict[str, int] = field(default_factory=dict)
    """Account → the newest world whose incident is on it."""
    stuck_commit: int = -1
    stuck_times: int = 0
    stuck_places: set[str] = field(default_factory=set)
    """Incidents in a row at one commit, and where they were."""
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    """Fingerprint of an error → place → when it last came."""
    drawn: tuple[int, int, float] | None = None
    """World, earlier failures and delay of the newest replacement."""
    _rose_at: float | None = None

    # -- progress -----------------------------------------------------------------------------------------

    def note_commits(self, commits: int, now: float) -> None:
        """The run's newest commit, as often as there is news of it."""
        if commits <= self.highest_commit:
            return
        if self._rose_at is not None:
            self.progress_s += max(0.0, now - self._rose_at)
        self.highest_commit, self._rose_at = commits, now

    def interrupt(self) -> None:
        """Something ended: the time until the next new commit is no progress."""
        self._rose_at = None

    def forgive(self, after_s: float) -> None:
        """Forget what lies `after_s` seconds of progress back."""
        self.spent = {
            account: left
            for account, marks in self.spent.items()
            if (left := [mark for mark in marks if self.progress_s - mark < after_s])
        }
        self.charged = {
            name: at for name, at in self.charged.items() if name == "stuck" or name in self.spent
        }

    # -- accounts -----------------------------------------------------------------------------------------

    def used(self, account: str) -> int:
        """Failures on an account that are not forgiven yet."""
        return len(self.spent.get(account, ()))

    def is_charged(self, account: str, generation: int) -> bool:
        """Whether this world's incident is on the account already."""
        return generation > 0 and self.charged.get(account) == generation

    def charge(self, account: str, generation: int) -> None:
        """Put this world's incident on the account, once."""
        if not self.is_charged(account, generation):
            self.spent.setdefault(account, []).append(self.progress_s)
            self.charged[account] = generation

    def attempt(self, place: str, now: float, window_s: float) -> int:
        """Note a failure of a place; returns how many it had before within the window."""
        self.failed_at = {
            known: recent
            for known, times in self.failed_at.items()
            if (recent := [at for at in times if now - at < window_s])
        }
        before = self.failed_at.get(place, [])
        self.failed_at[place] = [*before, now][-ATTEMPTS_KEPT:]
        return len(before)

    # -- cordons ------------------------------------------------------------------------------------------

    def cordon(self, node: str, why: str, now: float, lasting_s: float | None) -> None:
        """This node runs no workers; None: for ever, else twice as long each time."""
        known = self.cordons.get(node)
        times = known.times + 1 if known is not None else 1
        length_s = None if lasting_s is None else lasting_s * 2.0 ** min(times - 1, 30)
        self.cordons[node] = Cordon(why, length_s, times)
        self.cordoned_at[node] = now

    def cordon_reason(self, node: str, now: float) -> str:
        """Why a node may run no workers now; empty: it may."""
        known = self.cordons.get(node)
        if known is None or (known.lasting_s is not None and now - self.cordoned_at[node] >= known.lasting_s):
            return ""
        return known.why

    # -- early signs that nothing will help ---------------------------------------------------------------

    def note_stuck(self, world: WorldFacts) -> int:
        """Note a failure at a commit; returns how many incidents in a row were there."""
        if not self.is_charged("stuck", world.generation):
            away = abs(world.commits - self.stuck_commit) > world.commits_slack
            if self.stuck_times == 0 or away:
                self.stuck_times, self.stuck_places = 0, set()
            self.stuck_commit = world.commits
            self.stuck_times += 1
            self.charged["stuck"] = world.generation
        self.stuck_places.add(world.place)
        return self.stuck_times

    def note_error(self, fingerprint: str, place: str, now: float, window_s: float) -> int:
        """Note an error; returns how many places had the same one within the window."""
        for known, places in list(self.errors.items()):
            kept = {name: at for name, at in places.items() if now - at < window_s}
            if kept:
                self.errors[known] = kept
            else:
                del self.errors[known]
        self.errors.setdefault(fingerprint, {})[place] = now
        return len(self.errors[fingerprint])

    # -- journal ------------------------------------------------------------------------------------------

    def kept(self) -> BudgetsKept:
        """What the journal is to hold."""
        return BudgetsKept(
            progress_s=self.progress_s // PROGRESS_STEP_S * PROGRESS_STEP_S,
            spent={account: tuple(marks) for account, marks in self.spent.items()},
            failures={place: len(times) for place, times in self.failed_at.items()},
            cordons=dict(self.cordons),
            memory_bytes=self.memory_bytes,
            charged=dict(self.charged),
            stuck_commit=self.stuck_commit,
            stuck_times=self.stuck_times,
            stuck_places=tuple(sorted(self.stuck_places)),
            errors={error: tuple(sorted(places)) for error, places in self.errors.items()},
        )

    @classmethod
    def restore(cls, kept: BudgetsKept, now: float) -> Budgets:
        """From the journal."""
        return cls(
            progress_s=kept.progress_s,
            spent={account: list(marks) for account, marks in kept.spent.items()},
            failed_at={place: [now] * count for place, count in kept.failures.items()},
            cordons=dict(kept.cordons),
            cordoned_at=dict.fromkeys(kept.cordons, now),
            memory_bytes=kept.memory_bytes,
            charged=dict(kept.charged),
            stuck_commit=kept.stuck_commit,
            stuck_times=kept.stuck_times,
            stuck_places=set(kept.stuck_places),
            errors={error: dict.fromkeys(places, now) for error, places in kept.errors.items()},
        )
