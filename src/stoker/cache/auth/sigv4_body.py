"""The body of an S3 request: what of it is data, and whether it is the data that its sender meant. Pure, in bounded
memory.

What `feed` gives may be handed on, but is only good once `finish` has said so: until then nothing that was written is
to be seen by anybody.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

from stoker.cache.auth.aws_chunked import ChunkDecoder
from stoker.cache.auth.checksums import Checksums, checksums_of
from stoker.cache.auth.s3_refusal import S3Refusal
from stoker.cache.auth.sigv4 import ChunkSigning, Payload, PayloadMode

_IS_SIGNED = {
    PayloadMode.SIGNED_CHUNKS: True,
    PayloadMode.SIGNED_CHUNKS_TRAILER: True,
    PayloadMode.UNSIGNED_CHUNKS_TRAILER: False,
}
_HAS_TRAILER = (PayloadMode.SIGNED_CHUNKS_TRAILER, PayloadMode.UNSIGNED_CHUNKS_TRAILER)


class Body:
    """One request's. Made by `body_of`."""

    def __init__(
        self, checksums: Checksums, chunks: ChunkDecoder | None, sha256: str, size_bytes: int | None
    ) -> None:
        self.size_bytes = size_bytes
        """Of the data, as its sender says; None: the sender does not."""
        self.received_bytes = 0
        """Of the data."""
        self._checksums = checksums
        self._chunks = chunks
        self.sha256 = sha256
        """Of the data, as its sender says before; empty: nothing is said."""
        self._made = hashlib.sha256() if sha256 else None

    @property
    def is_done(self) -> bool:
        """Whether what has come says of itself that nothing more does."""
        return self._chunks is not None and self._chunks.is_done

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        """The next of the body, and what is data of it. Raises S3Refusal."""
        parts = [bytes(data)] if self._chunks is None else self._chunks.feed(data)
        for part in parts:
            self.received_bytes += len(part)
            if self.size_bytes is not None and self.received_bytes > self.size_bytes:
                raise S3Refusal(
                    "IncompleteBody", f"More came than the {self.size_bytes} bytes that were announced"
                )
            self._checksums.update(part)
            if self._made is not None:
                self._made.update(part)
        return parts

    def finish(self) -> dict[str, str]:
        """The body has ended. The checksums that were verified, by header. Raises S3Refusal."""
        if self._chunks is not None:
            self._chunks.finish()
            for name, value in self._chunks.trailers.items():
                self._checksums.expect(name, value)
        if self.size_bytes is not None and self.received_bytes != self.size_bytes:
            raise S3Refusal("IncompleteBody", f"{self.received_bytes} bytes came of {self.size_bytes}")
        if self._made is not None and not hmac.compare_digest(self._made.hexdigest(), self.sha256):
            raise S3Refusal(
                "XAmzContentSHA256Mismatch",
                "The provided 'x-amz-content-sha256' header does not match what was computed.",
                (
                    ("ClientComputedContentSHA256", self.sha256),
                    ("S3ComputedContentSHA256", self._made.hexdigest()),
                ),
            )
        self._checksums.check()
        return self._checksums.values()


def body_of(
    headers: Mapping[bytes, bytes],
    payload: Payload,
    signing: ChunkSigning | None,
    has_own_checksums: bool = True,
) -> Body:
    """How a request's body is to be read. `payload` and `signing`: of its `Proof`; one that is not signed has
    `Payload(PayloadMode.UNSIGNED)`, or what `payload_of` says of its header, and no signing.

    `has_own_checksums` False: checksums in the headers are of the object, as with CompleteMultipartUpload, whose body
    is a list of parts. Raises S3Refusal.
    """
    checksums = checksums_of(headers, has_own_checksums)
    if payload.mode not in _IS_SIGNED:
        return Body(checksums, None, payload.sha256, _length(headers, b"content-length"))
    if _IS_SIGNED[payload.mode] and signing is None:
        raise S3Refusal("AccessDenied", "The chunks of the body are signed, but the request is not")
    size_bytes = _length(headers, b"x-amz-decoded-content-length")
    if size_bytes is None:
        raise S3Refusal(
            "MissingContentLength", "You must provide the x-amz-decoded-content-length HTTP header."
        )
    trailers = _trailers(headers) if payload.mode in _HAS_TRAILER else []
    for name in trailers:
        checksums.announce(name)
    decoder = ChunkDecoder(signing if _IS_SIGNED[payload.mode] else None, trailers, size_bytes)
    return Body(checksums, decoder, "", size_bytes)


def _length(headers: Mapping[bytes, bytes], name: bytes) -> int | None:
    said = headers.get(name)
    if said is None:
        return None
    if not (said.isdigit() and len(said) <= 18):
        raise S3Refusal("InvalidArgument", f"{name.decode()} is no number of bytes: {said[:40]!r}")
    return int(said)


def _trailers(headers: Mapping[bytes, bytes]) -> list[str]:
    said = headers.get(b"x-amz-trailer", b"").decode("latin-1").lower()
    return [name.strip() for name in said.split(",") if name.strip()]
