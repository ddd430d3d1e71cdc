"""Puts Stoker's modules where `import horovod` looks for them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from stoker.errors import ConfigError

IMPORTABLE = Path(__file__).with_name("importable")
"""For PYTHONPATH."""
INTERFACE = "0.28.1"
"""The version of Horovod whose interface this is, for scripts that ask for it."""


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
    from stoker.compat.horovod import (  # these import PyTorch
        compression,
        elastic,
        exceptions,
        functions,
        optimizer,
        process_sets,
        sampler,
        state,
        sync_batch_norm,
        torch,
    )

    common = _Stand("horovod.common", "What Horovod's frameworks share.")
    common.exceptions = exceptions
    horovod = _Stand("horovod", "Stoker in Horovod's place.")
    horovod.torch, horovod.common = torch, common
    horovod.__version__, horovod.run = INTERFACE, _run
    sys.modules.update(
        {
            "horovod": horovod,
            "horovod.common": common,
            "horovod.common.exceptions": exceptions,
            "horovod.common.process_sets": process_sets,
            "horovod.common.util": torch,  # which has what scripts ask of it: nccl_built() and the like
            "horovod.torch": torch,
            "horovod.torch.compression": compression,
            "horovod.torch.elastic": elastic,
            "horovod.torch.elastic.sampler": sampler,
            "horovod.torch.elastic.state": state,
            "horovod.torch.functions": functions,
            "horovod.torch.mpi_ops": torch,
            "horovod.torch.optimizer": optimizer,
            "horovod.torch.sync_batch_norm": sync_batch_norm,
        }
    )


def _run(*_: object, **__: object) -> NoReturn:
    raise ConfigError(
        "horovod.run starts no workers here: let the script call the function itself, and start it with "
        "`stoker run --horovod --nproc-per-node N SCRIPT`"
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
