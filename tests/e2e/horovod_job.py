"""A Horovod script under `stoker run --horovod`, on hosts that a file lists."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.e2e.run_helpers import SCRIPTS, Finished, said, wait_for
from tests.e2e.test_discovery_job import LOCAL, Run

TRAIN = str(SCRIPTS / "horovod_train.py")


class HorovodRun(Run):
    """A job whose script notes each world that it is called in."""

    def __init__(self, folder: Path, *arguments: str, hosts: str = "", script: tuple[str, ...] = ()) -> None:
        """`hosts`: a fixed list; else the file that `write_hosts` writes."""
        source = ("--hosts", hosts) if hosts else ()
        if hosts:  # else the first agent that joins may begin without the others
            script = ("--begin-with", str(len(hosts.split(","))), *script)
        super().__init__(folder, "--horovod", *LOCAL, *source, *arguments, TRAIN, *script, script=not hosts)

    def worlds(self) -> list[dict[str, Any]]:
        """Each worker's calls of the training function, in the order of time."""
        path = self.folder / "worlds.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def rank_0(self) -> list[dict[str, Any]]:
        return [world for world in self.worlds() if world["rank"] == 0]

    def sizes(self) -> list[int]:
        """The size of each world in turn."""
        return [world["size"] for world in self.rank_0()]

    def until(self, what: Callable[[], Any], why: str) -> None:
        """Wait, as long as the job runs; PyTorch takes its time to start on a machine that is busy."""

        def look() -> Any:
            if self.process.poll() is not None:
                raise AssertionError(f"the job has ended before {why}\n{self.finish().text}")
            return what()

        wait_for(look, 200, why=why)

    def wait_for_world(self, size: int, steps: int = 3) -> None:
        """Until the newest world has this size, and some steps more were made."""
        self.until(lambda: self.sizes()[-1:] == [size], f"a world of {size}")
        before = self.commits()
        self.until(lambda: self.commits() > before + steps, f"steps in a world of {size}")

    def finish_well(self) -> Finished:
        """Let it come to its end: all workers hold the same, and have made as many steps."""
        (self.folder / "stop").touch()
        done = self.finish()
        assert done.code == 0, done.text
        workers = said(self.folder)
        assert len(workers) == workers[0]["size"]
        assert len({w["batches"] for w in workers}) == 1
        assert {weight for w in workers for weight in w["weights"]} == {float(workers[0]["batches"])}
        assert not self.processes()
        return done
