"""How batches are cut for etcd, against a naive twin; and what journal URLs mean."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import ConfigError, JournalUnavailable
from stoker.job.journal import etcd_layout
from stoker.job.journal.durable import Entry
from stoker.job.journal.etcd import EtcdJournal
from stoker.job.journal.etcd_layout import (
    INLINE,
    MAX_OPERATIONS,
    MAX_REQUEST_BYTES,
    Delete,
    Head,
    Keys,
    Operation,
    Ref,
    decode_pending,
    fits,
    plan_batch,
    record_operations,
    transactions,
)
from stoker.job.journal.file import FileJournal
from stoker.job.journal.memory import MemoryJournal
from stoker.job.journal.open import (
    EtcdPlace,
    FilePlace,
    MemoryPlace,
    open_journal,
    open_locator,
    parse_journal_url,
)
from stoker.testing.job_journal import entry
from tests.e2e.etcd import running_etcd

KEYS = Keys("/stoker", "j")
SIZES = st.sampled_from([0, 1, 5000, 393_216, 393_217, 600_000, 1_300_000])
RECORDS = st.dictionaries(st.integers(0, 400), st.none() | SIZES, max_size=300)


class NaiveEtcd:
    """etcd as its documentation describes it, for one client."""

    def __init__(self) -> None:
        self.kept: dict[bytes, bytes] = {}

    def apply(self, operations: list[Operation]) -> None:
        assert len(operations) <= 128
        assert sum(o.size_bytes for o in operations) < 1_500_000
        touched: set[bytes] = set()
        for operation in operations:
            if isinstance(operation, Delete):
                end = operation.end or operation.key + b"\x00"
                gone = {key for key in self.kept if operation.key <= key < end}
                assert not any(operation.key <= key < end for key in touched), (
                    "etcd: duplicate key given in txn"
                )
                for key in gone:
                    del self.kept[key]
            else:
                assert operation.key not in touched
                touched.add(operation.key)
                self.kept[operation.key] = operation.value

    def pieces(self, ref: Ref) -> bytes:
        start, end = KEYS.pieces_of(ref.id)
        value = b"".join(v for k, v in sorted(self.kept.items()) if start <= k < end)
        assert len(value) == ref.size_bytes
        return value

    def records(self) -> dict[str, bytes]:
        start = KEYS.records
        found = {}
        for key, value in self.kept.items():
            if key.startswith(start):
                body = value[1:]
                inline = value[:1] == INLINE
                found[KEYS.name_of(key)] = (
                    body if inline else self.pieces(msgspec.json.decode(body, type=Ref))
                )
        return found


@given(
    batches=st.lists(st.tuples(RECORDS, st.integers(0, 400)), min_size=1, max_size=4),
    start=st.integers(0, 12_000),
)
@settings(max_examples=40, deadline=None)
def test_batches_are_cut_so_that_etcd_takes_them(
    batches: list[tuple[dict[int, int | None], int]], start: int
) -> None:
    etcd, head = NaiveEtcd(), Head(next_seq=start + 1, first_seq=max(1, start - 9_990))
    expected: dict[str, bytes] = {}
    for number, (sizes, entry_count) in enumerate(batches):
        records = {f"r{i}": None if size is None else bytes([number]) * size for i, size in sizes.items()}
        plan = plan_batch(
            KEYS, head, head.next_seq, f"7-{number}", records, [entry(i) for i in range(entry_count)]
        )
        before = etcd.records()
        for group in transactions(plan.early):
            etcd.apply(group)
        assert etcd.records() == before
        assert fits(plan.flip)
        etcd.apply(plan.flip)
        if plan.head.pending is not None:
            stored = decode_pending(etcd.pieces(plan.head.pending))
            for group in transactions(record_operations(KEYS, stored)):
                etcd.apply(group)
        for name, value in records.items():
            expected.pop(name, None)
            if value is not None:
                expected[name] = value
        assert etcd.records() == expected
        assert plan.head.next_seq == head.next_seq + entry_count
        assert set(plan.referred) == set(records)
        head = msgspec.structs.replace(plan.head, pending=None)
    logged = sorted(KEYS.seq_of(key) for key in etcd.kept if key.startswith(KEYS.entries))
    assert logged == list(range(max(head.first_seq, start + 1), head.next_seq))


@given(st.lists(st.tuples(st.integers(0, 999), st.integers(0, 700_000)), max_size=300))
@settings(max_examples=30, deadline=None)
def test_transactions_keep_order_and_limits(shapes: list[tuple[int, int]]) -> None:
    operations: list[Operation] = [etcd_layout.Put(b"%d" % key, bytes(size)) for key, size in shapes]
    groups = list(transactions(operations))
    assert [o for group in groups for o in group] == operations
    assert all(0 < len(g) <= MAX_OPERATIONS for g in groups)
    assert all(len(g) == 1 or sum(o.size_bytes for o in g) <= MAX_REQUEST_BYTES for g in groups)


@given(st.text(), st.text(max_size=5), st.dictionaries(st.text(), st.text()))
def test_entries_are_bounded(why: str, kind: str, details: dict[str, str]) -> None:
    given_entry = Entry(1.5, kind, why * 1000, {**details, "big": why * 10_000})
    body = etcd_layout.encode_entry(given_entry)
    assert len(body) <= etcd_layout.MAX_ENTRY_BYTES
    again = etcd_layout.decode_entry(body)
    assert again == given_entry or "left_out_bytes" in again.details
    assert given_entry.why.startswith(again.why.removesuffix(" …"))


# -- URLs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("/var/lib/j.sqlite", FilePlace(Path("/var/lib/j.sqlite"))),
        ("runs/j", FilePlace(Path("runs/j"))),
        ("./a:b", FilePlace(Path("./a:b"))),
        ("sqlite:///var/a%20b.sqlite", FilePlace(Path("/var/a b.sqlite"))),
        ("memory:", MemoryPlace()),
        ("etcd://e1", EtcdPlace(("e1:2379",))),
        ("etcd://e1:1,e-2.x:65535,e1:1/", EtcdPlace(("e1:1", "e-2.x:65535"))),
        ("ETCD://[::1]:2379,[fe80::1]", EtcdPlace(("[::1]:2379", "[fe80::1]:2379"))),
        ("etcd://e1/prod/ml?compact_s=off", EtcdPlace(("e1:2379",), "/prod/ml", compact_s=None)),
        ("etcd://e1?compact_s=2m", EtcdPlace(("e1:2379",), compact_s=120.0)),
        ("etcd://e1?ca=system", EtcdPlace(("e1:2379",), ca="system")),
        ("etcd://e1?ca=/a&cert=/b&key=%2Fc", EtcdPlace(("e1:2379",), ca="/a", cert="/b", key="/c")),
    ],
)
def test_journal_urls(url: str, place: object) -> None:
    assert parse_journal_url(url) == place


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "no place"),
        ("a\0b", "no place"),
        ("sqlite:///a%00b", "no place"),
        ("redis://h", "redis://h"),
        ("http://e1:2379", "etcd://host:2379"),
        ("sqlite:", "names no file"),
        ("sqlite://relative", "names no file"),
        ("sqlite:///", "names no file"),
        ("etcd:", "names no etcd"),
        ("etcd://", "no endpoint"),
        ("etcd://e1,,e2", "no endpoint"),
        ("etcd://e1:0", "'e1:0'"),
        ("etcd://e1:99999", "'e1:99999'"),
        ("etcd://e1:x", "'e1:x'"),
        ("etcd://user:secret@e1", "must not hold a password"),
        ("etcd://e1/a b", "no prefix"),
        ("etcd://e1//a", "no prefix"),
        ("etcd://e1?timeout=3", "'timeout'"),
        ("etcd://e1?ca", "name=value"),
        ("etcd://e1?cert=/a&key=/b", "no authority"),
        ("etcd://e1?ca=/a&cert=/b", "only one of"),
        ("etcd://e1?compact_s=often", "compact_s"),
    ],
)
def test_journal_urls_that_cannot_be(url: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_journal_url(url)
    assert says in str(caught.value)
    assert "secret" not in str(caught.value)


@given(st.text())
def test_any_text_is_a_place_or_a_config_error(url: str) -> None:
    for text in (url, f"etcd://{url}", f"etcd://e1?{url}", f"sqlite://{url}"):
        try:
            parse_journal_url(text)
        except ConfigError:
            continue


def test_opening_touches_nothing(tmp_path: Path) -> None:
    path = tmp_path / "new" / "j.sqlite"
    assert isinstance(open_journal(str(path), "j"), FileJournal)
    assert isinstance(open_journal("memory:", "j"), MemoryJournal)
    journal = open_journal("etcd://e1.invalid,e2.invalid/p", "j")
    assert isinstance(journal, EtcdJournal)
    assert str(journal) == "etcd at http://e1.invalid:2379, http://e2.invalid:2379, below /p/jobs/j"
    assert not path.parent.exists()
    with pytest.raises(ConfigError, match="is a folder"):
        open_journal(str(tmp_path), "j")
    with pytest.raises(ConfigError, match="job name"):
        open_journal("etcd://e1", "Not/A/Job")
    with pytest.raises(ConfigError, match="cannot tell other hosts"):
        open_locator(str(path), "j")
    with pytest.raises(ConfigError, match="TLS files"):
        open_journal(f"etcd://e1?ca={path}", "j")


# -- what answers there is not etcd, or wants certificates ------------------------------------------------------


@pytest.mark.real
def test_something_else_answers_there() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 9\r\n\r\nnot here\n")
        await writer.drain()
        writer.close()

    async def test() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        journal = open_journal(f"etcd://127.0.0.1:{port}", "j")
        with pytest.raises(JournalUnavailable, match="gRPC gateway enabled"):
            await journal.lead("127.0.0.1:1")
        await journal.close()
        server.close()

    asyncio.run(test())


def make_certificates(folder: Path) -> None:
    """An authority, and one certificate that it signed for 127.0.0.1, for server and client."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, cwd=folder, capture_output=True)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    for name in ("ca", "other"):
        openssl(
            *("req", "-x509", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.pem"),
            *("-days", "2", "-subj", f"/CN={name}", "-addext", "keyUsage=critical,keyCertSign"),
        )
    openssl("req", *new_key, "-keyout", "peer.key", "-out", "peer.csr", "-subj", "/CN=peer")
    (folder / "peer.ext").write_text(
        "subjectAltName=IP:127.0.0.1,DNS:localhost\nextendedKeyUsage=serverAuth,clientAuth\n"
    )
    openssl(
        *("x509", "-req", "-in", "peer.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"),
        *("-days", "2", "-extfile", "peer.ext", "-out", "peer.pem"),
    )


@pytest.mark.real
def test_certificates_both_ways(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    own = (f"{tmp_path}/peer.pem", f"{tmp_path}/peer.key")
    ca = ("--client-cert-auth", "--trusted-ca-file", f"{tmp_path}/ca.pem")
    extra = ("--cert-file", own[0], "--key-file", own[1], *ca)

    async def test(url: str) -> None:
        trusting = f"{url}?ca={tmp_path}/ca.pem&cert={own[0]}&key={own[1]}"
        journal = open_journal(trusting, "j")
        await journal.lead("127.0.0.1:1")
        await journal.write({"a": b"1"}, [entry(1)])
        assert await journal.load() == {"a": b"1"}
        locator = open_locator(trusting, "j")
        assert await locator.locate() == "127.0.0.1:1"
        await locator.close()
        await journal.close()
        strangers = ["", f"?ca={tmp_path}/ca.pem", "?ca=system"]
        strangers.append(f"?ca={tmp_path}/other.pem&cert={own[0]}&key={own[1]}")
        await asyncio.gather(*(refused(f"{url}{options}") for options in strangers))

    async def refused(url: str) -> None:
        journal = open_journal(url, "j")
        with pytest.raises(JournalUnavailable):
            await journal.load()
        await journal.close()

    with running_etcd(tmp_path, extra=extra, tls=ssl_context(tmp_path)) as etcd:
        asyncio.run(test(etcd.url))


def ssl_context(folder: Path) -> ssl.SSLContext:
    """What the test's own requests to etcd use."""
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    context.load_cert_chain(folder / "peer.pem", folder / "peer.key")
    return context
