"""What the front is told of a fleet: it finds the same owners as all others do."""

from __future__ import annotations

import asyncio
import socket

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from stoker._native import Fleet
from stoker.cache.maglev import Member, Placement, block_owner_name
from stoker.cache.server.front_fleet import first_that_answers

ADDRESS = ("127.0.0.1", 9000)


def told(placement: Placement, me: int = 0) -> tuple[Fleet, list[str]]:
    names, table = placement.table()
    return Fleet([ADDRESS] * len(names), table, me, "", {}), names


def owner_in(placement: Placement, key: str) -> str:
    owner = placement.owner(block_owner_name("bucket", key, 0))
    assert owner is not None
    return owner.name


@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_the_front_finds_the_owners_that_the_back_finds(count: int) -> None:
    placement = Placement(Member(f"cache-{number}", 1 + number % 3) for number in range(count))
    fleet, names = told(placement)
    keys = [f"train/{number:06}.tar" for number in range(20_000)]
    assert [names[fleet.owner("bucket", key)] for key in keys] == [owner_in(placement, key) for key in keys]


@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=200))
def test_whatever_a_key_is_called_its_owner_is_the_same(key: str) -> None:
    size = 65537
    table = bytes(range(256)) * 2
    placement = Placement([Member("a", 2), Member("b"), Member("c")])
    fleet, names = told(placement)
    assert names[fleet.owner("bucket", key)] == owner_in(placement, key)
    # Of a table of its own, so that more of the hash shows than its residue among three.
    spread = Fleet([ADDRESS] * size, table, -1, "", {})
    number = xxhash.xxh64_intdigest(f"bucket/{key}".encode()) % 256
    assert spread.owner("bucket", key) == int.from_bytes(table[2 * number : 2 * number + 2], "little")


def test_one_that_is_leaving_owns_nothing_and_has_no_number() -> None:
    placement = Placement([Member("a"), Member("b", 0), Member("c")])
    fleet, names = told(placement)
    assert names == ["a", "c"]
    assert {fleet.owner("bucket", str(number)) for number in range(1000)} == {0, 1}


def test_an_empty_fleet_owns_nothing() -> None:
    fleet, names = told(Placement([]))
    assert names == []
    assert fleet.owner("bucket", "key") == -1


def test_what_cannot_be_a_fleet_is_refused() -> None:
    with pytest.raises(ValueError, match="names a peer that there is not"):
        Fleet([ADDRESS], b"\x01\x00", 0, "", {})
    with pytest.raises(ValueError, match="of digits, not localhost"):
        Fleet([("localhost", 9000)], b"\x00\x00", 0, "", {})


def test_of_several_addresses_the_first_that_answers_is_told_and_kept() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as other,
        socket.socket() as nobody,
    ):
        nobody.bind(("127.0.0.1", 0))
        first, second, deaf = (link.getsockname() for link in (one, other, nobody))

        def told(found: list[tuple[str, int]], before: tuple[str, int] = ("", 0)) -> tuple[str, int]:
            return asyncio.run(first_that_answers(found, before))

        assert told([deaf, first, second]) == first
        assert told([second, deaf, first], first) == first, "in whatever order they come"
        assert told([second, deaf], first) == second, "it is none of them any more"
        assert told([first, deaf], deaf) == first, "it answers no longer"
        assert told([deaf]) == deaf, "there is no other"
        assert told([]) == ("", 0)
