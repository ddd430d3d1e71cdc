"""The log folder of a `stoker run`, and the check of what was read."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from stoker.errors import EXIT_FAILED, EXIT_OK, EnvironmentProblem

log = logging.getLogger("stoker")


def log_folder(base: str) -> Path:
    """Make a folder for this command in that of all runs. Raises EnvironmentProblem."""
    folder = Path(base) / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot make the log folder {folder}: {error.strerror}; see --log-dir"
        ) from None
    return folder.resolve()


def audited(folder: Path, readers: str) -> int:
    """Check what the workers have noted below a folder; returns the exit code. `readers`: who may have noted the rest
    of a step in a folder elsewhere."""
    from stoker.data.audit import audit_known
    from stoker.data.ledger import read_ledgers

    report = audit_known([entry for path in sorted(folder.rglob("audit")) for entry in read_ledgers(path)])
    if report.unseen_steps:
        log.warning(
            "audit: %d steps were read by %s whose log folder is not to be seen here; bring all together to check",
            report.unseen_steps,
            readers,
        )
        return EXIT_OK
    log.info(
        "audit: %d steps in %d generations, %d done again; records missed %d, repeated %d",
        report.steps,
        report.generations,
        report.steps_lost,
        report.missed,
        report.repeated,
    )
    return EXIT_OK if report.missed == report.repeated == 0 else EXIT_FAILED
