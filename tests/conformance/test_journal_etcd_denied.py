"""Somebody edits etcd's roles while a job runs: what was permitted is denied for a while, and then permitted again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.request
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest

from stoker.errors import AccessDenied, JournalUnavailable
from stoker.job.journal.etcd_room import EtcdRoom
from stoker.job.journal.open import open_journal, open_locator
from stoker.testing.job_journal import entry
from stoker.wire.etcd import EtcdClient
from tests.e2e.etcd import Etcd, running_etcd

pytestmark = pytest.mark.real
DENIED_S = 2.0


class Roles:
    """etcd's own access control: while it is enabled, who shows no credentials may nothing."""

    def __init__(self, etcd: Etcd) -> None:
        self._endpoint = etcd.members[0].endpoint
        self._ask("auth/role/add", {"name": "root"})
        self._ask("auth/user/add", {"name": "root", "password": "secret"})
        self._ask("auth/user/grant", {"user": "root", "role": "root"})

    def deny(self) -> None:
        self._ask("auth/enable", {})

    def permit(self) -> None:
        token = self._ask("auth/authenticate", {"name": "root", "password": "secret"})["token"]
        self._ask("auth/disable", {}, token)

    def _ask(self, path: str, body: dict[str, Any], token: str = "") -> Any:
        headers = {"Authorization": token} if token else {}
        request = urllib.request.Request(
            f"http://{self._endpoint}/v3/{path}", data=json.dumps(body).encode(), headers=headers
        )
        with urllib.request.urlopen(request, timeout=10.0) as response:
            return json.loads(response.read())

    @contextlib.asynccontextmanager
    async def denied(self) -> AsyncGenerator[None, None]:
        await asyncio.to_thread(self.deny)
        try:
            yield
        finally:
            await asyncio.to_thread(self.permit)


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with running_etcd(tmp_path_factory.mktemp("etcd")) as running:
        yield running


@pytest.fixture(scope="module")
def roles(etcd: Etcd) -> Roles:
    return Roles(etcd)


def test_a_write_waits_for_the_roles_to_be_right_again(etcd: Etcd, roles: Roles) -> None:
    async def test() -> None:
        journal = open_journal(etcd.url, "edited")
        leadership = await journal.lead("127.0.0.1:1", ttl_s=10.0)
        await journal.write({"a": b"1"}, [entry(1)])
        async with roles.denied():
            writing = asyncio.create_task(journal.write({"a": b"2"}, [entry(2)]))
            await asyncio.sleep(DENIED_S)
            assert not writing.done()
        await writing
        assert await journal.load() == {"a": b"2"}
        assert len(await journal.read_entries()) == 2
        assert leadership.lost is None
        await journal.close()

    asyncio.run(test())


def test_a_denial_that_lasts_is_an_outage(etcd: Etcd, roles: Roles) -> None:
    """The master goes on trying, leads as long as its lease is renewed, and may go at any time."""

    async def test() -> None:
        journal = open_journal(etcd.url, "lasting")
        leadership = await journal.lead("127.0.0.1:1", ttl_s=5.0)
        await journal.write({"a": b"1"})
        async with roles.denied():
            with pytest.raises(JournalUnavailable, match="user name is empty"):
                await journal.write({"a": b"2"})
            assert leadership.lost is None
        await journal.write({"a": b"3"})
        assert await journal.load() == {"a": b"3"}
        async with roles.denied():
            await journal.close()

    asyncio.run(test())


def test_who_was_never_permitted_is_told_so(etcd: Etcd, roles: Roles) -> None:
    async def test() -> None:
        async with roles.denied():
            journal, locator = open_journal(etcd.url, "refused"), open_locator(etcd.url, "refused")
            for asking in (journal.lead("127.0.0.1:1", ttl_s=2.0), locator.locate()):
                with pytest.raises(AccessDenied, match="give credentials"):
                    await asking
            await journal.close()
            await locator.close()

    asyncio.run(test())


def test_who_looks_for_the_master_looks_on(etcd: Etcd, roles: Roles) -> None:
    async def test() -> None:
        journal, locator = open_journal(etcd.url, "moves"), open_locator(etcd.url, "moves")
        await journal.lead("127.0.0.1:1", ttl_s=10.0)
        async with contextlib.aclosing(locator.changes()) as changes:
            first = await anext(changes)
            assert first is not None
            assert first.endpoint == "127.0.0.1:1"
            looking = asyncio.ensure_future(anext(changes))
            async with roles.denied():
                await asyncio.sleep(DENIED_S)
                assert not looking.done()
            await journal.close()
            assert await asyncio.wait_for(looking, 30.0) is None
        await locator.close()

    asyncio.run(test())


def test_no_room_is_made_meanwhile(etcd: Etcd, roles: Roles, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        client = EtcdClient([etcd.members[0].endpoint])
        room = EtcdRoom(client, b"key", compact_after_s=60.0)
        await client.get(b"key")
        async with roles.denied():
            assert not await room.make()
        await client.close()

    asyncio.run(test())
    assert "making room failed" in caplog.text
