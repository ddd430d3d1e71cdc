"""Put a block, or a part of one, into a response: from its file if it is held, as it comes in if it is fetched."""

from __future__ import annotations

from stoker._native import Piece
from stoker.cache.layout import BlockSpan
from stoker.cache.server.engine import Engine
from stoker.cache.server.fetches import Ticket
from stoker.cache.server.port import Answer
from stoker.cache.store.known import Known


async def send_block(
    engine: Engine, known: Known, span: BlockSpan, found: Piece | Ticket, answer: Answer, hops: int = 0
) -> None:
    """Write the span's bytes. A held block that is gone by now is fetched, one that is stored by now is sent from its
    file. Raises what a fetch fails with."""
    ticket = found if isinstance(found, Ticket) else None
    own: list[Ticket] = []
    at = span.start
    try:
        while at < span.stop:
            if ticket is None or ticket.landing.is_stored:
                # What is sent is looked up in the same turn of the loop: it may be gone in the next.
                piece = engine.store.held(known, span.index)
                if piece is not None and piece.is_verified and answer.piece(piece, at, span.stop):
                    return
                ticket = engine.fetch(known, span.index, hops)
                own.append(ticket)
            there = min(await ticket.more(at), span.stop)
            if ticket.landing.is_stored:
                continue
            answer.data(memoryview(ticket.landing.data)[at:there])
            at = there
            await answer.drain()
    finally:
        for one in own:
            one.leave()
