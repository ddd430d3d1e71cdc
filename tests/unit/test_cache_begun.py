"""Uploads to S3 that nobody ends are given up as who has begun them, where that is known."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from stoker.cache.auth.access import Access
from stoker.cache.auth.principals import Principal
from stoker.cache.auth.rules import EVERYTHING
from stoker.cache.origin.open import open_writable_origin
from stoker.cache.origin.s3_signing import Credentials
from stoker.cache.origin.users import OriginUser
from stoker.cache.server.begun import BEGUN_MAX, BegunUploads
from stoker.cache.server.cleaning import AGE_S, Cleaning
from stoker.wire.cache_api import BucketSpec
from tests.clocks import HandClock
from tests.s3_server import BUCKET, s3_server
from tests.unit.test_cache_engine import World, run

VISION = Principal(
    "vision", EVERYTHING, origin_users={"*": OriginUser(None, Credentials("VISIONKEY", "vision-secret", ""))}
)
UNIX = Principal("unix", EVERYTHING, origin_users={"w": OriginUser()})


def identity(name: str, access: str, *verbs: str) -> dict[str, object]:
    credentials = [{"accessKey": access, "secretKey": f"{name}-secret"}]
    return {"name": name, "credentials": credentials, "actions": [f"{verb}:{BUCKET}" for verb in verbs]}


@pytest.mark.real
@pytest.mark.timeout(240)
def test_who_may_not_write_itself_gives_up_as_who_has_begun(tmp_path: Path) -> None:
    for name in ("weed", "cache"):
        (tmp_path / name).mkdir()
    identities = (
        identity("reader", "READER", "Read", "List"),
        identity("vision", "VISIONKEY", "Read", "Write", "List"),
    )
    own = {"AWS_ACCESS_KEY_ID": "READER", "AWS_SECRET_ACCESS_KEY": "reader-secret"}
    access = Access()
    access.take_file([], principals=[VISION])

    async def story(world: World) -> None:
        world.engine._origins._open_writable = lambda url: open_writable_origin(url, own)
        world.engine.add_bucket("w", BucketSpec(f"s3://{BUCKET}/below?endpoint={endpoint}", writable=True))
        origin = world.engine.bucket("w").writable_origin
        begun = BegunUploads(tmp_path / "cache", world.clock, [])
        for key in ("a", "b"):
            upload = await origin.written_as(VISION.user_at("w")).begin_upload(key)
            await begun.begin("w", key, upload, VISION)
            world.clock.at += 3600
        # As after a restart.
        begun = BegunUploads(tmp_path / "cache", world.clock, [])
        cleaning = Cleaning(world.engine, access, world.clock, begun)
        world.clock.at += AGE_S - 7300
        assert await cleaning.clean() == 0
        world.clock.at += 3600
        assert await cleaning.clean() == 1
        assert [found.key for found in await origin.list_uploads()] == ["b"]
        await origin.written_as(VISION.user_at("w")).abort_upload("b", upload)
        world.clock.at += 3600
        await cleaning.clean()
        assert begun.before("w", world.clock.wall()) == [], "also what somebody else has ended"

    with s3_server(tmp_path / "weed", *identities) as endpoint:
        run(World(tmp_path / "cache"), story)


def test_only_of_those_who_sign_for_themselves_is_it_written_down(tmp_path: Path) -> None:
    clock = HandClock()

    async def story() -> None:
        begun = BegunUploads(tmp_path, clock, [])
        for who in (UNIX, Principal("nobody", EVERYTHING)):
            await begun.begin("w", "k", "id", who)
        assert list(tmp_path.iterdir()) == []
        await begun.begin("w", "k", "id", VISION)
        begun.end("id")
        begun.end("id")
        assert begun.before("w", clock.wall() + 1) == []
        await begun.begin("w", "k", "first", VISION)
        begun._known |= {f"{n}": begun._known["first"] for n in range(BEGUN_MAX - 1)}
        await begun.begin("w", "k", "last", VISION)
        known = dict(BegunUploads(tmp_path, clock, []).before("w", clock.wall() + 1))
        assert ("first" in known, "last" in known, len(known)) == (False, True, BEGUN_MAX)

    asyncio.run(story())
