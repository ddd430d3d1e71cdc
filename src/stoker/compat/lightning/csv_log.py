"""CSV logs that go on when another process becomes rank 0."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from typing import Any

from lightning.pytorch.loggers.csv_logs import CSVLogger, ExperimentWriter


class _Continued(ExperimentWriter):
    """Appends to what other processes of the job have written. Lightning's own deletes that, and fails at columns that
    it has not written itself."""

    def _check_log_dir_exists(self) -> None:
        """Nothing is deleted."""

    def save(self) -> None:
        if self.metrics and self._fs.isfile(self.metrics_file_path):
            with self._fs.open(self.metrics_file_path, "r", newline="") as file:
                self.metrics_keys = next(csv.reader(file), [])
        super().save()


def continue_csv_logs(loggers: Iterable[Any]) -> None:
    """Of loggers that all processes have alike: without a `version`, each chooses a folder of its own."""
    for logger in loggers:
        if isinstance(logger, CSVLogger) and logger._version is not None and logger._experiment is None:
            logger._experiment = _Continued(log_dir=logger.log_dir)
