"""What a request of the S3 dialect asks for: by its method, target and headers. Pure.

https://docs.aws.amazon.com/AmazonS3/latest/API/API_Operations_Amazon_Simple_Storage_Service.html
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import unquote_to_bytes

from stoker.cache.auth.s3_refusal import S3Refusal
from stoker.cache.auth.sigv4_canonical import Head
from stoker.cache.server.s3 import operation_types as ops
from stoker.cache.server.s3.errors import method_not_allowed, not_implemented
from stoker.cache.server.s3.headers import conditions_of
from stoker.cache.server.s3.operation_fields import (
    Query,
    attributes_wanted,
    bucket_name,
    canned_acl,
    checked_range,
    checksum_of_upload,
    copy_source,
    new_bucket_name,
    object_key,
    overrides_of,
    refuse_version,
    written_headers,
)
from stoker.cache.server.s3.settings import ACL, BUCKET_SETTINGS, OBJECT_SETTINGS
from stoker.cache.server.s3.xml import part_number

_SOURCE = "x-amz-copy-source"
_OF_BUCKETS = (
    *BUCKET_SETTINGS,
    "abac", "analytics", "intelligent-tiering", "inventory", "metadataConfiguration", "metadataInventoryTable",
    "metadataJournalTable", "metadataTable", "metrics", "session",
)  # fmt: skip
_OF_OBJECTS = (*OBJECT_SETTINGS, "attributes", "renameObject", "restore", "select", "torrent")
"""Fields of queries that stand for operations which a cache has not."""


def operation_of(head: Head, domains: Sequence[str] = ()) -> ops.Operation:
    """What is asked for. `domains`: below which a host's first labels are a bucket's name (`BUCKET.DOMAIN`), in lower
    case; else the bucket is the path's first part. Raises S3Refusal."""
    path = head.target.partition(b"?")[0]
    if not path.startswith(b"/"):
        raise S3Refusal("InvalidURI", "Couldn't parse the specified URI.")
    fields = Query(head.fields)
    bucket = _bucket_of_host(head.headers.get(b"host", b""), domains)
    rest = path[1:]
    if bucket is None:
        first, _, rest = rest.partition(b"/")
        bucket = unquote_to_bytes(first)
    if not bucket:
        return _of_service(head.method, fields)
    if not rest:
        return _of_bucket(head, fields, bucket_name(bucket))
    key = object_key(unquote_to_bytes(rest))
    name = bucket_name(bucket)
    about = _about_object(head, fields, name, key)
    if about is not None:
        return about
    _refuse_unknown(fields, _OF_OBJECTS)
    if head.method in ("GET", "HEAD"):
        return _read(head, fields, name, key)
    fields.refuse_others("uploads", "uploadId", "partNumber", "versionId")
    if head.method == "PUT":
        return _put(head.headers, fields, name, key)
    if head.method == "POST":
        return _post(head.headers, fields, name, key)
    if head.method == "DELETE":
        return _delete(head.headers, fields, name, key)
    raise method_not_allowed(head.method, "GET, HEAD, PUT, POST or DELETE")


def _bucket_of_host(host: bytes, domains: Sequence[str]) -> bytes | None:
    name = host.decode("latin-1").lower()
    port = name.rpartition(":")
    if port[1] and (port[2].isdigit() or not port[2]):
        name = port[0]
    for domain in domains:
        if name.endswith(f".{domain}") and len(name) > len(domain) + 1:
            return name[: -len(domain) - 1].encode("latin-1")
    return None


def _refuse_unknown(fields: Query, names: Sequence[str]) -> None:
    for name in names:
        if name in fields:
            raise not_implemented(f"?{name}")


def _of_service(method: str, fields: Query) -> ops.Operation:
    if method != "GET":
        raise method_not_allowed(method, "GET")
    return ops.ListBuckets(
        prefix=fields.text("prefix"),
        continuation_token=fields.text("continuation-token"),
        max_buckets=fields.number("max-buckets", 10_000, 1, 10_000),
    )


def _about_object(head: Head, fields: Query, bucket: str, key: str) -> ops.Operation | None:
    """What is asked of it besides its content; None: something else."""
    if head.method == "GET":
        for setting in OBJECT_SETTINGS:
            if setting in fields:
                refuse_version(fields)
                return ops.GetObjectSetting(bucket=bucket, key=key, setting=setting)
        if "attributes" in fields:
            refuse_version(fields)
            wanted = attributes_wanted(head.headers)
            return ops.GetObjectAttributes(bucket=bucket, key=key, wanted=wanted)
    if head.method == "PUT" and ACL in fields:
        return ops.PutObjectAcl(bucket=bucket, key=key, canned=canned_acl(head.headers))
    return None


def _of_bucket(head: Head, fields: Query, bucket: str) -> ops.Operation:
    method = head.method
    if method == "GET":
        for setting in BUCKET_SETTINGS:
            if setting in fields:
                return ops.GetBucketSetting(bucket=bucket, setting=setting)
    if method == "PUT" and ACL in fields:
        return ops.PutBucketAcl(bucket=bucket, canned=canned_acl(head.headers))
    _refuse_unknown(fields, _OF_BUCKETS)
    if method == "GET":
        return _get_bucket(fields, bucket)
    if method == "HEAD":
        return ops.HeadBucket(bucket=bucket)
    fields.refuse_others("delete" if method == "POST" else "")
    if method == "PUT":
        canned_acl(head.headers)
        if head.headers.get(b"x-amz-bucket-object-lock-enabled", b"").lower() == b"true":
            raise not_implemented("Object lock")
        return ops.CreateBucket(bucket=new_bucket_name(bucket))
    if method == "DELETE":
        return ops.DeleteBucket(bucket=bucket)
    if method == "POST" and "delete" in fields:
        return ops.DeleteObjects(bucket=bucket)
    if method == "POST":
        raise not_implemented("An upload by an HTML form (POST Object)")
    raise method_not_allowed(method, "GET, HEAD, PUT, POST or DELETE")


def _get_bucket(fields: Query, bucket: str) -> ops.Operation:
    if "location" in fields:
        return ops.GetBucketLocation(bucket=bucket)
    if "versioning" in fields:
        return ops.GetBucketVersioning(bucket=bucket)
    prefix, delimiter, is_url_encoded = (
        fields.text("prefix"),
        fields.text("delimiter"),
        fields.is_url_encoded(),
    )
    if "uploads" in fields:
        return ops.ListMultipartUploads(
            bucket=bucket,
            prefix=prefix,
            delimiter=delimiter,
            is_url_encoded=is_url_encoded,
            max_keys=fields.limit("max-uploads"),
            key_marker=fields.text("key-marker"),
            upload_id_marker=fields.text("upload-id-marker"),
        )
    max_keys = fields.limit("max-keys")
    if "versions" in fields:
        if fields.text("version-id-marker") and not fields.text("key-marker"):
            raise fields.wrong(
                "version-id-marker", "A version-id marker cannot be specified without a key marker."
            )
        return ops.ListObjectVersions(
            bucket=bucket,
            prefix=prefix,
            delimiter=delimiter,
            is_url_encoded=is_url_encoded,
            max_keys=max_keys,
            key_marker=fields.text("key-marker"),
            version_id_marker=fields.text("version-id-marker"),
        )
    kind = fields.text("list-type")
    if kind == "2":
        token = fields.text("continuation-token") if "continuation-token" in fields else None
        return ops.ListObjectsV2(
            bucket=bucket,
            prefix=prefix,
            delimiter=delimiter,
            is_url_encoded=is_url_encoded,
            max_keys=max_keys,
            start_after=fields.text("start-after"),
            continuation_token=token,
            fetch_owner=fields.text("fetch-owner").lower() == "true",
        )
    if kind not in ("", "1"):
        raise fields.wrong("list-type", "Invalid List Type specified in Request")
    return ops.ListObjects(
        bucket=bucket,
        prefix=prefix,
        delimiter=delimiter,
        is_url_encoded=is_url_encoded,
        max_keys=max_keys,
        marker=fields.text("marker"),
    )


def _read(head: Head, fields: Query, bucket: str, key: str) -> ops.Operation:
    if head.method == "GET" and "uploadId" in fields:
        return ops.ListParts(
            bucket=bucket,
            key=key,
            upload_id=fields.needed("uploadId"),
            max_parts=fields.limit("max-parts"),
            part_number_marker=fields.number("part-number-marker", 0, 0, 1 << 31),
            is_url_encoded=fields.is_url_encoded(),
        )
    refuse_version(fields)
    headers = head.headers
    said = {name.decode(): value.decode("latin-1") for name, value in headers.items() if name == b"range"}
    number = part_number(fields.text("partNumber")) if "partNumber" in fields else 0
    if number and said:
        raise S3Refusal("InvalidRequest", "Cannot specify both Range header and partNumber query parameter")
    kind = ops.GetObject if head.method == "GET" else ops.HeadObject
    return kind(
        bucket=bucket,
        key=key,
        range=said.get("range", ""),
        part_number=number,
        conditions=conditions_of(headers),
        overrides=overrides_of(fields),
        is_checksum_wanted=headers.get(b"x-amz-checksum-mode", b"").upper() == b"ENABLED",
    )


def _put(headers: Mapping[bytes, bytes], fields: Query, bucket: str, key: str) -> ops.Operation:
    source = headers.get(_SOURCE.encode())
    is_part = "uploadId" in fields or "partNumber" in fields
    if is_part and source is None:
        number = part_number(fields.needed("partNumber"))
        return ops.UploadPart(bucket=bucket, key=key, upload_id=fields.needed("uploadId"), part_number=number)
    if is_part and source is not None:
        return ops.UploadPartCopy(
            bucket=bucket,
            key=key,
            upload_id=fields.needed("uploadId"),
            part_number=part_number(fields.needed("partNumber")),
            source=copy_source(source),
            source_range=checked_range(headers.get(b"x-amz-copy-source-range")),
            source_conditions=conditions_of(headers, f"{_SOURCE}-"),
        )
    written = written_headers(headers)
    if source is None:
        return ops.PutObject(bucket=bucket, key=key, written=written, conditions=conditions_of(headers))
    directive = headers.get(b"x-amz-metadata-directive", b"COPY").upper()
    if directive not in (b"COPY", b"REPLACE"):
        raise S3Refusal("InvalidArgument", "Unknown metadata directive.")
    copied = copy_source(source)
    if copied == (bucket, key) and directive == b"COPY":
        raise S3Refusal(
            "InvalidRequest",
            "This copy request is illegal because it is trying to copy an object to itself without changing the"
            " object's metadata, storage class, website redirect location or encryption attributes.",
        )
    return ops.CopyObject(
        bucket=bucket,
        key=key,
        source=copied,
        written=written,
        is_replacing=directive == b"REPLACE",
        source_conditions=conditions_of(headers, f"{_SOURCE}-"),
        conditions=conditions_of(headers),
    )


def _post(headers: Mapping[bytes, bytes], fields: Query, bucket: str, key: str) -> ops.Operation:
    if "uploads" in fields:
        algorithm, kind = checksum_of_upload(headers)
        return ops.CreateMultipartUpload(
            bucket=bucket,
            key=key,
            written=written_headers(headers),
            checksum=algorithm,
            checksum_type=kind,
        )
    if "uploadId" in fields:
        return ops.CompleteMultipartUpload(
            bucket=bucket, key=key, upload_id=fields.needed("uploadId"), conditions=conditions_of(headers)
        )
    raise method_not_allowed("POST", "PUT, or POST with ?uploads or ?uploadId")


def _delete(headers: Mapping[bytes, bytes], fields: Query, bucket: str, key: str) -> ops.Operation:
    if "uploadId" in fields:
        return ops.AbortMultipartUpload(bucket=bucket, key=key, upload_id=fields.needed("uploadId"))
    refuse_version(fields)
    return ops.DeleteObject(bucket=bucket, key=key, conditions=conditions_of(headers))
