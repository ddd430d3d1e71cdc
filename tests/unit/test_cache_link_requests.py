"""Requests that come by a link: whose they are then, what of them is heard, and how they are answered."""

from __future__ import annotations

from typing import Any, cast

import pytest

from stoker.base.clock import SystemClock
from stoker.cache.auth.access import Access
from stoker.cache.auth.links import make_link
from stoker.cache.auth.principals import UNPROVEN, Principal
from stoker.cache.auth.rules import Rules, parse_rule
from stoker.cache.auth.tokens import Credential
from stoker.cache.server.links import Links
from stoker.cache.server.port import Answer, Request
from stoker.cli.cache_ask import describe_rules
from stoker.cli.cache_link import link_age_max_s
from stoker.errors import AccessDenied, ConfigError
from stoker.wire.cache_api import BucketStatus

MAKER = Principal("maker", Rules([parse_rule("b/dir/: all"), parse_rule("c: read")]), 1000.0)
TOKEN = Credential(MAKER, "a-token-of-links")
LINKS = Links(Access([TOKEN]), SystemClock(), 3600.0)


class Said:
    """An answer that remembers."""

    def __init__(self) -> None:
        self.charged: list[Principal] = []
        self.started: list[Any] = []

    def charge(self, principal: Principal) -> None:
        self.charged.append(principal)

    def start(self, *said: Any) -> None:
        self.started.append(said)


def linked(bucket: str = "b", path: str = "dir/") -> str:
    return make_link(TOKEN, bucket, path, SystemClock().wall(), 60.0)


def opened(target: str, method: str = "GET", **headers: bytes) -> tuple[Request, Answer, Said]:
    said = Said()
    fields = {name.replace("_", "-").encode(): value for name, value in headers.items()}
    request = Request(method, target.encode(), fields, b"", UNPROVEN)
    assert LINKS.is_for(request)
    return *LINKS.opened(request, cast(Answer, said)), said


def test_a_request_by_a_link_is_its_makers_and_may_read_what_it_opens() -> None:
    asked, _, said = opened(linked() + "sub/a%20b?prefix=x", "HEAD")
    assert (asked.method, asked.target) == ("HEAD", b"/b/dir/sub/a%20b")
    assert said.charged == [MAKER]
    who = asked.principal
    assert who.name == "maker"
    assert who.may_read("b", "dir/sub/a b")
    for is_allowed in (
        who.may_read("b", "dir/x"), who.may_read("b", "other"),
        who.may_read("c", "dir/x"), who.may_list("b", "dir/"), who.may_write("b", "dir/x"),
        who.may_delete("b", "dir/x"), who.may_administer("b", "dir/"), who.is_unrestricted,
    ):  # fmt: skip
        assert not is_allowed


def test_only_what_a_reader_may_say_is_heard() -> None:
    heard = {
        "range": b"bytes=0-1",
        "if_match": b'"x"',
        "if_none_match": b'"y"',
        "if_range": b'"z"',
    }
    others = dict.fromkeys(
        ("authorization", "host", "stoker_hops", "stoker_origin", "cache_control", "x_amz_copy_source"), b"1"
    )
    asked, _, _ = opened(linked() + "a", **heard, **others)
    assert set(asked.headers) == {name.replace("_", "-").encode() for name in heard}


@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE", "PATCH", "OPTIONS"])
def test_a_link_is_for_reading(method: str) -> None:
    with pytest.raises(ConfigError, match="use GET or HEAD"):
        opened(linked() + "a", method)


@pytest.mark.parametrize(
    "rest",
    ["../x", "sub/../x", "%2e%2e/x", "sub%2F..%2Fx", "./a", "..%5Cx", "a\\b"],
)
def test_paths_that_mean_another_thing_elsewhere_are_refused(rest: str) -> None:
    with pytest.raises(AccessDenied, match="something else"):
        opened(linked() + rest)


def test_what_is_not_covered_or_not_the_makers_is_refused() -> None:
    proof = linked().split("/")[3]
    for path in ("b/other", "b/dir", "b/", "c/dir/a", "", "b%2Fdir/a"):
        with pytest.raises(AccessDenied, match="something else"):
            opened(f"/-/link/{proof}/{path}")
    for target in (linked("b", ""), linked("b", "private"), linked("d", "x")):
        with pytest.raises(AccessDenied, match="who made this link, may not read that"):
            opened(target)
    assert opened(linked("c", "any"))[0].target == b"/c/any"
    with pytest.raises(ConfigError, match="UTF-8"):
        opened(linked() + "%ff")


@pytest.mark.parametrize(
    ("rest", "key", "kind"),
    [
        ("", "dir/index.html", "text/html"),
        ("sub/", "dir/sub/index.html", "text/html"),
        ("a.HTM", "dir/a.HTM", "text/html"),
        ("r.json", "dir/r.json", "application/json"),
        ("a.whl", "dir/a.whl", "application/octet-stream"),
        ("html", "dir/html", "application/octet-stream"),
    ],
)
def test_a_folder_is_shown_by_its_index_with_a_type_that_programs_go_by(
    rest: str, key: str, kind: str
) -> None:
    asked, answer, said = opened(linked() + rest)
    assert asked.target.decode() == f"/b/{key}"
    answer.start(200, [("ETag", "x"), ("Content-Type", "application/octet-stream")], 5)
    answer.start(206, [("Content-Type", "image/png")], 5)
    (_, headers, _), (_, others, _) = said.started
    assert headers == [("ETag", "x"), ("Content-Type", kind), ("Referrer-Policy", "no-referrer")]
    assert others[0] == ("Content-Type", "image/png"), "the origin knows better"


def test_the_index_is_what_must_be_allowed_and_not_all_of_the_folder() -> None:
    only_index = Principal(
        "clerk", Rules([parse_rule("b/dir/index.html: read"), parse_rule("c/index.html: read")])
    )
    token = Credential(only_index, "a-token-of-a-clerk")
    links = Links(Access([token]), SystemClock(), 3600.0)
    now = SystemClock().wall()
    for bucket, path, rest in (("b", "dir/", ""), ("c", "", ""), ("c", "", "index.html")):
        target = make_link(token, bucket, path, now, 60.0) + rest
        asked, _ = links.opened(Request("GET", target.encode(), {}, b"", UNPROVEN), cast(Answer, Said()))
        assert asked.target.decode() == f"/{bucket}/{path}index.html"
    for path in ("dir/", "dir/index.html"):
        target = make_link(token, "b", path, now, 60.0) + "2"
        with pytest.raises(AccessDenied):
            links.opened(Request("GET", target.encode(), {}, b"", UNPROVEN), cast(Answer, Said()))


def test_how_long_links_are_good_is_said_as_a_time() -> None:
    assert (link_age_max_s(None), link_age_max_s("2h"), link_age_max_s("0")) == (604800, 7200, 0)
    for text in ("-1h", "soon", ""):
        with pytest.raises(ConfigError, match="--link-max-age"):
            link_age_max_s(text)


def test_the_status_says_what_came_through_a_nearer_fleet() -> None:
    row = BucketStatus(
        "b", "/data", "lru", 0, 0, 0, 0, 0, 0, 0,
        nearer="stoker+http://a:1/b", nearer_state="closed", nearer_bytes=2000,
    )  # fmt: skip
    assert "2 KB came through the nearer fleet stoker+http://a:1/b" in describe_rules(row)
    left = describe_rules(
        BucketStatus("b", "/data", "lru", 0, 0, 0, 0, 0, 0, 0, nearer="x", nearer_state="open")
    )
    assert any(line.endswith("which failed and is left alone for a while") for line in left)
    assert len(describe_rules(BucketStatus("b", "/data", "lru", 0, 0, 0, 0, 0, 0, 0))) == 1
