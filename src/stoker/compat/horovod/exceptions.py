"""Horovod's exceptions, by which a script may tell the elastic loop what to do."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """A collective failed because a peer or the network is gone: the state of the last commit is restored."""


class HostsUpdatedInterrupt(RuntimeError):
    """The world is to change; raised by `state.commit()` and `state.check_host_updates()`."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of this job have changed")
        self.skip_sync = skip_sync
        """As in Horovod; which workers copy the state is decided by what they hold, not by this."""
