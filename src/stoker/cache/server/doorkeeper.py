"""Who comes in: credentials that are given, those of a file, which is read again when it has changed, and tokens and
certificates for which somebody else vouches."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from stoker.base.clock import Clock
from stoker.cache.auth.access import Access
from stoker.cache.auth.access_file import AccessFile, AccessRead
from stoker.cache.auth.claims import CERTIFICATE, Claim, Claimant, principal_of
from stoker.cache.auth.principals import Principal
from stoker.cache.auth.reviewing import JwtReviewer, KubernetesReviewer, Reviewer, is_canonical
from stoker.cache.auth.tokens import credentials_of
from stoker.errors import ConfigError, EnvironmentProblem, NotAuthenticated

_LOOK_S = 1.0
"""So often the file is looked at."""
_WRONG_S = 10.0
_WRONG_MAX = 10_000
"""Tokens that were not proved are remembered so long, and so many."""
_CERTIFICATE_S = 3600.0
"""So long a name in a certificate that was looked up is remembered."""
_REVIEWS_AT_ONCE = 8
_REVIEWS_WAITING_MAX = 256
TOKEN_BYTES_MAX = 16 * 1024


class Doorkeeper:
    """`on_change` is called when other credentials open other things. Raises ConfigError where what is given, or the
    file, cannot be understood."""

    def __init__(
        self,
        tokens: Sequence[str],
        keys: Sequence[str],
        file: Path | None,
        clock: Clock,
        on_change: Callable[[], None],
    ) -> None:
        self._file = None if file is None else AccessFile(file)
        self._clock = clock
        self._on_change = on_change
        self._claimants: Sequence[Claimant] = ()
        self._reviewers: Sequence[Reviewer] = ()
        self._reviews: dict[bytes, asyncio.Task[Principal]] = {}
        self._wrong: dict[bytes, tuple[float, str]] = {}
        self._has_changed = False
        self._slots = asyncio.Semaphore(_REVIEWS_AT_ONCE)
        self._looked_at = clock.now()
        self.access = Access(credentials_of(tokens, keys), is_closed=file is not None)
        self.problem: str | None = None
        """Why the file is not taken as it is: what it said before holds."""
        if self._file is not None:
            self._take(self._file.read())

    @property
    def has_reviewers(self) -> bool:
        """Whether a token that is not known may still be somebody's."""
        return bool(self._reviewers)

    def look(self) -> None:
        """Several times a second: tell of what was proved since, read the file if it has changed, and forget what is
        over."""
        now = self._clock.now()
        if now - self._looked_at >= _LOOK_S:
            self._looked_at = now
            self._has_changed |= self.access.expire(self._clock.wall())
            self._look_at_file()
        if self._has_changed:
            self._has_changed = False
            self._on_change()

    def _look_at_file(self) -> None:
        if self._file is None or not self._file.has_changed():
            return
        try:
            self._take(self._file.read())
            self.problem = None
            self._has_changed = True
        except ConfigError as error:
            self.problem = f"the file of access is not taken, and what it said before holds: {error}"

    async def identify(self, token: str) -> Principal:
        """Whose a token is that is not known. Raises NotAuthenticated, EnvironmentProblem."""
        if not self._reviewers or len(token) > TOKEN_BYTES_MAX or not is_canonical(token):
            raise NotAuthenticated("this token is not known here")
        proved = self.access.proved(token)
        if proved is not None:
            return proved
        digest = hashlib.sha256(token.encode("latin-1", "replace")).digest()
        until_s, why = self._wrong.get(digest, (0.0, ""))
        if until_s > self._clock.now():
            raise NotAuthenticated(why)
        task = self._reviews.get(digest)
        if task is None:
            if len(self._reviews) >= _REVIEWS_WAITING_MAX:
                raise EnvironmentProblem("too many tokens are being reviewed: try again")
            task = asyncio.get_running_loop().create_task(self._review(token, digest))
            self._reviews[digest] = task
            task.add_done_callback(lambda _: self._reviews.pop(digest, None))
        # Who gave up waiting leaves the review to the others.
        return await asyncio.shield(task)

    def identify_certificate(self, name: str) -> Principal:
        """Whose a certificate is that was verified and has this name; who shows one that is nobody's may as well have
        shown none. Raises NotAuthenticated."""
        until_s = self._clock.wall() + _CERTIFICATE_S
        principal = (
            principal_of(Claim(CERTIFICATE, name, until_s), self._claimants) or self.access.anonymous()
        )
        if principal is None:
            raise NotAuthenticated(f"no principal here has the certificate {name!r}")
        self.access.remember_certificate(name, principal, until_s)
        self._has_changed = True
        return principal

    async def _review(self, token: str, digest: bytes) -> Principal:
        while True:
            reviewers, claimants = self._reviewers, self._claimants
            claim, principal, problem = await self._ask(reviewers, claimants, token)
            if self._claimants is claimants:
                break  # else by what the file says now
        if claim is not None and principal is not None:
            self.access.remember(token, principal, claim.until_s)
            self._has_changed = True
            return principal
        if problem is not None:
            raise problem
        why = (
            "nobody vouches for this token"
            if claim is None
            else f"no principal here has the {claim.kind} {claim.name!r}"
        )
        while len(self._wrong) >= _WRONG_MAX:
            del self._wrong[next(iter(self._wrong))]
        self._wrong[digest] = self._clock.now() + _WRONG_S, why
        raise NotAuthenticated(why)

    async def _ask(
        self, reviewers: Sequence[Reviewer], claimants: Sequence[Claimant], token: str
    ) -> tuple[Claim | None, Principal | None, EnvironmentProblem | None]:
        """What is claimed of it, whom that stands for, and why some could not be asked."""
        known: Claim | None = None
        problem = None
        async with self._slots:
            for reviewer in reviewers:
                try:
                    claim = await reviewer.review(token, self._clock.wall())
                except EnvironmentProblem as error:
                    problem = error
                    continue
                known = claim or known
                principal = None if claim is None else principal_of(claim, claimants)
                if principal is not None:
                    return claim, principal, None
        return known, None, problem

    def _take(self, read: AccessRead) -> None:
        """All of it, or nothing. Raises ConfigError."""
        reviewers: list[Reviewer] = []
        if read.jwt is not None:
            reviewers.append(JwtReviewer(read.jwt, read.jwt_keys))
        if read.kubernetes is not None:
            reviewers.append(KubernetesReviewer(read.kubernetes))
        self.access.take_file(read.credentials, read.quotas, read.principals)
        self.access.asks_back = bool(reviewers)
        self.access.writes_need_user = read.writes_need_user
        self.access.asks_of_certificates = any(one.kind == CERTIFICATE for one in read.claimants)
        self._reviewers, self._claimants = reviewers, read.claimants
        self._wrong.clear()
