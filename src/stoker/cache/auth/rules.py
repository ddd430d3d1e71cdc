"""Who may do what with which keys. Pure. What no rule allows is not allowed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from stoker.base.ids import check_name
from stoker.errors import ConfigError

READ = "read"
LIST = "list"
WRITE = "write"
DELETE = "delete"
ADMIN = "admin"
VERBS = frozenset((READ, LIST, WRITE, DELETE, ADMIN))
ANY_BUCKET = "*"
_ALL = "all"


class Rule(NamedTuple):
    """Verbs with the keys of a bucket (`*`: of each) that begin with a prefix."""

    bucket: str
    prefix: str
    verbs: frozenset[str]


class Rules:
    """Of one principal."""

    __slots__ = ("_rules",)

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._rules = tuple(rules)

    def allow(self, verb: str, bucket: str, key: str = "") -> bool:
        """Whether this may be done with a key; or with all keys below a prefix, which is `key`, then: without one, with
        all of the bucket. `*` is all buckets."""
        return any(
            verb in rule.verbs and rule.bucket in (bucket, ANY_BUCKET) and key.startswith(rule.prefix)
            for rule in self._rules
        )

    def allow_some(self, verb: str, bucket: str) -> bool:
        """Whether this may be done with any key of that bucket."""
        return any(verb in rule.verbs and rule.bucket in (bucket, ANY_BUCKET) for rule in self._rules)

    def know(self, bucket: str) -> bool:
        """Whether anything may be done there: who may do nothing is not told whether it is there."""
        return any(rule.verbs and rule.bucket in (bucket, ANY_BUCKET) for rule in self._rules)

    @property
    def are_unlimited(self) -> bool:
        """Whether everything may be done with everything."""
        return all(self.allow(verb, ANY_BUCKET) for verb in VERBS)

    def reads(self) -> dict[str, list[str]]:
        """Prefixes of what may be read, by bucket."""
        found: dict[str, list[str]] = {}
        for rule in self._rules:
            if READ in rule.verbs:
                found.setdefault(rule.bucket, []).append(rule.prefix)
        return found


EVERYTHING = Rules([Rule(ANY_BUCKET, "", VERBS)])
NOTHING = Rules([])


def parse_rule(text: str) -> Rule:
    """`BUCKET: VERB, VERB`, `BUCKET/PREFIX: VERB, …` or `*: …`; `all` is every verb. Raises ConfigError."""
    where, colon, what = text.rpartition(":")
    bucket, _, prefix = where.strip().partition("/")
    names = {name.strip() for name in what.split(",") if name.strip()}
    if not colon or not bucket or not names:
        raise ConfigError(
            f"the rule {text!r} is not written BUCKET: VERB, … or BUCKET/PREFIX: VERB, … (* is every bucket)"
        )
    if unknown := names - VERBS - {_ALL}:
        known = ", ".join(sorted(VERBS))
        raise ConfigError(f"the rule {text!r} has the verb {min(unknown)!r}; there are {known}, and all")
    if bucket != ANY_BUCKET:
        try:
            check_name("bucket", bucket)
        except ValueError as error:
            raise ConfigError(f"the rule {text!r}: {error}") from error
    return Rule(bucket, prefix, VERBS if _ALL in names else frozenset(names))
