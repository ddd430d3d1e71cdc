"""Cyclic checksums that grow with their data. Pure.

That of two strings, one after the other, is the first one's, moved on by the second's length (a multiplication by a
power of x), xor the second one's: as zlib's `crc32_combine` does it. So CRC-32C is made of the native one-shot
function, and CRC-64/NVME of many lanes at once, in numpy.
"""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from stoker._native import crc32c

CRC32C = 0x82F63B78
"""Castagnoli's polynomial, its bits reversed, as those of the processors have it."""
CRC64NVME = 0x9A6C9329AC4BC9B5
"""Of the NVM Express specification (Rocksoft), its bits reversed."""
_LANE_BYTES = 64
"""Gone through two bytes at a time, in all lanes at once."""
_LANES_MAX = 8192

Words = npt.NDArray[np.uint64]


class Crc(Protocol):
    """A checksum of what was fed."""

    def update(self, data: bytes | memoryview) -> None: ...

    def digest(self) -> bytes: ...


class Crc32:
    """The one of zlib."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: bytes | memoryview) -> None:
        self._value = zlib.crc32(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(4, "big")


class Crc32c:
    """CRC-32C (Castagnoli)."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: bytes | memoryview) -> None:
        self._value = moved_on(CRC32C, self._value, len(data)) ^ crc32c(data)

    def digest(self) -> bytes:
        return self._value.to_bytes(4, "big")


class Crc64Nvme:
    """CRC-64/NVME."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: bytes | memoryview) -> None:
        lot = _LANE_BYTES * _LANES_MAX
        view = memoryview(data)
        for begin in range(0, len(view), lot):
            part = view[begin : begin + lot]
            self._value = moved_on(CRC64NVME, self._value, len(part)) ^ _crc64(part)

    def digest(self) -> bytes:
        return self._value.to_bytes(8, "big")


def moved_on(polynomial: int, value: int, size_bytes: int) -> int:
    """A checksum's share in that of its data with `size_bytes` more after them."""
    power = 0
    while size_bytes and value:
        if size_bytes & 1:
            value = _times(polynomial, value, _power(polynomial, power))
        size_bytes >>= 1
        power += 1
    return value


def _width(polynomial: int) -> int:
    return polynomial.bit_length()


def _times(polynomial: int, left: int, right: int) -> int:
    """The product of two polynomials whose highest bit is that of x**0, modulo a third."""
    bit = 1 << (_width(polynomial) - 1)
    product = 0
    while left:
        if left & bit:
            product ^= right
            left ^= bit
        bit >>= 1
        right = (right >> 1) ^ (polynomial if right & 1 else 0)
    return product


@lru_cache(maxsize=256)
def _power(polynomial: int, power: int) -> int:
    """x to the power of the bits in 2**power bytes."""
    if power == 0:
        return 1 << (_width(polynomial) - 1 - 8)
    half = _power(polynomial, power - 1)
    return _times(polynomial, half, half)


@lru_cache(maxsize=1)
def _table() -> Words:
    """What each two bytes that leave the register add to it."""
    register = np.arange(1 << 16, dtype=np.uint64)
    for _ in range(16):
        register = (register >> np.uint64(1)) ^ np.where(
            register & np.uint64(1), np.uint64(CRC64NVME), np.uint64(0)
        )
    return register


@lru_cache(maxsize=32)
def _moves(power: int) -> Words:
    """For each byte of a register, and each value of it, what it is 2**power bytes later."""
    factor = _power(CRC64NVME, power)
    moves = np.zeros((8, 256), np.uint64)
    for bit in range(64):
        byte, first = bit // 8, 1 << (bit % 8)
        moved = np.uint64(_times(CRC64NVME, 1 << bit, factor))
        moves[byte, first : 2 * first] = moves[byte, :first] ^ moved
    return moves


def _crc64(data: memoryview) -> int:
    """Of at most `_LANES_MAX` lanes. Zeros before the data change nothing, once the register begins with none."""
    lanes = 1 << max(0, (len(data) - 1) // _LANE_BYTES).bit_length()
    padded = np.zeros(lanes * _LANE_BYTES, np.uint8)
    padded[len(padded) - len(data) :] = np.frombuffer(data, np.uint8)
    register = np.zeros(lanes, np.uint64)
    table = _table()
    for column in np.ascontiguousarray(padded.view("<u2").reshape(lanes, -1).T):
        register = table.take(register.astype(np.uint16) ^ column) ^ (register >> np.uint64(16))
    power = _LANE_BYTES.bit_length() - 1
    while len(register) > 1:
        left = np.ascontiguousarray(register[0::2]).view(np.uint8).reshape(-1, 8)
        moves = _moves(power)
        moved = register[1::2].copy()
        for byte in range(8):
            moved ^= moves[byte].take(left[:, byte])
        register = moved
        power += 1
    # The register begins with ones, not zeros, and ends inverted.
    ones = (1 << 64) - 1
    return int(register[0]) ^ moved_on(CRC64NVME, ones, len(data)) ^ ones
