"""What does reading through a mount cost? fio, many small files, lists and a training: a mount against the local disk,
and against another program's mount of the same S3 server."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from _common import parser, report
from _mount_names import lists, opens
from _mount_reads import limited_reads, warm_reads
from _mount_training import epochs
from _mounted import may_mount

PARTS = {"reads": warm_reads, "limited": limited_reads, "opens": opens, "lists": lists, "training": epochs}


def main() -> int:
    """Print the figures of each part, or of those that were asked for."""
    made = parser(__doc__ or "")
    made.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS), help="some parts of it")
    arguments = made.parse_args()
    if problem := may_mount():
        report("mount", {f"skipped: {problem}": 0}, arguments.json)
        return 0
    figures: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name:
        os.environ["TMPDIR"] = name  # where mounts are noted down
        for part in arguments.only:
            print(f"… {part}", file=sys.stderr, flush=True)
            figures |= PARTS[part](Path(name).resolve() / part, quick=arguments.quick)
    figures["load average"] = round(os.getloadavg()[0], 2)
    report("mount", figures, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
