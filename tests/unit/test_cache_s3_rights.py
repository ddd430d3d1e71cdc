"""What each S3 operation takes, taken away right by right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stoker.cache.auth.principals import Principal
from stoker.cache.auth.rules import EVERYTHING, VERBS, Rule, Rules
from stoker.cache.auth.s3_refusal import S3Refusal
from stoker.cache.server.s3 import operation_types as ops
from stoker.cache.server.s3.rights import check_allowed

WRITTEN = ops.WrittenHeaders({}, {})
SOURCE = ops.CopySource("from", "s/k")
IN_KEY = {"bucket": "b", "key": "p/k"}
UPLOAD = {**IN_KEY, "upload_id": "u"}
READ, LIST, WRITE, DELETE = (("b", "p/", verb) for verb in ("read", "list", "write", "delete"))
OF_SOURCE = ("from", "s/", "read")

NEEDS: list[tuple[ops.Operation, list[tuple[str, str, str]]]] = [
    (ops.GetObject(**IN_KEY), [READ]),
    (ops.HeadObject(**IN_KEY), [READ]),
    (ops.ListObjects(bucket="b", prefix="p/x"), [LIST]),
    (ops.ListObjectsV2(bucket="b", prefix="p/"), [LIST]),
    (ops.ListObjectVersions(bucket="b", prefix="p/"), [LIST]),
    (ops.ListMultipartUploads(bucket="b", prefix="p/"), [LIST]),
    (ops.PutObject(**IN_KEY, written=WRITTEN), [WRITE]),
    (ops.CopyObject(**IN_KEY, written=WRITTEN, source=SOURCE), [WRITE, OF_SOURCE]),
    (ops.DeleteObject(**IN_KEY), [DELETE]),
    (ops.DeleteObjects(bucket="b"), [DELETE]),
    (ops.CreateMultipartUpload(**IN_KEY, written=WRITTEN), [WRITE]),
    (ops.UploadPart(**UPLOAD, part_number=1), [WRITE]),
    (ops.UploadPartCopy(**UPLOAD, part_number=1, source=SOURCE), [WRITE, OF_SOURCE]),
    (ops.CompleteMultipartUpload(**UPLOAD), [WRITE]),
    (ops.AbortMultipartUpload(**UPLOAD), [WRITE]),
    (ops.ListParts(**UPLOAD), [WRITE]),
    (ops.GetObjectSetting(**IN_KEY, setting="acl"), [READ]),
    (ops.GetObjectAttributes(**IN_KEY, wanted=frozenset()), [READ]),
    (ops.PutObjectAcl(**IN_KEY, canned="private"), [WRITE]),
]
FOR_ALL = [
    ops.CreateBucket(bucket="b"),
    ops.DeleteBucket(bucket="b"),
    ops.PutBucketAcl(bucket="b", canned="private"),
]
FOR_SOME = [
    ops.HeadBucket(bucket="b"),
    ops.GetBucketLocation(bucket="b"),
    ops.GetBucketVersioning(bucket="b"),
    ops.GetBucketSetting(bucket="b", setting="policy"),
]


def someone(*rights: tuple[str, str, str]) -> Principal:
    return Principal(
        "someone", Rules(Rule(bucket, prefix, frozenset((verb,))) for bucket, prefix, verb in rights)
    )


def is_allowed(who: Principal, operation: ops.Operation) -> bool:
    try:
        check_allowed(who, operation)
    except S3Refusal as refusal:
        return refusal.code != "AccessDenied"
    return True


def leaves(kind: type[ops.Operation]) -> Iterator[type[ops.Operation]]:
    below = kind.__subclasses__()
    for other in below:
        yield from leaves(other)
    if not below:
        yield kind


def test_each_operation_is_here() -> None:
    here = {type(one) for one, _ in NEEDS} | {type(one) for one in (*FOR_ALL, *FOR_SOME)} | {ops.ListBuckets}
    assert here == set(leaves(ops.Operation))


@pytest.mark.parametrize(("operation", "needs"), NEEDS, ids=lambda one: type(one).__name__)
def test_an_operation_takes_these_rights_and_no_others(
    operation: ops.Operation, needs: list[tuple[str, str, str]]
) -> None:
    assert is_allowed(someone(*needs), operation)
    for needed in needs:
        others = [right for right in needs if right != needed]
        bucket, prefix, verb = needed
        wrong = [("other", prefix, verb), *((bucket, prefix, other) for other in VERBS - {verb})]
        if not isinstance(operation, ops.DeleteObjects):  # its keys come with the body
            wrong.append((bucket, "q/", verb))
        assert not is_allowed(someone(*others), operation)
        assert not is_allowed(someone(*others, *wrong), operation)


@pytest.mark.parametrize("operation", FOR_ALL, ids=lambda one: type(one).__name__)
def test_buckets_come_and_go_by_who_may_do_all(operation: ops.Operation) -> None:
    assert is_allowed(Principal("all", EVERYTHING), operation)
    assert not is_allowed(someone(*(("b", "", verb) for verb in VERBS)), operation)
    assert not is_allowed(someone(*(("*", "", verb) for verb in VERBS - {"admin"})), operation)


@pytest.mark.parametrize("operation", FOR_SOME, ids=lambda one: type(one).__name__)
def test_a_bucket_is_known_to_who_may_do_anything_there(operation: ops.Operation) -> None:
    assert is_allowed(someone(("b", "p/", "write")), operation)
    assert not is_allowed(someone(("c", "", "read")), operation)


def test_what_is_not_in_the_table_nobody_may() -> None:
    class Another(ops.Operation, frozen=True, kw_only=True):
        pass

    assert not is_allowed(Principal("all", EVERYTHING), Another(bucket="b"))
