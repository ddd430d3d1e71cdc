"""Put a block, or a part of one, into a response: from its file if it is held, as it comes in if it is fetched."""

from __future__ import annotations

from stoker._native import Piece
from stoker.cache.layout import BlockSpan
from stoker.cache.server.engine import Engine
from stoker.cache.server.fetches import Ticket
from stoker.cache.server.port import Answer
from stoker.cache.store.known import Known


async def send_block(
    engine: Engine, known: Known, span: BlockSpan, found: Piece | Ticket, answer: Answer
) -> None:
    """Write the span's bytes. A held block that is gone by now is fetched. Raises as `Engine.fetch`."""
    if isinstance(found, Ticket):
        await send_ticket(found, span, answer)
        return
    # Between the look-up and now the loop may have turned: what is sent is looked up in the same turn.
    piece = engine.store.held(known, span.index)
    if piece is not None and piece.is_verified and answer.piece(piece, span.start, span.stop):
        return
    ticket = engine.fetch(known, span.index)
    try:
        await send_ticket(ticket, span, answer)
    finally:
        ticket.leave()


async def send_ticket(ticket: Ticket, span: BlockSpan, answer: Answer) -> None:
    """Write the span's bytes as they come. Raises what the fetch failed with."""
    at = span.start
    while at < span.stop:
        there = min(await ticket.more(at), span.stop)
        answer.data(memoryview(ticket.landing.data)[at:there])
        at = there
        await answer.drain()
