"""Checksums of uploads, beside other implementations of them."""

from __future__ import annotations

import base64
import hashlib
import zlib

import google_crc32c
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.cache.auth.checksums import MAKERS, Checksums, checksums_of
from stoker.cache.auth.crc import CRC64NVME, Crc64Nvme
from stoker.cache.auth.s3_refusal import S3Refusal

ONES = (1 << 64) - 1


def crc64_by_bits(data: bytes) -> bytes:
    register = ONES
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = (register >> 1) ^ (CRC64NVME if register & 1 else 0)
    return (register ^ ONES).to_bytes(8, "big")


TRUTH = {
    "crc32": lambda data: zlib.crc32(data).to_bytes(4, "big"),
    "crc32c": lambda data: google_crc32c.value(data).to_bytes(4, "big"),
    "crc64nvme": crc64_by_bits,
    "sha1": lambda data: hashlib.sha1(data).digest(),
    "sha256": lambda data: hashlib.sha256(data).digest(),
}


def test_the_check_value_of_crc64nvme() -> None:
    # As the NVM Express specification and the CRC catalogue have it.
    crc = Crc64Nvme()
    crc.update(b"123456789")
    assert crc.digest().hex() == "ae8b14860a799888"


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_they_grow_with_their_data(name: str, data: st.DataObject) -> None:
    pieces = data.draw(st.lists(st.binary(max_size=300), max_size=4))
    made = MAKERS[name]()
    for piece in pieces:
        made.update(memoryview(piece))
    assert made.digest() == TRUTH[name](b"".join(pieces))


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 127, 128, 129, 4096, 4097, 10_000])
def test_crc64nvme_of_any_number_of_lanes(size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    crc = Crc64Nvme()
    crc.update(data[:size])
    assert crc.digest() == crc64_by_bits(data[:size])


def test_crc64nvme_of_more_than_one_lot() -> None:
    data = hashlib.sha256(b"seed").digest() * 32768  # 1 MiB
    whole, parts = Crc64Nvme(), Crc64Nvme()
    whole.update(data)
    for at in range(0, len(data), 100_003):
        parts.update(data[at : at + 100_003])
    assert whole.digest() == parts.digest()


def said(name: str, data: bytes) -> str:
    digest = hashlib.md5(data).digest() if name == "content-md5" else TRUTH[name.rpartition("-")[2]](data)
    return base64.b64encode(digest).decode()


HEADERS = ["content-md5", *(f"x-amz-checksum-{name}" for name in MAKERS)]


@pytest.mark.parametrize("name", HEADERS)
def test_data_that_is_what_was_said(name: str) -> None:
    checksums = checksums_of({name.encode(): said(name, b"data").encode(), b"host": b"h"})
    checksums.update(b"da")
    checksums.update(b"ta")
    checksums.check()
    assert checksums.values() == ({} if name == "content-md5" else {name: said(name, b"data")})


@pytest.mark.parametrize("name", HEADERS)
def test_data_that_is_not_what_was_said(name: str) -> None:
    checksums = checksums_of({name.encode(): said(name, b"data").encode()})
    checksums.update(b"date")
    with pytest.raises(S3Refusal) as refused:
        checksums.check()
    assert refused.value.code == "BadDigest"


@pytest.mark.parametrize("name", HEADERS)
@pytest.mark.parametrize("value", ["", "x", "AAAA", "AAAAAA==x", "ü", "A" * 400])
def test_what_cannot_be_a_checksum(name: str, value: str) -> None:
    with pytest.raises(S3Refusal) as refused:
        checksums_of({name.encode(): value.encode()})
    assert refused.value.code == ("InvalidDigest" if name == "content-md5" else "InvalidRequest")


def test_two_values_of_one_checksum() -> None:
    checksums = Checksums()
    checksums.expect("x-amz-checksum-crc32", said("crc32", b"a"))
    checksums.expect("x-amz-checksum-crc32", said("crc32", b"a"))
    with pytest.raises(S3Refusal, match="two values"):
        checksums.expect("x-amz-checksum-crc32", said("crc32", b"b"))


def test_headers_that_are_about_checksums_but_are_none() -> None:
    checksums_of({b"x-amz-checksum-algorithm": b"CRC32", b"x-amz-checksum-type": b"COMPOSITE"}).check()


def test_a_checksum_that_is_not_known() -> None:
    with pytest.raises(S3Refusal, match="md4"):
        Checksums().announce("x-amz-checksum-md4")
