"""The native part of the cache server, in C++: what it holds (`Index`), the front that answers hits (`Front`),
and what writes blocks (`Writer`); for its readers, files as memory (`Mapping`).

`index.h` and `front.h` say what each does. What does not belong here: decisions, origins, anything that is not done for
every request.
"""

from stoker._native._core import (
    Container,
    FileProblem,
    Files,
    Found,
    Front,
    FrontSettings,
    Index,
    Inflow,
    Mapping,
    Name,
    Piece,
    Survey,
    Writer,
    crc32c,
)

__all__ = [
    "Container",
    "FileProblem",
    "Files",
    "Found",
    "Front",
    "FrontSettings",
    "Index",
    "Inflow",
    "Mapping",
    "Name",
    "Piece",
    "Survey",
    "Writer",
    "crc32c",
]
