"""What a server holds, told to the others of its fleet in ten bits a block. Pure.

A summary is a Bloom filter, as proxies exchange them in Summary Cache (Fan, Cao, Almeida, Broder, IEEE/ACM Transactions
on Networking, 2000): it never denies what was held when it was made, and of a hundred blocks that were not it claims
one. Xor filters (Graf, Lemire, 2020) are as small and more precise, but want all hashes in memory while they are made,
many bytes a block; this one takes in a page of names at a time.

A block's hash is the same on every server: one BLAKE2b of bucket, key and version for an object, from which those of
its blocks are derived, and from each the places in the filter by double hashing (Kirsch, Mitzenmacher, ESA 2006). With
the version in it a copy of another version is none.

Who may give up a copy because of another's: two servers that see each other's must not both do so. Hence the holders of
a block stand in an order that all agree on (`copies`), and each counts only the copies of those that come before it.
Whoever is first among the holders counts one copy, however old the summaries are, and so gives up what it holds only as
it would a last copy. The block's owner comes first of all, because there the fleet looks for the block. To agree on the
owner, servers must know the same members: a summary says among whom it was made (`membership`), and counts only for a
server that knows the same.

What is left: what the first gives up after all, as the last copy that it is, others may count for as long as its
summary lives; and of a hundred last copies that are not with their owner, one is taken for a further copy of each other
server.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from hashlib import blake2b

import xxhash

from stoker.base.rng import GOLDEN_GAMMA, MASK64, mix64
from stoker.cache.maglev import Member
from stoker.errors import WireError

BITS_PER_BLOCK = 10
HASHES = 7
"""With ten bits a block seven places each claim the fewest wrongly: 0.8 %."""
BLOCKS_MIN = 100
BITS_BYTES_MAX = 64 * 1024 * 1024
"""A server with more blocks than fit (53 million) tells of as many."""
OVERFULL = 1.5
"""So many times the blocks that it was made for are taken in: it is as yet a summary (4 % claimed wrongly)."""
FILL_MAX = 0.75
"""A filter with more of its bits set says yes to most: it is damaged."""
PERIOD_S_MAX = 3600
_COUNTED_AT_ONCE = 64 * 1024
_MAGIC = b"SKS1"
_TWO = struct.Struct("!QQ")
_HEADER = struct.Struct("!4s8sIIQQ")
ENCODED_BYTES_MAX = BITS_BYTES_MAX + _HEADER.size


BlockHash = tuple[int, int]
"""A block, on every server the same two numbers of 64 bits."""


def object_hash(bucket: str, key: str, version: str) -> BlockHash:
    """Of a version of an object; what its blocks' are derived from."""
    text = f"{len(bucket)},{len(key)},{bucket}{key}{version}".encode("utf-8", "surrogatepass")
    return _TWO.unpack(blake2b(text, digest_size=16).digest())


def block_hash(whole: BlockHash, block: int) -> BlockHash:
    """Of a block of the object with that hash."""
    first = mix64(whole[0] + block * GOLDEN_GAMMA)
    return first, whole[1] ^ (first >> 32 | first << 32) & MASK64


def membership(members: Iterable[Member], block_size_bytes: int) -> bytes:
    """Eight bytes that stand for a fleet: two servers with the same ones agree on who owns which block."""
    text = blake2b(block_size_bytes.to_bytes(8, "big"), digest_size=8)
    for member in sorted(members, key=lambda member: member.name):
        name = member.name.encode("utf-8", "surrogatepass")
        text.update(struct.pack("!II", len(name), member.weight) + name)
    return text.digest()


def copies(block: BlockHash, me: str, holders: Iterable[str], owner: str | None) -> int:
    """How many copies of a block that this server holds it may count, its own included: those before it in the order
    of all that may hold it. The owner's is the first, the others' follow by chance."""
    if me == owner:
        return 1
    mine = _rank(block, me)
    return 1 + sum(holder == owner or _rank(block, holder) < mine for holder in holders)


def _rank(block: BlockHash, name: str) -> tuple[int, str]:
    """Rendezvous hashing (Thaler, Ravishankar, 1998)."""
    return xxhash.xxh64_intdigest(name.encode("utf-8", "surrogatepass"), seed=block[0]), name


class Summary:
    """Held blocks. `made_at` is when its making began, on the clock of whoever has it; `period_s` is how often its
    maker makes one. Thread-safe once all is added."""

    __slots__ = ("_bits", "_most", "_size", "blocks", "made_at", "members", "period_s")

    def __init__(self, members: bytes, made_at: float, period_s: float, bits: bytearray | bytes) -> None:
        self.members = members
        self.made_at = made_at
        self.period_s = period_s
        self.blocks = 0
        self._bits = bits
        self._size = len(bits) * 8
        self._most = int(self._size / BITS_PER_BLOCK * OVERFULL)

    @classmethod
    def sized_for(cls, blocks: int, members: bytes, made_at: float, period_s: float) -> Summary:
        """An empty one, for about so many blocks."""
        size_bytes = -(-max(blocks, BLOCKS_MIN) * BITS_PER_BLOCK // 8)
        return cls(members, made_at, period_s, bytearray(min(size_bytes, BITS_BYTES_MAX)))

    @property
    def size_bytes(self) -> int:
        """What it takes of memory."""
        return len(self._bits)

    def add(self, block: BlockHash) -> bool:
        """Say that a block is held; False: there are too many, and it is left out."""
        bits = self._bits
        if self.blocks >= self._most or not isinstance(bits, bytearray):
            return False
        self.blocks += 1
        size, place, step = self._size, block[0] % self._size, block[1] % self._size
        for _ in range(HASHES):
            bits[place >> 3] |= 1 << (place & 7)
            place += step
            if place >= size:
                place -= size
        return True

    def holds(self, block: BlockHash) -> bool:
        """Whether a block was held: always right where it was, wrong once in a hundred where it was not."""
        bits, size = self._bits, self._size
        place, step = block[0] % size, block[1] % size
        for _ in range(HASHES):
            if not bits[place >> 3] >> (place & 7) & 1:
                return False
            place += step
            if place >= size:
                place -= size
        return True

    def encode(self, now: float) -> bytes:
        """To be sent: it tells its age, as clocks differ."""
        age_s = min(max(0, int(now - self.made_at)), 2**32 - 1)
        period_s = min(max(1, int(self.period_s)), PERIOD_S_MAX)
        head = _HEADER.pack(_MAGIC, self.members, age_s, period_s, self.blocks, len(self._bits))
        return head + self._bits

    @classmethod
    def decode(cls, data: bytes, now: float) -> Summary:
        """What another server has sent. Raises WireError for what is no summary, or cannot be one."""
        if len(data) < _HEADER.size or not data.startswith(_MAGIC):
            raise WireError(f"{len(data)} bytes that begin with {data[:4]!r} are no summary of blocks")
        _, members, age_s, period_s, blocks, size_bytes = _HEADER.unpack_from(data)
        bits = data[_HEADER.size :]
        if not 0 < size_bytes <= BITS_BYTES_MAX or len(bits) != size_bytes:
            raise WireError(f"a summary of {size_bytes} bytes came with {len(bits)}")
        if not 1 <= period_s <= PERIOD_S_MAX:
            raise WireError(f"a summary that is made every {period_s} s is none: 1 to {PERIOD_S_MAX}")
        summary = cls(members, now - age_s, period_s, bits)
        if blocks > summary._most or summary.fill() > FILL_MAX:
            raise WireError(
                f"a summary of {blocks} blocks in {size_bytes} bytes holds too much to tell anything"
            )
        summary.blocks = blocks
        return summary

    def fill(self) -> float:
        """The part of its bits that are set."""
        view, step = memoryview(self._bits), _COUNTED_AT_ONCE
        parts = (view[first : first + step] for first in range(0, len(view), step))
        return sum(int.from_bytes(part, "big").bit_count() for part in parts) / self._size
