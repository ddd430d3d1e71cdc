"""The little XML that S3's answers and questions are made of. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from stoker.errors import OriginError

_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class Node:
    """An element, without the namespaces that servers differ in."""

    def __init__(self, element: ElementTree.Element) -> None:
        self._element = element

    @property
    def name(self) -> str:
        """Of the element itself."""
        return _local(self._element)

    def text(self, name: str) -> str:
        """Of the first child of that name; empty if there is none."""
        return next((child.text or "" for child in self._element if _local(child) == name), "")

    def texts(self) -> dict[str, str]:
        """Of its children, by their names; of several of one name the first."""
        found: dict[str, str] = {}
        for child in self._element:
            found.setdefault(_local(child), child.text or "")
        return found

    def all(self, name: str) -> list[Node]:
        """Children of that name."""
        return [Node(child) for child in self._element if _local(child) == name]


def parse(body: bytes, name: str = "") -> Node:
    """An answer, which is an element of that name if one is said. Raises OriginError for what is none, and for what has
    entities of its own."""
    if b"<!DOCTYPE" in body or b"<!ENTITY" in body:
        raise OriginError("an answer of S3 has no entities of its own")
    try:
        # Servers that have to think send blanks meanwhile, also before all else.
        node = Node(ElementTree.fromstring(body.strip()))
    except ElementTree.ParseError as error:
        raise OriginError(f"S3 answered with no XML: {error}") from None
    if name not in ("", node.name):
        raise OriginError(f"S3 answered with {node.name[:80]!r}, and not with {name}")
    return node


def error_of(body: bytes) -> tuple[str, str]:
    """Code and message of an error; empty where it is none."""
    try:
        node = parse(body)
    except OriginError:
        return "", ""
    return (node.text("Code"), node.text("Message")) if node.name == "Error" else ("", "")


def can_say(text: str) -> bool:
    """Whether it can be written in XML."""
    return _NO_XML.search(text) is None


def completion(parts: Sequence[tuple[int, str]]) -> bytes:
    """The question of CompleteMultipartUpload."""
    said = (
        f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(etag)}</ETag></Part>" for number, etag in parts
    )
    return f"<CompleteMultipartUpload>{''.join(said)}</CompleteMultipartUpload>".encode()


def deletion(keys: Iterable[str]) -> bytes:
    """The question of DeleteObjects."""
    said = (f"<Object><Key>{escape(key)}</Key></Object>" for key in keys)
    return f"<Delete><Quiet>true</Quiet>{''.join(said)}</Delete>".encode()


def seconds_of(text: str) -> float:
    """A time as S3 writes it, in seconds since 1970; 0 for what is none."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0


def number_of(text: str) -> int:
    """Raises OriginError for what is none."""
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise OriginError(f"{text[:40]!r} stands where S3 says a number")
    return int(text)


def _local(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]
