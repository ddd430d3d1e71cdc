"""The port: records that outlive the master, an event log beside them, and the right to write both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol


class Entry(NamedTuple):
    """One line of the event log. `details` holds whatever msgspec writes as JSON."""

    wall_s: float
    kind: str
    why: str
    details: dict[str, Any]


class Leadership(Protocol):
    """The right to be the job's only master."""

    @property
    def epoch(self) -> int:
        """Greater than that of every earlier master of this job in the same journal; 0 where nobody can follow."""
        ...

    @property
    def waited(self) -> bool:
        """Whether there was another master when this process came."""
        ...

    @property
    def lost(self) -> str | None:
        """Why it is lost, judged by the local clock at this moment; None while it is held."""
        ...

    async def wait_lost(self) -> str:
        """Return why, once it is lost; never before."""
        ...


class Journal(Protocol):
    """Keeps what the job decided. One caller at a time; writes are kept in the order of the calls.

    A master calls `lead`, then `load`, then `write` as often as it decides; who only looks on calls `read_entries`.
    Constructors touch neither disk nor network. `str` of a journal says where it is, for people.
    """

    async def lead(self, endpoint: str, *, ttl_s: float = 5.0) -> Leadership:
        """Become the job's only master, known to its agents under `endpoint` (host:port).

        etcd: waits until there is no other; the others learn of this one's death after at most `ttl_s` seconds.
        A file: raises JournalHeld at once if a live process has it. Raises JournalUnavailable, JournalDamaged.
        """
        ...

    async def load(self) -> dict[str, bytes]:
        """All kept records. Raises JournalUnavailable, JournalDamaged."""
        ...

    async def write(self, records: Mapping[str, bytes | None], entries: Sequence[Entry] = ()) -> None:
        """Keep (or, None, delete) these records and append these entries: all or nothing.

        On return they outlive this process. Raises

        - JournalUnavailable: cannot be kept now. On etcd an answer may have been lost, so the batch may have been
          kept all the same: write it again, or a newer one that holds the same records and begins with the same
          entries. Entries are not doubled by that.
        - LeadershipLost: nothing was kept, and nothing will be.
        """
        ...

    async def read_entries(self, after: int = 0, limit: int | None = None) -> list[dict[str, Any]]:
        """Entries with `seq` above `after`, oldest first, at most `limit`: their details and `seq`, `wall_s`,
        `kind`, `why`. Only the newest are kept, each with its number. Raises JournalUnavailable, JournalDamaged.
        """
        ...

    async def close(self) -> None:
        """Give up leadership, so that a successor need not wait, and let go of file and connections."""
        ...


def entry_as_dict(seq: int, entry: Entry) -> dict[str, Any]:
    """An entry as `read_entries` gives it; its own four names win over equal names in the details."""
    return {**entry.details, "seq": seq, "wall_s": entry.wall_s, "kind": entry.kind, "why": entry.why}
