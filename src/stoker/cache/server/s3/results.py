"""The documents with which operations of the S3 dialect are answered, but for listings of objects. Pure.

Entity tags are given without quotes, times in seconds since 1970.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import quote

from stoker.cache.auth.checksums import PREFIX
from stoker.cache.auth.s3_refusal import S3Refusal
from stoker.cache.server.s3.headers import quoted_etag
from stoker.cache.server.s3.listing_xml import Owner, owner_element
from stoker.cache.server.s3.operation_types import (
    CreateMultipartUpload,
    GetBucketLocation,
    ListBuckets,
    ListParts,
    OfUpload,
)
from stoker.cache.server.s3.xml import NAMESPACE, XML, DeletedKey, document, element, escape
from stoker.wire.http_dates import format_iso_date


class StoredPart(NamedTuple):
    """A part that came; `checksums` by header, in base64."""

    number: int
    etag: str
    size_bytes: int
    modified_s: float
    checksums: Mapping[str, str] = {}


def buckets_document(
    operation: ListBuckets, buckets: Iterable[tuple[str, float]], owner: Owner, region: str
) -> bytes:
    """The answer to ListBuckets; `buckets`: names and when each was made, in the order of their names."""
    after = operation.continuation_token
    rest = [one for one in buckets if one[0].startswith(operation.prefix) and one[0] > after]
    page = rest[: operation.max_buckets]
    inner = "".join(
        f"<Bucket>{element('Name', name)}{element('CreationDate', format_iso_date(made_s))}"
        f"{element('BucketRegion', region)}</Bucket>"
        for name, made_s in page
    )
    return document(
        "ListAllMyBucketsResult",
        owner_element(owner),
        f"<Buckets>{inner}</Buckets>",
        *([element("ContinuationToken", page[-1][0])] if len(rest) > len(page) else []),
        *([element("Prefix", operation.prefix)] if operation.prefix else []),
    )


def location_document(operation: GetBucketLocation, region: str) -> bytes:
    """The answer to GetBucketLocation; `us-east-1` is said by saying nothing."""
    said = "" if region == "us-east-1" else escape(region)
    return f'{XML}<LocationConstraint xmlns="{NAMESPACE}">{said}</LocationConstraint>'.encode()


def versioning_document() -> bytes:
    """The answer to GetBucketVersioning: versions are not kept, and never were."""
    return document("VersioningConfiguration")


def copied_document(name: str, etag: str, modified_s: float, checksums: Mapping[str, str]) -> bytes:
    """The answer to CopyObject (`name`: CopyObjectResult) or UploadPartCopy (CopyPartResult)."""
    return document(
        name,
        element("LastModified", format_iso_date(modified_s)),
        element("ETag", quoted_etag(etag)),
        *_checksums(checksums),
    )


def deleted_document(
    deleted: Sequence[DeletedKey], failed: Sequence[tuple[DeletedKey, S3Refusal]], is_quiet: bool
) -> bytes:
    """The answer to DeleteObjects."""
    parts = [] if is_quiet else [f"<Deleted>{_name_of(one)}</Deleted>" for one in deleted]
    for one, why in failed:
        said = element("Code", why.code) + element("Message", str(why))
        parts.append(f"<Error>{_name_of(one)}{said}</Error>")
    return document("DeleteResult", *parts)


def created_document(operation: CreateMultipartUpload, upload_id: str) -> bytes:
    """The answer to CreateMultipartUpload."""
    return document(
        "InitiateMultipartUploadResult",
        element("Bucket", operation.bucket),
        element("Key", operation.key),
        element("UploadId", upload_id),
    )


def completed_document(operation: OfUpload, location: str, etag: str, checksums: Mapping[str, str]) -> bytes:
    """The answer to CompleteMultipartUpload; `location`: the object's URL."""
    return document(
        "CompleteMultipartUploadResult",
        element("Location", location),
        element("Bucket", operation.bucket),
        element("Key", operation.key),
        element("ETag", quoted_etag(etag)),
        *_checksums(checksums),
    )


def parts_document(operation: ListParts, parts: Iterable[StoredPart], owner: Owner) -> bytes:
    """The answer to ListParts; `parts`: all that came, in the order of their numbers."""
    rest = [part for part in parts if part.number > operation.part_number_marker]
    page = rest[: operation.max_parts]
    is_truncated = bool(page) and len(rest) > len(page)
    key = quote(operation.key, safe="/-_.~") if operation.is_url_encoded else operation.key
    listed = (
        f"<Part>{element('PartNumber', part.number)}{element('LastModified', format_iso_date(part.modified_s))}"
        f"{element('ETag', quoted_etag(part.etag))}{element('Size', part.size_bytes)}"
        f"{''.join(_checksums(part.checksums))}</Part>"
        for part in page
    )
    return document(
        "ListPartsResult",
        element("Bucket", operation.bucket),
        element("Key", key),
        element("UploadId", operation.upload_id),
        *([element("EncodingType", "url")] if operation.is_url_encoded else []),
        owner_element(owner, "Initiator"),
        owner_element(owner),
        element("StorageClass", "STANDARD"),
        element("PartNumberMarker", operation.part_number_marker),
        *([element("NextPartNumberMarker", page[-1].number)] if page else []),
        element("MaxParts", operation.max_parts),
        element("IsTruncated", is_truncated),
        *listed,
    )


def _name_of(one: DeletedKey) -> str:
    return element("Key", one.key) + (element("VersionId", one.version_id) if one.version_id else "")


def _checksums(checksums: Mapping[str, str]) -> list[str]:
    return [
        element(f"Checksum{name.removeprefix(PREFIX).upper()}", value) for name, value in checksums.items()
    ]
