"""S3's XML: writing by escaping, and reading in bounds. Pure.

Read by expat with every declaration refused: there are no document types, so no entities but XML's own five, and
nothing from elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import NamedTuple, NoReturn
from xml.parsers import expat

from stoker.cache.auth.s3_refusal import S3Refusal

XML = '<?xml version="1.0" encoding="UTF-8"?>\n'
NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
BODY_BYTES_MAX = 4 * 1024 * 1024
"""10,000 parts with all that is said of them are some 3 MiB, 1,000 keys of 1,024 bytes, each escaped, as much."""
DEPTH_MAX = 5
ELEMENTS_MAX = 100_000
"""10,000 parts with a number, a tag and checksums of each kind."""
ATTRIBUTES_MAX = 8
PARTS_MAX = 10_000
DELETE_KEYS_MAX = 1000
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff\ud800-\udfff]")
_SPECIAL = re.compile("[\x00-\x1f&<>\"'\ufffe\uffff\ud800-\udfff]")
"""What does not stand for itself: most texts have nothing of it."""
_ESCAPES = str.maketrans({
    "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;",
    # Else a reader would take them for line ends.
    "\r": "&#13;", "\n": "&#10;", "\t": "&#9;",
})  # fmt: skip


def escape(text: str) -> str:
    """As text in XML. What XML 1.0 cannot have at all becomes U+FFFD: a lister that has such keys asks for them with
    `encoding-type=url`."""
    if _SPECIAL.search(text) is None:
        return text
    return _FORBIDDEN.sub("\ufffd", text).translate(_ESCAPES)


def element(name: str, text: str | int | bool) -> str:
    """One element with a text in it."""
    if isinstance(text, bool):
        text = "true" if text else "false"
    return f"<{name}>{escape(str(text))}</{name}>"


def document(name: str, *inner: str) -> bytes:
    """A whole answer; `inner` is XML."""
    return f'{XML}<{name} xmlns="{NAMESPACE}">{"".join(inner)}</{name}>'.encode()


class Element:
    """What was read: its name without its namespace, what is in it, and its text if nothing else is."""

    __slots__ = ("children", "name", "text")

    def __init__(self, name: str) -> None:
        self.name = name
        self.text = ""
        self.children: list[Element] = []

    def get(self, name: str, default: str = "") -> str:
        """The text of the only element of that name in it. Raises S3Refusal if there are more."""
        found = [child.text for child in self.children if child.name == name]
        if len(found) > 1:
            raise malformed(f"{name} is there twice")
        return found[0] if found else default


class DeletedKey(NamedTuple):
    """One to be deleted; `version_id` is empty for whatever version there is."""

    key: str
    version_id: str


class DeleteRequest(NamedTuple):
    """`is_quiet`: only what failed is told of."""

    keys: list[DeletedKey]
    is_quiet: bool


class CompletedPart(NamedTuple):
    """A part that an object is made of; `checksums` by the header that would say them."""

    number: int
    etag: str
    checksums: Mapping[str, str]


def read_xml(body: bytes, root: str) -> Element:
    """The document, whose root must have that name. Raises S3Refusal."""
    if len(body) > BODY_BYTES_MAX:
        raise S3Refusal(
            "MaxMessageLengthExceeded", f"Your request was too big: at most {BODY_BYTES_MAX} bytes of XML"
        )
    open_elements: list[Element] = []
    roots: list[Element] = []
    texts: list[str] = []
    count = 0

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal count
        count += 1
        if count > ELEMENTS_MAX or len(attributes) > ATTRIBUTES_MAX:
            raise malformed(
                f"more than {ELEMENTS_MAX} elements, or more than {ATTRIBUTES_MAX} attributes of one"
            )
        if len(open_elements) == DEPTH_MAX:
            raise malformed(f"it is deeper than {DEPTH_MAX} elements")
        found = Element(name.rpartition("}")[2])
        (open_elements[-1].children if open_elements else roots).append(found)
        open_elements.append(found)
        texts.clear()

    def end(name: str) -> None:
        closed = open_elements.pop()
        if not closed.children:
            closed.text = "".join(texts)
        texts.clear()

    parser = expat.ParserCreate("UTF-8", namespace_separator="}")
    # A text comes in pieces, else as one only where its buffer suffices.
    parser.buffer_text = True
    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.CharacterDataHandler = texts.append
    parser.StartDoctypeDeclHandler = _refuse("it has a document type")
    parser.EntityDeclHandler = _refuse("it declares an entity")
    parser.ExternalEntityRefHandler = _refuse("it refers to an entity elsewhere")
    parser.ProcessingInstructionHandler = _refuse("it has a processing instruction")
    try:
        parser.Parse(body, True)
    except (expat.ExpatError, ValueError) as error:
        raise malformed(str(error)) from error
    if roots[0].name != root:
        raise malformed(f"it is no {root}, but {roots[0].name[:100]!r}")
    return roots[0]


def read_delete(body: bytes) -> DeleteRequest:
    """Keys to be deleted, at most 1,000. Raises S3Refusal."""
    document = read_xml(body, "Delete")
    found = [child for child in document.children if child.name == "Object"]
    if not 1 <= len(found) <= DELETE_KEYS_MAX:
        raise malformed(f"it must name 1 to {DELETE_KEYS_MAX} objects, not {len(found)}")
    keys = [DeletedKey(one.get("Key"), one.get("VersionId")) for one in found]
    if not all(one.key for one in keys):
        raise malformed("an object has no Key")
    return DeleteRequest(keys, document.get("Quiet").strip().lower() == "true")


def read_complete(body: bytes) -> list[CompletedPart]:
    """The parts that an object is made of, in ascending order. Raises S3Refusal."""
    found = [child for child in read_xml(body, "CompleteMultipartUpload").children if child.name == "Part"]
    if not 1 <= len(found) <= PARTS_MAX:
        raise malformed(f"it must name 1 to {PARTS_MAX} parts, not {len(found)}")
    parts = [CompletedPart(part_number(one.get("PartNumber")), _etag(one), _checksums(one)) for one in found]
    if any(part.number <= before.number for before, part in pairwise(parts)):
        raise S3Refusal(
            "InvalidPartOrder",
            "The list of parts was not in ascending order. Parts must be ordered by part number.",
        )
    return parts


def read_location(body: bytes) -> str:
    """Where a bucket is to be; empty, if nothing is said. Raises S3Refusal."""
    return read_xml(body, "CreateBucketConfiguration").get("LocationConstraint") if body.strip() else ""


def part_number(said: str) -> int:
    """The number of a part, 1 to 10,000. Raises S3Refusal."""
    text = said.strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 6 and 1 <= int(text) <= PARTS_MAX):
        raise S3Refusal(
            "InvalidArgument",
            f"Part number must be an integer between 1 and {PARTS_MAX}, inclusive",
            (("ArgumentName", "partNumber"), ("ArgumentValue", text[:40])),
        )
    return int(text)


def malformed(why: str) -> S3Refusal:
    """The refusal of a document that is not what it must be."""
    return S3Refusal("MalformedXML", f"The XML you provided was not well-formed or did not validate: {why}")


def _etag(part: Element) -> str:
    etag = part.get("ETag").strip().strip('"')
    if not etag:
        raise malformed("a part has no ETag")
    return etag


def _checksums(part: Element) -> dict[str, str]:
    return {
        f"x-amz-checksum-{child.name.removeprefix('Checksum').lower()}": child.text.strip()
        for child in part.children
        if child.name.startswith("Checksum")
    }


def _refuse(why: str) -> Callable[..., NoReturn]:
    def refuse(*_: object) -> NoReturn:
        raise malformed(why)

    return refuse
