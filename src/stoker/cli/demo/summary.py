"""The report at the end, in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stoker.base.units import format_bytes, format_duration
from stoker.cli.demo.facts import Facts


def rows_of(facts: Facts) -> list[tuple[str, str, bool | None]]:
    """(name, value, whether that is as it should be) of every headline figure; None: no judgement."""
    setting, found = facts.setting, facts.audit
    accuracy = (
        "not reached"
        if facts.accuracy is None
        else f"{facts.accuracy:.1%} on {setting.layout.test_records:,} test records"
    )
    rows: list[tuple[str, str, bool | None]] = [("accuracy", accuracy, facts.accuracy is not None)]
    if facts.kill is not None:
        kill = facts.kill
        rows.append(("killed", f"{kill.worker} (rank {kill.rank}, pid {kill.pid}) by SIGKILL", None))
        recovered = facts.recovery_s
        rows.append(
            (
                "recovery",
                "no step after the kill"
                if recovered is None
                else f"{format_duration(recovered)} from the kill to the next committed step",
                recovered is not None,
            )
        )
        rows.append(("replacement", _replacement(facts), None))
        rows.append(
            (
                "survivors",
                "the same processes to the end" if facts.survivors_kept_pids else "not the same processes",
                facts.survivors_kept_pids,
            )
        )
    elif facts.kill_wanted:
        rows.append(("killed", "nobody: the run was over before its time came", None))
    rows += [
        ("generations", str(found.generations), None),
        ("steps", f"{found.steps:,}, {found.steps_lost} of them done twice", None),
        ("records missed", str(found.missed), found.missed == 0),
        ("records read twice", str(found.repeated), found.repeated == 0),
        (
            "origin bytes",
            f"{facts.origin_ratio:.2f} x the dataset's {format_bytes(setting.layout.total_bytes)}",
            None if not setting.cold else facts.origin_ratio < 1.005,
        ),
        ("cache", f"{facts.hits:,} hits, {facts.misses:,} misses", None),
        ("speed", f"{facts.samples_per_s:,.0f} samples/s over {setting.schedule.epochs} epochs", None),
        ("time", format_duration(facts.seconds), None),
    ]
    return rows


def print_summary(facts: Facts, console: Console) -> None:
    """Headline figures, and where the rest is."""
    table = Table(box=None, pad_edge=False, show_header=False, title_justify="left", title_style="bold")
    table.title = "How it went"
    table.add_column(style="dim")
    table.add_column()
    table.add_column()
    for name, value, good in rows_of(facts):
        mark = Text() if good is None else Text("✓", "green") if good else Text("✗", "bold red")
        table.add_row(name, value, mark)
    console.print()
    console.print(table, soft_wrap=not console.is_terminal)
    console.print()
    console.print(f"report  {facts.folder / 'report.html'}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"logs    {facts.folder}", markup=False, highlight=False, soft_wrap=True)


def _replacement(facts: Facts) -> str:
    if not facts.newcomers:
        return "did not join before the end of the run"
    names = ", ".join(f"{worker} (pid {pid})" for worker, pid in facts.newcomers.items())
    if facts.kill is None or facts.join is None or facts.join_pause_s is None:
        return f"{names} joined"
    after_s = facts.join.committed_s - facts.kill.wall_s
    pause = format_duration(facts.join_pause_s)
    return f"{names} joined {format_duration(after_s)} after the kill; steps paused for {pause}"
