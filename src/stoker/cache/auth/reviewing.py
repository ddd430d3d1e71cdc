"""Bearer tokens for which somebody else vouches: JSON Web Tokens by their issuer's public keys, and tokens of service
accounts by Kubernetes' API server (TokenReview)."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import logging
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from stoker.cache.auth.claims import SERVICE_ACCOUNT, SUBJECT, Claim
from stoker.errors import ConfigError, EnvironmentProblem

if TYPE_CHECKING:
    import jwt

    from stoker.cache.auth.access_file import JwtSaid, KubernetesSaid

_ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Those with public keys: a shared secret would let everyone who can verify a token make one."""
_LEEWAY_S = 30.0
_PROVED_S = 300.0
"""So long a token of an issuer is remembered at most."""
_KEYS_AGAIN_S = 10.0
"""An issuer is asked for its keys no more often because of a key that is not known."""
_TIMEOUT_S = 5.0
_REVIEW_S = 60.0
"""So long what the API server has said of a token holds: one that is revoked opens nothing after that."""
log = logging.getLogger(__name__)
_ACCOUNT = "system:serviceaccount:"
_ANSWER_BYTES_MAX = 1024 * 1024
_UNREVIEWED = "tokens of Kubernetes cannot be reviewed now; the server's log says why"


class Reviewer(Protocol):
    """Finds out whose a token is."""

    async def review(self, token: str, now_s: float) -> Claim | None:
        """None if it is no token of this kind, or a wrong one. Raises EnvironmentProblem where it cannot be found out
        now."""
        ...


class JwtReviewer:
    """Raises ConfigError where PyJWT is not installed, or the keys cannot be read. `keys`: what the file of them says;
    None: they are at a URL."""

    def __init__(self, said: JwtSaid, keys: str | None) -> None:
        try:
            import jwt
        except ImportError as error:
            raise ConfigError("for [jwt], install PyJWT: pip install 'stoker[jwt]'") from error
        self._jwt = jwt
        self._said = said
        self._keys: list[jwt.PyJWK] | None = None
        self._client: jwt.PyJWKClient | None = None
        self._asked_at = -_KEYS_AGAIN_S
        try:
            if keys is None:
                context = ssl.create_default_context(cafile=said.ca_file or None)
                self._client = jwt.PyJWKClient(said.jwks, timeout=_TIMEOUT_S, ssl_context=context)
            else:
                self._keys = list(jwt.PyJWKSet.from_dict(_object(keys)).keys)
        except (OSError, ValueError, jwt.PyJWTError) as error:
            raise ConfigError(f"jwt.jwks: {said.jwks} cannot be used: {error}") from error

    async def review(self, token: str, now_s: float) -> Claim | None:
        """See `Reviewer`."""
        if not self._is_worth_it(token, now_s):
            return None
        return await asyncio.to_thread(self._review, token, now_s)

    def _is_worth_it(self, token: str, now_s: float) -> bool:
        """Whether it says that it is one of this issuer, and of now: what is not even that costs no thread."""
        try:
            said = self._jwt.decode(token, options={"verify_signature": False})
            return said.get("iss") == self._said.issuer and float(said["exp"]) + _LEEWAY_S > now_s
        except Exception:  # noqa: BLE001  a stranger wrote it, and it has been through parsers of others
            return False

    def _review(self, token: str, now_s: float) -> Claim | None:
        try:
            key = self._key(token)
            if key is None:
                return None
            said: dict[str, Any] = self._jwt.decode(
                token,
                key,
                algorithms=_ALGORITHMS,
                audience=self._said.audience,
                issuer=self._said.issuer,
                leeway=_LEEWAY_S,
                options={"require": ["exp", "iss", "aud"]},
            )
            name, until_s = said.get(self._said.subject), float(said["exp"]) + _LEEWAY_S
        except self._jwt.PyJWKClientConnectionError as error:
            raise EnvironmentProblem(f"the keys at {self._said.jwks} cannot be had: {error}") from error
        except Exception:  # noqa: BLE001  as above: whatever it did to a parser, nothing is proved
            return None
        if not isinstance(name, str) or not name:
            return None
        # A key that is taken back opens nothing for long.
        return Claim(SUBJECT, name, min(until_s, now_s + _PROVED_S))

    def _key(self, token: str) -> jwt.PyJWK | None:
        """That it says it is signed with. Raises PyJWTError."""
        wanted = self._jwt.get_unverified_header(token).get("kid")
        found = _key_of(self._known(is_again=False), wanted)
        if found is None and self._client is not None and time.monotonic() - self._asked_at > _KEYS_AGAIN_S:
            found = _key_of(self._known(is_again=True), wanted)
        return found

    def _known(self, *, is_again: bool) -> Sequence[jwt.PyJWK]:
        if self._client is None:
            return self._keys or ()
        if is_again:
            self._asked_at = time.monotonic()
        return self._client.get_signing_keys(refresh=is_again)


def _key_of(keys: Sequence[jwt.PyJWK], wanted: object) -> jwt.PyJWK | None:
    if wanted is None:
        return keys[0] if len(keys) == 1 else None
    return next((key for key in keys if key.key_id == wanted), None)


def _object(text: str) -> dict[str, Any]:
    """Raises ValueError."""
    said = json.loads(text)
    if not isinstance(said, dict):
        raise ValueError("it is no object")
    return said


def is_canonical(token: str) -> bool:
    """Whether a token of three parts is written in the one way that there is: who remembers tokens would else have to
    remember as many as somebody likes."""
    parts = token.split(".")
    if len(parts) != 3:
        return True
    try:
        return all(
            base64.urlsafe_b64encode(base64.b64decode(part + "=" * (-len(part) % 4), b"-_", validate=True))
            == part.encode() + b"=" * (-len(part) % 4)
            for part in parts
        )
    except ValueError:
        return False


class KubernetesReviewer:
    """`fetch` is for tests of what an API server may answer; by default it is asked over HTTPS. Raises ConfigError."""

    def __init__(
        self, said: KubernetesSaid, fetch: Callable[[urllib.request.Request], bytes] | None = None
    ) -> None:
        if not said.api_server.startswith("https://"):
            raise ConfigError(f"kubernetes.api_server must be an https:// URL, not {said.api_server!r}")
        self._said = said
        self._fetch = self._ask if fetch is None else fetch

    async def review(self, token: str, now_s: float) -> Claim | None:
        """See `Reviewer`."""
        name = await asyncio.to_thread(self._review, token)
        return None if name is None else Claim(SERVICE_ACCOUNT, name, now_s + _REVIEW_S)

    def _review(self, token: str) -> str | None:
        spec: dict[str, Any] = {"token": token}
        if self._said.audiences:
            spec["audiences"] = self._said.audiences
        asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": spec}
        url = f"{self._said.api_server.rstrip('/')}/apis/authentication.k8s.io/v1/tokenreviews"
        try:
            with open(self._said.token_file, encoding="ascii") as file:
                own = file.read().strip()
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {own}"}
            request = urllib.request.Request(url, json.dumps(asked).encode(), headers, method="POST")
            said = json.loads(self._fetch(request))
        except urllib.error.HTTPError as error:
            log.warning(
                "%s answers %d: may this server's service account create tokenreviews (the cluster role "
                "system:auth-delegator)?",
                url,
                error.code,
            )
            raise EnvironmentProblem(_UNREVIEWED) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            log.warning("tokens cannot be reviewed at %s: %s", url, error)
            raise EnvironmentProblem(_UNREVIEWED) from error
        return self._account(said)

    def _account(self, said: Any) -> str | None:
        """`NAMESPACE/NAME` of the service account that was found, for the right audience."""
        status = said.get("status") if isinstance(said, dict) else None
        if not isinstance(status, dict) or status.get("authenticated") is not True:
            return None
        wanted = set(self._said.audiences)
        audiences = status.get("audiences")
        known = {one for one in audiences if isinstance(one, str)} if isinstance(audiences, list) else set()
        if wanted and not wanted & known:
            return None  # it was not looked at: the API server knows no audiences
        user = status.get("user")
        name = user.get("username") if isinstance(user, dict) else None
        if not isinstance(name, str) or not name.startswith(_ACCOUNT):
            return None
        namespace, _, account = name.removeprefix(_ACCOUNT).partition(":")
        return f"{namespace}/{account}" if namespace and account else None

    def _ask(self, request: urllib.request.Request) -> bytes:
        context = ssl.create_default_context(cafile=self._said.ca_file or None)
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=context) as answer:
            data: bytes = answer.read(_ANSWER_BYTES_MAX)
        return data
