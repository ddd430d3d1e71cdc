"""Keeps an agent running on every host, as a cluster would, and notes how each one ended."""

from __future__ import annotations

import math
import subprocess
import threading
import time
from dataclasses import dataclass, field
from typing import IO

from tests.chaos.job import EXIT_NO_MASTER
from tests.e2e.hosts import Host

RESTART_AFTER_S = 0.5


@dataclass(frozen=True)
class Line:
    """Something said or done, for the story."""

    wall_s: float
    who: str
    text: str


class Story:
    """Everything that was said or done, by time. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lines: list[Line] = []
        self._lock = threading.Lock()

    def add(self, who: str, text: str, wall_s: float | None = None) -> None:
        with self._lock:
            self._lines.append(Line(time.time() if wall_s is None else wall_s, who, text))

    def listen(self, who: str, pipe: IO[str]) -> None:
        """Take the lines of a process as they come."""

        def read() -> None:
            with pipe:
                for line in pipe:
                    self.add(who, line.rstrip())

        threading.Thread(target=read, daemon=True).start()

    def lines(self) -> list[Line]:
        with self._lock:
            return sorted(self._lines, key=lambda line: line.wall_s)


@dataclass
class _Place:
    """One host's agent, and what its end may look like."""

    host: Host
    process: subprocess.Popen[str] | None = None
    wanted: bool = True
    start_at: float = 0.0
    killed: bool = False
    leaving: bool = False
    cut_off_until: float = 0.0
    starts: int = 0
    started_wall_s: float = 0.0


@dataclass
class Agents:
    """One `stoker run` a host; those that end are started again while the host is wanted."""

    hosts: list[Host]
    command: list[str]
    story: Story
    wrong: list[str] = field(default_factory=list)
    """Ends that no fault explains."""
    over: bool = False
    """The job is to end: nobody is started again, and everybody must end well."""

    def __post_init__(self) -> None:
        self._places = {host.number: _Place(host) for host in self.hosts}

    def tick(self) -> None:
        """Note ends, start what is due."""
        for place in self._places.values():
            if place.process is not None and place.process.poll() is not None:
                self._ended(place, place.process.returncode)
            if place.process is None and place.wanted and not self.over and time.time() >= place.start_at:
                self._start(place)

    def _start(self, place: _Place) -> None:
        place.starts += 1
        place.killed = place.leaving = False
        place.started_wall_s = time.time()
        pipe = subprocess.PIPE
        process = place.host.popen(*self.command, stdout=pipe, stderr=subprocess.STDOUT, text=True)
        place.process = process
        self.story.add(place.host.name, f"agent {place.starts} starts, pid {process.pid}")
        self.story.listen(place.host.name, process.stdout)  # type: ignore[arg-type]

    def _ended(self, place: _Place, code: int) -> None:
        self.story.add(place.host.name, f"agent {place.starts} ended with {code}")
        explained = (
            (code == -9 and place.killed)
            or (code == 0 and (self.over or place.leaving))
            or (code == EXIT_NO_MASTER and not self.over and time.time() < place.cut_off_until)
        )
        if not explained:
            self.wrong.append(f"{place.host.name}: its agent ended with {code}, and no fault explains it")
        place.process = None
        place.start_at = max(place.start_at, time.time() + RESTART_AFTER_S)

    @property
    def all_ended(self) -> bool:
        return all(place.process is None for place in self._places.values())

    def runs_since(self, number: int) -> float:
        """When the agent that runs on a host now was started, seconds since 1970; infinity: none runs."""
        place = self._places[number]
        return math.inf if place.process is None else place.started_wall_s

    # -- what faults do to agents -------------------------------------------------------------------------

    def kill(self, number: int, away_s: float) -> bool:
        """SIGKILL an agent; another starts after `away_s`. False: there is none."""
        place = self._places[number]
        if place.process is None:
            return False
        place.killed, place.start_at = True, time.time() + away_s
        place.process.kill()
        return True

    def leave(self, number: int) -> bool:
        """SIGTERM an agent, and let it stay away until `come_back`."""
        place = self._places[number]
        if place.process is None:
            return False
        place.wanted, place.leaving = False, True
        place.process.terminate()
        return True

    def come_back(self, number: int) -> None:
        self._places[number].wanted = True

    def excuse(self, number: int, seconds: float) -> None:
        """Until then the host's agent may end for want of a master."""
        self._places[number].cut_off_until = time.time() + seconds
