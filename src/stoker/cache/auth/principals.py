"""Who requests speak for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from stoker.cache.auth.rules import ADMIN, ANY_BUCKET, DELETE, EVERYTHING, LIST, NOTHING, READ, WRITE, Rules
from stoker.cache.origin.users import OriginUser

_NO_USERS: Mapping[str, OriginUser] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Principal:
    """A team, a program or a person. `egress_bytes_per_s`: what it is sent each second at most by this server, on all
    its connections together; 0: no limit of its own. `origin_users`: whom it is at the
    origins that it writes to, by bucket; `*` is all others."""

    name: str
    rules: Rules
    egress_bytes_per_s: float = 0.0
    origin_users: Mapping[str, OriginUser] = field(
        default_factory=lambda: _NO_USERS, repr=False, compare=False
    )

    @property
    def is_unrestricted(self) -> bool:
        """Whether it may do everything, administer the server included."""
        return self.rules.are_unlimited

    def knows(self, bucket: str) -> bool:
        """Whether it may do anything there."""
        return self.rules.know(bucket)

    def may_read(self, bucket: str, key: str = "") -> bool:
        """Whether it may read a key; without one, all of the bucket."""
        return self.rules.allow(READ, bucket, key)

    def may_list(self, bucket: str, prefix: str = "") -> bool:
        """Whether it may be told what is below a prefix."""
        return self.rules.allow(LIST, bucket, prefix)

    def may_write(self, bucket: str, key: str = "") -> bool:
        """Whether it may write a key, where anybody may."""
        return self.rules.allow(WRITE, bucket, key)

    def may_delete(self, bucket: str, key: str = "") -> bool:
        """Whether it may remove a key, where anybody may."""
        return self.rules.allow(DELETE, bucket, key)

    def user_at(self, bucket: str) -> OriginUser | None:
        """Whom it is at the bucket's origin; None: nobody of its own."""
        return self.origin_users.get(bucket) or self.origin_users.get(ANY_BUCKET)

    def may_administer(self, bucket: str, prefix: str = "") -> bool:
        """Whether it may pin and evict what is below a prefix."""
        return self.rules.allow(ADMIN, bucket, prefix)


UNPROVEN = Principal("unproven", NOTHING)
"""Until it is found out who asks."""
ANYONE = Principal("anyone", EVERYTHING)
"""Where no credential is needed."""
