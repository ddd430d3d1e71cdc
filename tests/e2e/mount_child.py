"""Calls one function for a test, in a process that may be left behind: MODULE:FUNCTION ARGUMENTS, as JSON."""

from __future__ import annotations

import importlib
import json
import sys


def main() -> None:
    """What it returns goes to stdout, as JSON."""
    module, _, name = sys.argv[1].partition(":")
    said = getattr(importlib.import_module(module), name)(*json.loads(sys.argv[2]))
    sys.stdout.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    main()
