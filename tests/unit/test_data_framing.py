"""How records lie in files: each format against a writer, ours or somebody else's, and against damage."""

from __future__ import annotations

import contextlib
import csv as other_csv
import io
import struct
import tarfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker._native import crc32c
from stoker.data.framing import csv, example, lines, mds, recordio, tar, tfrecord
from stoker.data.framing.scan import Compressed, Malformed, ReadAhead, Spans, Want
from tests.unit.framing_helpers import look_through

AHEADS = st.integers(0, 5000)
BODIES = st.lists(st.binary(max_size=300), max_size=12)
MAGIC = struct.pack("<I", recordio.MAGIC)
WITH_MAGIC = st.lists(st.one_of(st.just(MAGIC), st.binary(max_size=6)), max_size=12).map(b"".join)


def tar_of(files: Sequence[tuple[str, bytes]], kind: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=kind) as archive:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def own_tar(files: Sequence[tuple[str, bytes]]) -> bytes:
    parts = [tar.head(name, len(data)) + data + bytes(-len(data) % tar.BLOCK) for name, data in files]
    return b"".join(parts) + tar.END


@given(BODIES, AHEADS)
@settings(deadline=None)
def test_tfrecord_there_and_back(bodies: list[bytes], ahead: int) -> None:
    records, _, wrong = look_through(tfrecord.scan, b"".join(map(tfrecord.framed, bodies)), ahead)
    assert wrong is None
    assert [tfrecord.payload(record) for record in records] == bodies


def test_tfrecord_as_tensorflow_writes_it() -> None:
    # TensorBoard's files begin with a record of 24 bytes.
    assert tfrecord.framed(bytes(24)).startswith(bytes.fromhex("1800000000000000a37f4b22"))
    assert tfrecord.framed(b"")[-4:] == bytes.fromhex("d8ea82a2")
    assert crc32c(bytes(32)) == 0x8A9136AA, "as RFC 3720 says"


@given(st.lists(st.one_of(WITH_MAGIC, st.binary(max_size=100)), max_size=8), AHEADS)
@settings(deadline=None)
def test_recordio_there_and_back(bodies: list[bytes], ahead: int) -> None:
    records, _, wrong = look_through(recordio.scan, b"".join(map(recordio.framed, bodies)), ahead)
    assert wrong is None
    assert [recordio.payload(record) for record in records] == bodies


def test_recordio_divides_a_record_where_the_magic_number_stands() -> None:
    framed = recordio.framed(b"abcd" + MAGIC + b"ef")
    assert (
        framed
        == MAGIC
        + struct.pack("<I", 1 << 29 | 4)
        + b"abcd"
        + MAGIC
        + struct.pack("<I", 3 << 29 | 2)
        + b"ef\0\0"
    )
    assert recordio.payload(framed) == b"abcd" + MAGIC + b"ef"
    assert recordio.framed(b"a" + MAGIC).startswith(MAGIC + struct.pack("<I", 5)), (
        "it does not stand at four bytes"
    )


NAMES = st.from_regex(r"[a-c]{1,3}(/[a-c.]{1,4})?\.[a-cA-C]{1,3}(\.[a-c])?", fullmatch=True)


@given(st.lists(st.tuples(NAMES, st.binary(max_size=1500)), max_size=8, unique_by=lambda f: f[0].lower()), AHEADS,
       st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))  # fmt: skip
@settings(deadline=None)
def test_tar_against_tarfile(files: list[tuple[str, bytes]], ahead: int, kind: int) -> None:
    wanted: list[dict[str, Any]] = []
    for name, data in files:
        named = tar.key_of(name)
        if named is None:
            continue
        if not wanted or wanted[-1]["__key__"] != named[0]:
            wanted.append({"__key__": named[0]})
        wanted[-1][named[1]] = data
    for archive in (tar_of(files, kind), own_tar(files)):
        records, _, wrong = look_through(tar.scan, archive, ahead)
        assert wrong is None
        assert [tar.sample(record) for record in records] == wanted


@pytest.mark.parametrize("kind", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize(
    "name", ["d" * 90 + "/" + "n" * 150 + ".jpg", "ü/" + "é" * 80 + ".x", "a" * 96 + ".jpg"]
)
def test_tar_has_long_names(kind: int, name: str) -> None:
    files = [("a.txt", b"1"), (name, b"2" * 600), (name[:-4] + ".cls", b"3")]
    for archive in (tar_of(files, kind), own_tar(files)):
        records, _, wrong = look_through(tar.scan, archive)
        assert wrong is None
        assert [tar.sample(record) for record in records][-1]["__key__"] == tar.key_of(files[-1][0])[0]  # type: ignore[index]
        with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
            assert [member.name for member in opened] == [file for file, _ in files]


def test_tar_passes_over_what_is_no_file_of_a_record() -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, kind in (("d", tarfile.DIRTYPE), ("l.txt", tarfile.SYMTYPE), ("h.txt", tarfile.LNKTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "x" * 200
            archive.addfile(info)
        for name in ("a.jpg", "README", "__meta__", ".hidden", "a.cls", "b.c/d"):
            info = tarfile.TarInfo(name)
            info.size = 3
            archive.addfile(info, io.BytesIO(b"abc"))
    records, _, wrong = look_through(tar.scan, out.getvalue())
    assert wrong is None
    assert [tar.sample(record) for record in records] == [{"__key__": "a", "jpg": b"abc", "cls": b"abc"}]


@pytest.mark.parametrize(("name", "key"), [
    ("a.jpg", ("a", "jpg")), ("d/a.seg.PNG", ("d/a", "seg.png")), ("d.e/a.x", ("d.e/a", "x")), ("d.e/a", None),
    ("a", None), (".a.b", None), ("d/.a", ("d/", "a")), ("__k__/a.b", None), ("a.", ("a", "")),
])  # fmt: skip
def test_names_are_divided_as_webdataset_has_it(name: str, key: tuple[str, str] | None) -> None:
    assert tar.key_of(name) == key


def test_tar_with_a_file_twice_is_damaged() -> None:
    records, _, wrong = look_through(tar.scan, tar_of([("a.x", b"1"), ("a.X", b"2")]))
    assert wrong is None
    with pytest.raises(Malformed, match="twice"):
        tar.sample(records[0])


def test_tar_knows_sizes_of_eight_gigabytes_and_more() -> None:
    size = 8**11 + 5
    for head in (tar.head("a.bin", size), tarfile.TarInfo("a.bin")):
        if isinstance(head, tarfile.TarInfo):
            head.size = size
            head = head.tobuf(tarfile.GNU_FORMAT)
        scan = tar.scan(len(head) + size + 2048, Spans())
        next(scan)
        assert scan.send(head).start == len(head) + size + -size % tar.BLOCK


@pytest.mark.parametrize("packed", [b"\x1f\x8b\x08", b"BZh9", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd"])
def test_a_compressed_archive_is_refused(packed: bytes) -> None:
    with pytest.raises(Compressed):
        look_through(tar.scan, packed + bytes(2000))


LINES = st.lists(st.text(st.characters(exclude_characters="\r\n", codec="utf-8"), max_size=20), max_size=20)


@given(LINES, AHEADS, st.booleans(), st.sampled_from([b"\n", b"\r\n"]), st.booleans(), st.booleans())
@settings(deadline=None)
def test_lines(
    texts: list[str], ahead: int, has_end: bool, end: bytes, has_mark: bool, keeps_empty: bool
) -> None:
    if texts and texts[0].startswith("\ufeff"):
        return
    data = (lines.BYTE_ORDER_MARK if has_mark else b"") + b"".join(text.encode() + end for text in texts)
    wanted = [text.encode() for text in texts]
    if not has_end and texts:
        data = data[: -len(end)]
        if not wanted[-1]:
            wanted.pop()
    found, _, wrong = look_through(partial(lines.scan, keeps_empty=keeps_empty), data, ahead)
    assert wrong is None
    assert found == [text for text in wanted if text or keeps_empty]


FIELDS = st.lists(
    st.lists(st.text(st.sampled_from("ab\",;\n\r é'"), max_size=6), min_size=2, max_size=4), max_size=8
)


@given(FIELDS, AHEADS, st.sampled_from([",", ";", "\t"]), st.sampled_from(["\n", "\r\n"]), st.booleans())
@settings(deadline=None, max_examples=300)
def test_csv_against_pythons(
    rows: list[list[str]], ahead: int, delimiter: str, end: str, quotes_all: bool
) -> None:
    out = io.StringIO(newline="")
    # A carriage return is only quoted where it ends lines.
    quotes_all = quotes_all or "\r" in str(rows).replace("\\r", "\r")
    quoting = other_csv.QUOTE_ALL if quotes_all else other_csv.QUOTE_MINIMAL
    other_csv.writer(out, delimiter=delimiter, lineterminator=end, quoting=quoting).writerows(rows)
    dialect = csv.Dialect(delimiter.encode())
    scanner = partial(csv.scan, dialect=dialect, has_header=False)
    found, _, wrong = look_through(scanner, out.getvalue().encode(), ahead)
    assert wrong is None
    assert [csv.split(record, dialect) for record in found] == rows


@given(st.text(st.sampled_from('ab",\n'), max_size=30), AHEADS)
@settings(deadline=None, max_examples=500)
def test_csv_of_any_text_against_pythons(text: str, ahead: int) -> None:
    dialect = csv.Dialect()
    found, _, wrong = look_through(partial(csv.scan, dialect=dialect, has_header=False), text.encode(), ahead)
    wanted = [row for row in other_csv.reader(io.StringIO(text, newline="")) if row]
    rows = [csv.split(record, dialect) for record in found]
    assert rows == (wanted if wrong is None else wanted[: len(rows)])


def test_csv_has_a_header_with_line_ends_in_it() -> None:
    data = b'\xef\xbb\xbf\n"a\nb",c\n\n1,"2\n3"\r\n4,5'
    found, header, wrong = look_through(partial(csv.scan, dialect=csv.Dialect(), has_header=True), data)
    assert (header, found, wrong) == ('"a\nb",c', [b'1,"2\n3"', b"4,5"], None)


def test_csv_without_quotes() -> None:
    dialect = csv.Dialect(b"\t", b"")
    found, _, wrong = look_through(partial(csv.scan, dialect=dialect, has_header=False), b'a"\tb\n"c\td\n')
    assert wrong is None
    assert [csv.split(record, dialect) for record in found] == [['a"', "b"], ['"c', "d"]]


def test_csv_with_a_quote_that_is_never_closed_is_damaged() -> None:
    found, _, wrong = look_through(
        partial(csv.scan, dialect=csv.Dialect(), has_header=False), b'a,b\nc,"d\ne,f\n' * 1
    )
    assert found == [b"a,b"]
    assert wrong is not None
    assert wrong.offset == 4


VALUES = st.one_of(st.lists(st.binary(max_size=20)), st.lists(st.integers(-(2**63), 2**63 - 1)),
                   st.lists(st.floats(width=32, allow_nan=False)))  # fmt: skip


@given(st.dictionaries(st.text(max_size=8), VALUES, max_size=6))
@settings(deadline=None)
def test_examples_there_and_back(features: dict[str, list[Any]]) -> None:
    found = example.parse(example.build(features))
    assert {name: list(values) for name, values in found.items()} == features


def test_an_example_of_tensorflow() -> None:
    message = (
        b"\nR\n\x11\n\x08feature0\x12\x05\x1a\x03\n\x01\x00\n\x11\n\x08feature1\x12\x05\x1a\x03\n\x01\x04"
        b"\n\x14\n\x08feature2\x12\x08\n\x06\n\x04goat\n\x14\n\x08feature3\x12\x08\x12\x06\n\x04[\xd3|?"
    )
    wanted = {"feature0": 0, "feature1": 4, "feature2": b"goat", "feature3": 0.9876}
    found = example.parse(message)
    assert {name: values[0] for name, values in found.items()} == {**wanted, "feature3": np.float32(0.9876)}
    assert example.build(wanted) == message


def test_an_example_whose_numbers_are_not_packed() -> None:
    integers = b"\x0a\x0d\x0a\x0b\x0a\x01b\x12\x06\x1a\x04\x08\x05\x08\x07"
    assert list(example.parse(integers)["b"]) == [5, 7]
    floats = b"\x0a\x0e\x0a\x0c\x0a\x01c\x12\x07\x12\x05\x0d" + struct.pack("<f", 0.5)
    assert list(example.parse(floats)["c"]) == [0.5]


COLUMNS = {"a": "int", "b": "bytes", "c": "str", "d": "json", "e": "ndarray", "f": "float32", "g": "uint8"}


@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.binary(max_size=30), st.text(max_size=9),
                          st.lists(st.booleans(), max_size=3)), max_size=8))  # fmt: skip
@settings(deadline=None)
def test_mds_there_and_back(rows: list[tuple[int, bytes, str, list[bool]]]) -> None:
    columns = mds.Columns(list(COLUMNS), list(COLUMNS.values()), [mds.size_of(e) for e in COLUMNS.values()])
    samples = [
        {"a": a, "b": b, "c": c, "d": d, "e": np.arange(6, dtype=np.int16).reshape(2, 3), "f": 0.5, "g": 7}
        for a, b, c, d in rows
    ]
    framed = [mds.framed(sample, columns) for sample in samples]
    data = mds.shard_head([len(record) for record in framed]) + b"".join(framed)
    found, _, wrong = look_through(partial(scan_mds, samples=len(rows)), data)
    assert wrong is None
    for record, sample in zip(found, samples, strict=True):
        read = mds.sample(record, columns)
        assert (read.pop("e") == sample.pop("e")).all()
        assert read == sample


def scan_mds(size_bytes: int, spans: Spans, samples: int) -> Any:
    return mds.scan(size_bytes, samples, spans)


def columns_of(value: Any) -> mds.Columns:
    encoding = mds.encoding_of(value)
    return mds.Columns(["v"], [encoding], [mds.size_of(encoding)])


@pytest.mark.parametrize("value", [
    1, -5, 1.5, "é", b"\0", [1, {"a": None}], True, None, np.float16(0.5), np.uint64(2**64 - 1), {"k": "v"},
])  # fmt: skip
def test_mds_has_an_encoding_for(value: Any) -> None:
    columns = columns_of(value)
    assert mds.sample(mds.framed({"v": value}, columns), columns) == {"v": value}


@pytest.mark.parametrize("shape", [(3,), (1, 1, 4), (300, 2)])
def test_mds_has_arrays_of_fixed_type_and_shape(shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    fixed = f"ndarray:float32:{','.join(map(str, shape))}"
    assert (mds.decoded(fixed, array.tobytes()) == array).all()
    whole = mds.encoded("ndarray", array)
    assert (mds.decoded("ndarray", whole) == array).all()
    assert (mds.decoded("ndarray:float32", whole[1:]) == array).all()


Framed = tuple[Callable[..., Any], bytes, Callable[[bytes], Any]]
_COLUMNS = mds.Columns(["a", "b"], ["int", "json"], [8, None])
_SAMPLES = [mds.framed({"a": n, "b": {"n": [n]}}, _COLUMNS) for n in range(4)]
FRAMED: dict[str, Framed] = {
    "tfrecord": (tfrecord.scan, b"".join(tfrecord.framed(b"body%d" % n * n) for n in range(5)), tfrecord.payload),
    "recordio": (recordio.scan, b"".join(recordio.framed(b"%d" % n + MAGIC * n) for n in range(5)), recordio.payload),
    "tar": (
        tar.scan,
        tar_of([("a.x", b"1" * 700), ("n" * 120 + ".x", b"2"), ("b.x", b""), ("b.y", b"3")])[: 16 * 512],
        tar.sample,
    ),
    "csv": (
        partial(csv.scan, dialect=csv.Dialect(), has_header=True),
        b'x,y\n1,"2\n"\n"3""",4\n',
        partial(csv.split, dialect=csv.Dialect()),
    ),
    "mds": (
        partial(scan_mds, samples=4),
        mds.shard_head([len(s) for s in _SAMPLES]) + b"".join(_SAMPLES),
        partial(mds.sample, columns=_COLUMNS),
    ),
    "example": (
        tfrecord.scan,
        tfrecord.framed(example.build({"a": [1, 2], "b": b"x", "c": [0.5]})),
        lambda record: example.parse(tfrecord.payload(record)),
    ),
}  # fmt: skip


def read_all(framed: Framed, data: bytes) -> tuple[list[Any], list[Exception]]:
    """Samples, and what was wrong; nothing but Malformed may come."""
    scanner, _, parse = framed
    try:
        records, _, wrong = look_through(scanner, data)
    except Compressed as error:
        return [], [error]
    found: list[Any] = []
    errors: list[Exception] = [] if wrong is None else [wrong]
    for record in records:
        try:
            found.append(parse(record))
        except Malformed as error:
            errors.append(error)
    return found, errors


@pytest.mark.parametrize("name", FRAMED)
def test_a_file_that_is_cut_off_anywhere(name: str) -> None:
    whole, wrong = read_all(FRAMED[name], FRAMED[name][1])
    assert not wrong
    data = FRAMED[name][1]
    for stop in range(1, len(data)):
        found, errors = read_all(FRAMED[name], data[:stop])
        if name == "tar" and stop % tar.BLOCK == 0 and not errors:
            found = found[:-1]  # nothing tells that a file of its last record is missing
        if name not in ("csv", "mds"):
            assert [str(sample) for sample in found] == [str(sample) for sample in whole[: len(found)]]
        if name in ("tfrecord", "recordio", "example") and len(found) < len(whole):
            boundaries = cuts(FRAMED[name])
            assert errors or stop in boundaries, f"nothing is wrong with {stop} of {len(data)} bytes"
        if name == "mds":
            assert errors


def cuts(framed: Framed) -> set[int]:
    """Where a file may end and be whole."""
    spans = Spans()
    scan = framed[0](len(framed[1]), spans)
    with contextlib.suppress(StopIteration):
        want = next(scan)
        while True:
            want = scan.send(framed[1][want.start :])
    stops = set(spans.stops.tolist())
    return stops | {stop + -stop % 4 for stop in stops} | {s + n for s in stops for n in range(-s % 4)}


@pytest.mark.parametrize("name", FRAMED)
@pytest.mark.parametrize("bits", [0x01, 0x80, 0xFF])
def test_a_file_of_which_any_byte_is_wrong(name: str, bits: int) -> None:
    data = FRAMED[name][1]
    whole, _ = read_all(FRAMED[name], data)
    for place in range(len(data)):
        broken = bytearray(data)
        broken[place] ^= bits
        found, errors = read_all(FRAMED[name], bytes(broken))
        if name in ("tfrecord", "example"):
            assert errors, f"byte {place} is wrong, and nobody sees it"
            assert all(str(sample) in [str(w) for w in whole] for sample in found)


@pytest.mark.parametrize("name", FRAMED)
@given(data=st.binary(max_size=1200))
@settings(deadline=None, max_examples=60)
def test_any_bytes_are_no_reason_to_fail(name: str, data: bytes) -> None:
    read_all(FRAMED[name], data)


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_any_bytes_as_an_example(data: bytes) -> None:
    with contextlib.suppress(Malformed):
        example.parse(data)


@given(
    st.binary(max_size=60), st.sampled_from(["int", "str", "json", "ndarray", "ndarray:int16", "str_decimal"])
)
@settings(deadline=None)
def test_any_bytes_as_a_column(data: bytes, encoding: str) -> None:
    with contextlib.suppress(Malformed):
        mds.sample(data, mds.Columns(["a", "b"], [encoding, "bytes"], [mds.size_of(encoding), None]))


@pytest.mark.parametrize("text", [b"", b"[]", b'{"shards": [{}]}', b"\xff", b"[" * 100_000])
def test_an_index_of_mds_that_is_none(text: bytes) -> None:
    with pytest.raises(Malformed):
        mds.parse_index(text)


def test_read_ahead_grows_where_records_are_short_and_shrinks_where_they_are_long() -> None:
    ahead, size = ReadAhead(), 1 << 40
    at, spans = 0, []
    for _ in range(10):
        stop = ahead.stop(Want(at, 12), size)
        spans.append(stop - at)
        at = stop
    assert spans == sorted(spans)
    assert spans[-1] == 4 * 1024 * 1024
    for _ in range(12):
        at += 100_000_000
        last = ahead.stop(Want(at, 12), size) - at
    assert last == 16 * 1024
    assert ahead.stop(Want(size - 5, 12), size) == size
