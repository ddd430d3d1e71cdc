"""Names, heads, errors and tokens as they travel."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker import errors
from stoker.cache.auth.access import access_of, check_listen
from stoker.cache.auth.principals import UNPROVEN
from stoker.cache.client.asked import Wholes
from stoker.cache.client.batch import split_frames
from stoker.cache.client.client import CacheClient
from stoker.cache.origin.open import open_origin, without_query, without_secrets
from stoker.errors import ConfigError, ObjectNotFound, WireError
from stoker.wire.cache_batch import FRAME, FRAME_DATA, FRAME_LAST
from stoker.wire.cache_errors import ERROR_CODES, ErrorBody, code_of, error_of
from stoker.wire.http import etag_of, object_target, parse_response_head, split_target, version_of

keys = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=60)


@given(keys)
def test_any_key_survives_the_request_target(key: str) -> None:
    target = object_target("b", key)
    assert target.isascii()
    assert " " not in target
    assert split_target(target.encode()) == ("b", key, {})


@given(keys)
def test_any_version_survives_the_etag(version: str) -> None:
    assert etag_of(version).isascii()
    assert version_of(etag_of(version)) == version


@pytest.mark.parametrize(
    "target", [b"b/k", b"", b"/b/%ff", b"/b/%00", b"/b/" + b"a" * 5000, b"/b/" + b"%61" * 5000]
)
def test_impossible_targets_are_refused(target: bytes) -> None:
    with pytest.raises(ConfigError):
        split_target(target)


def test_a_key_keeps_its_slashes_and_queries_are_read() -> None:
    assert split_target(b"/b//x/../y/?prefix=a%2Fb&after=") == (
        "b",
        "/x/../y/",
        {"prefix": "a/b", "after": ""},
    )


@pytest.mark.parametrize("code", sorted(ERROR_CODES))
def test_every_error_comes_back_as_its_class(code: str) -> None:
    error = error_of(ErrorBody(code, "why"))
    assert type(error) is ERROR_CODES[code].error
    assert type(error_of(ErrorBody(code_of(error), "why"))) is type(error)


def test_unknown_codes_and_derived_errors_have_a_class_too() -> None:
    assert type(error_of(ErrorBody("new-in-2.0", "why"))) is errors.CacheError
    assert code_of(errors.ShortBody("x")) == "short_body"
    assert code_of(errors.OriginError("x")) == "origin"
    assert code_of(errors.OriginBusy("x")) == "origin_busy"


@pytest.mark.parametrize(
    "head", [b"", b"SSH-2.0", b"HTTP/1.1", b"HTTP/1.1 abc", b"HTTP/1.1 200 OK\r\nnocolon"]
)
def test_what_is_not_http_is_refused(head: bytes) -> None:
    with pytest.raises(WireError):
        parse_response_head(head)


def test_frames_are_put_together() -> None:
    body = (
        FRAME.pack(FRAME_LAST, 1)
        + b"a"
        + FRAME.pack(FRAME_DATA, 2)
        + b"bc"
        + FRAME.pack(FRAME_LAST, 1)
        + b"d"
    )
    assert split_frames(body, "b", Wholes(["x", "y"])) == [b"a", b"bcd"]
    for cut in range(len(body)):
        with pytest.raises(WireError):
            split_frames(body[:cut], "b", Wholes(["x", "y"]))
    with pytest.raises(WireError):
        split_frames(body, "b", Wholes(["x"]))
    with pytest.raises(WireError):
        split_frames(FRAME.pack(9, 0), "b", Wholes(["x"]))


def test_tokens_open_what_they_name_and_nothing_else() -> None:
    access = access_of(["all-buckets", "only-some:a, b"])
    assert access.rules() == [
        (0, "all-buckets", {"*": [""]}, "", "token-1"),
        (1, "only-some", {"a": [""], "b": [""]}, "", "token-2"),
    ]
    everything, some = access.principal(0), access.principal(1)
    assert everything.is_unrestricted
    assert [some.may_read(bucket, "k") for bucket in "abc"] == [True, True, False]
    assert not some.is_unrestricted
    assert not some.may_write("a", "k")
    for token in (-3, -2, -1, 2):
        nobody = access.principal(token)
        assert nobody is UNPROVEN
        assert not nobody.may_read("a")
        assert not nobody.is_unrestricted
    assert access_of([]).principal(-2).is_unrestricted


@pytest.mark.parametrize(
    "token", ["short", "", "has space in it", "ünicode-token", "token-without-bucket:", "line\nbreak-token"]
)
def test_bad_tokens_are_refused_without_being_shown(token: str) -> None:
    with pytest.raises(ConfigError) as caught:
        access_of([token])
    assert not token or token not in str(caught.value)


def test_keys_open_what_they_name_to_those_who_sign_with_them() -> None:
    auth = access_of(["all-buckets"], ["AKID:secret/of+one", "OTHER:secret-two:a, b"])
    assert [(one[1], one[3], one[4]) for one in auth.rules()[1:]] == [
        ("secret/of+one", "AKID", "key-AKID"),
        ("secret-two", "OTHER", "key-OTHER"),
    ]
    assert auth.fleet_token() == "all-buckets"
    assert access_of([], ["AKID:secret-one"]).fleet_token() is None
    assert not access_of([], ["AKID:secret-one"]).is_open
    assert (auth.secret_of("OTHER"), auth.secret_of("NONE")) == ("secret-two", None)
    assert auth.principal_of_key("OTHER").may_read("b")
    assert auth.principal(2) is auth.principal_of_key("OTHER")


@pytest.mark.parametrize(
    "key",
    [
        "AKID",
        "AKID:short",
        "A:secret-one",
        ":secret-one",
        "A B:secret-one",
        "AKID:secret-one:",
        "ÄKID:secret-one",
    ],
)
def test_bad_keys_are_refused_without_their_secrets_being_shown(key: str) -> None:
    with pytest.raises(ConfigError, match="key 1") as caught:
        access_of([], [key])
    assert "secret-one" not in str(caught.value)


def test_two_keys_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="another key"):
        access_of([], ["AKID:secret-one", "AKID:secret-two"])


def test_other_machines_need_a_token() -> None:
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", ""):
        with pytest.raises(ConfigError, match="--token"):
            check_listen(host, access_of([]))
        check_listen(host, access_of(["long-enough"]))
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        check_listen(host, access_of([]))


@pytest.mark.parametrize(
    "url",
    ["", "/not/there", "file://host/x", "s3://", "s3://b?nonsense=1",
     "nothing://x", "/tmp?stoker_mbps=0", "/tmp?stoker_mbps=x",
     "\0", "file:///\0x", "file:///%00", "file://[", "/\ud800"],
)  # fmt: skip
def test_bad_origin_urls_are_one_clear_error(url: str) -> None:
    with pytest.raises(ConfigError):
        open_origin(url)


def test_secrets_in_urls_are_not_shown() -> None:
    assert without_query("s3://b/p?secret_access_key=SECRET") == "s3://b/p"
    for url, shown in (
        ("http://user:SECRET@host/p", "http://host/p"),
        ("sftp://user:a@SECRET@host:22/p@1", "sftp://host:22/p@1"),
        ("sftp://user:a?SECRET@host/p", "sftp://user"),
        ("sftp://user:SECRET/b@host/p", "sftp://user/b@host/p"),
        ("zip://inner::sftp://user:a@SECRET@host/p", "zip://inner::sftp://host/p"),
        ("http://[::1]:80/p", "http://[::1]:80/p"),
        ("http://[::1]/p:1", "http://[::1]/p:1"),
        ("/data/a:b@c", "/data/a:b@c"),
    ):
        assert without_query(url) == shown
    with pytest.raises(ConfigError) as caught:
        open_origin("s3://b?nonsense=1&secret_access_key=SECRET")
    assert "SECRET" not in str(caught.value)
    for url in (
        "s3://key:SECRET@bucket/p",
        "file://user:SECRET@host/p",
        "file://user:SECRET@\u2100/p",
        "nosuch://user:a@SECRET@host/p?SECRET",
    ):
        with pytest.raises(ConfigError) as caught:
            open_origin(url)
        assert "SECRET" not in str(caught.value)


def test_what_libraries_say_of_an_origin_is_shown_without_its_secrets() -> None:
    url = "https://user:p%40SECRET@host/p?signature=SECRET%2B"
    for said in (
        "404, url='https://host/p/key?signature=SECRET+'",
        f"cannot connect to {url}",
        "login of user:p%40SECRET@host failed",
        "wrong password 'p@SECRET'",
        "/p/key?signature=SECRET%2B is not there",
    ):
        assert "SECRET" in said
        assert "SECRET" not in without_secrets(said, url)
    assert without_secrets("no such file: /a/b@c", url) == "no such file: /a/b@c"


def test_not_found_is_a_cache_error() -> None:
    assert issubclass(ObjectNotFound, errors.CacheError)


def test_a_client_can_be_sent_to_another_process() -> None:
    copy = pickle.loads(pickle.dumps(CacheClient("http://host:1", "some-token", timeout_s=3.0)))
    assert copy.endpoint == "http://host:1"
    with pytest.raises(ConfigError):
        CacheClient("http://host:1", "line\r\nbreak")
