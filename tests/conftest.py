"""For all tests: what processes print at their end is what the test is about."""

from __future__ import annotations

import os

os.environ.setdefault("STOKER_REPORT", "0")
