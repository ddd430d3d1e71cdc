"""Requests that were read from a mount's device and have no answer yet, for the next daemon. Pure.

A kernel that can (Linux 6.9 and newer) sends them again. For any other each request is written down before anything
is done with it; the next daemon asks the kernel which of those still wait, and takes them as if they had been sent
again. The one that was read last may not be written down yet: it lies where it was read to, which outlives the daemon.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from stoker.cache.mount.records import RequestRead, TakenAgain, packed
from stoker.cache.mount.requests import RESENT, Init, Opcode

IS_SENT_AGAIN = int(Init.HAS_RESEND)
"""Of what is agreed in INIT."""
_QUIET = frozenset({int(Opcode.FORGET), int(Opcode.BATCH_FORGET), int(Opcode.INTERRUPT)})
"""Nobody waits for an answer to these."""
_TAKEN_MAX = 2
"""So many daemons may end with a request that was sent again, and the one that read it first."""


class Unanswered:
    """Of one mount. `restore` before all else."""

    def __init__(self) -> None:
        self._read: dict[int, bytes] = {}
        self._taken_before: Counter[int] = Counter()
        self._taken: dict[int, int] = {}

    def restore(self, record: RequestRead | TakenAgain) -> None:
        """What a daemon before wrote down."""
        if isinstance(record, TakenAgain):
            self._taken_before[record.unique] += 1
        else:
            self._read[record.unique] = record.request

    def left(self) -> Iterator[tuple[int, bytes]]:
        """What may still wait, each with the number that the kernel has for it, and as it would be sent again."""
        for unique, request in list(self._read.items()):
            yield unique, request[:8] + (unique | RESENT).to_bytes(8, "little") + request[16:]

    def read(self, request: bytes | memoryview) -> bytes:
        """What is to be written down of a request that the kernel does not send again, before anything is done with
        it. Nothing: it is known, or has no answer."""
        opcode, unique = int.from_bytes(request[4:8], "little"), int.from_bytes(request[8:16], "little")
        if unique & RESENT or opcode in _QUIET:
            return b""
        self._read[unique] = kept = bytes(request)
        return packed(RequestRead(unique, kept))

    def number(self, unique: int) -> int:
        """Which request the kernel means that has another number here, for it was taken again."""
        again = unique | RESENT
        return again if again in self._taken else unique

    def takes_again(self, unique: int, *, is_excused: bool) -> tuple[bool, bytes]:
        """A request comes that was read before: whether it ended too many daemons already, and what is to be written
        down. `is_excused`: the daemon before was told to end."""
        before = self._taken_before[unique]
        self._taken[unique] = before if is_excused else before + 1
        if is_excused:
            return False, b""
        return before >= _TAKEN_MAX, packed(TakenAgain(unique))

    def addressed(self, parts: Sequence[bytes | memoryview]) -> tuple[int, Sequence[bytes | memoryview]]:
        """An answer as the kernel takes it, and the number of what it answers."""
        head = bytes(parts[0])
        unique = int.from_bytes(head[8:16], "little")
        if unique & RESENT and (known := unique & ~RESENT) in self._read:
            return unique, (head[:8] + known.to_bytes(8, "little") + head[16:], *parts[1:])
        return unique, parts

    def answered(self, unique: int) -> None:
        """The kernel has the answer."""
        self._taken.pop(unique, None)
        self._read.pop(unique & ~RESENT, None)

    def __bool__(self) -> bool:
        return bool(self._read or self._taken)

    def records(self) -> Iterator[bytes]:
        """All of it, for a log that is written anew."""
        for unique, count in list(self._taken.items()):
            for _ in range(count):
                yield packed(TakenAgain(unique))
        for unique, request in list(self._read.items()):
            yield packed(RequestRead(unique, request))
