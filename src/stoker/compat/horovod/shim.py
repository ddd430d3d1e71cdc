"""Puts Stoker's modules where `import horovod` looks for them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

from stoker.errors import ConfigError

IMPORTABLE = Path(__file__).with_name("importable")
"""For PYTHONPATH."""


def install() -> None:
    """From now on `import horovod.torch as hvd` gives Stoker's. May be called again.

    Raises ConfigError where another `horovod` has been imported already.
    """
    known = sys.modules.get("horovod")
    if isinstance(known, _Stand):
        return
    if known is not None and not _is_our_own(known):
        where = getattr(known, "__file__", None) or "unknown place"
        raise ConfigError(
            f"another horovod is imported already, from {where}: call stoker.compat.horovod.install() before the "
            "first `import horovod`, or start the script with `stoker run --horovod`"
        )
    from stoker.compat.horovod import elastic, exceptions, torch  # these import PyTorch

    common = _Stand("horovod.common", "What Horovod's frameworks share.")
    common.exceptions = exceptions
    horovod = _Stand("horovod", "Stoker in Horovod's place.")
    horovod.torch, horovod.common = torch, common
    sys.modules.update(
        {
            "horovod": horovod,
            "horovod.common": common,
            "horovod.common.exceptions": exceptions,
            "horovod.torch": torch,
            "horovod.torch.elastic": elastic,
        }
    )


class _Stand(ModuleType):
    """A package without files."""

    def __init__(self, name: str, doc: str) -> None:
        super().__init__(name, doc)
        self.__path__: list[str] = []

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)


def _is_our_own(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and IMPORTABLE in Path(file).parents
