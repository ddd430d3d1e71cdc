"""Bodies of S3 requests as they come, and as they do not."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from stoker.cache.auth.principals import ANYONE
from stoker.cache.auth.s3_refusal import S3Refusal
from stoker.cache.auth.sigv4 import Payload, PayloadMode
from stoker.cache.auth.sigv4_body import body_of
from stoker.cache.server.body import BodyParts
from stoker.cache.server.port import Answer, Request
from stoker.cache.server.s3 import call as calls
from stoker.cache.server.s3.call import Call


def call_of(parts: BodyParts) -> Call:
    headers = {b"content-length": b"10"}
    request = Request("PUT", b"/b/k", headers, b"", ANYONE, parts=parts)
    body = body_of(headers, Payload(PayloadMode.UNSIGNED), None)
    return Call(request, cast(Answer, None), request.principal, body, "id", "host")


def test_who_sends_nothing_more_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "SILENCE_S", 0.05)

    async def story() -> tuple[bytes, str]:
        parts = BodyParts(10, lambda _: None)
        parts.take(b"some", False)
        coming = call_of(parts).parts()
        first = await anext(coming)
        with pytest.raises(S3Refusal, match="4 bytes of the body before") as caught:
            await anext(coming)
        return first, caught.value.code

    assert asyncio.run(asyncio.wait_for(story(), 20)) == (b"some", "RequestTimeout")
