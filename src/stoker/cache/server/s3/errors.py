"""S3's error codes: their statuses, and their XML. Pure.

https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from stoker import errors
from stoker.cache.auth.s3_refusal import S3Refusal
from stoker.cache.server.s3.xml import XML, element

STATUSES: Mapping[str, int] = {
    "AccessDenied": 403, "AuthorizationHeaderMalformed": 400, "AuthorizationQueryParametersError": 400,
    "BadDigest": 400, "BucketAlreadyExists": 409, "BucketAlreadyOwnedByYou": 409, "BucketNotEmpty": 409,
    "EntityTooLarge": 400, "EntityTooSmall": 400, "ExpiredToken": 400, "IllegalLocationConstraintException": 400,
    "IncompleteBody": 400, "InternalError": 500, "InvalidAccessKeyId": 403, "InvalidArgument": 400,
    "InvalidBucketName": 400, "InvalidChunkSizeError": 403, "InvalidDigest": 400, "InvalidPart": 400,
    "InvalidPartNumber": 416, "InvalidPartOrder": 400, "InvalidRange": 416, "InvalidRequest": 400,
    "InvalidStorageClass": 400, "InvalidTag": 400, "InvalidToken": 400, "InvalidURI": 400, "KeyTooLongError": 400,
    "MalformedTrailerError": 400, "MalformedXML": 400, "MaxMessageLengthExceeded": 400, "MetadataTooLarge": 400,
    "MethodNotAllowed": 405, "MissingContentLength": 411, "MissingRequestBodyError": 400,
    "MissingSecurityHeader": 400, "NoSuchBucket": 404, "NoSuchKey": 404, "NoSuchUpload": 404, "NoSuchVersion": 404,
    "NoSuchBucketPolicy": 404, "NoSuchCORSConfiguration": 404, "NoSuchLifecycleConfiguration": 404,
    "NoSuchPublicAccessBlockConfiguration": 404, "NoSuchTagSet": 404, "NoSuchWebsiteConfiguration": 404,
    "NotImplemented": 501, "ObjectLockConfigurationNotFoundError": 404, "OperationAborted": 409,
    "OwnershipControlsNotFoundError": 404, "ReplicationConfigurationNotFoundError": 404,
    "ServerSideEncryptionConfigurationNotFoundError": 404, "PreconditionFailed": 412, "RequestTimeTooSkewed": 403,
    "RequestTimeout": 400, "ServiceUnavailable": 503, "SignatureDoesNotMatch": 403, "SlowDown": 503,
    "XAmzContentSHA256Mismatch": 400,
}  # fmt: skip

_OF_ERRORS: tuple[tuple[type[errors.StokerError], str], ...] = (
    # The first that fits; those further down are bases of those further up.
    (errors.AccessDenied, "AccessDenied"),
    (errors.ObjectNotFound, "NoSuchKey"),
    (errors.ObjectChanged, "PreconditionFailed"),
    (errors.WriteDenied, "AccessDenied"),
    (errors.OriginReadOnly, "AccessDenied"),
    (errors.BadKey, "InvalidArgument"),
    (errors.ObjectTooLarge, "EntityTooLarge"),
    (errors.WrongBodyLength, "IncompleteBody"),
    (errors.NoSuchUpload, "NoSuchUpload"),
    (errors.WriteRefused, "ServiceUnavailable"),
    (errors.AnotherOrigin, "OperationAborted"),
    (errors.OriginError, "ServiceUnavailable"),
    (errors.CacheUnavailable, "ServiceUnavailable"),
    (errors.ConfigError, "InvalidRequest"),
    (errors.WireError, "InvalidRequest"),
    (errors.EnvironmentProblem, "ServiceUnavailable"),
    (errors.StokerError, "InternalError"),
)


class ErrorAnswer(NamedTuple):
    """How a request is refused. To a HEAD only the status and headers are sent."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


def error_answer(refusal: S3Refusal, resource: str, request_id: str, host_id: str) -> ErrorAnswer:
    """The answer to a request for that resource (its path as it was asked for)."""
    parts = [
        element("Code", refusal.code),
        element("Message", str(refusal)),
        *(element(name, text) for name, text in refusal.more),
        element("Resource", resource),
        element("RequestId", request_id),
        element("HostId", host_id),
    ]
    body = f"{XML}<Error>{''.join(parts)}</Error>".encode()
    headers = [("Content-Type", "application/xml"), *answer_headers(request_id, host_id)]
    if refusal.code == "InvalidRange" and (size := dict(refusal.more).get("ActualObjectSize")):
        headers.append(("Content-Range", f"bytes */{size}"))
    return ErrorAnswer(STATUSES[refusal.code], headers, body)


def answer_headers(request_id: str, host_id: str) -> list[tuple[str, str]]:
    """What each answer of the dialect has."""
    return [("x-amz-request-id", request_id), ("x-amz-id-2", host_id)]


def refusal_of(error: errors.StokerError) -> S3Refusal:
    """What an error of the rest of Stoker is in this dialect."""
    if isinstance(error, S3Refusal):
        return error
    if isinstance(error, errors.BadParts) and error.code in STATUSES:
        return S3Refusal(error.code, str(error))
    code = next(code for kind, code in _OF_ERRORS if isinstance(error, kind))
    return S3Refusal(code, str(error))


def no_such_bucket(name: str) -> S3Refusal:
    """The refusal for a bucket that there is not."""
    return S3Refusal("NoSuchBucket", "The specified bucket does not exist", (("BucketName", name),))


def no_such_key(key: str) -> S3Refusal:
    """The refusal for an object that there is not."""
    return S3Refusal("NoSuchKey", "The specified key does not exist.", (("Key", key),))


def no_such_upload(upload_id: str) -> S3Refusal:
    """The refusal for an upload that is not under way."""
    why = "The specified upload does not exist. The upload ID may be invalid, or it was aborted or completed."
    return S3Refusal("NoSuchUpload", why, (("UploadId", upload_id),))


def method_not_allowed(method: str, allowed: str) -> S3Refusal:
    """The refusal for a method that is not for such a resource."""
    why = f"The specified method is not allowed against this resource: use {allowed}"
    return S3Refusal("MethodNotAllowed", why, (("Method", method), ("ResourceType", "OBJECT")))


def not_implemented(what: str) -> S3Refusal:
    """The refusal for what this server has not."""
    return S3Refusal("NotImplemented", f"{what} is not implemented by this cache")
