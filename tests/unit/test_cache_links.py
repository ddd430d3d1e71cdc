"""Links: what a proof opens, and that each thing that is checked of it is."""

from __future__ import annotations

import base64
import dataclasses
import hmac
from collections.abc import Callable

import msgspec
import pytest

from stoker.cache.auth.access import Access, access_of
from stoker.cache.auth.links import (
    SKEW_S,
    Grant,
    Verified,
    is_clean,
    link_name,
    make_link,
    verify_link,
)
from stoker.cache.auth.principals import Principal
from stoker.cache.auth.rules import EVERYTHING
from stoker.cache.auth.tokens import Credential, credentials_of
from stoker.errors import AccessDenied, ConfigError

NOW = 1_700_000_000.0
TOKEN = Credential(Principal("t", EVERYTHING), "a-token-of-links")
KEY = Credential(Principal("k", EVERYTHING), "a-secret-of-links", "AKID")
ACCESS = Access([TOKEN, KEY])


def proof_of(target: str) -> str:
    return target.split("/")[3]


def verified(proof: str, now_s: float = NOW, age_max_s: float = 3600.0, access: Access = ACCESS) -> Verified:
    return verify_link(proof, now_s, age_max_s, access.link_maker)


def made(credential: Credential = TOKEN, path: str = "dir/", expires_in_s: float = 3600.0) -> str:
    return proof_of(make_link(credential, "b", path, NOW, expires_in_s))


@pytest.mark.parametrize("credential", [TOKEN, KEY])
def test_a_link_says_what_it_opens_and_tells_no_secret(credential: Credential) -> None:
    target = make_link(credential, "b", "dir/a b+é.bin", NOW, 60.0)
    assert target == f"/-/link/{proof_of(target)}/b/dir/a%20b%2B%C3%A9.bin"
    grant, maker = verified(proof_of(target))
    assert (grant.bucket, grant.path, grant.expires_s) == ("b", "dir/a b+é.bin", int(NOW) + 60)
    assert maker is credential
    proof = proof_of(target)
    told = base64.urlsafe_b64decode(proof + "=" * (-len(proof) % 4))
    assert credential.secret.encode() not in told
    assert hmac.digest(credential.secret.encode(), b"", "sha256") not in told


@pytest.mark.parametrize(
    ("path", "bucket", "key", "is_covered"),
    [
        ("dir/a", "b", "dir/a", True),
        ("dir/a", "b", "dir/ab", False),
        ("dir/a", "b", "dir/a/b", False),
        ("dir/a", "b", "dir/", False),
        ("dir/a", "c", "dir/a", False),
        ("dir/", "b", "dir/a", True),
        ("dir/", "b", "dir/sub/a", True),
        ("dir/", "b", "dir/", True),
        ("dir/", "b", "dir", False),
        ("dir/", "b", "dir0", False),
        ("dir/", "b", "other/dir/a", False),
        ("dir/", "c", "dir/a", False),
        ("", "b", "any/thing", True),
        ("", "c", "any/thing", False),
    ],
)
def test_a_link_covers_one_key_or_all_below_a_slash(
    path: str, bucket: str, key: str, is_covered: bool
) -> None:
    assert verified(made(path=path)).grant.covers(bucket, key) == is_covered


def test_a_link_is_good_until_its_time_is_over() -> None:
    proof = made(expires_in_s=100.0)
    assert verified(proof, NOW + 99)
    for late_s in (100, 101, 1e9):
        with pytest.raises(AccessDenied, match="time is over"):
            verified(proof, NOW + late_s)


def test_a_link_is_not_good_before_it_was_made() -> None:
    proof = made()
    assert verified(proof, NOW - SKEW_S)
    with pytest.raises(AccessDenied, match="a clock that is ahead"):
        verified(proof, NOW - SKEW_S - 1)


def test_a_server_says_how_long_links_are_good_at_most() -> None:
    proof = made(expires_in_s=100.0)
    assert verified(proof, age_max_s=100)
    for age_max_s in (99, 0):
        with pytest.raises(AccessDenied, match="at most here"):
            verified(proof, NOW + 50, age_max_s)


@pytest.mark.parametrize("credential", [TOKEN, KEY])
def test_a_proof_that_was_altered_in_any_character_is_refused(credential: Credential) -> None:
    proof = made(credential)
    for at, character in enumerate(proof):
        for other in {"A", "B", "-", "_", chr(ord(character) ^ 1)} - {character}:
            with pytest.raises(AccessDenied):
                verified(proof[:at] + other + proof[at + 1 :])
        with pytest.raises(AccessDenied):
            verified(proof[:at])
    for end in ("=", "==", "A", "AAAA", " ", "\n", "é", "\0"):
        with pytest.raises(AccessDenied):
            verified(proof + end)


def test_a_proof_that_was_altered_in_any_bit_is_refused() -> None:
    proof = made()
    data = bytearray(base64.urlsafe_b64decode(proof + "=" * (-len(proof) % 4)))
    for at in range(len(data)):
        for bit in range(8):
            data[at] ^= 1 << bit
            with pytest.raises(AccessDenied):
                verified(base64.urlsafe_b64encode(data).rstrip(b"=").decode())
            data[at] ^= 1 << bit


@pytest.mark.parametrize("proof", ["", "A", "AAAA", "A" * 100, "!" * 44, "é", "A" * 100_000])
def test_what_is_no_proof_is_refused(proof: str) -> None:
    with pytest.raises(AccessDenied, match="no link"):
        verified(proof)


def forged(grant: Grant, key: Callable[[bytes], bytes]) -> str:
    said = msgspec.msgpack.encode(grant)
    return base64.urlsafe_b64encode(said + hmac.digest(key(b""), said, "sha256")).rstrip(b"=").decode()


def test_nobody_makes_a_link_without_the_secret() -> None:
    whole = verified(made()).grant
    for key in (
        lambda _: b"",
        lambda _: whole.maker.encode(),
        lambda _: TOKEN.secret.encode(),  # the secret is not the key itself
    ):
        with pytest.raises(AccessDenied, match="no link"):
            verified(forged(whole, key))
    # Whoever has one secret makes no link in the name of another.
    other = Credential(Principal("o", EVERYTHING), "another-secret", "OTHER")
    access = Access([TOKEN, KEY, other])
    stolen = dataclasses.replace(other, access_key="AKID")
    with pytest.raises(AccessDenied, match="no link"):
        verified(made(stolen), access=access)


def test_a_link_of_another_version_is_refused_with_its_number() -> None:
    grant = msgspec.structs.replace(verified(made()).grant, version=2)
    key = hmac.digest(TOKEN.secret.encode(), b"stoker link key 1", "sha256")
    assert verified(forged(msgspec.structs.replace(grant, version=1), lambda _: key))
    with pytest.raises(AccessDenied, match="version 2"):
        verified(forged(grant, lambda _: key))


def test_a_link_ends_with_the_credential_and_its_secret() -> None:
    access = Access(is_closed=True)
    for one, renewed in ((TOKEN, "a-renewed-token"), (KEY, "a-renewed-secret")):
        proof = made(one)
        access.take_file([one])
        assert verified(proof, access=access).maker is one
        access.take_file([dataclasses.replace(one, secret=renewed)])
        with pytest.raises(AccessDenied):
            verified(proof, access=access)
        access.take_file([])
        with pytest.raises(AccessDenied, match="not known here"):
            verified(proof, access=access)
        access.take_file([one])
        assert verified(proof, access=access)


def test_tokens_that_others_vouch_for_and_those_who_show_none_make_no_links() -> None:
    access = Access([Credential(Principal("all", EVERYTHING))], asks_back=True)
    access.remember(TOKEN.secret, TOKEN.principal, NOW + 1e6)
    assert access.principal(1) is TOKEN.principal
    with pytest.raises(AccessDenied, match="not known here"):
        verified(made(), access=access)
    nobody = Credential(Principal("all", EVERYTHING))
    assert access.link_maker(link_name(nobody)) is None
    # Nor where it is forgotten to leave them out: their key would be everybody's.
    said = msgspec.structs.replace(verified(made(KEY), access=ACCESS).grant, maker=link_name(nobody))
    proof = forged(said, lambda _: hmac.digest(b"", b"stoker link key 1", "sha256"))
    with pytest.raises(AccessDenied, match="not known here"):
        verify_link(proof, NOW, 3600.0, lambda _: nobody)
    with pytest.raises(ConfigError, match="token or a key"):
        make_link(nobody, "b", "a", NOW, 60.0)


def test_any_server_that_knows_the_credential_takes_the_link() -> None:
    given = credentials_of(["first-token", TOKEN.secret], ["AKID:a-secret-of-links:b"])
    for one in (TOKEN, KEY):
        maker = verified(made(one), access=Access(given)).maker
        assert (maker.secret, maker.access_key) == (one.secret, one.access_key)
    assert link_name(TOKEN) == link_name(access_of([TOKEN.secret]).link_maker(link_name(TOKEN)) or KEY)


@pytest.mark.parametrize("expires_in_s", [0.0, 0.5, -1.0, float("nan"), float("inf"), 1e12])
def test_a_time_that_is_none_is_refused(expires_in_s: float) -> None:
    with pytest.raises(ConfigError, match="a link is good for 1 s"):
        make_link(TOKEN, "b", "a", NOW, expires_in_s)


@pytest.mark.parametrize("path", ["..", "a/../b", "./a", "a/.", "a\\b", "a/..\\b"])
def test_paths_that_others_would_change_cannot_be_linked_to(path: str) -> None:
    assert not is_clean(path)
    with pytest.raises(ConfigError, match="cannot be linked to"):
        make_link(TOKEN, "b", path, NOW, 60.0)


def test_a_path_that_is_too_long_is_refused() -> None:
    assert make_link(TOKEN, "b", "a" * 4096, NOW, 60.0)
    with pytest.raises(ConfigError, match="4096 bytes"):
        make_link(TOKEN, "b", "a" * 4097, NOW, 60.0)


def test_ordinary_names_are_clean() -> None:
    for key in ("a", "a/b", "...", ".hidden", "a..b", "a/..b/c", "", "a/"):
        assert is_clean(key)
