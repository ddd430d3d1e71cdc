"""Settings of buckets and objects that a cache has not: what S3 says of them by default. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from stoker.cache.auth.s3_refusal import S3Refusal
from stoker.cache.server.s3.errors import not_implemented
from stoker.cache.server.s3.listing_xml import Owner, owner_element
from stoker.cache.server.s3.xml import document, element

ACL = "acl"
_NOT_SET: Mapping[str, tuple[str, str]] = {
    "cors": ("NoSuchCORSConfiguration", "The CORS configuration does not exist"),
    "encryption": (
        "ServerSideEncryptionConfigurationNotFoundError",
        "The server side encryption configuration was not found",
    ),
    "lifecycle": ("NoSuchLifecycleConfiguration", "The lifecycle configuration does not exist"),
    "object-lock": (
        "ObjectLockConfigurationNotFoundError",
        "Object Lock configuration does not exist for this bucket",
    ),
    "ownershipControls": ("OwnershipControlsNotFoundError", "The bucket ownership controls were not found"),
    "policy": ("NoSuchBucketPolicy", "The bucket policy does not exist"),
    "policyStatus": ("NoSuchBucketPolicy", "The bucket policy does not exist"),
    "publicAccessBlock": (
        "NoSuchPublicAccessBlockConfiguration",
        "The public access block configuration was not found",
    ),
    "replication": (
        "ReplicationConfigurationNotFoundError",
        "The replication configuration was not found",
    ),
    "tagging": ("NoSuchTagSet", "The TagSet does not exist"),
    "website": (
        "NoSuchWebsiteConfiguration",
        "The specified bucket does not have a website configuration",
    ),
}
_DEFAULTS: Mapping[str, bytes] = {
    "accelerate": document("AccelerateConfiguration"),
    "logging": document("BucketLoggingStatus"),
    "notification": document("NotificationConfiguration"),
    "requestPayment": document("RequestPaymentConfiguration", element("Payer", "BucketOwner")),
}
_LOCK = "Bucket is missing Object Lock Configuration"
BUCKET_SETTINGS = (ACL, *_NOT_SET, *_DEFAULTS)
OBJECT_SETTINGS = (ACL, "tagging", "legal-hold", "retention")
"""The fields of queries that name them."""
_PRIVATE = ("private", "bucket-owner-read", "bucket-owner-full-control")
"""Canned lists by which nobody else gets a right."""


def bucket_setting(setting: str, owner: Owner) -> bytes:
    """What is said of one of BUCKET_SETTINGS. Raises S3Refusal: it was never set."""
    if setting == ACL:
        return _acl(owner)
    if setting in _NOT_SET:
        raise S3Refusal(*_NOT_SET[setting])
    return _DEFAULTS[setting]


def object_setting(setting: str, owner: Owner) -> bytes:
    """What is said of one of OBJECT_SETTINGS. Raises S3Refusal: there can be none."""
    if setting == ACL:
        return _acl(owner)
    if setting == "tagging":
        return document("Tagging", "<TagSet></TagSet>")
    raise S3Refusal("InvalidRequest", _LOCK)


def check_acl_as_it_is(canned: str) -> None:
    """Raises S3Refusal unless a list of rights says what holds anyway."""
    if canned not in _PRIVATE:
        raise not_implemented(
            "Giving rights by access control lists (who may do what, the server's settings say)"
        )


def _acl(owner: Owner) -> bytes:
    grantee = (
        '<Grantee xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance" xsi:type="CanonicalUser">'
        f"{element('ID', owner.id)}{element('DisplayName', owner.name)}</Grantee>"
    )
    grant = f"<Grant>{grantee}{element('Permission', 'FULL_CONTROL')}</Grant>"
    return document(
        "AccessControlPolicy", owner_element(owner), f"<AccessControlList>{grant}</AccessControlList>"
    )
