"""Commands whose options take long to import."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module
from typing import Any


class LaterParser(argparse.ArgumentParser):
    """A parser that may add its options when it is asked, so that no other command waits for them. `options_by`: the
    module and its function that add them."""

    options_by: tuple[str, str] | None = None

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """As argparse's, which asks each command that is named so."""
        if self.options_by is not None:
            module, add = self.options_by
            self.options_by = None
            getattr(import_module(module), add)(self)
        return super().parse_known_args(args, namespace)
