"""Buckets that S3 clients make and remove, at a fleet of servers."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from stoker.cache.client.client import CacheClient
from tests.e2e.run_helpers import wait_for
from tests.e2e.s3_helpers import boto3_at
from tests.e2e.test_cache_fleet import FleetOfServers, fleet_of

pytestmark = pytest.mark.real
ADMIN, OTHER = ("AKIDADMIN", "secret-of-admin"), ("AKIDOTHER", "secret-of-other")


def options(tmp_path: Path) -> tuple[str, ...]:
    return (
        *("--s3-buckets-at", str(tmp_path / "made"), "--key", ":".join(ADMIN)),
        *("--key", f"{':'.join(OTHER)}:b=rw,new-one=rw", "--token", "fleet-token"),
    )


def at(fleet: FleetOfServers, name: str, key: tuple[str, str] = ADMIN) -> Any:
    return boto3_at(fleet.servers[name].url, key)


def names(client: Any) -> set[str]:
    return {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}


def refused(call: Any, **arguments: Any) -> tuple[int, str]:
    with pytest.raises(ClientError) as caught:
        call(**arguments)
    answer = caught.value.response
    return answer["ResponseMetadata"]["HTTPStatusCode"], answer["Error"]["Code"]


def test_buckets_are_made_and_removed_everywhere(tmp_path: Path) -> None:
    (tmp_path / "o").mkdir()
    with fleet_of(tmp_path, "", str(tmp_path / "o")) as fleet:
        for name in "xy":
            fleet.start(name, *options(tmp_path))
        for name in "xy":
            with CacheClient(fleet.servers[name].url, "fleet-token") as client:
                wait_for(lambda client=client: len(client.status().fleet.members) == 2, 30, why="the fleet")
        x, y, other = at(fleet, "x"), at(fleet, "y"), at(fleet, "x", OTHER)

        assert refused(x.head_bucket, Bucket="new-one") == (404, "404")
        x.create_bucket(Bucket="new-one", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
        assert names(x) == names(y) == {"b", "new-one"}
        (made,) = (one for one in y.list_buckets()["Buckets"] if one["Name"] == "new-one")
        assert made["CreationDate"].year > 2000
        for client in (x, y):
            assert refused(client.create_bucket, Bucket="new-one") == (409, "BucketAlreadyOwnedByYou")
            assert refused(client.create_bucket, Bucket="b-") == (400, "InvalidBucketName")
        assert refused(x.delete_bucket, Bucket="b") == (403, "AccessDenied"), "it is of the settings"

        y.put_object(Bucket="new-one", Key="k", Body=b"one")
        assert (tmp_path / "made" / "new-one" / "k").read_bytes() == b"one"
        assert x.get_object(Bucket="new-one", Key="k")["Body"].read() == b"one"
        other.put_object(Bucket="new-one", Key="other", Body=b"two")
        for call in (other.create_bucket, other.delete_bucket):
            assert refused(call, Bucket="new-one") == (403, "AccessDenied")
        assert refused(x.delete_bucket, Bucket="new-one") == (409, "BucketNotEmpty")
        for key in ("k", "other"):
            y.delete_object(Bucket="new-one", Key=key)
        x.delete_bucket(Bucket="new-one")
        for client in (x, y):
            assert names(client) == {"b"}
            assert refused(client.delete_bucket, Bucket="new-one") == (404, "NoSuchBucket")
            assert refused(client.get_object, Bucket="new-one", Key="k") == (404, "NoSuchBucket")

        y.create_bucket(Bucket="new-one")
        for client in (x, y):
            assert "Contents" not in client.list_objects_v2(Bucket="new-one")
            assert refused(client.get_object, Bucket="new-one", Key="k") == (404, "NoSuchKey")
        x.create_bucket(Bucket="kept")

        # Who is away learns of it, and does not bring back what is gone.
        fleet.servers.pop("y").stop(signal.SIGKILL)
        x.delete_bucket(Bucket="new-one")
        fleet.start("y", *options(tmp_path))
        wait_for(lambda: names(at(fleet, "y")) == {"b", "kept"}, why="word of it once it is back")
        assert names(x) == {"b", "kept"}
        for name in "xy":
            fleet.servers.pop(name).stop(signal.SIGKILL)
        fleet.start("y", *options(tmp_path))
        assert names(at(fleet, "y")) == {"b", "kept"}, "it is written down"


def test_without_a_place_no_bucket_is_made(tmp_path: Path) -> None:
    (tmp_path / "o").mkdir()
    with fleet_of(tmp_path, "", str(tmp_path / "o")) as fleet:
        fleet.start("x", *options(tmp_path)[2:])
        assert refused(at(fleet, "x").create_bucket, Bucket="new-one") == (403, "AccessDenied")
