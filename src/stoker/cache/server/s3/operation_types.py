"""What a request of the S3 dialect can ask for. Pure.

Numbers and names are checked already; whether the bucket or object is there, and who may do it, is for others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from stoker.cache.server.s3.headers import Conditions

LIST_MAX = 1000
"""So many keys or parts at most in one page, however many are asked for."""


class CopySource(NamedTuple):
    """The object that a copy is made of."""

    bucket: str
    key: str


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """Any of the operations. `bucket` is empty for those on all of them, `key` for those on a bucket."""

    bucket: str = ""
    key: str = ""

    @property
    def name(self) -> str:
        """As S3 calls it."""
        return type(self).__name__


class ListBuckets(Operation, frozen=True, kw_only=True):
    """All buckets that the asker may see."""

    prefix: str = ""
    continuation_token: str = ""
    max_buckets: int = 10_000


class HeadBucket(Operation, frozen=True, kw_only=True):
    """Whether it is there."""


class GetBucketLocation(Operation, frozen=True, kw_only=True):
    """Its region."""


class GetBucketVersioning(Operation, frozen=True, kw_only=True):
    """Whether it keeps versions."""


class GetSetting(Operation, frozen=True, kw_only=True):
    """A setting that is here as it is by default: `setting` is the field of the query that names it."""

    setting: str


class GetBucketSetting(GetSetting, frozen=True, kw_only=True):
    """Of a bucket."""


class GetObjectSetting(GetSetting, frozen=True, kw_only=True):
    """Of an object."""


class PutAcl(Operation, frozen=True, kw_only=True):
    """Who may do what. `canned`: the name of a list that S3 has ready; empty, if it is said in another way."""

    canned: str


class PutBucketAcl(PutAcl, frozen=True, kw_only=True):
    """With a bucket."""


class PutObjectAcl(PutAcl, frozen=True, kw_only=True):
    """With an object."""


class GetObjectAttributes(Operation, frozen=True, kw_only=True):
    """`wanted`: the names of those that are to be told."""

    wanted: frozenset[str]


class CreateBucket(Operation, frozen=True, kw_only=True):
    """Has perhaps a body: `xml.read_location`."""


class DeleteBucket(Operation, frozen=True, kw_only=True):
    """Give it up."""


class Listing(Operation, frozen=True, kw_only=True):
    """What the listings of objects have in common. `max_keys` is at most LIST_MAX."""

    prefix: str = ""
    delimiter: str = ""
    max_keys: int = LIST_MAX
    is_url_encoded: bool = False


class ListObjects(Listing, frozen=True, kw_only=True):
    """Version 1."""

    marker: str = ""


class ListObjectsV2(Listing, frozen=True, kw_only=True):
    """Version 2. `continuation_token` None, or empty: this is the first page."""

    start_after: str = ""
    continuation_token: str | None = None
    fetch_owner: bool = False


class ListObjectVersions(Listing, frozen=True, kw_only=True):
    """Of each object there is one version, `null`."""

    key_marker: str = ""
    version_id_marker: str = ""


class ListMultipartUploads(Listing, frozen=True, kw_only=True):
    """Uploads under way; `max_keys` is `max-uploads`."""

    key_marker: str = ""
    upload_id_marker: str = ""


class ReadObject(Operation, frozen=True, kw_only=True):
    """`range`: the header as it came; `overrides`: what headers of the answer are to say instead, by their names.
    `part_number` 0: no part is asked for."""

    range: str = ""
    part_number: int = 0
    conditions: Conditions = Conditions()
    overrides: Mapping[str, str] = {}
    is_checksum_wanted: bool = False


class GetObject(ReadObject, frozen=True, kw_only=True):
    """The object or a part of it."""


class HeadObject(ReadObject, frozen=True, kw_only=True):
    """Only what is known of it."""


class WrittenHeaders(NamedTuple):
    """What is kept with an object: headers as they are (names in lower case, `aws-chunked` taken out of the encoding),
    and `x-amz-meta-…` without that prefix."""

    headers: Mapping[str, str]
    metadata: Mapping[str, str]


class PutObject(Operation, frozen=True, kw_only=True):
    """The body is the object: `auth.sigv4_body`."""

    written: WrittenHeaders
    conditions: Conditions = Conditions()


class CopyObject(Operation, frozen=True, kw_only=True):
    """`written` counts if `is_replacing`, else what is kept with the source is kept with the copy too."""

    source: CopySource
    written: WrittenHeaders
    is_replacing: bool = False
    source_conditions: Conditions = Conditions()
    conditions: Conditions = Conditions()


class DeleteObject(Operation, frozen=True, kw_only=True):
    """One of them."""

    conditions: Conditions = Conditions()


class DeleteObjects(Operation, frozen=True, kw_only=True):
    """Has a body: `xml.read_delete`."""


class CreateMultipartUpload(Operation, frozen=True, kw_only=True):
    """Begin an upload in parts. `checksum`: the algorithm, in upper case; empty, if none is said. `checksum_type`:
    `COMPOSITE` (of the parts' checksums) or `FULL_OBJECT`; empty, if there is no algorithm."""

    written: WrittenHeaders
    checksum: str = ""
    checksum_type: str = ""


class OfUpload(Operation, frozen=True, kw_only=True):
    """What the operations on an upload in parts have in common."""

    upload_id: str


class UploadPart(OfUpload, frozen=True, kw_only=True):
    """The body is the part."""

    part_number: int


class UploadPartCopy(OfUpload, frozen=True, kw_only=True):
    """`source_range`: first and last byte, both within; None: all of it."""

    part_number: int
    source: CopySource
    source_range: tuple[int, int] | None = None
    source_conditions: Conditions = Conditions()


class CompleteMultipartUpload(OfUpload, frozen=True, kw_only=True):
    """Has a body: `xml.read_complete`."""

    conditions: Conditions = Conditions()


class AbortMultipartUpload(OfUpload, frozen=True, kw_only=True):
    """Give up what came of it."""


class ListParts(OfUpload, frozen=True, kw_only=True):
    """What came of it. `max_parts` is at most LIST_MAX."""

    max_parts: int = LIST_MAX
    part_number_marker: int = 0
    is_url_encoded: bool = False
