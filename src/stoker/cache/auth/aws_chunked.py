"""Bodies in `aws-chunked` encoding, whose chunks and trailers are signed, or not. Pure.

    SIZE[;chunk-signature=HEX] CRLF DATA CRLF … 0[;chunk-signature=HEX] CRLF [NAME:VALUE CRLF …] CRLF

https://docs.aws.amazon.com/AmazonS3/latest/API/sigv4-streaming.html and sigv4-streaming-trailers.html
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Collection
from enum import Enum

from stoker.cache.auth.s3_refusal import S3Refusal
from stoker.cache.auth.sigv4 import ChunkSigning

SIGNED_CHUNK_BYTES_MAX = 16 * 1024 * 1024
"""A signed chunk is kept until all of it is there: nothing unproved is handed on."""
LINE_BYTES_MAX = 1024
TRAILER_SIGNATURE = "x-amz-trailer-signature"
_LINES_MAX = 16
_EMPTY = hashlib.sha256(b"").hexdigest()
_SIGNED = re.compile(rb"([0-9a-fA-F]{1,15});chunk-signature=([0-9a-f]{64})")
_UNSIGNED = re.compile(rb"([0-9a-fA-F]{1,15})")


class _State(Enum):
    SIZE = "a chunk's size"
    DATA = "a chunk's data"
    AFTER_DATA = "the end of a chunk"
    TRAILER = "a trailer"
    DONE = "nothing more"


class ChunkDecoder:
    """Takes the encoding off. `trailers`: the names, in lower case, of what must come after the data.

    With `signing`, data is given out once its chunk's signature is proved. At most a chunk is kept, or a line.
    """

    def __init__(self, signing: ChunkSigning | None, trailers: Collection[str], size_bytes: int) -> None:
        self.trailers: dict[str, str] = {}
        """What came after the data; complete once the body has ended."""
        self._signing = signing
        self._signature = signing.signature if signing else ""
        self._wanted = frozenset(trailers)
        self._size_bytes = size_bytes
        self._state = _State.SIZE
        self._line = bytearray()
        self._lines = 0
        self._chunk = bytearray()
        self._chunk_signature = ""
        self._left = 0
        self._announced = 0
        self._is_proved = signing is None

    @property
    def is_done(self) -> bool:
        """Whether nothing more may come."""
        return self._state is _State.DONE

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        """The next of the body, and what of the data is now good. Raises S3Refusal."""
        view = memoryview(data)
        good: list[bytes] = []
        while len(view):
            if self._state is _State.DATA:
                view = self._take_data(view, good)
            else:
                view = self._take_line(view)
        return good

    def finish(self) -> None:
        """The body has ended. Raises S3Refusal: too early, or without something that must be there; whether all of the
        data came is for who counts it.

        The empty line at the very end may be missing: what it would end is complete.
        """
        if self._state not in (_State.TRAILER, _State.DONE) or self._line:
            raise _incomplete(f"it ended in the middle of {self._state.value}")
        if missing := self._wanted - self.trailers.keys():
            raise _trailer(f"there is no {', '.join(sorted(missing))}")
        if self._wanted and not self._is_proved:
            raise _trailer(f"there is no {TRAILER_SIGNATURE}")

    def _take_data(self, view: memoryview, good: list[bytes]) -> memoryview:
        taken, rest = view[: self._left], view[self._left :]
        self._left -= len(taken)
        if self._signing is None:
            good.append(bytes(taken))
        else:
            self._chunk += taken
        if not self._left:
            if self._signing is not None:
                good.append(self._proved_chunk(self._signing))
            self._state = _State.AFTER_DATA
        return rest

    def _proved_chunk(self, signing: ChunkSigning) -> bytes:
        chunk, self._chunk = bytes(self._chunk), bytearray()
        text = f"{self._signature}\n{_EMPTY}\n{hashlib.sha256(chunk).hexdigest()}"
        self._check(signing, "AWS4-HMAC-SHA256-PAYLOAD", text, self._chunk_signature, "a chunk")
        return chunk

    def _check(self, signing: ChunkSigning, algorithm: str, text: str, signature: str, what: str) -> None:
        asked = f"{algorithm}\n{signing.scope.time}\n{signing.scope}\n{text}"
        made = hmac.digest(signing.key, asked.encode(), "sha256").hex()
        if not hmac.compare_digest(made.encode(), signature.encode()):
            raise S3Refusal(
                "SignatureDoesNotMatch", f"The signature of {what} of the body is not that of what came"
            )
        self._signature = made

    def _take_line(self, view: memoryview) -> memoryview:
        # A line is short: what is searched for its end is a few bytes.
        head = bytes(view[: LINE_BYTES_MAX + 2])
        end = head.find(b"\n")
        self._line += head if end < 0 else head[: end + 1]
        if len(self._line) > LINE_BYTES_MAX + 2:
            raise _incomplete(f"a line of its encoding is longer than {LINE_BYTES_MAX} bytes")
        if end < 0:
            return view[len(head) :]
        line = bytes(self._line[:-1]).removesuffix(b"\r")
        self._line.clear()
        if self._state is _State.SIZE:
            self._read_size(line)
        elif self._state is _State.AFTER_DATA:
            if line:
                raise _incomplete("a chunk is longer than it says")
            self._state = _State.SIZE
        elif self._state is _State.TRAILER:
            self._read_trailer(line)
        else:
            raise _incomplete("something follows its end")
        return view[end + 1 :]

    def _read_size(self, line: bytes) -> None:
        found = (_SIGNED if self._signing else _UNSIGNED).fullmatch(line)
        if found is None:
            raise _incomplete(f"{line[:100]!r} does not begin a chunk")
        self._left = int(found[1], 16)
        self._announced += self._left
        if self._announced > self._size_bytes:
            raise _incomplete(f"more bytes come than the {self._size_bytes} of x-amz-decoded-content-length")
        if self._signing is None:
            self._state = _State.DATA if self._left else _State.TRAILER
            return
        if self._left > SIGNED_CHUNK_BYTES_MAX:
            raise S3Refusal(
                "InvalidChunkSizeError",
                f"A signed chunk has at most {SIGNED_CHUNK_BYTES_MAX} bytes here, not {self._left}",
            )
        self._chunk_signature = found[2].decode()
        self._state = _State.DATA
        if not self._left:
            self._proved_chunk(self._signing)
            self._state = _State.TRAILER

    def _read_trailer(self, line: bytes) -> None:
        self._lines += 1
        if self._lines > _LINES_MAX:
            raise _trailer(f"it has more than {_LINES_MAX} lines")
        if not line:
            # Some put an empty line before the trailers as well.
            is_complete = self._wanted <= self.trailers.keys() and (self._is_proved or not self._wanted)
            self._state = _State.DONE if is_complete else _State.TRAILER
            return
        name, colon, value = line.decode("latin-1").partition(":")
        name, value = name.strip().lower(), value.strip()
        if name == TRAILER_SIGNATURE and self._signing is not None and not self._is_proved:
            listed = "".join(f"{name}:{self.trailers[name]}\n" for name in sorted(self.trailers))
            text = f"{self._signature}\n{hashlib.sha256(listed.encode('latin-1')).hexdigest()}"
            self._check(self._signing, "AWS4-HMAC-SHA256-TRAILER", text, value, "the trailer")
            self._is_proved = True
        elif not colon or name not in self._wanted or name in self.trailers:
            raise _trailer(f"{line[:100]!r} was not announced by x-amz-trailer, or is there twice")
        elif self._signing is not None and self._is_proved:
            raise _trailer(f"{name} comes after the signature")
        else:
            self.trailers[name] = value


def _incomplete(why: str) -> S3Refusal:
    return S3Refusal("IncompleteBody", f"The body is not what was announced: {why}")


def _trailer(why: str) -> S3Refusal:
    return S3Refusal("MalformedTrailerError", f"The trailer of the body is not well-formed: {why}")
