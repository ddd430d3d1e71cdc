"""The report as one self-contained HTML file."""

from __future__ import annotations

import time
from collections.abc import Iterable
from html import escape
from importlib.resources import files
from string import Template

from stoker.base.units import format_bytes, format_duration
from stoker.cli.demo.charts import Bar, Frame, Line, Mark, bar_chart, curve_chart
from stoker.cli.demo.facts import Facts, environment_facts
from stoker.cli.demo.summary import rows_of


def render_page(facts: Facts) -> str:
    """The whole file."""
    frame = Frame(
        seconds=facts.seconds,
        epochs=[(a - facts.started_s, b - facts.started_s) for a, b in facts.epochs],
        marks=marks_of(facts),
    )
    rows, bars = bars_of(facts)
    setting = facts.setting
    template = Template(files("stoker.cli.demo").joinpath("page.html").read_text("utf-8"))
    return template.substitute(
        verdict="ok" if facts.succeeded else "bad",
        verdict_text=escape(_verdict(facts)),
        story=_story(facts),
        when=time.strftime("%Y-%m-%d %H:%M", time.localtime(facts.started_s)),
        cards=_cards(facts),
        throughput=curve_chart(
            frame,
            [Line(facts.curve, "rate", is_area=True)],
            height=300,
            unit="",
            name="samples per second over time",
        ),
        cache=curve_chart(
            frame, _cache_lines(facts), height=230, unit=" %", name="origin bytes and cache hits over time"
        ),
        workers=bar_chart(frame, rows, bars, name="which worker was in which world"),
        findings=_table((name, value) for name, value, _ in rows_of(facts)),
        events=_events(facts),
        settings=_table(
            [
                (
                    "Dataset",
                    f"{setting.title}, {setting.schedule.records:,} + {setting.layout.test_records:,} records",
                ),
                ("Bytes", format_bytes(setting.layout.total_bytes)),
                ("Workers", str(setting.workers)),
                ("Epochs", str(setting.schedule.epochs)),
                ("Global batch", f"{setting.schedule.global_batch_size} records"),
                ("Origin", f"{setting.origin_mbps:.3g} Mbit/s, {setting.origin_latency_ms:g} ms a request"),
                ("Cache", "empty at the start" if setting.cold else "kept from an earlier run"),
            ]
        ),
        environment=_table(environment_facts().items()),
    )


def marks_of(facts: Facts) -> list[Mark]:
    """Kill, recovery and join."""
    marks = []
    start_s = facts.started_s
    if facts.kill is not None:
        marks.append(Mark(facts.kill.wall_s - start_s, f"SIGKILL to {facts.kill.worker}", "kill"))
    if facts.recovery is not None and facts.recovery_s is not None:
        text = f"next step after {format_duration(facts.recovery_s)}"
        marks.append(Mark(facts.recovery.committed_s - start_s, text, "recovered"))
    if facts.join is not None:
        text = f"{', '.join(facts.newcomers)} joins, pause {format_duration(facts.join.pause_s)}"
        marks.append(Mark(facts.join.committed_s - start_s, text, "joined"))
    return marks


def bars_of(facts: Facts) -> tuple[list[str], list[Bar]]:
    """Row names and bars of the world timeline."""
    starts = {e.worker: e.wall_s for e in facts.events if e.kind == "worker-started"}
    rows = sorted({s.worker for s in facts.stays} | set(starts), key=lambda w: (starts.get(w, 0.0), w))
    newest = max((s.generation for s in facts.stays), default=0)
    bars = []
    for worker in rows:
        stays = sorted((s for s in facts.stays if s.worker == worker), key=lambda s: s.generation)
        ready_s = stays[0].start_s if stays else facts.ended_s
        if worker in starts:
            title = f"{worker} starts: {format_duration(ready_s - starts[worker])}"
            bars.append(
                Bar(
                    rows.index(worker),
                    starts[worker] - facts.started_s,
                    ready_s - facts.started_s,
                    "starting",
                    "starting",
                    "",
                    title,
                )
            )
        for stay in stays:
            end_s = max(stay.end_s, facts.ended_s) if stay.generation == newest else stay.end_s
            if facts.kill is not None and worker == facts.kill.worker:
                end_s = min(max(end_s, facts.kill.wall_s), facts.kill.wall_s)
            label = f"generation {stay.generation}, rank {stay.rank}"
            title = f"{worker}: {label} of {stay.world_size}" + (
                ", state copied from a peer" if stay.copied else ""
            )
            bars.append(
                Bar(
                    rows.index(worker),
                    stay.start_s - facts.started_s,
                    end_s - facts.started_s,
                    f"g{stay.generation % 4}",
                    label,
                    f"gen {stay.generation}",
                    title,
                )
            )
    return rows, bars


def _cache_lines(facts: Facts) -> list[Line]:
    total = facts.setting.layout.total_bytes
    origin = [(s.wall_s - facts.started_s, 100 * s.origin_bytes / total) for s in facts.cache]
    hits = []
    for before, now in zip(facts.cache, facts.cache[1:], strict=False):
        asked = now.hits - before.hits + now.misses - before.misses
        if asked > 0:
            hits.append((now.wall_s - facts.started_s, 100 * (now.hits - before.hits) / asked))
    return [Line(hits, "hits"), Line(origin, "origin", is_area=True)]


def _verdict(facts: Facts) -> str:
    if facts.succeeded:
        return "every record read exactly once"
    if facts.exit_code != 0:
        return f"the run failed (exit code {facts.exit_code})"
    if not facts.is_exact:
        return f"{facts.audit.missed} records missed, {facts.audit.repeated} read twice"
    return "the run did not reach its evaluation"


def _story(facts: Facts) -> str:
    setting = facts.setting
    text = (
        f"{setting.workers} workers trained a small CNN on {setting.title} for {setting.schedule.epochs} epochs, "
        f"reading {setting.schedule.records:,} records through the cache from an origin limited to "
        f"{setting.origin_mbps:.3g} Mbit/s."
    )
    if facts.kill is not None and facts.recovery_s is not None:
        text += (
            f" After {format_duration(facts.kill.wall_s - facts.started_s)}, rank {facts.kill.rank} was killed with "
            f"SIGKILL; the others committed their next step {format_duration(facts.recovery_s)} later"
        )
        text += ", in the same processes." if facts.survivors_kept_pids else "."
    if facts.kill is not None:
        text += (
            " A replacement joined." if facts.newcomers else " No replacement joined before the run was over."
        )
    return escape(text)


def _cards(facts: Facts) -> str:
    found, setting, recovery = facts.audit, facts.setting, facts.recovery_s
    accuracy = "-" if facts.accuracy is None else f"{facts.accuracy:.1%}"
    cards = [
        ("accuracy", accuracy, f"{setting.layout.test_records:,} test records"),
        (
            "missed / read twice",
            f"{found.missed} / {found.repeated}",
            f"of {setting.schedule.records:,} an epoch",
        ),
        (
            "recovery",
            "-" if recovery is None else format_duration(recovery),
            "from SIGKILL to the next commit",
        ),
        ("steps lost", str(found.steps_lost), f"of {found.steps:,} committed"),
        (
            "origin bytes",
            f"{facts.origin_ratio:.2f} x",
            f"the dataset's {format_bytes(setting.layout.total_bytes)}",
        ),
        ("generations", str(found.generations), "worlds in this run"),
        ("throughput", f"{facts.samples_per_s:,.0f}", "samples/s, pauses included"),
        ("time", format_duration(facts.seconds), "start-up included"),
    ]
    return "".join(
        f'<div class="card"><div class="name">{escape(name)}</div><div class="value">{escape(value)}</div>'
        f'<div class="note">{escape(note)}</div></div>'
        for name, value, note in cards
    )


def _events(facts: Facts) -> str:
    rows = "".join(
        f'<tr class="{escape(e.kind)}"><td class="time">{e.wall_s - facts.started_s:.1f} s</td>'
        f"<td>{escape(e.text)}</td></tr>"
        for e in facts.events
    )
    return f"<table>{rows}</table>"


def _table(rows: Iterable[tuple[str, str]]) -> str:
    body = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
    return f"<table>{body}</table>"
