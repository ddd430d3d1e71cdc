"""The documents with which operations of the S3 dialect are answered, but for listings of objects. Pure.

Entity tags are given without quotes, times in seconds since 1970.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from stoker.cache.auth.checksums import PREFIX
from stoker.cache.auth.s3_refusal import S3Refusal
from stoker.cache.server.s3.headers import quoted_etag
from stoker.cache.server.s3.listing import HIGHEST, entry_of
from stoker.cache.server.s3.listing_xml import Owner, encoded, owner_element
from stoker.cache.server.s3.operation_types import (
    CreateMultipartUpload,
    GetBucketLocation,
    ListBuckets,
    ListMultipartUploads,
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


class StoredUpload(NamedTuple):
    """An upload under way."""

    key: str
    upload_id: str
    begun_s: float


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
        *(
            element("ChecksumType", "COMPOSITE" if "-" in said else "FULL_OBJECT")
            for said in checksums.values()
        ),
    )


def parts_document(operation: ListParts, parts: Iterable[StoredPart], owner: Owner) -> bytes:
    """The answer to ListParts; `parts`: all that came, in the order of their numbers."""
    rest = [part for part in parts if part.number > operation.part_number_marker]
    page = rest[: operation.max_parts]
    is_truncated = bool(page) and len(rest) > len(page)
    key = encoded(operation.key) if operation.is_url_encoded else operation.key
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


def uploads_document(operation: ListMultipartUploads, uploads: Iterable[StoredUpload], owner: Owner) -> bytes:
    """The answer to ListMultipartUploads; `uploads`: all that are under way in the bucket, in any order."""
    # Without an upload's id all uploads of the marker's key are behind it.
    marker = operation.key_marker, operation.upload_id_marker or HIGHEST
    entries: dict[tuple[str, str], StoredUpload] = {}
    for upload in sorted(uploads):
        if upload.key.startswith(operation.prefix):
            entry = entry_of(upload.key, operation.prefix, operation.delimiter)
            is_prefix = bool(operation.delimiter) and entry.endswith(
                operation.delimiter, len(operation.prefix)
            )
            place = entry, "" if is_prefix else upload.upload_id
            if place > marker:
                entries.setdefault(place, upload)
    page = list(entries)[: operation.max_keys]
    is_truncated = bool(page) and len(entries) > len(page)
    encode = encoded if operation.is_url_encoded else str
    listed = (
        f"<Upload>{element('Key', encode(entry))}{element('UploadId', upload_id)}"
        f"{owner_element(owner, 'Initiator')}{owner_element(owner)}{element('StorageClass', 'STANDARD')}"
        f"{element('Initiated', format_iso_date(entries[entry, upload_id].begun_s))}</Upload>"
        for entry, upload_id in page
        if upload_id
    )
    prefixes = (element("Prefix", encode(entry)) for entry, upload_id in page if not upload_id)
    return document(
        "ListMultipartUploadsResult",
        element("Bucket", operation.bucket),
        element("KeyMarker", encode(operation.key_marker)),
        element("UploadIdMarker", operation.upload_id_marker),
        element("NextKeyMarker", encode(page[-1][0]) if is_truncated else ""),
        element("NextUploadIdMarker", page[-1][1] if is_truncated else ""),
        element("Prefix", encode(operation.prefix)),
        *([element("Delimiter", encode(operation.delimiter))] if operation.delimiter else []),
        *([element("EncodingType", "url")] if operation.is_url_encoded else []),
        element("MaxUploads", operation.max_keys),
        element("IsTruncated", is_truncated),
        *listed,
        *(f"<CommonPrefixes>{prefix}</CommonPrefixes>" for prefix in prefixes),
    )


def _name_of(one: DeletedKey) -> str:
    return element("Key", one.key) + (element("VersionId", one.version_id) if one.version_id else "")


def _checksums(checksums: Mapping[str, str]) -> list[str]:
    return [
        element(f"Checksum{name.removeprefix(PREFIX).upper()}", value) for name, value in checksums.items()
    ]
