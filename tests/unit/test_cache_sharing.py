"""Which of announced reads are of what which member of a fleet owns."""

from __future__ import annotations

import numpy as np
import pytest

from stoker.cache.maglev import Member, Placement, block_owner_name
from stoker.cache.sharing import Sharing

BLOCK = 1000
MEMBERS = [Member(name) for name in ("a", "b", "c", "d")]
KEYS = [f"key-{number}" for number in range(500)]


def shared(copies: int = 1, *, by_block: bool = False, members: list[Member] | None = None) -> Sharing:
    sharing = Sharing(Placement(members or MEMBERS), "bucket", copies, BLOCK, by_block=by_block)
    sharing.learn(KEYS[:100])
    sharing.learn(KEYS[100:])
    return sharing


@pytest.mark.parametrize("copies", [1, 2])
def test_each_read_is_told_to_those_who_own_its_object(copies: int) -> None:
    sharing = shared(copies)
    numbers = np.random.default_rng(1).integers(0, len(KEYS), 3000)
    divided = sharing.divide(numbers, None, KEYS.__getitem__)
    told: list[set[str]] = [set() for _ in numbers]
    for name, share in divided.items():
        catalog = sharing.catalog(name)
        assert [KEYS[catalog[n]] for n in share.numbers] == [KEYS[n] for n in numbers[share.places]]
        assert (np.diff(share.places) > 0).all()
        for place in share.places:
            told[place].add(name)
    placement = Placement(MEMBERS)
    for number, names in zip(numbers, told, strict=True):
        owners = placement.owners(block_owner_name("bucket", KEYS[number], 0), copies)
        assert names == {owner.name for owner in owners}
    assert sum(len(sharing.catalog(name)) for name in sharing.members) == copies * len(KEYS)


def test_reads_of_many_blocks_are_told_to_the_owners_of_each() -> None:
    sharing = shared(by_block=True)
    chance = np.random.default_rng(2)
    numbers = chance.integers(0, 3, 400)
    starts = chance.integers(0, 50 * BLOCK, 400)
    stops = starts + chance.integers(0, 3 * BLOCK, 400)
    spans = np.stack([starts, stops], axis=1).astype(np.uint64)
    divided = sharing.divide(numbers, spans, KEYS.__getitem__)
    placement = Placement(MEMBERS)
    for at in range(400):
        blocks = range(starts[at] // BLOCK, (max(stops[at], starts[at] + 1) - 1) // BLOCK + 1)
        owners = {placement.owner(block_owner_name("bucket", KEYS[numbers[at]], block)) for block in blocks}
        told = {name for name, share in divided.items() if at in share.places}
        assert told == {owner.name for owner in owners if owner is not None}
    assert all(list(sharing.catalog(name)) == list(range(len(KEYS))) for name in sharing.members)


def test_who_is_leaving_is_told_nothing() -> None:
    sharing = shared(members=[*MEMBERS, Member("leaving", 0)])
    assert "leaving" not in sharing.members
    divided = sharing.divide(np.arange(500), None, KEYS.__getitem__)
    assert sum(len(share.places) for share in divided.values()) == 500


def test_nobody_owns_anything_in_an_empty_fleet() -> None:
    sharing = Sharing(Placement([]), "bucket", 1, BLOCK, by_block=False)
    sharing.learn(KEYS)
    assert sharing.divide(np.arange(5), None, KEYS.__getitem__) == {}
