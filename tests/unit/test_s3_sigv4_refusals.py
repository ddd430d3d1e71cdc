"""Each check of a signature: what it refuses, and as what."""

from __future__ import annotations

import re

import pytest

from stoker.cache.auth.s3_refusal import S3Refusal
from stoker.cache.auth.sigv4 import PayloadMode, SigningKeys, payload_of, verify
from stoker.cache.auth.sigv4_canonical import Head, Scope, canonical_request, signature_of
from stoker.cache.auth.sigv4_sign import presign, sign_header
from stoker.cache.origin.s3_signing import signing_key
from tests.unit.s3_signed import ALICE, GUEST, HOST, NOW_S, changed, credentials_of, head_of


def code_of(head: Head, now_s: float = NOW_S) -> str:
    """What it is refused as; empty, if it is not."""
    try:
        verify(head, now_s, credentials_of(), SigningKeys())
    except S3Refusal as refusal:
        return refusal.code
    return ""


def authorization(head: Head, pattern: str, by: str) -> Head:
    said = head.headers[b"authorization"].decode()
    assert re.search(pattern, said)
    return changed(head, authorization=re.sub(pattern, by, said))


def target(head: Head, pattern: str, by: str) -> Head:
    said = head.target.decode()
    assert re.search(pattern, said)
    return head._replace(target=re.sub(pattern, by, said).encode())


def resigned(pattern: bytes, by: bytes) -> Head:
    """Signed in full, with another text in the scope: only the check of that text is left to refuse it."""
    text = Scope.__str__
    try:
        Scope.__str__ = lambda self: text(self).replace(pattern.decode(), by.decode())  # type: ignore[method-assign]
        head = Head("GET", b"/b/k", {b"host": HOST.encode()})
        signed = sign_header(head, ALICE, "us-east-1", NOW_S, "UNSIGNED-PAYLOAD")
    finally:
        Scope.__str__ = text  # type: ignore[method-assign]
    return head._replace(headers=signed)


def test_nothing_is_wrong_with_what_these_tests_change() -> None:
    assert code_of(head_of()) == ""
    assert code_of(head_of(expires_s=60)) == ""
    assert code_of(head_of(credentials=GUEST)) == ""
    assert code_of(head_of(credentials=GUEST, expires_s=60)) == ""


def test_an_unknown_key_id() -> None:
    assert code_of(head_of(credentials=ALICE._replace(access_key_id="NOBODY"))) == "InvalidAccessKeyId"


def test_another_secret() -> None:
    other = ALICE._replace(secret_access_key="guessed")
    assert code_of(head_of(credentials=other)) == "SignatureDoesNotMatch"
    assert code_of(head_of(credentials=other, expires_s=60)) == "SignatureDoesNotMatch"


def test_both_a_header_and_a_query() -> None:
    head = head_of(expires_s=60)
    both = head._replace(headers={**head_of().headers, **head.headers})
    assert code_of(both) == "InvalidArgument"
    assert code_of(changed(head, authorization="Bearer x")) == "InvalidArgument"


def test_no_signature_at_all() -> None:
    assert code_of(Head("GET", b"/b/k", {b"host": b"h"})) == "AccessDenied"


@pytest.mark.parametrize("said", ["AWS AK:c2ln", "AWS4-ECDSA-P256-SHA256 x", "Bearer t"])
def test_another_mechanism(said: str) -> None:
    assert code_of(changed(head_of(), authorization=said)) == "InvalidRequest"


def test_another_mechanism_in_the_query() -> None:
    head = Head("GET", b"/b/k?AWSAccessKeyId=AK&Expires=1&Signature=x", {b"host": b"h"})
    assert code_of(head) == "InvalidRequest"


@pytest.mark.parametrize(
    ("pattern", "by"),
    [
        (r" Credential=[^,]*,", ""),
        (r"SignedHeaders=[^,]*, ", ""),
        (r", Signature=.*", ""),
        (r"Credential=", "Credentials="),
        (r"Signature=", "Signature"),
        (r"$", ", Signature=00"),
        (r"$", ", Other=00"),
        (r"ALICE/20260102/", "/20260102/"),
        (r"ALICE/20260102/", "20260102/"),
        (r" .*", ""),
        (r" .*", " ü"),
    ],
)
def test_an_authorization_that_cannot_be_read(pattern: str, by: str) -> None:
    assert code_of(authorization(head_of(), pattern, by)) == "AuthorizationHeaderMalformed"


def test_a_scope_of_another_day_than_the_request() -> None:
    assert code_of(resigned(b"20260102", b"20260101")) == "AuthorizationHeaderMalformed"


def test_a_scope_of_another_service() -> None:
    assert code_of(resigned(b"/s3/", b"/ec2/")) == "AuthorizationHeaderMalformed"


def test_a_scope_with_another_end() -> None:
    assert code_of(resigned(b"aws4_request", b"aws5_request")) == "AuthorizationHeaderMalformed"


@pytest.mark.parametrize("region", ["", "a b", "a" * 65])
def test_a_scope_with_no_region(region: str) -> None:
    assert code_of(resigned(b"us-east-1", region.encode())) == "AuthorizationHeaderMalformed"


def test_an_access_key_id_may_have_slashes() -> None:
    odd = ALICE._replace(access_key_id="a/b/c")
    head = head_of(credentials=odd)
    assert verify(head, NOW_S, credentials_of(odd), SigningKeys()).access_key_id == "a/b/c"


def test_any_region_is_taken() -> None:
    for region in ("us-east-1", "auto", "garage", "eu_x"):
        assert code_of(head_of(region=region)) == ""


def signing(*names: bytes, **headers: str) -> Head:
    """A good signature over just those headers, with others beside it."""
    plain = Head("GET", b"/b/k", {b"host": HOST.encode()})
    signed = sign_header(plain, ALICE, "r", NOW_S, "UNSIGNED-PAYLOAD")
    head = changed(plain._replace(headers=signed), **headers)
    scope = Scope("20260102T030405Z", "r")
    key = signing_key(ALICE.secret_access_key, scope.day, "r")
    made = signature_of(key, scope, canonical_request(head, [], names, "UNSIGNED-PAYLOAD"))
    said = b";".join(names).decode()
    return authorization(head, r"SignedHeaders=.*", f"SignedHeaders={said}, Signature={made}")


ALL = (b"host", b"x-amz-content-sha256", b"x-amz-date")


def test_headers_that_must_be_signed() -> None:
    assert code_of(signing(*ALL)) == ""
    assert code_of(signing(*ALL, range="bytes=0-1")) == ""


@pytest.mark.parametrize("name", ALL)
def test_a_header_that_is_not_signed_but_must_be(name: bytes) -> None:
    assert code_of(signing(*(other for other in ALL if other != name))) == "AccessDenied"


def test_an_amz_header_that_is_not_signed() -> None:
    assert code_of(signing(*ALL, x_amz_meta_a="b")) == "AccessDenied"
    assert code_of(signing(*ALL, x_amz_copy_source="/other/key")) == "AccessDenied"


def test_an_amz_header_beside_a_link() -> None:
    assert code_of(changed(head_of(expires_s=60), x_amz_acl="public-read")) == "AccessDenied"


def test_a_link_without_its_host() -> None:
    assert (
        code_of(target(head_of(expires_s=60), "SignedHeaders=host", "SignedHeaders=date")) == "AccessDenied"
    )


def test_a_link_sent_to_another_host() -> None:
    assert code_of(changed(head_of(expires_s=60), host="other")) == "SignatureDoesNotMatch"


def test_a_signed_header_that_did_not_come() -> None:
    head = head_of(headers=[("Range", "bytes=0-1")])
    assert code_of(changed(head, range=None)) == "SignatureDoesNotMatch"


@pytest.mark.parametrize(
    "names",
    [
        (b"x-amz-content-sha256", b"host", b"x-amz-date"),
        (b"host", b"host", b"x-amz-content-sha256", b"x-amz-date"),
        (b"Host", b"x-amz-content-sha256", b"x-amz-date"),
        (b"", b"host", b"x-amz-content-sha256", b"x-amz-date"),
    ],
)
def test_signed_headers_in_another_form(names: tuple[bytes, ...]) -> None:
    head = authorization(head_of(), r"SignedHeaders=[^,]*", f"SignedHeaders={b';'.join(names).decode()}")
    assert code_of(head) == "AuthorizationHeaderMalformed"


@pytest.mark.parametrize(("late_s", "code"), [(900, ""), (-900, ""), (901, "*"), (-901, "*")])
def test_clocks_that_are_apart(late_s: int, code: str) -> None:
    assert code_of(head_of(), NOW_S + late_s) == code.replace("*", "RequestTimeTooSkewed")


def test_no_date() -> None:
    assert code_of(changed(head_of(), x_amz_date=None)) == "AccessDenied"


@pytest.mark.parametrize(
    "said", ["", "yesterday", "20260102", "20261302T030405Z", "20260102T030405Z,20260102T030405Z"]
)
def test_a_date_that_is_none(said: str) -> None:
    assert code_of(changed(head_of(), x_amz_date=said)) == "AccessDenied"
    head = head_of(headers=[("Date", "Fri, 02 Jan 2026 03:04:05 GMT")])
    assert code_of(changed(head, date=said)) == "AccessDenied"


def test_x_amz_date_is_what_counts_beside_a_date() -> None:
    assert code_of(changed(head_of(), date="Fri, 02 Jan 2016 03:04:05 GMT")) == ""


def test_nothing_said_of_the_body() -> None:
    assert code_of(changed(head_of(), x_amz_content_sha256=None)) == "MissingSecurityHeader"


@pytest.mark.parametrize("said", ["", "HASH", "abc", "0" * 63, "STREAMING-AWS4-ECDSA-P256-SHA256-PAYLOAD"])
def test_what_cannot_be_said_of_the_body(said: str) -> None:
    head = Head("PUT", b"/b/k", {b"host": b"h"})
    signed = head._replace(headers=sign_header(head, ALICE, "r", NOW_S, said))
    assert code_of(signed) == "InvalidArgument"


@pytest.mark.parametrize("mode", [mode for mode in PayloadMode if mode is not PayloadMode.HASH])
def test_what_can_be_said_of_the_body(mode: PayloadMode) -> None:
    head = Head("PUT", b"/b/k", {b"host": b"h"})
    signed = head._replace(headers=sign_header(head, ALICE, "r", NOW_S, mode.value))
    assert verify(signed, NOW_S, credentials_of(), SigningKeys()).payload.mode is mode


def test_a_hash_is_known_in_upper_case_too() -> None:
    assert payload_of("AB" * 32) == (PayloadMode.HASH, "ab" * 32)


def test_another_body_than_was_signed() -> None:
    other = changed(head_of(body=b"one"), x_amz_content_sha256="00" * 32)
    assert code_of(other) == "SignatureDoesNotMatch"


def test_a_token_that_is_missing() -> None:
    assert code_of(head_of(credentials=GUEST._replace(session_token=""))) == "InvalidToken"
    assert code_of(head_of(credentials=GUEST._replace(session_token=""), expires_s=60)) == "InvalidToken"


def test_a_token_that_is_another() -> None:
    assert code_of(head_of(credentials=GUEST._replace(session_token="x"))) == "InvalidToken"
    assert code_of(head_of(credentials=GUEST._replace(session_token="x"), expires_s=60)) == "InvalidToken"


def test_a_token_that_is_not_known() -> None:
    assert code_of(head_of(credentials=ALICE._replace(session_token="x"))) == "InvalidToken"
    assert code_of(head_of(credentials=ALICE._replace(session_token="x"), expires_s=60)) == "InvalidToken"


def test_a_link_that_has_expired() -> None:
    head = head_of(expires_s=60)
    assert code_of(head, NOW_S + 60) == ""
    assert code_of(head, NOW_S + 61) == "AccessDenied"


def test_a_link_of_later() -> None:
    head = head_of(expires_s=60)
    assert code_of(head, NOW_S - 900) == ""
    assert code_of(head, NOW_S - 901) == "AccessDenied"


@pytest.mark.parametrize("said", ["-1", "604801", "1.5", "soon", "-", "9" * 30, "%D9%A1"])
def test_a_link_for_a_time_that_is_none(said: str) -> None:
    head = target(head_of(expires_s=60), "X-Amz-Expires=60", f"X-Amz-Expires={said}")
    assert code_of(head) == "AuthorizationQueryParametersError"


def test_a_link_for_longer_than_a_week_though_it_is_signed() -> None:
    assert code_of(head_of(expires_s=604800)) == ""
    assert code_of(head_of(expires_s=604801)) == "AuthorizationQueryParametersError"


@pytest.mark.parametrize("name", ["Algorithm", "Credential", "Date", "Expires", "SignedHeaders", "Signature"])
def test_a_link_without_one_of_its_fields(name: str) -> None:
    head = target(head_of(expires_s=60), f"X-Amz-{name}=[^&]*&?", "")
    assert code_of(head) == "AuthorizationQueryParametersError"


@pytest.mark.parametrize(
    "name", ["Algorithm", "Credential", "Date", "Expires", "SignedHeaders", "Signature", "Security-Token"]
)
def test_a_link_with_one_of_its_fields_twice(name: str) -> None:
    head = target(head_of(expires_s=60, credentials=GUEST), "$", f"&X-Amz-{name}=x&X-Amz-{name}=x")
    assert code_of(head) == "AuthorizationQueryParametersError"


@pytest.mark.parametrize(
    ("pattern", "by"),
    [
        ("Algorithm=AWS4-HMAC-SHA256", "Algorithm=AWS4-HMAC-SHA1"),
        ("X-Amz-Date=20260102", "X-Amz-Date=20260101"),
        ("X-Amz-Date=[^&]*", "X-Amz-Date=today"),
        ("X-Amz-Date=[^&]*", "X-Amz-Date=20260102"),
        ("%2F20260102%2F", "%2F20260101%2F"),
        ("%2Fs3%2F", "%2Fsts%2F"),
        ("aws4_request", "aws3_request"),
        ("Credential=[^&]*", "Credential=ALICE"),
        ("SignedHeaders=host", "SignedHeaders=Host"),
    ],
)
def test_a_link_whose_fields_are_wrong(pattern: str, by: str) -> None:
    assert code_of(target(head_of(expires_s=60), pattern, by)) == "AuthorizationQueryParametersError"


def test_a_link_says_of_the_body_what_it_must_be() -> None:
    said = "ab" * 32
    link = presign("PUT", f"/b/k?X-Amz-Content-Sha256={said}".encode(), HOST, ALICE, "r", NOW_S, 60)
    head = Head("PUT", link, {b"host": HOST.encode()})
    assert verify(head, NOW_S, credentials_of(), SigningKeys()).payload == (PayloadMode.HASH, said)
    # As a header it must be signed too.
    assert code_of(changed(head, x_amz_content_sha256=said)) == "AccessDenied"
