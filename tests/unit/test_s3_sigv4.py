"""Requests that botocore signs are proved, and no other one is."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.cache.auth.s3_refusal import S3Refusal
from stoker.cache.auth.sigv4 import PayloadMode, Proof, SigningKeys, is_signed, verify
from stoker.cache.auth.sigv4_canonical import Head, fold_headers, query_fields
from stoker.cache.auth.sigv4_sign import presign, sign_header
from stoker.cache.origin.s3_signing import Credentials
from stoker.errors import ConfigError
from tests.unit.s3_signed import ALICE, GUEST, HOST, NOW_S, changed, credentials_of, head_of

TEXT = st.text(
    st.one_of(
        st.sampled_from(list("aZ09/+%~ .-_&=?#@:;,'()*!$äß雪🙂")),
        st.characters(codec="utf-8", exclude_characters="\0"),
    ),
    max_size=20,
)
VALUES = st.text(st.sampled_from(list("aB1 \t,;=/+\"'%~")), min_size=0, max_size=20).map(str.strip)
QUERY = st.lists(st.tuples(TEXT.filter(lambda name: not name.startswith("X-Amz-")), TEXT), max_size=5)
KEY = TEXT.map(lambda key: quote(key, safe="/~"))


def proved(head: Head, now_s: float = NOW_S) -> Proof:
    return verify(head, now_s, credentials_of(), SigningKeys())


def target_of(key: str, query: list[tuple[str, str]]) -> str:
    pairs = [f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}" for name, value in query]
    return f"/bucket/{key}" + ("?" + "&".join(pairs) if pairs else "")


@settings(max_examples=100, deadline=None)
@given(KEY, QUERY, VALUES, VALUES, st.sampled_from(["GET", "PUT", "DELETE", "POST", "HEAD"]), st.binary())
def test_what_botocore_signs_in_the_header_is_proved(
    key: str, query: list[tuple[str, str]], value: str, other: str, method: str, body: bytes
) -> None:
    headers = [("x-amz-meta-a", value), ("Content-Type", other), ("X-Amz-Meta-a", other)]
    head = head_of(method, target_of(key, query), headers, body)
    proof = proved(head)
    assert proof.access_key_id == "ALICE"
    assert not proof.is_presigned
    assert proof.payload.mode is PayloadMode.HASH
    assert proof.chunks.scope.region == "eu-west-1"
    assert proof.chunks.signature in head.headers[b"authorization"].decode()


@settings(max_examples=100, deadline=None)
@given(
    KEY,
    st.dictionaries(
        st.text(st.sampled_from(list("abc-+% ä/")), min_size=1), TEXT, max_size=4
    ),  # botocore keeps one of each name in the query
    st.integers(1, 604800),
    st.sampled_from([ALICE, GUEST]),
)
def test_what_botocore_presigns_is_proved(
    key: str, query: dict[str, str], expires_s: int, credentials: Credentials
) -> None:
    head = head_of(target=target_of(key, list(query.items())), credentials=credentials, expires_s=expires_s)
    proof = proved(head, NOW_S + expires_s)
    assert proof.access_key_id == credentials.access_key_id
    assert proof.is_presigned
    assert proof.payload.mode is PayloadMode.UNSIGNED


@pytest.mark.parametrize(
    "target",
    [
        "/", "/bucket", "/bucket/", "/bucket//", "/bucket//a//b", "/bucket/./a", "/bucket/a/../b", "/bucket/..",
        "/bucket/a%20b", "/bucket/a%2Bb", "/bucket/a%25b", "/bucket/a~b", "/bucket/a%2520b", "/bucket/%E9%9B%AA",
        "/bucket?acl", "/bucket?acl=", "/bucket?b=2&a=1", "/bucket?a=2&a=1&a", "/bucket?prefix=a%2Fb%20c%2B",
        "/bucket?a-b=1&a=2&a.b=3", "/bucket?a%2Db=1",
    ],
)  # fmt: skip
def test_paths_and_queries_out_of_the_ordinary(target: str) -> None:
    if target in ("/bucket?acl", "/bucket?a=2&a=1&a", "/bucket?a%2Db=1"):
        # What botocore would sign as it is written; others sign what it means.
        head = sign(Head("GET", target.encode(), {b"host": HOST.encode()}))
    else:
        head = head_of(target=target)
    assert head.target == target.encode()
    proved(head)


def sign(head: Head, credentials: Credentials = ALICE, payload: str = "UNSIGNED-PAYLOAD") -> Head:
    return head._replace(headers=sign_header(head, credentials, "us-east-1", NOW_S, payload))


@pytest.mark.parametrize(
    ("raw", "encoded"), [("/b/a=b@c:d", "/b/a%3Db%40c%3Ad"), ("/b/%7e", "/b/~"), ("/b/%e9", "/b/%E9")]
)
def test_a_path_is_signed_in_one_encoding_however_it_is_sent(raw: str, encoded: str) -> None:
    sent = sign(Head("GET", raw.encode(), {b"host": b"h"})).headers[b"authorization"]
    assert sent == sign(Head("GET", encoded.encode(), {b"host": b"h"})).headers[b"authorization"]


def test_the_published_example_of_a_get() -> None:
    # docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html
    credentials = Credentials("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    host = b"examplebucket.s3.amazonaws.com"
    head = Head("GET", b"/test.txt", {b"host": host, b"range": b"bytes=0-9"})
    signed = head._replace(headers=sign_header(head, credentials, "us-east-1", 1369353600, empty))
    assert signed.headers[b"authorization"].endswith(
        b"SignedHeaders=host;range;x-amz-content-sha256;x-amz-date, "
        b"Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
    )
    proof = verify(signed, 1369353600, credentials_of(credentials), SigningKeys())
    assert proof.signed_headers == (b"host", b"range", b"x-amz-content-sha256", b"x-amz-date")


def test_the_published_example_of_a_link() -> None:
    # docs.aws.amazon.com/AmazonS3/latest/API/sigv4-query-string-auth.html
    credentials = Credentials("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
    host = "examplebucket.s3.amazonaws.com"
    target = presign("GET", b"/test.txt", host, credentials, "us-east-1", 1369353600, 86400)
    assert target == (
        b"/test.txt?X-Amz-Algorithm=AWS4-HMAC-SHA256"
        b"&X-Amz-Credential=AKIAIOSFODNN7EXAMPLE%2F20130524%2Fus-east-1%2Fs3%2Faws4_request"
        b"&X-Amz-Date=20130524T000000Z&X-Amz-Expires=86400&X-Amz-SignedHeaders=host"
        b"&X-Amz-Signature=aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404"
    )
    head = Head("GET", target, {b"host": host.encode()})
    assert verify(head, 1369353600, credentials_of(credentials), SigningKeys()).is_presigned


@settings(max_examples=50, deadline=None)
@given(KEY, QUERY, st.sampled_from([ALICE, GUEST]))
def test_our_own_links_and_heads_are_proved(
    key: str, query: list[tuple[str, str]], credentials: Credentials
) -> None:
    target = target_of(key, query).encode()
    link = presign("PUT", target, HOST, credentials, "r", NOW_S, 60, {b"x-amz-meta-a": b"b"})
    headers = {b"host": HOST.encode(), b"x-amz-meta-a": b"b"}
    assert proved(Head("PUT", link, headers), NOW_S + 60).access_key_id == credentials.access_key_id
    head = sign(Head("PUT", target, headers), credentials)
    assert proved(head).access_key_id == credentials.access_key_id


def test_our_links_are_those_of_botocore() -> None:
    theirs = head_of(target="/bucket/a%20b?versionId=1", credentials=GUEST, expires_s=60)
    ours = presign("GET", b"/bucket/a%20b?versionId=1", HOST, GUEST, "eu-west-1", NOW_S, 60)
    assert sorted(query_fields(ours.partition(b"?")[2])) == sorted(
        query_fields(theirs.target.partition(b"?")[2])
    )


@pytest.mark.parametrize("expires_s", [0, -1, 604801])
def test_links_are_not_made_for_longer_than_they_hold(expires_s: int) -> None:
    with pytest.raises(ConfigError, match="a week"):
        presign("GET", b"/b/k", HOST, ALICE, "r", NOW_S, expires_s)


def test_the_date_header_stands_in_for_x_amz_date() -> None:
    # botocore makes it so where a request has a Date.
    head = head_of(headers=[("Date", "Fri, 02 Jan 2026 03:04:05 GMT")])
    assert b"x-amz-date" not in head.headers
    assert proved(head).chunks.scope.time == "20260102T030405Z"


@pytest.mark.parametrize(
    ("headers", "target", "expected"),
    [
        ({b"authorization": b"AWS4-HMAC-SHA256 x"}, b"/", True),
        ({b"authorization": b"AWS AK:sig"}, b"/", True),
        ({b"authorization": b"Bearer x"}, b"/", False),
        ({}, b"/b/k?X-Amz-Signature=x", True),
        ({}, b"/b/k?AWSAccessKeyId=x", True),
        ({}, b"/b/k?versionId=x", False),
    ],
)
def test_who_wants_to_be_taken_for_a_signer(
    headers: dict[bytes, bytes], target: bytes, expected: bool
) -> None:
    assert is_signed(Head("GET", target, headers)) is expected


def test_repeated_headers_are_joined_in_their_order() -> None:
    lines = [(b"X-Amz-Meta-A", b" 1 "), (b"Host", b"h"), (b"x-amz-meta-a", b"2")]
    assert fold_headers(lines) == {b"x-amz-meta-a": b"1,2", b"host": b"h"}


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_nothing_that_was_signed_can_be_changed(data: st.DataObject) -> None:
    head = head_of("PUT", "/bucket/some/key?partNumber=1&uploadId=u", [("x-amz-meta-a", "b")], b"body")
    where = data.draw(st.sampled_from(["method", "target", *sorted(head.headers)]))
    if where == "method":
        other = head._replace(method="GET")
    elif where == "target":
        at = data.draw(st.integers(1, len(head.target) - 1))
        byte = data.draw(st.sampled_from(b"abcXYZ019/-._~&=?"))
        other = head._replace(target=head.target[:at] + bytes([byte]) + head.target[at + 1 :])
        if other.target == head.target:
            return
    else:
        value = head.headers[where]
        at = data.draw(st.integers(0, len(value) - 1))
        byte = data.draw(st.integers(33, 126))
        changed_value = value[:at] + bytes([byte]) + value[at + 1 :]
        if changed_value == value:
            return
        other = head._replace(headers={**head.headers, where: changed_value})
    with pytest.raises(S3Refusal):
        proved(other)


ANY = st.one_of(
    st.binary(max_size=60),
    st.sampled_from(
        [
            b"AWS4-HMAC-SHA256 Credential=A/20260102/r/s3/aws4_request, SignedHeaders=host, Signature=",
            b"AWS4-HMAC-SHA256 Credential=ALICE/20260102/r/s3/aws4_request,SignedHeaders=host;\xff,Signature=\xff",
            b"20260102T030405Z",
            b"Fri, 02 Jan 2026 03:04:05 GMT",
        ]
    ),
)


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(
            [
                b"authorization",
                b"host",
                b"date",
                b"x-amz-date",
                b"x-amz-content-sha256",
                b"x-amz-security-token",
            ]
        ),
        ANY,
    ),
    st.lists(
        st.tuples(
            st.sampled_from([b"X-Amz-Date", b"X-Amz-Credential", b"X-Amz-Expires", b"X-Amz-Signature", b"a"]),
            ANY,
        )
    ),
)
def test_whatever_comes_is_refused_in_words(
    headers: dict[bytes, bytes], fields: list[tuple[bytes, bytes]]
) -> None:
    query = b"&".join(name + b"=" + value for name, value in fields)
    with pytest.raises(S3Refusal):
        proved(Head("GET", b"/b/k?" + query, headers))


def test_keys_are_derived_once_for_those_who_proved_themselves_and_are_bounded() -> None:
    keys = SigningKeys(keys_max=2)
    with pytest.raises(S3Refusal):
        verify(head_of(credentials=ALICE._replace(secret_access_key="x")), NOW_S, credentials_of(), keys)
    assert len(keys) == 0
    for region in ("a", "b", "b", "c"):
        verify(head_of(region=region), NOW_S, credentials_of(), keys)
    assert len(keys) == 2


def test_a_kept_key_is_of_its_secret() -> None:
    keys = SigningKeys()
    verify(head_of(), NOW_S, credentials_of(), keys)
    renewed = ALICE._replace(secret_access_key="another secret")
    with pytest.raises(S3Refusal, match="does not match"):
        verify(head_of(), NOW_S, credentials_of(renewed), keys)
    verify(head_of(credentials=renewed), NOW_S, credentials_of(renewed), keys)


def test_a_kept_key_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = SigningKeys()
    verify(head_of(), NOW_S, credentials_of(), keys)
    monkeypatch.setattr("stoker.cache.auth.sigv4.signing_key", None)
    verify(head_of(), NOW_S, credentials_of(), keys)


def test_no_key_is_written_down() -> None:
    proof = proved(head_of())
    assert repr(proof.chunks.key) not in repr(proof)
    assert "ChunkSigning(key=…" in repr(proof)


def test_white_space_in_a_header_is_one_space() -> None:
    head = sign(Head("GET", b"/b/k", {b"host": b"h", b"x-amz-meta-a": b"1  2\t3"}))
    proved(changed(head, x_amz_meta_a="1 2 3"))
