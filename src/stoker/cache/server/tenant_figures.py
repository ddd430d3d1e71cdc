"""What each principal has asked for and was sent, and what tenants take of the disk. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

PRINCIPALS_MAX = 200
"""So many have figures of their own, those that are configured first; the others' are summed up, with those of all of
whom it is not known who they are."""
_NO_TOKEN = 401


class SentBy(NamedTuple):
    """What the front knows of one: what it has answered itself, all that was sent, and how long connections waited for
    what they may send."""

    hits: int = 0
    sent_bytes: int = 0
    throttled_s: float = 0.0


class PrincipalFigures(NamedTuple):
    """Of one principal, or of several together."""

    name: str
    requests: int
    refused: int
    sent_bytes: int
    throttled_s: float


def principal_figures(
    names: Sequence[str],
    others: str,
    sent: Mapping[str, SentBy],
    requests: Mapping[str, int],
    refused: Mapping[str, int],
    turned_away: Mapping[int, int],
) -> list[PrincipalFigures]:
    """In the order of `names`, those who are configured; and last, as `others`, of all else. `requests` and `refused`:
    of the back, by name; `turned_away`: whom the front has refused, by status."""
    own = list(dict.fromkeys(names))[:PRINCIPALS_MAX]
    rest = (sent.keys() | requests.keys() | refused.keys()) - set(own)
    rows = [_sum(name, [name], sent, requests, refused) for name in own]
    last = _sum(others, rest, sent, requests, refused)
    return [
        *rows,
        last._replace(
            requests=last.requests + sum(turned_away.values()),
            refused=last.refused + turned_away.get(_NO_TOKEN, 0),
        ),
    ]


def _sum(
    label: str,
    names: Iterable[str],
    sent: Mapping[str, SentBy],
    requests: Mapping[str, int],
    refused: Mapping[str, int],
) -> PrincipalFigures:
    names = list(names)
    of_front = [sent.get(name, SentBy()) for name in names]
    return PrincipalFigures(
        label,
        sum(requests.get(name, 0) for name in names) + sum(one.hits for one in of_front),
        sum(refused.get(name, 0) for name in names),
        sum(one.sent_bytes for one in of_front),
        sum(one.throttled_s for one in of_front),
    )
