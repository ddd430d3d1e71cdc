"""Datasets for tests of the loader; at module level, so that spawned processes find them."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import numpy as np
import torch

ROW = 8192
"""Numbers in a record: 32 KiB, which crosses in shared memory."""


class Rows(torch.utils.data.Dataset[Any]):
    """Each record is a row full of its number, and the number."""

    def __init__(self, records: int) -> None:
        self.records = records

    def __len__(self) -> int:
        return self.records

    def __getitem__(self, record: int) -> Any:
        return np.full(ROW, record, dtype=np.int32), record


class Random(Rows):
    """Each record holds what the random generators give for it."""

    def __getitem__(self, record: int) -> Any:
        return torch.rand(4), random.random(), np.random.rand()


class TwoArguments(Exception):
    """Can be pickled, and not unpickled."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


class Failing(Rows):
    """Fails at record 5 in the way that it is told to."""

    def __init__(self, records: int, how: str) -> None:
        super().__init__(records)
        self.how = how

    def __getitem__(self, record: int) -> Any:
        if record == 5:
            if self.how == "raise":
                raise KeyError("no such thing")
            if self.how == "strange":
                raise TwoArguments(1, 2)
            if self.how == "unpicklable":
                return lambda: None
            if self.how == "exit":
                os._exit(7)
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor(record)


class Slow(Rows):
    """Takes its time."""

    def __init__(self, records: int, seconds: float) -> None:
        super().__init__(records)
        self.seconds = seconds

    def __getitem__(self, record: int) -> Any:
        time.sleep(self.seconds)
        return super().__getitem__(record)


def as_list(samples: list[Any]) -> list[Any]:
    """A collate function that leaves samples as they are."""
    return samples
