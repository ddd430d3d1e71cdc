"""What S3 clients say of an object, as it is kept and told again; and folders that are removed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stoker.cache.auth.s3_refusal import S3Refusal
from stoker.cache.origin import local_folders
from stoker.cache.origin.local_removing import remove_folder
from stoker.cache.origin.obstore_origin import _beginning
from stoker.cache.origin.s3_listing import _page_of
from stoker.cache.origin.writing_port import Attributes, attributes_in, told_of
from stoker.cache.server.s3.operation_fields import checksum_of_upload, written_headers


def test_what_is_told_is_what_was_kept() -> None:
    kept = Attributes(
        "text/x", {"a": "b", "empty": ""}, headers={"cache-control": "no-store", "expires": "0"}
    )
    assert attributes_in(dict(told_of(kept))) == kept
    assert told_of(Attributes()) == ()


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (b"plain text", "plain text"),
        (b"", ""),
        ("é".encode(), "=?UTF-8?B?w6k=?="),
        (b"\xe9", "=?UTF-8?B?w6k=?="),
        (b"=?UTF-8?Q?=C3=A9?=", "=?UTF-8?Q?=C3=A9?="),
    ],
)
def test_values_are_ascii(value: bytes, kept: str) -> None:
    assert written_headers({b"x-amz-meta-m": value}).metadata == {"m": kept}


@pytest.mark.parametrize("value", [b"\x04w", b"h\x04", b"h\x7fw", b"\x00"])
def test_values_with_control_characters_are_refused(value: bytes) -> None:
    for name in (b"x-amz-meta-m", b"content-type", b"cache-control"):
        with pytest.raises(S3Refusal) as caught:
            written_headers({name: value})
        assert caught.value.code == "InvalidArgument"


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, ("", "")),
        ({b"x-amz-checksum-algorithm": b"crc32"}, ("CRC32", "COMPOSITE")),
        ({b"x-amz-checksum-algorithm": b"CRC64NVME"}, ("CRC64NVME", "FULL_OBJECT")),
        (
            {b"x-amz-checksum-algorithm": b"CRC32C", b"x-amz-checksum-type": b"FULL_OBJECT"},
            ("CRC32C", "FULL_OBJECT"),
        ),
    ],
)
def test_the_checksum_of_an_upload(headers: dict[bytes, bytes], expected: tuple[str, str]) -> None:
    assert checksum_of_upload(headers) == expected


@pytest.mark.parametrize(
    ("path", "plain", "folder"),
    [
        ("a/b", "a/b", "a/b"), ("a/b/", "a/b", "a/b"), ("a//b", "a", "a"), ("a/./b", "a", "a"), ("../a", "", ""),
        ("a/x\ty/z", "a/x", "a"), ("\n", "", ""), ("a/.\n", "a", "a"), ("a/\x7f", "a", "a"), ("", "", ""),
    ],
)  # fmt: skip
def test_the_beginning_of_a_path_that_obstore_takes(path: str, plain: str, folder: str) -> None:
    assert _beginning(path) == plain
    assert _beginning(path, is_folder=True) == folder


def test_pages_of_s3_have_each_key_as_it_is() -> None:
    def page(*keys: str, more: str = "") -> bytes:
        entries = "".join(
            f"<Contents><Key>{key}</Key><Size>3</Size><ETag>&quot;e&quot;</ETag>"
            "<LastModified>1970-01-01T00:00:07.000Z</LastModified></Contents>"
            for key in keys
        )
        return f'<ListBucketResult xmlns="x">{entries}{more}</ListBucketResult>'.encode()

    url = "<EncodingType>url</EncodingType>"
    found = _page_of(page("r%2F", "r/a+b", "r/a%2Bb%2F%2F", "r/%C3%A9/", "other", more=url), "r/")
    assert [info.key for info in found.objects] == ["a b", "a+b//", "é/"]
    assert {(info.size_bytes, info.version, info.modified_s, info.headers) for info in found.objects} == {
        (3, "e", 7.0, None)
    }
    assert [info.key for info in _page_of(page("a+b%20"), "").objects] == ["a+b%20"]
    more = "<IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken>"
    assert _page_of(page(more=more), "")[1:] == (True, "t", [])
    names = ("r/a%2B/", "r/")
    folders = "".join(f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>" for name in names)
    assert _page_of(page("r%2Fz", more=url + folders), "r/").folders == ["a+/"]


def make(root: Path, kind: str) -> None:
    (root / ".stoker-writes/uploads/u").mkdir(parents=True)
    (root / ".stoker-writes/uploads/u/part").write_bytes(b"x")
    (root / "empty/inside").mkdir(parents=True)
    match kind:
        case "file":
            (root / "empty/inside/k").write_bytes(b"")
        case "link":
            (root / "empty/link").symlink_to(root / "empty/inside")
        case "staged elsewhere":
            (root / "empty/.stoker-writes").mkdir()
            (root / "empty/.stoker-writes/k").write_bytes(b"")
        case "folder":
            if local_folders.make(str(root), "empty/inside/", Attributes(), lambda _: None) is None:
                pytest.skip("no extended attributes here")


@pytest.mark.parametrize("kind", ["file", "link", "staged elsewhere", "folder"])
def test_a_folder_with_objects_is_as_it_was(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "bucket"
    make(root, kind)
    before = sorted(path for path, _, _ in os.walk(tmp_path))
    assert not remove_folder(str(root))
    assert sorted(path for path, _, _ in os.walk(tmp_path)) == before


def test_a_folder_without_objects_is_gone(tmp_path: Path) -> None:
    root = tmp_path / "bucket"
    make(root, "")
    assert remove_folder(str(root))
    assert os.listdir(tmp_path) == []
    assert remove_folder(str(root)), "it is gone already"
