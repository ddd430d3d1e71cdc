"""What ranks tell each other of the pieces that they keep, as bytes over their group. Nothing is pickled."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist

from stoker.errors import WireError
from stoker.train.checkpoints.image import Image
from stoker.train.dtensors import Box
from stoker.train.packing import Described
from stoker.train.transfer import bytes_of


class Held(NamedTuple):
    """The pieces of one rank as of a commit, on the host."""

    commits: int
    generation: int
    """Of the world that it was taken in; one commit may be taken in several."""
    rank: int
    size: int
    """Of that world: so many of these are the whole."""
    header: bytes
    body: torch.Tensor
    """The bytes of all pieces, one after the other."""

    @property
    def place(self) -> tuple[int, int, int]:
        return self.generation, self.size, self.rank


class Part(NamedTuple):
    """One piece as a header describes it."""

    name: str
    whole: Described
    box: Box

    @property
    def size_bytes(self) -> int:
        count = 1
        for length in self.box.shape:
            count *= length
        return count * self.whole.dtype.itemsize


def encode(image: Image) -> tuple[bytes, torch.Tensor]:
    """A header and the bytes of all pieces, copied to the host."""
    flat = [bytes_of(piece.tensor).cpu() for piece in image.pieces]
    body = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)
    return header_of(image), body


def header_of(image: Image) -> bytes:
    """What the pieces are, without their bytes."""
    described = [
        [p.name, str(p.tensor.dtype).removeprefix("torch."), p.shape, p.offsets, tuple(p.tensor.shape)]
        for p in image.pieces
    ]
    return msgspec.msgpack.encode([image.plain, described])


def decode(header: bytes) -> tuple[object, list[Part]]:
    """The plain part of the image and its pieces. Raises WireError."""
    try:
        plain, described = msgspec.msgpack.decode(header)
        parts = [
            Part(name, Described(getattr(torch, dtype), tuple(shape), "cpu"), Box(tuple(at), tuple(of)))
            for name, dtype, shape, at, of in described
        ]
    except (msgspec.MsgspecError, ValueError, TypeError, AttributeError) as error:
        raise WireError(f"broken header of pieces: {error}") from None
    return plain, parts


def tensor_of(raw: torch.Tensor, part: Part) -> torch.Tensor:
    """Bytes as the tensor that they are; copied where they do not lie as its type needs."""
    if raw.storage_offset() % part.whole.dtype.itemsize:
        raw = raw.clone()
    return raw.view(part.whole.dtype).reshape(part.box.shape)


# -- between ranks ----------------------------------------------------------------------------------------------


def give(mine: Held, stride: int, device: torch.device) -> Held:
    """Send this rank's pieces so many ranks further and take those from so many before. Raises RuntimeError."""
    size, rank = dist.get_world_size(), dist.get_rank()
    after, before = (rank + stride) % size, (rank - stride) % size
    own = [torch.frombuffer(bytearray(mine.header), dtype=torch.uint8), mine.body]
    sizes = torch.tensor([len(own[0]), len(own[1])])
    (theirs,) = _swap([sizes], [torch.zeros(2, dtype=torch.int64)], after, before, device)
    lengths = [int(n) for n in theirs.tolist()]
    header, body = _swap(own, [torch.empty(n, dtype=torch.uint8) for n in lengths], after, before, device)
    return mine._replace(rank=before, header=header.numpy().tobytes(), body=body)


def _swap(
    out: list[torch.Tensor], into: list[torch.Tensor], after: int, before: int, device: torch.device
) -> list[torch.Tensor]:
    sent, came = [t.to(device) for t in out], [t.to(device) for t in into]
    work = [dist.P2POp(dist.isend, t, after) for t in sent if t.numel()]
    work += [dist.P2POp(dist.irecv, t, before) for t in came if t.numel()]
    for one in dist.batch_isend_irecv(work):
        one.wait()
    return [t.cpu() for t in came]


def everybody_is_here(device: torch.device, *, wants: bool) -> bool:
    """Come back once every rank has called this, with whether any of them `wants` something. Raises RuntimeError."""
    wanted = torch.tensor([int(wants)], device=device)
    dist.all_reduce(wanted)
    return int(wanted) > 0


def gather_bytes(mine: bytes, device: torch.device) -> list[bytes]:
    """What each rank has to say. Raises RuntimeError."""
    size = dist.get_world_size()
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(mine)], dtype=torch.int64, device=device))
    longest = max(int(n) for n in lengths)
    padded = torch.frombuffer(bytearray(mine.ljust(longest + 1, b"\0")), dtype=torch.uint8)[:longest].to(
        device
    )
    said = [torch.zeros(longest, dtype=torch.uint8, device=device) for _ in range(size)]
    dist.all_gather(said, padded)
    return [raw.cpu().numpy().tobytes()[: int(n)] for raw, n in zip(said, lengths, strict=True)]


def broadcast_bytes(mine: bytes | None, source: int, device: torch.device) -> bytes:
    """What the source says. Raises RuntimeError."""
    length = torch.tensor([len(mine or b"")], dtype=torch.int64, device=device)
    dist.broadcast(length, src=source)
    raw = torch.zeros(int(length), dtype=torch.uint8, device=device)
    if mine:
        raw.copy_(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
    dist.broadcast(raw, src=source)
    return raw.cpu().numpy().tobytes()
