"""The documents of S3's listings of objects. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import quote

from stoker.cache.server.s3.headers import quoted_etag
from stoker.cache.server.s3.listing import Page, token_of
from stoker.cache.server.s3.operation_types import Listing, ListObjects, ListObjectsV2, ListObjectVersions
from stoker.cache.server.s3.xml import document, element, escape
from stoker.wire.cache_api import ObjectInfo
from stoker.wire.http_dates import format_iso_date


class Described(NamedTuple):
    """What a listing says of an object beside its key and size: its entity tag, without quotes, and when it was
    modified, in seconds since 1970."""

    etag: str
    modified_s: float = 0.0


class Owner(NamedTuple):
    """Whose all objects are said to be."""

    id: str
    name: str


Describe = Callable[[ObjectInfo], Described]


def list_document(operation: Listing, page: Page, describe: Describe, owner: Owner) -> bytes:
    """The answer to ListObjects, ListObjectsV2 or ListObjectVersions."""
    encode = encoded if operation.is_url_encoded else str
    said = owner_element(owner)
    if isinstance(operation, ListObjects):
        name, own = "ListBucketResult", _own_v1(operation, page, encode)
    elif isinstance(operation, ListObjectsV2):
        name, own = "ListBucketResult", _own_v2(operation, page, encode)
        said = said if operation.fetch_owner else ""
    else:
        assert isinstance(operation, ListObjectVersions)
        name, own = "ListVersionsResult", _own_versions(operation, page, encode)
    is_versions = name == "ListVersionsResult"
    # Version 1 gives it back as it was asked for: botocore does not decode it there.
    prefix = operation.prefix if isinstance(operation, ListObjects) else encode(operation.prefix)
    return document(
        name,
        element("Name", operation.bucket),
        element("Prefix", prefix),
        *own,
        element("MaxKeys", operation.max_keys),
        *([element("Delimiter", encode(operation.delimiter))] if operation.delimiter else []),
        *([element("EncodingType", "url")] if operation.is_url_encoded else []),
        element("IsTruncated", page.is_truncated),
        *_objects(page, describe, encode, said, is_versions),
        *(
            f"<CommonPrefixes>{element('Prefix', encode(one))}</CommonPrefixes>"
            for one in page.common_prefixes
        ),
    )


def _own_v1(operation: ListObjects, page: Page, encode: Callable[[str], str]) -> list[str]:
    parts = [element("Marker", encode(operation.marker))]
    if page.is_truncated and operation.delimiter:
        # Without a delimiter it is the last key, which is there.
        parts.append(element("NextMarker", encode(page.last)))
    return parts


def _own_v2(operation: ListObjectsV2, page: Page, encode: Callable[[str], str]) -> list[str]:
    parts = []
    if operation.start_after:
        parts.append(element("StartAfter", encode(operation.start_after)))
    if operation.continuation_token is not None:
        parts.append(element("ContinuationToken", operation.continuation_token))
    if page.is_truncated:
        parts.append(element("NextContinuationToken", token_of(operation, page.last)))
    parts.append(element("KeyCount", len(page.objects) + len(page.common_prefixes)))
    return parts


def _own_versions(operation: ListObjectVersions, page: Page, encode: Callable[[str], str]) -> list[str]:
    parts = [
        element("KeyMarker", encode(operation.key_marker)),
        element("VersionIdMarker", operation.version_id_marker),
    ]
    if page.is_truncated:
        parts.append(element("NextKeyMarker", encode(page.last)))
        if not page.last_is_prefix:
            parts.append(element("NextVersionIdMarker", "null"))
    return parts


def _objects(
    page: Page, describe: Describe, encode: Callable[[str], str], owner: str, is_version: bool
) -> list[str]:
    """There may be thousands: what is the same of all is made once."""
    version = element("VersionId", "null") + element("IsLatest", True) if is_version else ""
    name = "Version" if is_version else "Contents"
    begin, modified = f"<{name}><Key>", f"</Key>{version}<LastModified>"
    end = f"</Size>{owner}{element('StorageClass', 'STANDARD')}</{name}>"
    said = []
    for info in page.objects:
        etag, modified_s = describe(info)
        said.append(
            f"{begin}{escape(encode(info.key))}{modified}{format_iso_date(modified_s)}</LastModified>"
            f"<ETag>&quot;{escape(quoted_etag(etag)[1:-1])}&quot;</ETag><Size>{info.size_bytes}{end}"
        )
    return said


def owner_element(owner: Owner, name: str = "Owner") -> str:
    """Whose it is."""
    return f"<{name}>{element('ID', owner.id)}{element('DisplayName', owner.name)}</{name}>"


def encoded(text: str) -> str:
    """A name percent-encoded, as `encoding-type=url` asks for it."""
    return quote(text, safe="/-_.~")
