"""Links: a proof, made by whoever has a credential, with which anybody may read one object, or what lies below a
prefix, until a time. Pure.

A proof is what it says (version, whose credential, since when, until when, bucket, path) and an HMAC-SHA-256 of that,
in base64url. Its key comes from the credential's secret, which is not in it: any server that knows the credential can
verify it, and it ends with the credential.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import quote

import msgspec

from stoker.cache.auth.tokens import Credential
from stoker.errors import AccessDenied, ConfigError
from stoker.wire.cache_api import LINK_PREFIX
from stoker.wire.http import check_key

AGE_MAX_S = 7 * 24 * 3600
"""So long a link is good at most, unless a server says otherwise."""
SKEW_S = 900
"""So much clocks may differ."""
PROOF_BYTES_MAX = 8192
_VERSION = 1
_MAC_BYTES = 32
_KEY_LABEL, _NAME_LABEL = b"stoker link key 1", b"stoker link name 1"
_NAME_BYTES = 12
_TIME_MAX = 253_402_300_799


class Grant(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a link opens. `maker`: of `link_name`. `path`: one key; with a slash at its end, or empty, all below it."""

    version: int
    maker: str
    made_s: int
    expires_s: int
    bucket: str
    path: str

    def covers(self, bucket: str, key: str) -> bool:
        """Whether it opens that object."""
        is_below = (not self.path or self.path.endswith("/")) and key.startswith(self.path)
        return bucket == self.bucket and (key == self.path or is_below)


class Verified(NamedTuple):
    """A link that holds: what it opens, and whose credential it was made with."""

    grant: Grant
    maker: Credential


def link_name(credential: Credential) -> str:
    """What stands for a credential in its links: an access key as it is; of a token a hash, which opens nothing."""
    if credential.access_key:
        return f"key:{credential.access_key}"
    return f"token:{hmac.digest(credential.secret.encode(), _NAME_LABEL, 'sha256')[:_NAME_BYTES].hex()}"


def make_link(credential: Credential, bucket: str, path: str, now_s: float, expires_in_s: float) -> str:
    """The target that opens a key, or all below a path that is empty or ends with a slash, from now on and for so long.
    Raises ConfigError."""
    if not credential.secret:
        raise ConfigError("a link is made with a token or a key; there is none")
    if not 1 <= expires_in_s <= _TIME_MAX - now_s:
        raise ConfigError(f"a link is good for 1 s or longer, not for {expires_in_s:g} s")
    if not is_clean(check_key(path)):
        raise ConfigError(f"{path!r} cannot be linked to: programs that follow links change such paths")
    made_s = int(now_s)
    grant = Grant(_VERSION, link_name(credential), made_s, made_s + int(expires_in_s), bucket, path)
    said = msgspec.msgpack.encode(grant)
    proof = base64.urlsafe_b64encode(said + _mac(credential, said)).rstrip(b"=").decode()
    return f"{LINK_PREFIX}{proof}/{quote(bucket, safe='')}/{quote(path, safe='/')}"


def verify_link(
    proof: str, now_s: float, age_max_s: float, maker_of: Callable[[str], Credential | None]
) -> Verified:
    """What a link opens. `maker_of`: the credential that a `link_name` stands for, where that is known. Raises
    AccessDenied."""
    grant, said, mac = _read(proof)
    maker = maker_of(grant.maker)
    if maker is None or not maker.secret:
        raise AccessDenied("this link is good no more: what it was made with is not known here")
    if not hmac.compare_digest(mac, _mac(maker, said)):
        raise _no_link()
    if grant.made_s > now_s + SKEW_S:
        raise AccessDenied("this link is good later: it was made by a clock that is ahead")
    if grant.expires_s <= now_s:
        raise AccessDenied("this link is good no more: its time is over")
    if grant.expires_s - grant.made_s > age_max_s:
        raise AccessDenied(f"links are good for {age_max_s:g} s at most here: make one for a shorter time")
    return Verified(grant, maker)


def is_clean(key: str) -> bool:
    """Whether a path means the same to all who resolve it: no part of it is `.` or `..`, or has a backslash."""
    return "\\" not in key and not any(part in (".", "..") for part in key.split("/"))


def _read(proof: str) -> tuple[Grant, bytes, bytes]:
    if len(proof) > PROOF_BYTES_MAX or not proof.isascii():
        raise _no_link()
    try:
        data = base64.b64decode(proof + "=" * (-len(proof) % 4), altchars=b"-_", validate=True)
        # One proof is written in one way: its last character has bits that say nothing.
        if base64.urlsafe_b64encode(data).rstrip(b"=").decode() != proof:
            raise _no_link()
        said, mac = data[:-_MAC_BYTES], data[-_MAC_BYTES:]
        grant = msgspec.msgpack.decode(said, type=Grant)
    except (binascii.Error, ValueError):
        raise _no_link() from None
    if grant.version != _VERSION:
        raise AccessDenied(f"this link is of version {grant.version}, which is not known here")
    return grant, said, mac


def _mac(credential: Credential, said: bytes) -> bytes:
    key = hmac.digest(credential.secret.encode(), _KEY_LABEL, "sha256")
    return hmac.digest(key, said, "sha256")


def _no_link() -> AccessDenied:
    return AccessDenied("this is no link that was made here: is it whole?")
