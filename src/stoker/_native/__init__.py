"""The native part of the cache server, in C++: what it holds (`Index`), the front that answers hits (`Front`), what
writes blocks (`Writer`), and when what is read is read next (`Reads`); for its readers, files as memory (`Mapping`)
and memory that is lent (`Lent`), and the requests of mounts (`read_request`).

`index.h`, `front.h`, `reads.h` and `device.h` say what each does. What does not belong here: decisions, origins,
anything that is not done for every request.
"""

from stoker._native._core import (
    Container,
    FileProblem,
    Files,
    Fleet,
    Found,
    Front,
    FrontSettings,
    Index,
    Inflow,
    Lent,
    Mapping,
    Name,
    Piece,
    PlainFiles,
    Reads,
    Survey,
    TlsContext,
    Writer,
    crc32c,
    next_reads,
    next_reads_of,
    read_request,
)

__all__ = [
    "Container",
    "FileProblem",
    "Files",
    "Fleet",
    "Found",
    "Front",
    "FrontSettings",
    "Index",
    "Inflow",
    "Lent",
    "Mapping",
    "Name",
    "Piece",
    "PlainFiles",
    "Reads",
    "Survey",
    "TlsContext",
    "Writer",
    "crc32c",
    "next_reads",
    "next_reads_of",
    "read_request",
]
