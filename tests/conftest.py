"""For all tests: what processes print at their end is what the test is about, and examples may take their time."""

from __future__ import annotations

import os

from hypothesis import settings

os.environ.setdefault("STOKER_REPORT", "0")
settings.register_profile("stoker", deadline=None)  # else it is a matter of what else the machine does
settings.load_profile("stoker")
