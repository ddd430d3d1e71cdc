"""Batches of which everything is here: answered without waiting, so that nothing that was found can leave."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec

from stoker.cache.server.engine import Bucket, Engine, Pointer
from stoker.cache.server.port import Answer
from stoker.cache.store.port import OpenFile
from stoker.cache.store.shelf import HOT_BLOCK_BYTES_MAX, Held
from stoker.errors import CorruptBlock
from stoker.wire.cache_api import FRAME, FRAME_FOLDER, FRAME_LAST, FRAME_PATH, MSGPACK, PATH_SIZE, StoreFolder

_FILES_MAX = 512
_AT_ONCE_BYTES = 4 * 1024 * 1024

_Piece = tuple[Held, OpenFile]


class AtOnce:
    """Answers for one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        folder = engine.shelf.folder
        self.folder_frame = b""
        if folder is not None:
            body = msgspec.msgpack.encode(StoreFolder(folder.path, folder.device, folder.inode))
            self.folder_frame = FRAME.pack(FRAME_FOLDER, len(body)) + body

    def answer(
        self, bucket: Bucket, keys: Sequence[str], paths_from_bytes: int | None, answer: Answer
    ) -> bool:
        """Write the whole body, if every object is here; False, and nothing is written, otherwise."""
        body = self._from_memory(bucket, keys, paths_from_bytes)
        if body is not None:
            answer.start(200, [("Content-Type", MSGPACK)], len(body))
            answer.data(body)
            return True
        pieces = self._from_files(bucket, keys, paths_from_bytes)
        if pieces is None:
            return False
        size_bytes = sum(len(piece) if isinstance(piece, bytes) else piece[0].size_bytes for piece in pieces)
        answer.start(200, [("Content-Type", MSGPACK)], size_bytes)
        shelf = self._engine.shelf
        for piece in pieces:
            if isinstance(piece, bytes):
                answer.data(piece)
            else:
                held, file = piece
                shelf.pin(held)
                answer.file(file, 0, held.size_bytes, partial(shelf.unpin, held))
        return True

    def held(self, bucket: Bucket, key: str) -> tuple[Pointer, Held | None] | None:
        """A key's pointer and first block (an empty object has none), if they need no waiting for."""
        pointer = self._engine.fresh(bucket, key)
        if pointer is None:
            return None
        if pointer.size_bytes == 0:
            return pointer, None
        held = self._engine.shelf.find(pointer.first_block)
        if held is None or not (held.is_verified or held.size_bytes <= HOT_BLOCK_BYTES_MAX):
            return None
        return pointer, held

    def path_frame(self, held: Held) -> bytes:
        """The frame that answers an object of one block, held and verified, by its path."""
        if held.path_frame is None:
            path = self._engine.shelf.path_of(held)
            length = PATH_SIZE.size + len(path)
            held.path_frame = FRAME.pack(FRAME_PATH, length) + PATH_SIZE.pack(held.size_bytes) + path
        return held.path_frame

    def _from_memory(self, bucket: Bucket, keys: Sequence[str], paths_from_bytes: int | None) -> bytes | None:
        """All frames, if every object is small and here."""
        parts: list[bytes] = []
        fresh, find, bytes_of = self._engine.fresh, self._engine.shelf.find, self._engine.shelf.bytes_of
        size_bytes = 0
        size_bytes_max = HOT_BLOCK_BYTES_MAX
        if paths_from_bytes is not None:
            size_bytes_max = min(size_bytes_max, paths_from_bytes - 1)
        for key in keys:
            pointer = fresh(bucket, key)
            if pointer is None or pointer.size_bytes > size_bytes_max:
                return None
            data = b""
            if pointer.size_bytes:
                held = find(pointer.first_block)
                if held is None:
                    return None
                try:
                    data = held.hot or bytes_of(held)
                except CorruptBlock:
                    return None
            size_bytes += len(data)
            if size_bytes > _AT_ONCE_BYTES:
                return None
            parts.append(FRAME.pack(FRAME_LAST, len(data)))
            parts.append(data)
        bucket.hits += len(keys)
        bucket.hit_bytes += size_bytes
        return b"".join(parts)

    def _from_files(
        self, bucket: Bucket, keys: Sequence[str], paths_from_bytes: int | None
    ) -> list[bytes | _Piece] | None:
        """What to send, if every object is one block, here and known to be right."""
        pieces: list[bytes | _Piece] = []
        text: list[bytes] = [] if paths_from_bytes is None else [self.folder_frame]
        size_bytes = files = paths = 0
        block_size_bytes = self._engine.block_size_bytes
        for key in keys:
            first = self.held(bucket, key)
            if first is None or first[1] is None or first[0].size_bytes > block_size_bytes:
                return None
            held = first[1]
            size_bytes += held.size_bytes
            if paths_from_bytes is not None and held.size_bytes >= paths_from_bytes and held.is_verified:
                text.append(held.path_frame or self.path_frame(held))
                paths += 1
                continue
            text.append(FRAME.pack(FRAME_LAST, held.size_bytes))
            piece = self._piece(held)
            if piece is None:
                return None
            if isinstance(piece, bytes):
                text.append(piece)
                continue
            files += 1
            if files > _FILES_MAX:
                return None
            pieces += (b"".join(text), (held, piece))
            text = []
        if text:
            pieces.append(b"".join(text))
        bucket.hits += len(keys)
        bucket.hit_bytes += size_bytes
        bucket.path_hits += paths
        return pieces

    def _piece(self, held: Held) -> bytes | OpenFile | None:
        shelf = self._engine.shelf
        try:
            return shelf.bytes_of(held) if held.size_bytes <= HOT_BLOCK_BYTES_MAX else shelf.file_of(held)
        except CorruptBlock:
            return None
