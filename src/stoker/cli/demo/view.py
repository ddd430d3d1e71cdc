"""What the terminal shows while the demo runs: a live picture, or plain lines where there is none."""

from __future__ import annotations

import time
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stoker.base.units import format_bytes
from stoker.cli.demo.facts import Setting
from stoker.cli.demo.watch import Event, Picture

PLAIN_EVERY_S = 3.0
EVENTS_SHOWN = 7
BLOCKS = " ▁▂▃▄▅▆▇█"
EVENT_STYLES = {
    "kill": "bold red",
    "worker-replace": "yellow",
    "world": "green",
    "generation": "cyan",
    "ended": "bold",
}


class View(Protocol):
    """Shows the preparation, then the run."""

    def say(self, text: str) -> None: ...

    def progress(self, what: str, done: int, total: int) -> None: ...

    def begin(self, setting: Setting) -> None: ...

    def event(self, event: Event) -> None: ...

    def picture(self, picture: Picture) -> None: ...

    def end(self) -> None: ...


def view_for(console: Console) -> View:
    """A live view on a terminal, else plain lines."""
    return LiveView(console) if console.is_terminal and not console.is_dumb_terminal else PlainView(console)


class PlainView:
    """Lines at sensible intervals, and each event at once."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._setting: Setting | None = None
        self._started_s = 0.0
        self._said_s = 0.0

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def progress(self, what: str, done: int, total: int) -> None:
        if done == total:
            self.say(f"laid out {total} {what} records, one object each")

    def begin(self, setting: Setting) -> None:
        self._setting, self._started_s = setting, time.time()
        self.say(headline(setting))

    def event(self, event: Event) -> None:
        self.say(f"[{event.wall_s - self._started_s:5.1f} s] {event.text}")

    def picture(self, picture: Picture) -> None:
        now = time.monotonic()
        if self._setting is None or now - self._said_s < PLAIN_EVERY_S or not picture.steps_done:
            return
        self._said_s = now
        schedule = self._setting.schedule
        epoch = min(schedule.epoch_of(max(picture.steps_done, 1)), schedule.epochs - 1)
        share = schedule.records_in_epoch(epoch, picture.steps_done) / schedule.records
        loss = "" if picture.loss is None else f", loss {picture.loss:.3f}"
        cache = picture.cache
        cached = "" if cache is None else (
            f", cache {cache.hits} hits {cache.misses} misses, origin {format_bytes(cache.origin_bytes)} of "
            f"{format_bytes(self._setting.layout.total_bytes)}"
        )  # fmt: skip
        self.say(
            f"[{picture.elapsed_s:5.1f} s] epoch {epoch + 1}/{schedule.epochs} {share:4.0%}, {len(picture.workers)} "
            f"workers, generation {picture.generation}, {picture.samples_per_s:.0f} samples/s{loss}{cached}"
        )

    def end(self) -> None:
        return


class LiveView:
    """One picture that is drawn over and over."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._setting: Setting | None = None
        self._started_s = 0.0
        self._live: Live | None = None

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def progress(self, what: str, done: int, total: int) -> None:
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        grid = Table.grid(padding=(0, 2))
        grid.add_row(
            f"laying out {what} records", ProgressBar(total, done, width=40), f"{done:,} of {total:,}"
        )
        self._live.update(grid, refresh=True)
        if done == total:
            self.end()

    def begin(self, setting: Setting) -> None:
        self._setting, self._started_s = setting, time.time()
        self._live = Live(console=self._console, auto_refresh=False)
        self._live.start()

    def event(self, event: Event) -> None:
        return

    def picture(self, picture: Picture) -> None:
        if self._live is not None and self._setting is not None:
            self._live.update(draw(self._setting, picture, self._started_s), refresh=True)

    def end(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()


def headline(setting: Setting) -> str:
    """The run in one line."""
    schedule = setting.schedule
    return (
        f"{setting.title}: {schedule.records:,} records, {setting.workers} workers, {schedule.epochs} epochs, "
        f"origin of {setting.origin_mbps:.3g} Mbit/s and {setting.origin_latency_ms:g} ms"
    )


def draw(setting: Setting, picture: Picture, started_s: float) -> RenderableType:
    """The whole live picture."""
    top = Table.grid(expand=True, padding=(0, 2))
    top.add_column(ratio=1)
    top.add_column(ratio=1)
    top.add_row(_world(picture), _figures(setting, picture))
    title = Text.assemble(("stoker demo  ", "bold"), (headline(setting), "dim"))
    parts: list[RenderableType] = [
        _epochs(setting, picture),
        Text(),
        top,
        Text(),
        _events(picture, started_s),
    ]
    return Panel(Group(*parts), title=title, title_align="left", border_style="blue", padding=(1, 2))


def _epochs(setting: Setting, picture: Picture) -> RenderableType:
    """A bar per epoch; where there are many, those around the current one."""
    schedule = setting.schedule
    grid = Table.grid(padding=(0, 2))
    current = min(schedule.epoch_of(picture.steps_done + 1), schedule.epochs - 1)
    first = max(0, min(current - 1, schedule.epochs - 3))
    for epoch in range(first, min(first + 3, schedule.epochs)):
        read = schedule.records_in_epoch(epoch, picture.steps_done)
        grid.add_row(
            Text(f"epoch {epoch + 1}/{schedule.epochs}", "bold" if epoch == current else "dim"),
            ProgressBar(schedule.records, read, width=44),
            f"{read / schedule.records:4.0%}",
            Text(f"{read:,} of {schedule.records:,} records", "dim"),
        )
    return grid


def _world(picture: Picture) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="dim", title_justify="left", title_style="bold")
    table.title = f"world: generation {picture.generation}, {picture.phase}"
    for name in ("rank", "worker", "pid", "state"):
        table.add_column(name)
    for row in picture.workers:
        style = {"member": "green", "starting": "yellow", "parked": "cyan"}.get(row.state, "")
        rank = "-" if row.rank is None else str(row.rank)
        table.add_row(rank, row.worker, str(row.pid), Text(row.state, style))
    return table


def _figures(setting: Setting, picture: Picture) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_row("time", f"{picture.elapsed_s:.0f} s")
    grid.add_row("samples/s", f"{picture.samples_per_s:,.0f}")
    grid.add_row("", Text(sparkline(picture.rates[-30:]), "blue"))
    grid.add_row("loss", "-" if picture.loss is None else f"{picture.loss:.3f}")
    cache = picture.cache
    if cache is not None:
        asked = cache.hits + cache.misses
        ratio = f" ({cache.hits / asked:.0%} hits)" if asked else ""
        grid.add_row("cache", f"{cache.hits:,} hits, {cache.misses:,} misses{ratio}")
        total = setting.layout.total_bytes
        share = f"{format_bytes(cache.origin_bytes)} of {format_bytes(total)} ({cache.origin_bytes / total:.2f} x)"
        grid.add_row("origin", share)
    return grid


def _events(picture: Picture, started_s: float) -> RenderableType:
    lines = [
        Text.assemble(
            (f"{event.wall_s - started_s:6.1f} s  ", "dim"),
            (event.text, EVENT_STYLES.get(event.kind, "")),
            no_wrap=True,
            overflow="ellipsis",
        )
        for event in picture.events[-EVENTS_SHOWN:]
    ]
    return Group(*lines, *[Text() for _ in range(EVENTS_SHOWN - len(lines))])


def sparkline(values: tuple[float, ...]) -> str:
    """One block character per value, the highest full."""
    top = max(values, default=0.0)
    if top <= 0:
        return ""
    return "".join(BLOCKS[round(value / top * (len(BLOCKS) - 1))] for value in values)
