"""A process that writes to an origin: `WHAT URL`. Says what it is at on its standard output."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator

from stoker.cache.origin.open import open_writable_origin
from stoker.cache.origin.writing_port import WritableOrigin
from stoker.errors import PreconditionFailed, StokerError

COUNTS = 25


async def endless(upload_bytes: int) -> AsyncGenerator[bytes, None]:
    """Some, and then nothing for ever."""
    for _ in range(0, upload_bytes, 500_000):
        yield bytes(500_000)
    print("writing", flush=True)
    await asyncio.sleep(600)


async def count(origin: WritableOrigin) -> None:
    """Raises a number in an object, beside others who do the same."""
    done = 0
    while done < COUNTS:
        info = await origin.stat("number")
        try:
            number = int(await origin.read("number", 0, info.size_bytes, info.version))

            async def more(number: int = number) -> AsyncGenerator[bytes, None]:
                yield b"%06d" % (number + 1)

            await origin.put("number", more(), 6, if_match=info.version)
            done += 1
        except StokerError as error:
            if not isinstance(error, PreconditionFailed) and type(error).__name__ != "ObjectChanged":
                raise


async def main(what: str, url: str) -> None:
    origin = open_writable_origin(url, os.environ)
    if what == "known":
        await origin.put("old", endless(3_000_000), 100_000_000)
    elif what == "unknown":
        await origin.put("old", endless(18_000_000))
    elif what == "part":
        upload = await origin.begin_upload("old")
        await origin.put_part("old", upload, 1, endless(3_000_000), 100_000_000)
    elif what == "count":
        await count(origin)
    elif what == "user":
        os.setgid(65534)
        os.setuid(65534)

        async def one() -> AsyncGenerator[bytes, None]:
            yield b"one"

        try:
            await origin.put("old", one(), 3)
        except StokerError as error:
            print(type(error).__name__, error)
    await origin.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
