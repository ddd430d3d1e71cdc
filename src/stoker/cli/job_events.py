"""`stoker job events` and `summary`: from the master of a running job, from the log folder or journal of another."""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from stoker.cli.endpoint import DEFAULT_JOB
from stoker.cli.job_target import LOCATE_S, JobIsOver, Target, patiently, target_of
from stoker.cli.job_view import console, event_line
from stoker.cli.run_summary import Summary, summary_of
from stoker.errors import ConfigError, EnvironmentProblem
from stoker.job.journal.file import FileJournal
from stoker.job.journal.open import EtcdPlace, FilePlace, open_journal, parse_journal_url
from stoker.wire.control import WAIT_S_MAX, EventPage, JobEvent

log = logging.getLogger("stoker.job")
EVENTS_FILE = "events.db"


def show_events(arguments: argparse.Namespace) -> int:
    """Print events; returns the exit code. Raises StokerError."""
    kinds = {kind for text in arguments.kind for kind in text.split(",")}
    show = _printer(arguments.json)
    if arguments.follow and (arguments.log_dir or arguments.journal):
        raise ConfigError("--follow asks the master: leave out --log-dir or --journal, which are read once")
    if arguments.follow:
        events = follow(_target(arguments), arguments.after, arguments.timeout)
    else:
        events = _known(arguments, arguments.after)
    seen = set()
    for event in events:
        seen.add(event.kind)
        if not kinds or event.kind in kinds:
            show(event)
    if missing := sorted(kinds - seen):
        log.warning(
            "no event is of kind %s; there are: %s", ", ".join(missing), ", ".join(sorted(seen)) or "none"
        )
    return 0


def show_summary(arguments: argparse.Namespace) -> int:
    """Print where the job's time went; returns the exit code. Raises StokerError."""
    summary = summary_of(_known(arguments, 0))
    print(msgspec.json.encode(summary).decode() if arguments.json else summary)
    return 0


def summary_in(folder: Path) -> Summary | None:
    """That of the job whose log is in a run's folder; None: it is elsewhere. Raises EnvironmentProblem."""
    path = folder / EVENTS_FILE
    return summary_of(read_events(path)) if path.is_file() else None


def _known(arguments: argparse.Namespace, after: int) -> Iterator[JobEvent]:
    """The events so far, from where the flags say."""
    if arguments.log_dir is not None:
        return read_events(events_file(Path(arguments.log_dir)), after)
    if arguments.journal is not None:
        return journalled(arguments.journal, arguments.job, after, arguments.timeout)
    return _so_far(_target(arguments), after, arguments.timeout)


def _target(arguments: argparse.Namespace) -> Target:
    return target_of(arguments.job, arguments.job_token_file)


def _printer(as_json: bool) -> Callable[[JobEvent], None]:
    if as_json:
        return lambda event: print(msgspec.json.encode(event).decode(), flush=True)
    out = console()
    return lambda event: out.print(event_line(event), soft_wrap=True)


def _so_far(target: Target, after: int, timeout_s: float) -> Iterator[JobEvent]:
    with target.client(timeout_s) as client:
        while True:
            page = client.events(after)
            yield from page.events
            if not page.events:
                return
            after = page.after


def follow(target: Target, after: int, timeout_s: float) -> Iterator[JobEvent]:
    """Events until the job ends, across restarts of its master. Raises MasterUnreachable when it stays away."""
    with target.client(timeout_s) as client:

        def ask() -> EventPage:
            return client.events(after, wait_s=WAIT_S_MAX / 2)

        while True:
            try:
                page = patiently(target, client, ask)
            except JobIsOver:
                yield from _left(target, after)
                return
            yield from page.events
            after = page.after
            if page.ended:
                return


def _left(target: Target, after: int) -> Iterator[JobEvent]:
    """What was written between the last answer and the end."""
    if target.record and target.record.journal:
        yield from journalled(target.record.journal, target.record.job, after, LOCATE_S)
        return
    path = Path(target.record.journal_file) if target.record and target.record.journal_file else None
    if path is not None and path.is_file():
        yield from read_events(path, after)


def journalled(url: str, job: str | None, after: int, timeout_s: float) -> Iterator[JobEvent]:
    """Events from a job's journal, oldest first, whether it runs or is over.

    Raises ConfigError, JournalUnavailable and EnvironmentProblem.
    """
    match parse_journal_url(url):
        case FilePlace(path):
            return read_events(path, after)
        case EtcdPlace():
            return iter(asyncio.run(_from_etcd(url, job or DEFAULT_JOB, after, timeout_s)))
        case _:
            raise ConfigError(f"{url!r} keeps nothing that could be read: give the job's own --journal")


async def _from_etcd(url: str, job: str, after: int, timeout_s: float) -> list[JobEvent]:
    journal = open_journal(url, job)
    try:
        async with asyncio.timeout(timeout_s):
            entries = await journal.read_entries(after)
    except TimeoutError:
        raise EnvironmentProblem(
            f"{url!r} does not answer within {timeout_s:g} s: is it the right place?"
        ) from None
    finally:
        await journal.close()
    if not entries and not after:
        raise ConfigError(f"{url!r} holds no events of a job {job!r}: name it as --rdzv-id does")
    return _events_of(entries, url)


def events_file(path: Path) -> Path:
    """The event log at a path: the file itself, a run's log folder, or the folder of all runs, of which the newest is
    taken. Raises ConfigError."""
    if path.is_file():
        return path
    if (path / EVENTS_FILE).is_file():
        return path / EVENTS_FILE
    runs = sorted(path.glob(f"*/{EVENTS_FILE}"), key=lambda found: found.parent.name)
    if not runs:
        raise ConfigError(
            f"there is no {EVENTS_FILE} in {path} nor one folder below: see the run's --log-dir"
        )
    return runs[-1]


def read_events(path: Path, after: int = 0) -> Iterator[JobEvent]:
    """Events from a job's log, oldest first. Raises EnvironmentProblem."""
    yield from _events_of(asyncio.run(FileJournal(path).read_entries(after)), path)


def _events_of(entries: Iterable[Mapping[str, Any]], where: object) -> list[JobEvent]:
    """A journal's entries in the form of the API. Raises EnvironmentProblem."""
    known = ("seq", "wall_s", "kind", "why")
    try:
        return [
            msgspec.convert(
                {
                    **{name: entry[name] for name in known},
                    "details": {k: v for k, v in entry.items() if k not in known},
                },
                JobEvent,
            )
            for entry in entries
        ]
    except msgspec.ValidationError as error:
        raise EnvironmentProblem(f"{where} cannot be read as a job's events: {error}") from None
