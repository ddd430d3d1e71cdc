"""What Python sees of the index; how it keeps its promises is told by the C++ tests in tests/native."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

from stoker._native import FileProblem, Index, Piece
from tests.unit.full_disk import no_file_may_exceed

BLOCK = 100


def test_what_was_learnt_and_held_is_found_after_a_restart(tmp_path: Path) -> None:
    path = str(tmp_path / "index")
    index = Index(path, BLOCK)
    bucket = index.bucket("data", "s3://origin")
    assert index.learn(bucket, "kéy/☃", "v1", 250, False, 1000)
    assert not index.learn(bucket, "kéy/☃", "v1", 250, False, 1001), "the same version"
    assert index.learn(bucket, "gone", "", 0, True, 1000)
    assert index.hold(bucket, "kéy/☃", "v1", 2, 7, 0, 0xFFFFFFFF, 1002)
    assert not index.hold(bucket, "kéy/☃", "v0", 1, 7, 0, 5, 1002), "another version"
    found = index.find(bucket, "kéy/☃", with_blocks=True)
    assert found is not None
    assert found.block(2) == (0xFFFFFFFF, True)
    del index
    index = Index(path, BLOCK)
    assert index.buckets() == {"data": (bucket, "s3://origin")}
    found = index.find(bucket, "kéy/☃", with_blocks=True)
    assert found is not None
    assert (found.version, found.size_bytes, found.checked_s, found.container) == ("v1", 250, 1001, 7)
    assert found.is_large
    assert [found.block(number) for number in (0, 1, 2, 3)] == [None, None, (0xFFFFFFFF, False), None]
    absent = index.find(bucket, "gone")
    assert absent is not None
    assert absent.is_absent
    assert index.verified(bucket, "kéy/☃", 2, 7)
    names, cursor = index.scan(bucket, "", 0, 10)
    assert cursor == 0
    assert {name.key for name in names} == {"kéy/☃", "gone"}
    (piece,) = index.sample(1, [], None, 3)
    assert (piece.block, piece.container, piece.size_bytes) == (2, 7, 50)
    assert index.lose(Piece(bucket, piece.id, 2, 7))
    assert not index.lose(piece)
    assert index.containers() == {}
    assert index.refresh(bucket, "kéy") == 1
    assert len(index) == 2


@pytest.mark.parametrize("is_large", [True, False])
def test_what_is_told_anew_of_a_version_costs_no_piece(tmp_path: Path, is_large: bool) -> None:
    """Also while the journal is written anew, and after a restart."""
    path = str(tmp_path / "index")
    index = Index(path, BLOCK)
    bucket = index.bucket("data", "s3://origin")
    block = 2 if is_large else None

    def check(attributes: str, checked_s: int) -> None:
        found = index.find(bucket, "k", with_blocks=True)
        assert found is not None
        assert (found.attributes, found.checked_s, found.container) == (attributes, checked_s, 7)
        assert (found.version, found.size_bytes, found.is_large) == ("v1", 250, is_large)
        if is_large:
            assert found.block(2) is not None
        ((piece, _),) = index.pieces(7)
        assert piece.size_bytes == (50 if is_large else 250)

    index.learn(bucket, "k", "v1", 250, False, 1000, "content-type: a\r\n")
    assert index.hold(bucket, "k", "v1", block, 7, 0, 5, 1000)
    assert not index.learn(bucket, "k", "v1", 250, False, 1001, "content-type: b, longer than before\r\n")
    check("content-type: b, longer than before\r\n", 1001)
    assert not index.learn(bucket, "k", "v1", 250, False, 1002), "who says nothing takes nothing back"
    check("content-type: b, longer than before\r\n", 1002)
    del index
    index = Index(path, BLOCK)
    check("content-type: b, longer than before\r\n", 1002)
    assert index.compact(True)
    assert not index.learn(bucket, "k", "v1", 250, False, 1003, "x-amz-meta-a: 1\r\n")
    del index
    index = Index(path, BLOCK)
    check("x-amz-meta-a: 1\r\n", 1003)
    assert index.learn(bucket, "k", "v2", 250, False, 1004, "x-amz-meta-a: 2\r\n")
    del index
    index = Index(path, BLOCK)
    found = index.find(bucket, "k")
    assert found is not None
    assert (found.version, found.container, found.attributes) == ("v2", 0, "x-amz-meta-a: 2\r\n")


def test_a_survey_tells_what_the_folder_has_and_the_index_does_not(tmp_path: Path) -> None:
    index = Index(str(tmp_path / "index"), 4096)
    files = tmp_path / "files"
    (files / "000").mkdir(parents=True)
    (files / "001").mkdir()
    for number, size_bytes in (("one", 4096), ("two", 10000), ("three", 4096), ("four", 50)):
        index.learn(1, number, "v", size_bytes, False, 5)
    index.hold(1, "one", "v", 0, 1, 0, 0, 5)
    index.hold(1, "two", "v", 2, 0x1002, 0, 0, 5)
    index.hold(1, "three", "v", 0, 3, 0, 0, 5)
    index.hold(1, "four", "v", None, 4, 0, 0, 5)
    (files / "000/00000001").write_bytes(b"x" * 200_000)
    (files / "001/00001002").write_bytes(b"x" * 1808)
    (files / "000/00000004").write_bytes(b"x" * 50)
    (files / "000/00000005").write_bytes(b"x")
    (files / "000/5").write_bytes(b"another's")
    (files / "000/00001003").write_bytes(b"where no container lies")
    (files / "README").write_bytes(b"no folder")
    (files / "002").symlink_to(tmp_path)
    found = index.survey(str(files))
    assert (found.unknown, found.missing, found.too_long) == ([5], [3], [1])
    assert found.large_bytes == {1: 8192}
    assert {number: (one.pieces, size) for number, (one, size) in found.segments.items()} == {4: (1, 4096)}
    with pytest.raises(FileProblem, match=r"cannot look through .*nowhere: No such file") as nowhere:
        index.survey(str(tmp_path / "nowhere"))
    assert nowhere.value.errno == errno.ENOENT


def test_errors_say_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match="No such file") as nowhere:
        Index(str(tmp_path / "no" / "index"), BLOCK)
    assert nowhere.value.errno == errno.ENOENT
    (tmp_path / "index").write_bytes(b"something else altogether, of 40 bytes..")
    with pytest.raises(FileProblem, match="is no index of this version"):
        Index(str(tmp_path / "index"), BLOCK)
    index = Index(str(tmp_path / "other"), BLOCK)
    with pytest.raises(FileProblem, match="too long, or empty"):
        index.learn(1, "", "v", 1, False, 1)
    with pytest.raises(ValueError, match="16 bytes"):
        Piece(1, b"short", None, 1)


def test_a_full_disk_costs_no_more_than_what_is_new(tmp_path: Path) -> None:
    path = str(tmp_path / "index")
    index = Index(path, BLOCK)
    bucket = index.bucket("data", "")
    for key in ("old", "other", "changed"):
        index.learn(bucket, key, "v1", 50, False, 1)
        index.hold(bucket, key, "v1", None, 3, 0, 9, 1)
    with no_file_may_exceed(index.file_bytes() + 10):
        for attempt in range(2):
            with pytest.raises(FileProblem, match="File too large"):
                index.learn(bucket, f"new-{attempt}", "v1", 50, False, 1)
        with pytest.raises(FileProblem, match="File too large"):
            index.hold(bucket, "old", "v1", None, 4, 0, 9, 1)
        with pytest.raises(FileProblem, match="File too large"):
            index.learn(bucket, "changed", "v2", 50, False, 1)
        with no_file_may_exceed(100), pytest.raises(FileProblem, match="File too large"):
            index.compact(anyway=True)
        assert not index.learn(bucket, "old", "v1", 50, False, 2), "it is confirmed, in memory at least"
        assert index.forget(bucket, "other")
        assert index.find(bucket, "changed") is None, "what it was is not true any more"
        with pytest.raises(FileProblem, match="File too large"):
            index.learn(bucket, "old", "v2", 50, False, 2, stays_true=True)
        found = index.find(bucket, "old")
        assert found is not None
        assert (found.version, found.container) == ("v1", 3)
    assert index.learn(bucket, "new", "v1", 50, False, 1)
    assert index.compact(anyway=True)
    del index
    index = Index(path, BLOCK)
    assert (len(index), index.replay.damaged_bytes, index.replay.was_torn) == (2, 0, False)


def test_the_interpreter_goes_on_while_the_index_works(tmp_path: Path) -> None:
    index = Index(str(tmp_path / "index"), BLOCK)
    bucket = index.bucket("data", "")
    for number in range(3000):
        index.learn(bucket, f"key-{number}", "v", 50, False, 1)
    done = threading.Event()

    def compact() -> None:
        for _ in range(20):
            index.compact(anyway=True)
        done.set()

    threading.Thread(target=compact).start()
    turns = 0
    while not done.is_set():
        assert index.find(bucket, f"key-{turns % 3000}") is not None
        turns += 1
    assert turns > 100
    assert len(index) == 3000


def test_a_container_number_is_known_after_all_of_it_is_gone(tmp_path: Path) -> None:
    path = str(tmp_path / "index")
    index = Index(path, 100)
    bucket = index.bucket("b", "")
    for container in (3, 10):
        index.learn(bucket, f"k{container}", "v", 5, False, 1)
        assert index.hold(bucket, f"k{container}", "v", None, container, 0, 7, 1)
    index.lose_containers([10, 11])
    assert index.container_max() == 10
    index.compact(True)
    index.sync()
    del index
    again = Index(path, 100)
    assert again.container_max() == 10
    assert again.containers().keys() == {3}


def test_some_objects_of_each_segment_are_drawn_and_of_large_files_none(tmp_path: Path) -> None:
    index = Index(str(tmp_path / "index"), BLOCK)
    bucket = index.bucket("data", "")
    own: dict[int, set[bytes]] = {}
    for number in range(1000):
        container = 1 + number % 3 if number >= 5 else 4
        assert index.learn(bucket, f"k{number}", "v", 50, False, 1000)
        assert index.hold(bucket, f"k{number}", "v", None, container, number, 5, 1000)
    assert index.learn(bucket, "large", "v", 250, False, 1000)
    assert index.hold(bucket, "large", "v", 0, 5, 0, 5, 1000)
    for container in range(1, 5):
        own[container] = {piece.id for piece, _ in index.pieces(container)}
    drawn = index.sample_ids([2, 3, 4, 5, 9], 32, seed=1)
    assert sorted(drawn) == [2, 3, 4]
    for container, ids in drawn.items():
        some = {ids[at : at + 16] for at in range(0, len(ids), 16)}
        assert some <= own[container]
        assert len(some) * 16 == len(ids) == 16 * min(32, len(own[container]))
    often: dict[bytes, int] = {}
    for seed in range(1, 1200, 2):
        ids = index.sample_ids([2], 32, seed)[2]
        for at in range(0, len(ids), 16):
            often[ids[at : at + 16]] = often.get(ids[at : at + 16], 0) + 1
    assert len(often) == len(own[2])
    assert max(often.values()) < 3 * min(often.values()), "each is drawn as often as another"
