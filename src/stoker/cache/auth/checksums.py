"""Checksums that a writer gives of an object's data: `Content-MD5`, and one of `x-amz-checksum-…`. Pure."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Callable, Mapping

from stoker.cache.auth.crc import Crc, Crc32, Crc32c, Crc64Nvme
from stoker.cache.auth.s3_refusal import S3Refusal

PREFIX = "x-amz-checksum-"


def _sha1() -> Crc:
    return hashlib.sha1(usedforsecurity=False)


def _md5() -> Crc:
    return hashlib.md5(usedforsecurity=False)


MAKERS: Mapping[str, Callable[[], Crc]] = {
    "crc32": Crc32,
    "crc32c": Crc32c,
    "crc64nvme": Crc64Nvme,
    "sha1": _sha1,
    "sha256": hashlib.sha256,
}
"""By the end of the header's name, which in upper case is S3's name for it."""
_MD5 = "content-md5"


class Checksums:
    """Of data that is fed: those that were announced, and in the end whether they are what was said."""

    def __init__(self) -> None:
        self._said: dict[str, bytes] = {}
        self._made: dict[str, Crc] = {}

    def expect(self, name: str, value: str) -> None:
        """A header's name in lower case, and what it says. Raises S3Refusal: it can be no such checksum.

        Data is fed after it, or was announced by `announce`.
        """
        made = self._made.get(name) or self._begin(name)
        try:
            digest = base64.b64decode(value.strip(), validate=True)
        except (binascii.Error, ValueError):
            digest = b""
        if len(digest) != len(made.digest()):
            if name == _MD5:
                raise S3Refusal("InvalidDigest", "The Content-MD5 you specified is not valid.")
            raise S3Refusal("InvalidRequest", f"Value for {name} header is invalid: {value[:100]!r}")
        if self._said.setdefault(name, digest) != digest:
            raise S3Refusal("InvalidRequest", f"There are two values for {name}")

    def announce(self, name: str) -> None:
        """A checksum that comes after the data. Raises S3Refusal."""
        if name not in self._made:
            self._begin(name)

    def update(self, data: bytes | memoryview) -> None:
        """The next of the data."""
        for made in self._made.values():
            made.update(data)

    def check(self) -> None:
        """The data has ended. Raises S3Refusal: it is other data than the checksums are of."""
        for name, digest in self._said.items():
            if not hmac.compare_digest(self._made[name].digest(), digest):
                what = "Content-MD5" if name == _MD5 else name.removeprefix(PREFIX).upper()
                raise S3Refusal(
                    "BadDigest", f"The {what} you specified did not match the calculated checksum."
                )

    def values(self) -> dict[str, str]:
        """What was checked, by header, in base64: what is said of the object when it is written."""
        return {
            name: base64.b64encode(self._made[name].digest()).decode() for name in self._said if name != _MD5
        }

    def _begin(self, name: str) -> Crc:
        algorithm = name.removeprefix(PREFIX)
        if name == _MD5:
            made = _md5()
        elif name != algorithm and algorithm in MAKERS:
            made = MAKERS[algorithm]()
        else:
            raise S3Refusal("InvalidRequest", f"{name[:100]!r} is no checksum that can be verified here")
        self._made[name] = made
        return made


def checksums_of(headers: Mapping[bytes, bytes], are_of_body: bool = True) -> Checksums:
    """Those that a request's headers give of its body (names in lower case).

    `are_of_body` False: its `x-amz-checksum-…` are not of the body, only `Content-MD5` is. Raises S3Refusal.
    """
    checksums = Checksums()
    said = [f"{PREFIX}{name}" for name in MAKERS if f"{PREFIX}{name}".encode() in headers]
    if are_of_body and len(said) > 1:
        raise S3Refusal(
            "InvalidRequest",
            "Expecting a single x-amz-checksum- header. Multiple checksum Types are not allowed.",
        )
    meant = headers.get(b"x-amz-sdk-checksum-algorithm", b"").decode("latin-1").lower()
    if are_of_body and meant and said and said != [f"{PREFIX}{meant}"]:
        raise S3Refusal(
            "InvalidRequest", f"Value for x-amz-sdk-checksum-algorithm header is invalid: {meant[:100]!r}"
        )
    for name in (_MD5, *(said if are_of_body else ())):
        if name.encode() in headers:
            checksums.expect(name, headers[name.encode()].decode("latin-1"))
    return checksums
