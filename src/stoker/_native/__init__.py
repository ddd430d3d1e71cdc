"""The native part of the cache server, in C++: what it holds (`Index`), and the front that answers hits (`Front`);
for its readers, files as memory (`Mapping`).

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
    "crc32c",
]
