"""Checksums of objects in parts, beside those of all their bytes."""

from __future__ import annotations

import random
from base64 import b64encode
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.cache.auth.checksums import MAKERS, PREFIX
from stoker.cache.auth.composing import PartSum, check_composed
from stoker.cache.auth.s3_refusal import S3Refusal


def digest(algorithm: str, data: bytes) -> bytes:
    made = MAKERS[algorithm]()
    made.update(data)
    return made.digest()


def said(data: bytes) -> str:
    return b64encode(data).decode()


def sums(algorithm: str, parts: Sequence[bytes]) -> list[PartSum]:
    return [PartSum(said(digest(algorithm, part)), len(part)) for part in parts]


def code_of(algorithm: str, value: str, parts: Sequence[PartSum]) -> str:
    try:
        check_composed(f"{PREFIX}{algorithm}", value, parts)
    except S3Refusal as refusal:
        return refusal.code
    return ""


SIZES = st.lists(st.integers(0, 3000), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(MAKERS)), SIZES, st.randoms(use_true_random=False))
def test_it_is_that_of_the_parts_together(algorithm: str, sizes: list[int], rng: random.Random) -> None:
    parts = [rng.randbytes(size) for size in sizes]
    inner = b"".join(digest(algorithm, part) for part in parts)
    composite = f"{said(digest(algorithm, inner))}-{len(parts)}"
    assert code_of(algorithm, composite, sums(algorithm, parts)) == ""
    assert code_of(algorithm, composite, sums(algorithm, [*parts, b""])) == "BadDigest"
    full = said(digest(algorithm, b"".join(parts)))
    if algorithm.startswith("crc"):
        assert code_of(algorithm, full, sums(algorithm, parts)) == ""
        longer = sums(algorithm, parts)
        longer[-1] = longer[-1]._replace(checksum=said(digest(algorithm, parts[-1] + b"x")))
        assert code_of(algorithm, full, longer) == "BadDigest"
    else:
        # Of these there is none of the whole that could be made of the parts'.
        assert code_of(algorithm, full, sums(algorithm, parts)) == "InvalidRequest"


@pytest.mark.parametrize("value", ["", "bad", "AAAA", "AAAAAA==-", "AAAAAA==-x", "AAAAAA=="[:-1], "é", "-2"])
def test_what_can_be_no_checksum_is_refused(value: str) -> None:
    assert code_of("crc32", value, sums("crc32", [b"a", b"b"])) == "InvalidRequest"


def test_parts_that_do_not_say_theirs() -> None:
    parts = [PartSum("", 1), *sums("crc32", [b"b"])]
    assert code_of("crc32", "AAAAAA==-2", parts) == "InvalidRequest"
    assert code_of("crc32", "AAAAAA==", parts) == "NotImplemented"
