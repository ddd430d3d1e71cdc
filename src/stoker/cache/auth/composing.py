"""Checksums of an object that came in parts, from those of its parts. Pure.

https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity.html
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stoker.cache.auth.checksums import MAKERS, PREFIX
from stoker.cache.auth.crc import CRC32C, CRC64NVME, moved_on
from stoker.cache.auth.s3_refusal import S3Refusal


class PartSum(NamedTuple):
    """Of one part: its checksum in base64, and its length."""

    checksum: str
    size_bytes: int


_CRCS: Mapping[str, int] = {"crc32": 0xEDB88320, "crc32c": CRC32C, "crc64nvme": CRC64NVME}
"""Their polynomials, reflected."""


def check_composed(header: str, said: str, parts: Sequence[PartSum]) -> None:
    """Whether an object's checksum, as `x-amz-checksum-…` says it, is that of these parts together: one of the parts'
    checksums (`…-N`), or one of all bytes. Raises S3Refusal."""
    algorithm = header.removeprefix(PREFIX)
    value, dash, count = said.partition("-")
    digest = _digest(algorithm, value)
    if digest is None or (dash and not count.isdigit()) or (not dash and algorithm not in _CRCS):
        raise S3Refusal("InvalidRequest", f"Value for {header} header is invalid: {said[:100]!r}")
    sums = [_digest(algorithm, part.checksum) for part in parts]
    known = [one for one in sums if one is not None]
    if len(known) < len(sums):
        if dash:
            raise S3Refusal(
                "InvalidRequest", f"The upload has a {algorithm} checksum; each of its parts must say its own"
            )
        raise S3Refusal(
            "NotImplemented",
            f"Verifying {header} of an object is not implemented by this cache where its parts do not say theirs",
        )
    if dash:
        made = MAKERS[algorithm]()
        made.update(b"".join(known))
        is_right = made.digest() == digest and int(count) == len(known)
    else:
        is_right = _joined(_CRCS[algorithm], known, [part.size_bytes for part in parts]) == digest
    if not is_right:
        raise S3Refusal("BadDigest", f"The {algorithm} you specified did not match the calculated checksum.")


def _digest(algorithm: str, said: str) -> bytes | None:
    """None: it can be no such checksum."""
    try:
        digest = base64.b64decode(said.strip(), validate=True)
    except (binascii.Error, ValueError):
        return None
    return digest if len(digest) == len(MAKERS[algorithm]().digest()) else None


def _joined(polynomial: int, sums: Sequence[bytes], sizes_bytes: Sequence[int]) -> bytes:
    """The CRC of what these are of, one after the other."""
    joined = 0
    for one, size_bytes in zip(sums, sizes_bytes, strict=True):
        joined = moved_on(polynomial, joined, size_bytes) ^ int.from_bytes(one, "big")
    return joined.to_bytes(len(sums[0]), "big")
