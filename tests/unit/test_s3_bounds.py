"""What a request may cost the server at most, and what a write costs that nobody waits for."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import pytest

from stoker.cache.auth import sigv4, sigv4_canonical
from stoker.cache.auth.access import Access
from stoker.cache.auth.s3_refusal import S3Refusal
from stoker.cache.auth.sigv4_canonical import Head, fold_headers
from stoker.cache.origin.local_writing import WritableLocalOrigin
from stoker.cache.server.begun import BegunUploads
from stoker.cache.server.cleaning import AGE_S, Cleaning
from stoker.cache.server.lists import Lists
from stoker.cache.server.s3 import operation_fields
from stoker.cache.server.s3.documents import Documents
from stoker.cache.server.s3.listing import ASKS_IN_VAIN_MAX, ASKS_MAX, Lister
from stoker.cache.server.s3.operation_types import ListObjects, ListObjectsV2
from stoker.cache.server.s3.operations import operation_of
from stoker.cache.server.s3.xml import ATTRIBUTES_MAX, ELEMENTS_MAX, read_complete, read_xml
from stoker.wire.cache_api import BucketSpec, ObjectInfo, ObjectPage
from tests.unit.test_cache_engine import World, run


def page_of(*keys: str, after: str | None = None) -> ObjectPage:
    return ObjectPage([ObjectInfo(key, 1, "v") for key in keys], after)


def test_the_names_that_lists_are_asked_by_count() -> None:
    lists = Lists(bytes_max=3_000_000)
    for number in range(100):
        lists.put("b", f"{number:03}" + "p" * 100_000, "a" * 100_000, 1000, page_of(), 0.0)
        assert lists.size_bytes <= 3_000_000
    assert lists.size_bytes >= 2_000_000
    lists.refresh("b", "", 0.0)
    assert lists.size_bytes == 0
    assert not lists._of_prefix


def test_a_document_is_good_for_the_very_page_that_it_was_made_of() -> None:
    documents, lists = Documents(bytes_max=20_000), Lists()
    operation = ListObjectsV2(bucket="b", prefix="p/")

    def page(now: float) -> bytes | None:
        return lists.said("b", "p/", None, 1000, 10.0, now)

    lists.put("b", "p/", None, 1000, page_of("p/1"), 0.0)
    first = page(1.0)
    assert first is not None
    assert documents.get(operation, first) is None
    documents.put(operation, first, b"one")
    assert documents.get(operation, page(10.0)) == b"one"
    assert documents.get(ListObjectsV2(bucket="b", prefix="p/", fetch_owner=True), first) is None
    assert documents.get(ListObjects(bucket="b", prefix="p/"), first) is None
    assert documents.get(operation, page(10.1)) is None, "the page is too old"
    lists.put("b", "p/", None, 1000, page_of("p/1"), 11.0)
    assert page(11.0) == first
    assert documents.get(operation, page(11.0)) is None, "the origin was asked anew"
    documents.put(operation, first, b"one")
    lists.refresh("b", "p/2", 12.0)
    assert documents.get(operation, page(12.0)) is None, "it was written to"
    for number in range(100):
        documents.put(
            ListObjectsV2(bucket="b", prefix=f"{number}", start_after="s" * 500), first, b"d" * 1000
        )
        assert 0 < documents.size_bytes <= 20_000
    assert documents.get(operation, first) is None
    assert documents.get(ListObjectsV2(bucket="b", prefix="99", start_after="s" * 500), first) == b"d" * 1000


def test_a_write_drops_the_pages_that_may_tell_of_it_and_no_others() -> None:
    lists = Lists()
    pages = {
        ("", None): page_of("a/1", "b/1", after="b/1"),
        ("", "b/1"): page_of("b/2", "d", after="d"),
        ("", "d"): page_of("e"),
        ("b/", None): page_of("b/1", "b/2"),
        ("b/2", None): page_of("b/2"),
        ("c", None): page_of(),
    }

    times = itertools.count()

    def left(key: str, bucket: str = "b") -> set[tuple[str, str | None]]:
        now = next(times)
        for (prefix, after), page in pages.items():
            lists.put("b", prefix, after, 2, page, now)
        lists.refresh(bucket, key, now + 0.5, is_key=True)
        return {which for which in pages if lists.get("b", *which, 2, 1.0, now + 0.5) is not None}

    assert left("b/1") == pages.keys() - {("", None), ("b/", None)}
    assert left("b/15") == pages.keys() - {("", "b/1"), ("b/", None)}
    assert left("b/2") == pages.keys() - {("", "b/1"), ("b/", None), ("b/2", None)}
    assert left("z") == pages.keys() - {("", "d")}
    assert left("c") == pages.keys() - {("", "b/1"), ("c", None)}
    assert left("b/1", "other") == pages.keys()


def test_a_page_of_many_common_prefixes_costs_no_more_than_so_many_questions() -> None:
    """Each has more keys than one answer holds; what follows comes with the next pages."""
    asked = 0
    found: list[str] = []
    after, is_truncated = "", True
    while is_truncated:
        lister = Lister("", "/", after, 1000)
        before = asked
        while (ask := lister.ask) is not None:
            asked += 1
            number = int(ask.after[:4]) + 1 if ask.after else 0
            keys = [ObjectInfo(f"{number:04}/{n:04}", 1, "v") for n in range(1000)] if number < 100 else []
            lister.feed(keys, is_last=number >= 99)
        page = lister.page()
        assert asked - before <= ASKS_MAX
        found += page.common_prefixes
        after, is_truncated = page.last, page.is_truncated
    assert found == [f"{number:04}/" for number in range(100)]


def test_an_origin_that_leads_nowhere_is_not_asked_for_ever() -> None:
    lister = Lister("", "", "", 1000)
    assert lister.ask is not None
    lister.feed([ObjectInfo("b", 1, "v")], is_last=False)
    with pytest.raises(S3Refusal, match="lists 'a' behind 'b'"):
        lister.feed([ObjectInfo("a", 1, "v")], is_last=False)
    lister = Lister("", "/", "a" * 1020 + "/", 1000)
    for number in range(ASKS_IN_VAIN_MAX - 1):
        lister.feed([ObjectInfo(f"{'a' * 1020}/{number:04}", 1, "v")], is_last=False)
    with pytest.raises(S3Refusal, match="Too much lies below"):
        lister.feed([ObjectInfo(f"{'a' * 1020}/z", 1, "v")], is_last=False)


MANY = " ".join(f'a{n}=""' for n in range(ATTRIBUTES_MAX + 1))


@pytest.mark.parametrize("inside", ["<a/>" * ELEMENTS_MAX, f"<a {MANY}/>"])
def test_documents_of_very_many_elements_or_attributes_are_refused(inside: str) -> None:
    with pytest.raises(S3Refusal, match="more than") as caught:
        read_xml(f"<Delete>{inside}</Delete>".encode(), "Delete")
    assert caught.value.code == "MalformedXML"


def test_the_largest_list_of_parts_is_read() -> None:
    sums = "".join(f"<Checksum{kind}>{'a' * 44}</Checksum{kind}>" for kind in ("CRC32", "CRC32C", "SHA256"))
    parts = "".join(
        f"<Part><PartNumber>{n}</PartNumber><ETag>&quot;{'e' * 32}&quot;</ETag>{sums}</Part>"
        for n in range(1, 10_001)
    )
    assert (
        len(read_complete(f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode())) == 10_000
    )


def test_a_query_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[bytes] = []
    really = sigv4_canonical.query_fields

    def counted(query: bytes) -> sigv4_canonical.Fields:
        read.append(query)
        return really(query)

    for module in (sigv4_canonical, operation_fields):
        monkeypatch.setattr(module, "query_fields", counted)
    head = Head("GET", b"/b?list-type=2&prefix=a", fold_headers([(b"Host", b"h")]))
    assert not sigv4.is_signed(head)
    with pytest.raises(S3Refusal):
        sigv4.verify(head, 0.0, lambda _: None, sigv4.SigningKeys())
    assert operation_of(head).name == "ListObjectsV2"
    assert read == [b"list-type=2&prefix=a"]


def test_uploads_that_nobody_ends_are_given_up(tmp_path: Path) -> None:
    (tmp_path / "origin").mkdir()
    (tmp_path / "cache").mkdir()

    async def one() -> AsyncGenerator[bytes, None]:
        yield b"part"

    async def story(world: World) -> None:
        world.engine._origins._open_writable = lambda url: WritableLocalOrigin(str(tmp_path / "origin"))
        world.engine.add_bucket("w", BucketSpec("file", writable=True))
        origin = world.engine.bucket("w").writable_origin
        upload = await origin.begin_upload("k")
        async with aclosing(one()) as parts:
            await origin.put_part("k", upload, 1, parts, 4)
        (begun,) = await origin.list_uploads()
        begun_here = BegunUploads(tmp_path / "cache", world.clock, [])
        cleaning = Cleaning(world.engine, Access(), world.clock, begun_here)
        world.clock.at += begun.begun_at + AGE_S - 60 - world.clock.wall()
        assert await cleaning.clean() == 0
        world.clock.at += 120
        cleaning.start()
        async with asyncio.timeout(60):
            while await origin.list_uploads():  # noqa: ASYNC110  it is told by nobody
                await asyncio.sleep(0.01)
        await cleaning.stop()

    run(World(tmp_path / "cache"), story)
