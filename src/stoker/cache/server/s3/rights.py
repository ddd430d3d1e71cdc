"""What each operation takes. Pure. What is not in this table nobody may do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from stoker.cache.auth.principals import Principal
from stoker.cache.auth.rules import DELETE, LIST, READ, WRITE
from stoker.cache.auth.s3_refusal import S3Refusal
from stoker.cache.server.s3 import operation_types as ops

_SOME = "some"
"""In place of a verb: anything there."""
_EVERYTHING = "everything"


class Need(NamedTuple):
    """A verb with a key, or all keys below a prefix. `is_some`: with any of the bucket is enough, for now."""

    verb: str
    bucket: str
    key: str = ""
    is_some: bool = False


def _of_key(verb: str) -> Callable[[ops.Operation], list[Need]]:
    return lambda operation: [Need(verb, operation.bucket, operation.key)]


def _list(operation: ops.Operation) -> list[Need]:
    assert isinstance(operation, ops.Listing)
    return [Need(LIST, operation.bucket, operation.prefix)]


def _copy(operation: ops.Operation) -> list[Need]:
    assert isinstance(operation, ops.CopyObject | ops.UploadPartCopy)
    source = operation.source
    return [Need(WRITE, operation.bucket, operation.key), Need(READ, source.bucket, source.key)]


_NEEDS: Mapping[type[ops.Operation], Callable[[ops.Operation], list[Need]]] = {
    ops.ListBuckets: lambda _: [],  # it shows those of which one knows
    ops.HeadBucket: _of_key(_SOME),
    ops.GetBucketLocation: _of_key(_SOME),
    ops.GetBucketVersioning: _of_key(_SOME),
    ops.GetBucketSetting: _of_key(_SOME),
    ops.PutBucketAcl: _of_key(_EVERYTHING),
    ops.GetObjectSetting: _of_key(READ),
    ops.GetObjectAttributes: _of_key(READ),
    ops.PutObjectAcl: _of_key(WRITE),
    ops.CreateBucket: _of_key(_EVERYTHING),
    ops.DeleteBucket: _of_key(_EVERYTHING),
    ops.ListObjects: _list,
    ops.ListObjectsV2: _list,
    ops.ListObjectVersions: _list,
    ops.ListMultipartUploads: _list,
    ops.GetObject: _of_key(READ),
    ops.HeadObject: _of_key(READ),
    ops.PutObject: _of_key(WRITE),
    ops.CopyObject: _copy,
    ops.DeleteObject: _of_key(DELETE),
    ops.DeleteObjects: lambda operation: [
        Need(DELETE, operation.bucket, is_some=True)
    ],  # each key is looked at
    ops.CreateMultipartUpload: _of_key(WRITE),
    ops.UploadPart: _of_key(WRITE),
    ops.UploadPartCopy: _copy,
    ops.CompleteMultipartUpload: _of_key(WRITE),
    ops.AbortMultipartUpload: _of_key(WRITE),
    ops.ListParts: _of_key(WRITE),
}


def check_allowed(principal: Principal, operation: ops.Operation) -> None:
    """Raises S3Refusal: who knows nothing of a bucket is not told whether it is there."""
    needs = _NEEDS.get(type(operation))
    if needs is None:
        raise S3Refusal("AccessDenied", f"Access Denied: nobody may {operation.name} here")
    for need in needs(operation):
        if not _has(principal, need):
            what = f"{need.verb} {need.key!r} in" if need.key else f"{need.verb}, in"
            raise S3Refusal(
                "AccessDenied",
                f"Access Denied: {principal.name} may not {operation.name}, which takes the right to {what} the bucket "
                f"{need.bucket!r}",
            )


def _has(principal: Principal, need: Need) -> bool:
    if need.verb == _EVERYTHING:
        return principal.is_unrestricted
    if need.verb == _SOME:
        return principal.knows(need.bucket)
    if need.is_some:
        return principal.rules.allow_some(need.verb, need.bucket)
    return principal.rules.allow(need.verb, need.bucket, need.key)
