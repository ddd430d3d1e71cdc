"""Put a block, or a part of one, into a response: from its file if it is held, as it comes in if it is fetched."""

from __future__ import annotations

from collections.abc import Callable

from stoker._native import Piece
from stoker.cache.layout import BlockSpan
from stoker.cache.server.engine import Engine
from stoker.cache.server.fetches import Ticket
from stoker.cache.server.port import Answer
from stoker.cache.store.known import Known


async def send_block(
    engine: Engine,
    known: Known,
    span: BlockSpan,
    found: Piece | Ticket,
    answer: Answer,
    begin: Callable[[], None],
    hops: int = 0,
) -> None:
    """Write the span's bytes, and wait until they are there; `begin` is called before the first. A held block that is
    gone by now is fetched. Raises what a fetch fails with."""
    if isinstance(found, Ticket):
        await _follow(found, span, answer, begin)
        return
    # What is sent is looked up in the same turn of the loop: it may be gone in the next.
    piece = engine.store.held(known, span.index)
    if piece is not None and piece.is_verified and engine.store.files.is_there(piece.container):
        begin()
        if answer.piece(piece, span.start, span.stop):
            return
    ticket = engine.fetch(known, span.index, hops)
    try:
        await _follow(ticket, span, answer, begin)
    finally:
        ticket.leave()


async def _follow(ticket: Ticket, span: BlockSpan, answer: Answer, begin: Callable[[], None]) -> None:
    await ticket.more(span.start)
    begin()
    answer.landing(ticket.landing, span.start, span.stop)
    await ticket.more(span.stop - 1)
