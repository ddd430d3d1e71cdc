"""Principals, their rules and credentials, and the file that says them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.cache.auth.access import PROVED_MAX, Access, access_of
from stoker.cache.auth.access_file import AccessFile
from stoker.cache.auth.claims import (
    CERTIFICATE,
    SERVICE_ACCOUNT,
    SUBJECT,
    Claim,
    Claimant,
    is_like,
    principal_of,
)
from stoker.cache.auth.principals import UNPROVEN, Principal
from stoker.cache.auth.rules import EVERYTHING, NOTHING, VERBS, Rule, Rules, parse_rule
from stoker.cache.auth.tokens import Credential, credentials_of
from stoker.cache.origin.s3_signing import Credentials
from stoker.cache.origin.users import OriginUser
from stoker.cache.origin.writing_port import Owner
from stoker.errors import ConfigError

keys = st.text(alphabet="ab/", max_size=4)
verbs = st.frozensets(st.sampled_from(sorted(VERBS)))
rules = st.lists(st.builds(Rule, st.sampled_from(["b", "c", "*"]), keys, verbs), max_size=4)


@given(rules, st.sampled_from(sorted(VERBS)), st.sampled_from("bcd"), keys)
def test_what_no_rule_allows_is_not_allowed(
    given_rules: list[Rule], verb: str, bucket: str, key: str
) -> None:
    said = Rules(given_rules)
    expected = any(
        verb in rule.verbs and (rule.bucket == "*" or rule.bucket == bucket) and key.startswith(rule.prefix)
        for rule in given_rules
    )
    assert said.allow(verb, bucket, key) == expected
    if expected:
        assert said.know(bucket)
        assert said.allow_some(verb, bucket)
        assert said.allow(verb, bucket, key + "more")
    if said.allow(verb, bucket):
        assert said.allow(verb, bucket, key)


def test_rules_are_written_in_a_line() -> None:
    assert parse_rule("images: read, list") == Rule("images", "", frozenset(("read", "list")))
    assert parse_rule("scratch/a:b/c/ : all") == Rule("scratch", "a:b/c/", VERBS)
    assert parse_rule("*:read") == Rule("*", "", frozenset(("read",)))
    assert Rules([parse_rule("*: all")]).are_unlimited
    assert not Rules([parse_rule("*/x: all"), parse_rule("b: all")]).are_unlimited
    assert EVERYTHING.are_unlimited
    assert not NOTHING.know("b")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        *((text, "BUCKET: VERB") for text in ("images", "images:", ": read", "")),
        ("images: fly", "'fly'; there are admin"),
        ("Images: read", "bucket name"),
        ("i mages: read", "bucket name"),
    ],
)
def test_bad_rules_are_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_rule(text)


def test_a_token_alone_may_not_write_unless_it_says_so() -> None:
    read, write = (one.principal for one in credentials_of(["secret-1:a", "secret-2:a=rw"], []))
    assert [
        read.may_read("a", "k"),
        read.may_list("a"),
        read.may_write("a", "k"),
        read.may_delete("a", "k"),
    ] == [
        True,
        True,
        False,
        False,
    ]
    assert write.may_write("a", "k")
    assert write.may_delete("a", "k")
    assert not write.may_administer("a")
    assert not write.may_write("b", "k")


def principal(name: str, *texts: str) -> Principal:
    return Principal(name, Rules(parse_rule(text) for text in texts))


def test_credentials_keep_their_ids_and_give_them_to_no_other() -> None:
    access = Access(credentials_of(["given-token"], []))
    access.take_file(
        [Credential(principal("a", "b: read"), "token-of-a"), Credential(principal("k"), "secret-k", "KEY")]
    )
    ids = {secret: number for number, secret, *_ in access.rules()}
    access.take_file(
        [Credential(principal("a", "c: read"), "token-of-a"), Credential(principal("n"), "token-of-n")]
    )
    later = {secret: number for number, secret, *_ in access.rules()}
    assert later["token-of-a"] == ids["token-of-a"]
    assert later["token-of-n"] not in ids.values()
    assert access.principal(ids["secret-k"]) is UNPROVEN
    assert access.secret_of("KEY") is None
    # A request that waited speaks for whom its token stands for now.
    assert access.principal(ids["token-of-a"]).may_read("c")
    assert not access.principal(ids["token-of-a"]).may_read("b")


def test_tokens_that_were_vouched_for_end() -> None:
    access = Access(is_closed=True, asks_back=True)
    someone = principal("someone", "b: read")
    access.remember("first", someone, 100.0)
    access.remember("second", someone, 200.0)
    assert not access.expire(99.9)
    assert access.expire(100.0)
    assert [secret for _, secret, *_ in access.rules()] == ["second"]
    for number in range(PROVED_MAX):
        access.remember(f"token-{number}", someone, 300.0)
    assert len(access.rules()) == PROVED_MAX
    access.take_file([])
    assert access.rules() == []
    assert not access.is_open
    assert access.principal(-2) is UNPROVEN


def test_a_credential_has_one_principal() -> None:
    both = [Credential(principal("a"), "same-token"), Credential(principal("b"), "same-token")]
    with pytest.raises(ConfigError, match="a and b both have the same token"):
        Access().take_file(both)
    access = access_of(["given-token"], ["KEY:its-secret"])
    before = access.rules()
    for taken in (
        Credential(principal("a"), "given-token"),
        Credential(principal("a"), "other-secret", "KEY"),
    ):
        with pytest.raises(ConfigError):
            access.take_file([Credential(principal("b"), "fine-token"), taken])
        assert access.rules() == before


@pytest.mark.parametrize(
    ("pattern", "like", "unlike"),
    [
        ("a/b", ["a/b"], ["a/bc", "a/", ""]),
        ("svc[bot]", ["svc[bot]"], ["svcb", "svco"]),
        ("vision/*", ["vision/", "vision/train"], ["vision", "xvision/a"]),
        ("*/train", ["a/train", "/train"], ["a/trainer"]),
        ("repo:*/x:*:main", ["repo:a/x:b:main", "repo:a/x:/x:c:main"], ["repo:a/x:main", "repo:a/x:b:main2"]),
        ("aba*aba", ["abaaba"], ["aba", "ababa"]),
        ("*", ["", "anything\nat all"], []),
        ("a?c", ["a?c"], ["abc"]),
    ],
)
def test_only_a_star_stands_for_anything(pattern: str, like: list[str], unlike: list[str]) -> None:
    assert all(is_like(name, pattern) for name in like)
    assert not any(is_like(name, pattern) for name in unlike)


TEXT = """
[principals.vision]
rules = ["images: read, list", "scratch/vision/: all"]
tokens = ["vision-token"]
token_files = ["vision.token"]
key_files = ["vision.keys"]
egress = "500MB"
quota = "2TB"
subjects = ["repo:vision/*"]

[principals.everyone]
rules = ["public: read"]
anonymous = true
service_accounts = ["web/*"]
"""


def written(folder: Path, text: str = TEXT) -> AccessFile:
    (folder / "vision.token").write_text("old-token\nnew-token\n\n")
    (folder / "vision.keys").write_text("VISION:its/secret\n")
    (folder / "access.toml").write_text(text)
    return AccessFile(folder / "access.toml")


def test_a_file_says_who_may_do_what(tmp_path: Path) -> None:
    file = written(tmp_path)
    read = file.read()
    assert [(one.principal.name, one.access_key, one.secret) for one in read.credentials] == [
        ("vision", "", "vision-token"),
        ("vision", "", "old-token"),
        ("vision", "", "new-token"),
        ("vision", "VISION", "its/secret"),
        ("everyone", "", ""),
    ]
    vision = read.credentials[0].principal
    assert vision.egress_bytes_per_s == 5e8
    assert vision.may_write("scratch", "vision/x")
    assert not vision.may_write("scratch", "audio/x")
    assert read.quotas == {"vision": 2_000_000_000_000}
    assert principal_of(Claim(SUBJECT, "repo:vision/train", 0), read.claimants) is vision
    assert principal_of(Claim(SUBJECT, "repo:audio/train", 0), read.claimants) is None
    found = principal_of(Claim(SERVICE_ACCOUNT, "web/front", 0), read.claimants)
    assert found is not None
    assert found.name == "everyone"
    assert principal_of(Claim(SUBJECT, "web/front", 0), read.claimants) is None
    assert principal_of(Claim(SUBJECT, "x", 0), [Claimant(SUBJECT, "*", vision)]) is vision


def test_certificates_stand_for_principals_by_their_kind_of_name(tmp_path: Path) -> None:
    text = '[principals.a]\ncertificates = ["URI:spiffe://x/*", "CN:one"]\n'
    claimants = written(tmp_path, text).read().claimants
    for name, is_a in (
        ("URI:spiffe://x/7", True),
        ("CN:one", True),
        ("CN:one2", False),
        ("DNS:one", False),
        ("CN:spiffe://x/7", False),
    ):
        assert (principal_of(Claim(CERTIFICATE, name, 0), claimants) is not None) == is_a
    assert principal_of(Claim(SUBJECT, "CN:one", 0), claimants) is None
    with pytest.raises(ConfigError, match=r"principals\.a: 'one' names no certificate: write URI:"):
        written(tmp_path, '[principals.a]\ncertificates = ["one"]\n').read()


def test_a_certificate_that_is_remembered_is_no_token_and_nobody_else() -> None:
    known, all_others = Principal("known", EVERYTHING), Principal("others", NOTHING)
    access = Access([Credential(Principal("operator", EVERYTHING), "a-token"), Credential(all_others)])
    assert access.certificates() is None
    access.remember_certificate("CN:x", known, 10.0)
    assert len(access.rules()) == 2, "it would be taken for those who show nothing"
    access.asks_of_certificates = True
    assert access.certificates() == {}
    access.remember_certificate("CN:x", known, 10.0)
    (number,) = access.certificates().values()
    assert access.principal(number) is known
    assert access.anonymous() is all_others
    assert access.unrestricted_tokens() == ["a-token"]
    assert len({row[0] for row in access.rules()}) == 3
    assert access.expire(10.0)
    assert access.certificates() == {}
    assert access.principal(number) is UNPROVEN


def test_it_is_known_when_the_file_or_one_of_secrets_has_changed(tmp_path: Path) -> None:
    file = written(tmp_path)
    file.read()
    assert not file.has_changed()
    # As Kubernetes does it: the name leads to another file.
    (tmp_path / "new").write_text("newest-token\n")
    os.replace(tmp_path / "new", tmp_path / "vision.token")
    assert file.has_changed()
    assert "newest-token" in [one.secret for one in file.read().credentials]
    assert not file.has_changed()
    (tmp_path / "vision.keys").unlink()
    assert file.has_changed()
    with pytest.raises(ConfigError, match=r"vision\.keys' cannot be read"):
        file.read()
    assert not file.has_changed()  # until it is mended


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[principals.a]\nrules = ['b: fly']", "'fly'"),
        ("[principals.a]\nrule = []", "unknown field"),
        ("[principals.A]", "principal name"),
        ("[principals.token-1]", "those of --token"),
        ("[principals.a]\negress = 'fast'", "'fast' is not a size"),
        ("[principals.a]\negress = -1", "egress: -1 is negative"),
        ("[principals.a]\nquota = '-1GB'", "quota: '-1GB' is not a size"),
        ("[principals.a]\ntokens = ['short']", "token 1 must have 8"),
        ("[principals.a]\nkeys = ['KEY:secret-secret:b']", "stand in its rules"),
        ("[principals.a]\nkeys = ['K:secret-secret']", "key 1 is written"),
        ("[principals.a]\ntoken_files = ['none']", "none' cannot be read"),
        ("[principals.a]\nanonymous = true\n[principals.b]\nanonymous = true", "show no credential"),
        ("[jwt]\nissuer = 'i'", "audience"),
        *(
            (f"[principals.a]\norigin_users = {{ {said} }}", why)
            for said, why in (
                ("b = {}", "principals.a: origin_users.b names nobody"),
                ("b = { unix = 'no-such-user' }", "no Unix user or group 'no-such-user'"),
                ("b = { unix = '1:no-such-group' }", "no Unix user or group '1:no-such-group'"),
                ("b = { unix = '4294967294' }", "'4294967294' on this machine"),
                ("b = { unix = '1:4294967295' }", "numbers end at 4294967294"),
                ("b = { unix = '-1:1' }", "'-1:1'"),
                ("B = { unix = '1:1' }", "bucket name"),
                ("b = { user = '1:1' }", "unknown field"),
                ("b = { key = 'secret-secret' }", "ACCESS:SECRET"),
                ("b = { key = 'K:secret-secret ' }", "ACCESS:SECRET"),
                ("b = { key = 'K:S', key_file = 'vision.keys' }", "give one of them"),
                ("b = { key_file = 'none' }", "none' cannot be read"),
                ("b = { key_file = 'empty' }", "'empty' is empty"),
            )
        ),
        ("not toml", "access.toml"),
    ],
)
def test_a_file_that_cannot_be_understood_says_where(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match=why) as caught:
        written(tmp_path, text).read()
    assert "access.toml" in str(caught.value)
    assert "secret-secret" not in str(caught.value)


def test_a_principal_is_somebody_at_each_origin(tmp_path: Path) -> None:
    mine = f'"{os.getuid()}"' if os.getuid() else '"root"'
    text = (
        "writes_need_user = true\n[principals.a]\ntokens = ['token-of-a']\n"
        f'origin_users = {{ "*" = {{ unix = {mine} }}, s = {{ key_file = "a.s3" }}, '
        'f = { unix = "7:8", key = "K:S" } }\n[principals.b]\nanonymous = true\n'
    )
    (tmp_path / "a.s3").write_text("AK:some/secret+key=:token\nignored\n")
    file = written(tmp_path, text)
    read = file.read()
    assert read.writes_need_user
    a, b = (one.principal for one in read.credentials)
    assert a.user_at("s") == OriginUser(credentials=Credentials("AK", "some/secret+key=", "token"))
    assert a.user_at("f") == OriginUser(Owner(7, 8), Credentials("K", "S"))
    assert a.user_at("others") == OriginUser(Owner(os.getuid(), os.getgid()))
    assert b.user_at("f") is None
    assert "secret" not in repr(a)
    assert "secret" not in repr(a.user_at("s"))
    assert not file.has_changed()
    (tmp_path / "a.s3").write_text("AK:another-secret\n")
    assert file.has_changed()


def test_what_changed_is_told_once_and_makes_what_all_is(tmp_path: Path) -> None:
    access = Access(credentials_of(["given-token"], []), asks_back=True)
    ci = principal("ci", "b: read")
    assert access.take_changes() is None, "all of it is new"
    known = {row[0]: row for row in access.rules()}

    def tell() -> tuple[int, int]:
        changes = access.take_changes()
        assert changes is not None
        for number in changes.removed:
            del known[number]
        known.update({row[0]: row for row in changes.added})
        assert sorted(known.values()) == sorted(access.rules())
        return len(changes.added), len(changes.removed)

    assert tell() == (0, 0)
    access.remember("first", ci, 100.0)
    access.remember("second", ci, 200.0)
    assert tell() == (2, 0)
    access.remember("third", ci, 90.0)
    assert access.expire(100.0)
    assert tell() == (0, 1), "what came and went since is nothing"
    access.remember("second", ci, 300.0)
    assert tell() == (1, 1)
    access.asks_of_certificates = True
    access.remember_certificate("CN:a", ci, 300.0)
    changes = access.take_changes()
    assert changes is not None
    assert changes.certificates == access.certificates()
    access.take_file([])
    assert access.take_changes() is None
