"""The least that an asyncio server can do with frames: read each and write it back. Prints its port."""

import asyncio
import resource

from stoker.wire.frames import FrameCodec
from stoker.wire.job import ToMaster


async def serve(reader, writer):
    codec = FrameCodec(ToMaster)
    while (message := await codec.read(reader)) is not None:
        writer.write(codec.encode(message))
    writer.close()


async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
asyncio.run(main())
