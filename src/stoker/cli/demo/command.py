"""One demo from beginning to end: data, origin, job, report."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib.util
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from rich.console import Console

from stoker.base.rng import Rng
from stoker.cli.demo.facts import Facts, Setting, as_json, facts_of
from stoker.cli.demo.layout import Layout, lay_out
from stoker.cli.demo.options import DemoOptions
from stoker.cli.demo.page import render_page
from stoker.cli.demo.pictures import Source, choose_source
from stoker.cli.demo.story import Schedule
from stoker.cli.demo.summary import print_summary
from stoker.cli.demo.view import View, view_for
from stoker.cli.demo.watch import Watch
from stoker.cli.endpoint import Endpoint, Nodes
from stoker.cli.launch import run_job
from stoker.cli.options import Launch
from stoker.errors import EXIT_INTERRUPTED, ConfigError, EnvironmentProblem
from stoker.settings import Timeouts

ORIGIN_MBPS_MAX = 20.0
COLD_EPOCH_S = 8.0
"""A small dataset gets an origin so slow that its first epoch still takes about this long."""
CACHE_BYTES = 2_000_000_000
BUCKET = "fashion"


def run_demo(options: DemoOptions) -> int:
    """Run the demo; returns the exit code."""
    console = Console(stderr=options.json)
    view = view_for(console)
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("the demo trains with PyTorch, which is missing: run `pip install torch`")
    timeouts = Timeouts.from_user_timeout(options.timeout_s)
    with _own_folder(options.folder) as folder:
        try:
            source = choose_source(options.dataset, view.say)
            layout = lay_out(source, folder / "origin", options.records, view.progress)
        finally:
            view.end()
        setting = setting_of(options, source, layout, cold=not _has_content(folder / "cache", options))
        watch = _watch_for(options, setting, view)
        exit_code = _run(_launch_for(options, setting, folder, timeouts, watch), setting, watch, view)
        if watch.folder is None or exit_code == EXIT_INTERRUPTED:
            return exit_code
        exit_code = _report(facts_of(watch, setting, exit_code), console, as_object=options.json)
        # Thousands of files: nobody should wait for them before reading how it went, or after Ctrl-C.
        if not options.keep_cache:
            shutil.rmtree(folder / "cache", ignore_errors=True)
        return exit_code


def setting_of(options: DemoOptions, source: Source, layout: Layout, *, cold: bool) -> Setting:
    """What will be run: the flags, and what suits the dataset where they say nothing."""
    suits_mbps = min(ORIGIN_MBPS_MAX, layout.train_bytes * 8 / 1e6 / COLD_EPOCH_S)
    return Setting(
        title=source.title,
        layout=layout,
        schedule=Schedule(
            records=layout.train_records,
            global_batch_size=options.global_batch_size or source.global_batch_size,
            epochs=options.epochs or source.epochs,
        ),
        workers=options.workers,
        origin_mbps=options.origin_mbps or round(suits_mbps, 3),
        origin_latency_ms=options.origin_latency_ms,
        cold=cold,
    )


def _watch_for(options: DemoOptions, setting: Setting, view: View) -> Watch:
    return Watch(
        schedule=setting.schedule,
        workers=setting.workers,
        kill_wanted=options.kill,
        rng=Rng(time.time_ns()),
        on_picture=view.picture,
        on_event=view.event,
    )


def _launch_for(
    options: DemoOptions, setting: Setting, folder: Path, timeouts: Timeouts, watch: Watch
) -> Launch:
    limits = f"stoker_mbps={setting.origin_mbps:g}&stoker_latency_ms={setting.origin_latency_ms:g}"
    schedule = setting.schedule
    script = [sys.executable, "-u", "-m", "stoker.cli.demo.train"]
    flags = ["--epochs", str(schedule.epochs), "--global-batch-size", str(schedule.global_batch_size)]
    return Launch(
        command=script + flags,
        nodes=Nodes(1, 1),
        slots=options.workers,
        endpoint=Endpoint("127.0.0.1", 0),
        timeouts=timeouts,
        job="demo",
        log_dir=str(folder / "runs"),
        buckets={BUCKET: f"{(folder / 'origin').as_uri()}?{limits}"},
        cache_dir=str(folder / "cache"),
        cache_capacity_bytes=CACHE_BYTES,
        audit=True,
        show=watch.show,
        on_start=watch.start,
    )


def _run(launch: Launch, setting: Setting, watch: Watch, view: View) -> int:
    async def whole() -> int:
        try:
            return await run_job(launch)
        finally:
            await watch.stop()

    with _quiet_logs(view):
        view.begin(setting)
        try:
            return asyncio.run(whole())
        finally:
            view.end()


def _report(facts: Facts, console: Console, *, as_object: bool) -> int:
    path = facts.folder / "report.html"
    try:
        path.write_text(render_page(facts), encoding="utf-8")
    except OSError as error:
        raise EnvironmentProblem(f"cannot write the report to {path}: {error.strerror}") from None
    latest = facts.folder.parent.parent / "report.html"
    with contextlib.suppress(OSError):
        latest.unlink(missing_ok=True)
        latest.symlink_to(path.relative_to(latest.parent))
    print_summary(facts, console)
    if as_object:
        print(json.dumps(as_json(facts)), flush=True)
    return facts.demo_exit_code


@contextlib.contextmanager
def _own_folder(path: Path) -> Iterator[Path]:
    """The demo's folder, used by one demo at a time, as an absolute path."""
    lock: IO[bytes] | None = None
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / ".lock").open("ab")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        assert lock is not None
        lock.close()
        raise EnvironmentProblem(f"another demo is using {path}: wait for it, or use another --dir") from None
    except OSError as error:
        raise EnvironmentProblem(f"cannot use the folder {path}: {error.strerror}; see --dir") from None
    with lock:
        yield path.resolve()


def _has_content(cache: Path, options: DemoOptions) -> bool:
    """Whether the cache starts with something in it; unless it is to be kept, it is emptied."""
    if not options.keep_cache:
        shutil.rmtree(cache, ignore_errors=True)
    return cache.is_dir() and any(os.scandir(cache))


class _ToView(logging.Handler):
    """Warnings and errors go through the view, so that they do not tear it."""

    def __init__(self, view: View) -> None:
        super().__init__(logging.WARNING)
        self._view = view

    def emit(self, record: logging.LogRecord) -> None:
        self._view.say(f"stoker: {record.getMessage()}")


@contextlib.contextmanager
def _quiet_logs(view: View) -> Iterator[None]:
    """The event log is in the picture; said twice it would only hide it."""
    logger = logging.getLogger("stoker")
    handler = _ToView(view)
    before = logger.propagate
    logger.propagate = logging.getLogger().level <= logging.DEBUG
    if not logger.propagate:
        logger.addHandler(handler)
    try:
        yield
    finally:
        logger.propagate = before
        logger.removeHandler(handler)
