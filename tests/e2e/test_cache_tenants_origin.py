"""What principals write belongs to their users at the origin, or is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from stoker.cache.server.begun import BEGUN_FILE
from tests.e2e.cache_helpers import ServerProcess, served
from tests.e2e.run_helpers import wait_for
from tests.e2e.s3_helpers import boto3_at
from tests.s3_server import BUCKET, KEYS, s3_client, s3_server

pytestmark = pytest.mark.real

MIB = 1024 * 1024
FOLDER_FILE = """
[principals.vision]
rules = ["data: all"]
keys = ["VISION:secret-of-vision"]
origin_users = { "*" = { unix = "12345:54321" } }

[principals.audio]
rules = ["data: all"]
keys = ["AUDIO:secret-of-audio"]
origin_users = { data = { unix = 1001 } }

[principals.nobody]
rules = ["data: all"]
keys = ["NOBODY:secret-of-nobody"]
tokens = ["nobody-token"]
"""


@contextmanager
def running(
    folder: Path, text: str, url: str, under: Sequence[str] = (), environment: dict[str, str] | None = None
) -> Iterator[ServerProcess]:
    (folder / "access.toml").write_text(text)
    options = "--access", str(folder / "access.toml"), "--writable", "data"
    with served(folder / "cache", {"data": url}, *options, under=under, environment=environment) as server:
        yield server


def s3(server: ServerProcess, who: str) -> Any:
    return boto3_at(server.url, (who.upper(), f"secret-of-{who}"))


def upload(client: Any, key: str, parts: Sequence[bytes]) -> None:
    upload_id = client.create_multipart_upload(Bucket="data", Key=key)["UploadId"]
    which = {"Bucket": "data", "Key": key, "UploadId": upload_id}
    tags = [
        {"PartNumber": number, "ETag": client.upload_part(**which, PartNumber=number, Body=body)["ETag"]}
        for number, body in enumerate(parts, start=1)
    ]
    client.complete_multipart_upload(**which, MultipartUpload={"Parts": tags})


def owner(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_uid, found.st_gid


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
def test_files_belong_to_the_user_that_a_principal_is(tmp_path: Path) -> None:
    origin = tmp_path / "origin"
    origin.mkdir()
    text = FOLDER_FILE.replace("unix = 1001", 'unix = "1001:1002"')
    with running(tmp_path, text, str(origin)) as server:
        vision, audio, nobody = s3(server, "vision"), s3(server, "audio"), s3(server, "nobody")
        vision.put_object(Bucket="data", Key="new/folder/a", Body=b"one")
        upload(vision, "large", [b"x" * 5 * MIB, b"y"])
        vision.copy_object(Bucket="data", Key="copy", CopySource={"Bucket": "data", "Key": "large"})
        for name in ("new", "new/folder", "new/folder/a", "large", "copy"):
            assert owner(origin / name) == (12345, 54321), name
        nobody.put_object(Bucket="data", Key="plain", Body=b"two")
        assert owner(origin / "plain") == (os.geteuid(), os.getegid())
        # Who writes last is whose it is, and reads are the same for all.
        audio.put_object(Bucket="data", Key="new/folder/a", Body=b"three")
        assert owner(origin / "new/folder/a") == (1001, 1002)
        for client in (vision, audio, nobody):
            assert client.get_object(Bucket="data", Key="new/folder/a")["Body"].read() == b"three"
        vision.delete_object(Bucket="data", Key="copy")
        assert not (origin / "copy").exists()
        # Who is another user from now on, and who may not write any more.
        said = "writes_need_user = true\n" + text.replace("12345:54321", "7:8")
        (tmp_path / "access.toml").write_text(said)
        why = "nobody is nobody at the origin of the bucket 'data'"
        wait_for(lambda: why in refusal(nobody, "plain"), 60)
        for refused in (
            lambda: nobody.delete_object(Bucket="data", Key="plain"),
            lambda: nobody.create_multipart_upload(Bucket="data", Key="plain"),
            lambda: nobody.copy_object(Bucket="data", Key="x", CopySource={"Bucket": "data", "Key": "large"}),
        ):
            with pytest.raises(ClientError, match="AccessDenied"):
                refused()
        assert nobody.get_object(Bucket="data", Key="large")["ContentLength"] == 5 * MIB + 1
        assert "Uploads" not in nobody.list_multipart_uploads(Bucket="data")
        vision.put_object(Bucket="data", Key="later", Body=b"five")
        assert owner(origin / "later") == (7, 8)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root could give files to others")
def test_a_server_that_cannot_give_files_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    origin = tmp_path / "origin"
    origin.mkdir()
    (origin / "before").write_bytes(b"before")
    text = FOLDER_FILE.replace("unix = 1001", 'unix = "1001:1002"')
    without = ["setpriv", "--bounding-set", "-chown", "--inh-caps", "-chown"]
    with running(tmp_path, text, str(origin), without) as server:
        vision = s3(server, "vision")
        for refused in (
            lambda: vision.put_object(Bucket="data", Key="new/a", Body=b"x"),
            lambda: vision.put_object(Bucket="data", Key="before", Body=b"x"),
            lambda: vision.copy_object(
                Bucket="data", Key="c", CopySource={"Bucket": "data", "Key": "before"}
            ),
            lambda: upload(vision, "large", [b"x"]),
        ):
            with pytest.raises(ClientError, match=r"AccessDenied.*user 12345 .*CAP_CHOWN"):
                refused()
        files = [path for path in origin.rglob("*") if path.is_file() and ".stoker-writes" not in path.parts]
        assert files == [origin / "before"]
        assert (origin / "before").read_bytes() == b"before"
        assert not (origin / "new").exists()
        assert not list((origin / ".stoker-writes" / "new").iterdir())
        s3(server, "nobody").put_object(Bucket="data", Key="plain", Body=b"two")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root hands on what it may")
def test_a_server_that_is_not_roots_needs_three_capabilities(tmp_path: Path) -> None:
    origin = tmp_path / "origin"
    for folder in (origin, tmp_path / "cache"):
        folder.mkdir()
        os.chown(folder, 65534, 65534)
    caps = "+chown,+dac_override,+fowner"
    user = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    text = FOLDER_FILE.replace("unix = 1001", 'unix = "1001:1002"')
    with running(tmp_path, text, str(origin), [*user, "--inh-caps", caps, "--ambient-caps", caps]) as server:
        vision, audio = s3(server, "vision"), s3(server, "audio")
        vision.put_object(Bucket="data", Key="new/folder/a", Body=b"one", Metadata={"x": "y"})
        upload(vision, "new/large", [b"x" * 5 * MIB, b"y"])
        vision.put_object(Bucket="data", Key="new/folder/a", Body=b"two", Metadata={"x": "z"})
        for name in ("new", "new/folder", "new/folder/a", "new/large"):
            assert owner(origin / name) == (12345, 54321), name
        assert vision.head_object(Bucket="data", Key="new/folder/a")["Metadata"] == {"x": "z"}
        audio.put_object(Bucket="data", Key="new/folder/a", Body=b"three")
        assert owner(origin / "new/folder/a") == (1001, 1002)
        audio.delete_object(Bucket="data", Key="new/large")
        s3(server, "nobody").put_object(Bucket="data", Key="plain", Body=b"four")
        assert owner(origin / "plain") == (65534, 65534)


S3_FILE = """
[principals.vision]
rules = ["data: all"]
keys = ["VISION:secret-of-vision"]
origin_users = { "*" = { key_file = "vision.s3" } }

[principals.audio]
rules = ["data: all"]
keys = ["AUDIO:secret-of-audio"]
origin_users = { data = { key = "UNKNOWN:no-such-key-there" } }

[principals.nobody]
rules = ["data: all"]
keys = ["NOBODY:secret-of-nobody"]
"""


def identity(name: str, access: str, secret: str, *actions: str) -> dict[str, Any]:
    return {
        "name": name,
        "credentials": [{"accessKey": access, "secretKey": secret}],
        "actions": list(actions),
    }


@pytest.mark.timeout(240)
def test_writes_to_s3_are_signed_by_the_key_that_a_principal_has(tmp_path: Path) -> None:
    (tmp_path / "weed").mkdir()
    everything = [f"{verb}:{BUCKET}" for verb in ("Read", "Write", "List")]
    identities = [
        identity("reader", "READER", "reader-secret", f"Read:{BUCKET}", f"List:{BUCKET}"),
        identity("vision", "VISIONKEY", "vision-secret", *everything),
        identity("second", "SECONDKEY", "second-secret", *everything),
        identity("neither", "NEITHER", "neither-secret", f"Read:{BUCKET}"),
    ]
    own = {"AWS_ACCESS_KEY_ID": "READER", "AWS_SECRET_ACCESS_KEY": "reader-secret"}
    (tmp_path / "vision.s3").write_text("VISIONKEY:vision-secret\n")
    with s3_server(tmp_path / "weed", *identities) as endpoint:
        there, url = s3_client(endpoint), f"s3://{BUCKET}/below?endpoint={endpoint}"
        with running(tmp_path, S3_FILE, url, environment={**KEYS, **own}) as server:
            vision, audio, nobody = s3(server, "vision"), s3(server, "audio"), s3(server, "nobody")
            vision.put_object(Bucket="data", Key="a", Body=b"one", Metadata={"x": "y"})
            upload(vision, "large", [b"x" * 5 * MIB, b"y"])
            vision.copy_object(Bucket="data", Key="copy", CopySource={"Bucket": "data", "Key": "a"})
            assert there.get_object(Bucket=BUCKET, Key="below/copy")["Body"].read() == b"one"
            assert there.head_object(Bucket=BUCKET, Key="below/large")["ContentLength"] == 5 * MIB + 1
            vision.delete_objects(Bucket="data", Delete={"Objects": [{"Key": "copy"}]})
            # The server's own key only reads, and others are refused as the origin refuses them.
            for client, who in ((nobody, ""), (audio, "as UNKNOWN")):
                assert client.get_object(Bucket="data", Key="a")["Body"].read() == b"one"
                for refused in (
                    lambda client=client: client.put_object(Bucket="data", Key="a", Body=b"two"),
                    lambda client=client: client.delete_object(Bucket="data", Key="a"),
                    lambda client=client: client.create_multipart_upload(Bucket="data", Key="a"),
                    lambda client=client: client.copy_object(
                        Bucket="data", Key="c", CopySource={"Bucket": "data", "Key": "a"}
                    ),
                ):
                    with pytest.raises(ClientError, match=f"AccessDenied.*{who}.*403"):
                        refused()
            begun = vision.create_multipart_upload(Bucket="data", Key="part/s")["UploadId"]
            written_down = json.loads((tmp_path / "cache" / BEGUN_FILE).read_text())[begun]
            assert (written_down["key"], written_down["principal"]) == ("part/s", "vision")
            vision.abort_multipart_upload(Bucket="data", Key="part/s", UploadId=begun)
            names = [one["Key"] for one in there.list_objects_v2(Bucket=BUCKET, Prefix="below/")["Contents"]]
            assert names == ["below/a", "below/large"]
            # The key is another from now on: one that may not, then one that may.
            (tmp_path / "vision.s3").write_text("NEITHER:neither-secret\n")
            wait_for(lambda: "AccessDenied" in (why := refusal(vision, "later")) and "as NEITHER" in why, 60)
            (tmp_path / "vision.s3").write_text("SECONDKEY:second-secret\n")
            wait_for(lambda: not refusal(vision, "later"), 60)
            assert there.get_object(Bucket=BUCKET, Key="below/later")["Body"].read() == b"x"


def refusal(client: Any, key: str) -> str:
    """Why a write is refused; empty where it is not."""
    try:
        client.put_object(Bucket="data", Key=key, Body=b"x")
    except ClientError as error:
        return str(error)
    return ""
