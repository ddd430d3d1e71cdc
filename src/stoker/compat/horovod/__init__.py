"""Horovod's interface for PyTorch on Stoker, elastic jobs included.

    import stoker.compat.horovod

    stoker.compat.horovod.install()
    import horovod.torch as hvd

`stoker run --horovod script.py` does the same for a script that is not changed at all. What works and what is other
than in Horovod: docs/how-to/horovod.md.
"""

from __future__ import annotations

from stoker.compat.horovod.shim import install

__all__ = ["install"]
