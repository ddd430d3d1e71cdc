"""The names, numbers and headers that an operation of the S3 dialect is asked for with. Pure."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from urllib.parse import unquote_to_bytes

from stoker.base.ids import check_name
from stoker.cache.auth.s3_refusal import S3Refusal
from stoker.cache.auth.sigv4_canonical import Fields, query_fields
from stoker.cache.server.s3.operation_types import LIST_MAX, CopySource, WrittenHeaders
from stoker.wire.cache_api import RESERVED_BUCKETS

KEY_BYTES_MAX = 1024
METADATA_BYTES_MAX = 2048
"""Names and values of `x-amz-meta-…` together, as S3 counts them."""
_NEW_BUCKET = re.compile(
    r"(?!\d+\.\d+\.\d+\.\d+\Z)(?!xn--)[a-z0-9](?:[a-z0-9]|-(?!\.)|\.(?![.-])){1,61}[a-z0-9]"
)
_CANNED_ACLS = frozenset(
    (
        *("private", "public-read", "public-read-write", "authenticated-read", "aws-exec-read"),
        *("log-delivery-write", "bucket-owner-read", "bucket-owner-full-control"),
    )
)
_STORAGE_CLASSES = frozenset(
    ("STANDARD", "REDUCED_REDUNDANCY", "STANDARD_IA", "ONEZONE_IA", "INTELLIGENT_TIERING", "GLACIER_IR")
)
"""Those whose objects can be read at once: which it is the origin does not hear."""
_RANGE = re.compile(rb"bytes=([0-9]{1,18})-([0-9]{1,18})")
_META = b"x-amz-meta-"
_KEPT = (
    b"cache-control", b"content-disposition", b"content-encoding", b"content-language", b"content-type", b"expires",
)  # fmt: skip
_OVERRIDES = (
    "cache-control", "content-disposition", "content-encoding", "content-language", "content-type", "expires",
)  # fmt: skip
_ATTRIBUTES = frozenset(("ETag", "Checksum", "ObjectParts", "StorageClass", "ObjectSize"))
_COMPOSITE, _FULL = "COMPOSITE", "FULL_OBJECT"
_CHECKSUM_TYPES: Mapping[str, tuple[str, ...]] = {
    "CRC32": (_COMPOSITE, _FULL),
    "CRC32C": (_COMPOSITE, _FULL),
    "CRC64NVME": (_FULL,),
    "SHA1": (_COMPOSITE,),
    "SHA256": (_COMPOSITE,),
}
"""Of each algorithm, the usual one first."""
_SIGNED_BY = ("AWSAccessKeyId", "Signature", "Expires")
_NOT_HERE = {
    b"x-amz-server-side-encryption": "Encryption that a request asks for",
    b"x-amz-server-side-encryption-customer-algorithm": "Encryption with the customer's key",
    b"x-amz-server-side-encryption-customer-key": "Encryption with the customer's key",
    b"x-amz-copy-source-server-side-encryption-customer-algorithm": "Encryption with the customer's key",
    b"x-amz-object-lock-mode": "Object lock",
    b"x-amz-object-lock-legal-hold": "Object lock",
    b"x-amz-website-redirect-location": "A redirect",
    b"x-amz-tagging": "Tagging",
    b"x-amz-write-offset-bytes": "Appending to an object",
}
"""Headers that would be a lie to take and not to do."""


class Query:
    """The fields of a query by their names; of a repeated one the first counts. Raises S3Refusal."""

    def __init__(self, fields: Fields) -> None:
        self._fields: dict[str, str] = {}
        for name, value in fields:
            text = _utf8(name, "InvalidURI", "Couldn't parse the specified URI.")
            said = _utf8(value, "InvalidArgument", f"The value of {text[:100]!r} is not UTF-8")
            self._fields.setdefault(text, said)

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def refuse_others(self, *names: str) -> None:
        """Refuse what may stand for an operation that is not known here: it must not be done as if it did not. Fields
        of signatures, and those that begin with `x-`, mean nothing. Raises S3Refusal."""
        for name in self._fields:
            if name not in names and not name.lower().startswith("x-") and name not in _SIGNED_BY:
                raise S3Refusal("NotImplemented", f"?{name[:100]} is not implemented by this cache")

    def text(self, name: str) -> str:
        """Its value; empty, if it is not there."""
        return self._fields.get(name, "")

    def needed(self, name: str) -> str:
        """Its value. Raises S3Refusal, if there is none."""
        if not self.text(name):
            raise self.wrong(name, f"This operation needs a value for {name}")
        return self.text(name)

    def number(self, name: str, default: int, least: int, most: int) -> int:
        """A number within bounds. Raises S3Refusal."""
        said = self.text(name)
        if not said:
            return default
        if not (said.isascii() and said.isdigit() and len(said) <= 18):
            raise self.wrong(name, f"Provided {name} not an integer or within integer range")
        if not least <= int(said) <= most:
            raise self.wrong(name, f"Argument {name} must be an integer between {least} and {most}")
        return int(said)

    def limit(self, name: str) -> int:
        """How many at most: LIST_MAX is the most that is given, whatever more is asked for."""
        return min(LIST_MAX, self.number(name, LIST_MAX, 0, (1 << 31) - 1))

    def is_url_encoded(self) -> bool:
        """Whether names in the answer are to be percent-encoded."""
        said = self.text("encoding-type")
        if said.lower() not in ("", "url"):
            raise self.wrong("encoding-type", "Invalid Encoding Method specified in Request")
        return bool(said)

    def wrong(self, name: str, why: str) -> S3Refusal:
        """The refusal for a value that cannot be."""
        return S3Refusal("InvalidArgument", why, (("ArgumentName", name), ("ArgumentValue", self.text(name))))


def bucket_name(raw: bytes) -> str:
    """A bucket's name, as any that can be here. Raises S3Refusal."""
    name = _utf8(raw, "InvalidBucketName", "The specified bucket is not valid.")
    try:
        check_name("bucket", name)
    except ValueError as error:
        raise _bad_bucket(name) from error
    if name in RESERVED_BUCKETS:
        raise _bad_bucket(name)
    return name


def new_bucket_name(name: str) -> str:
    """A name that S3 would give a bucket: 3 to 63 lower-case letters, digits, dots and hyphens. Raises S3Refusal."""
    if _NEW_BUCKET.fullmatch(name) is None:
        raise _bad_bucket(name)
    return name


def object_key(raw: bytes) -> str:
    """An object's name. Raises S3Refusal."""
    if len(raw) > KEY_BYTES_MAX:
        more = ("MaxSizeAllowed", str(KEY_BYTES_MAX)), ("Size", str(len(raw)))
        raise S3Refusal("KeyTooLongError", "Your key is too long", more)
    key = _utf8(raw, "InvalidURI", "Couldn't parse the specified URI: a key is UTF-8.")
    if "\0" in key:
        raise S3Refusal("InvalidURI", "Couldn't parse the specified URI: a key has no NUL.")
    return key


def refuse_version(fields: Query) -> None:
    """Refuse another version than the one that there is, `null`."""
    if fields.text("versionId") not in ("", "null"):
        raise S3Refusal(
            "NoSuchVersion",
            "The specified version does not exist: versions are not kept here.",
            (("VersionId", fields.text("versionId")),),
        )


def copy_source(raw: bytes) -> CopySource:
    """What `x-amz-copy-source` says: `/BUCKET/KEY` percent-encoded; its first slash may be missing.

    Raises S3Refusal.
    """
    path, mark, query = raw.strip().partition(b"?")
    if mark:
        refuse_version(Query(query_fields(query)))
    bucket, slash, key = unquote_to_bytes(path).removeprefix(b"/").partition(b"/")
    if bucket.startswith(b"arn:"):
        raise S3Refusal(
            "NotImplemented", "A copy of an object behind an access point is not implemented by this cache"
        )
    if not slash or not key:
        raise S3Refusal(
            "InvalidArgument",
            "Copy Source must mention the source bucket and key: sourcebucket/sourcekey",
            (("ArgumentName", "x-amz-copy-source"), ("ArgumentValue", raw.decode("latin-1")[:200])),
        )
    return CopySource(bucket_name(bucket), object_key(key))


def checked_range(raw: bytes | None) -> tuple[int, int] | None:
    """What `x-amz-copy-source-range` says: first and last byte, both said. Raises S3Refusal."""
    if raw is None:
        return None
    found = _RANGE.fullmatch(raw.strip())
    if found is None or int(found[1]) > int(found[2]):
        raise S3Refusal(
            "InvalidArgument",
            "The x-amz-copy-source-range value must be of the form bytes=first-last where first and last are the"
            " zero-based offsets of the first and last bytes to copy",
        )
    return int(found[1]), int(found[2])


def attributes_wanted(headers: Mapping[bytes, bytes]) -> frozenset[str]:
    """What `x-amz-object-attributes` names. Raises S3Refusal."""
    said = headers.get(b"x-amz-object-attributes", b"").decode("latin-1")
    wanted = frozenset(name.strip() for name in said.split(","))
    if not wanted <= _ATTRIBUTES:
        more = ("ArgumentName", "x-amz-object-attributes"), ("ArgumentValue", said[:200])
        raise S3Refusal("InvalidArgument", "Invalid attribute name specified.", more)
    return wanted


def checksum_of_upload(headers: Mapping[bytes, bytes]) -> tuple[str, str]:
    """The algorithm and the type of an upload's checksum, in upper case; empty, if none is said. Raises S3Refusal."""
    algorithm = headers.get(b"x-amz-checksum-algorithm", b"").decode("latin-1").upper()
    kind = headers.get(b"x-amz-checksum-type", b"").decode("latin-1").upper()
    if not algorithm:
        if kind:
            raise S3Refusal(
                "InvalidRequest",
                "The x-amz-checksum-type header can only be used with the x-amz-checksum-algorithm header.",
            )
        return "", ""
    if algorithm not in _CHECKSUM_TYPES:
        raise S3Refusal(
            "InvalidRequest",
            "Checksum algorithm provided is unsupported. Please try again with any of the valid types: "
            f"[{', '.join(_CHECKSUM_TYPES)}]",
        )
    if kind and kind not in _CHECKSUM_TYPES[algorithm]:
        raise S3Refusal(
            "InvalidRequest",
            f"The {kind[:40]} checksum type cannot be used with the {algorithm.lower()} checksum algorithm.",
        )
    return algorithm, kind or _CHECKSUM_TYPES[algorithm][0]


def overrides_of(fields: Query) -> dict[str, str]:
    """What headers of the answer are to say instead (`response-content-type` …). Raises S3Refusal."""
    said = {name: fields.text(f"response-{name}") for name in _OVERRIDES if f"response-{name}" in fields}
    for name, value in said.items():
        if not value.isprintable():
            raise fields.wrong(f"response-{name}", "A header has no control characters")
    return said


def written_headers(headers: Mapping[bytes, bytes]) -> WrittenHeaders:
    """What is kept with an object that is written. Raises S3Refusal."""
    for name, what in _NOT_HERE.items():
        if name in headers:
            raise S3Refusal("NotImplemented", f"{what} ({name.decode()}) is not implemented by this cache")
    canned_acl(headers)
    storage_class = headers.get(b"x-amz-storage-class", b"STANDARD").decode("latin-1")
    if storage_class not in _STORAGE_CLASSES:
        raise S3Refusal(
            "InvalidStorageClass",
            "The storage class you specified is not valid",
            (("StorageClassRequested", storage_class[:100]),),
        )
    kept = {name.decode(): _ascii(headers[name]) for name in _KEPT if headers.get(name)}
    encodings = [one.strip() for one in kept.pop("content-encoding", "").split(",")]
    rest = ", ".join(one for one in encodings if one and one.lower() != "aws-chunked")
    if rest:
        kept["content-encoding"] = rest
    metadata = {
        name.removeprefix(_META).decode("latin-1"): _ascii(value)
        for name, value in headers.items()
        if name.startswith(_META)
    }
    size = sum(len(name) + len(value) for name, value in metadata.items())
    if size > METADATA_BYTES_MAX:
        more = ("Size", str(size)), ("MaxSizeAllowed", str(METADATA_BYTES_MAX))
        raise S3Refusal(
            "MetadataTooLarge", "Your metadata headers exceed the maximum allowed metadata size.", more
        )
    return WrittenHeaders(kept, metadata)


def canned_acl(headers: Mapping[bytes, bytes]) -> str:
    """The name of a list of rights; empty, if none is said. Raises S3Refusal."""
    said = headers.get(b"x-amz-acl", b"").decode("latin-1")
    if said and said not in _CANNED_ACLS:
        more = ("ArgumentName", "x-amz-acl"), ("ArgumentValue", said[:100])
        raise S3Refusal("InvalidArgument", f"{said[:100]!r} is no canned ACL", more)
    return said


def _ascii(value: bytes) -> str:
    """A header's value as ASCII; what goes beyond that is encoded as in a mail (RFC 2047), as S3 gives it back. Raises
    S3Refusal."""
    if value.isascii():
        text = value.decode()
        if text.isprintable() or text.replace("\t", "").isprintable():
            return text
        raise S3Refusal("InvalidArgument", f"A header has no control characters: {text[:100]!r}")
    try:
        text = value.decode()
    except UnicodeDecodeError:
        text = value.decode("latin-1")
    return f"=?UTF-8?B?{base64.b64encode(text.encode()).decode()}?="


def _bad_bucket(name: str) -> S3Refusal:
    return S3Refusal("InvalidBucketName", "The specified bucket is not valid.", (("BucketName", name[:100]),))


def _utf8(raw: bytes, code: str, why: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise S3Refusal(code, why) from error
