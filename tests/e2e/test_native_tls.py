"""The native front's TLS over real sockets: handshakes that stall, peers that speak otherwise or go, limits."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from stoker._native import Front, TlsContext
from tests.certificates import Authority
from tests.e2e.native_front import NOW, Asked, answering, new_front
from tests.e2e.run_helpers import wait_for

pytestmark = pytest.mark.real
BIG = bytes(range(256)) * (4096 * 8)
HELLO_BEGUN = bytes.fromhex("16030100c8010000c40303")


@dataclass
class Served:
    """A front with TLS that holds `small` and `big`; its back says who asks, and keeps what it was told."""

    front: Front
    port: int
    ca: Path
    asked: list[Asked] = field(default_factory=list)

    def plain(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), 60)

    def connect(self, client: tuple[Path, Path] | None = None) -> ssl.SSLSocket:
        context = ssl.create_default_context(cafile=self.ca)
        if client is not None:
            context.load_cert_chain(*client)
        return context.wrap_socket(self.plain(), server_hostname="127.0.0.1")

    def get(self, link: socket.socket, key: str, *headers: str) -> bytes:
        """The body of the answer; the link may be used again."""
        lines = "".join(f"{header}\r\n" for header in headers)
        link.sendall(f"GET /data/{key} HTTP/1.1\r\nHost: x\r\n{lines}\r\n".encode())
        return body_of(link)


def body_of(link: socket.socket) -> bytes:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        part = link.recv(1)
        assert part, head
        head += part
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    body = bytearray()
    while len(body) < length:
        part = link.recv(min(65536, length - len(body)))
        assert part, len(body)
        body += part
    return bytes(body)


@contextlib.contextmanager
def served(
    folder: Path, client_ca: Path | None = None, *, is_client_required: bool = False, **limits: float
) -> Iterator[Served]:
    authority = Authority(folder / "pki")
    (folder / "cache").mkdir()
    front, index, files, bucket = new_front(folder / "cache", **limits)
    Path(files.path(1)).write_bytes(b"....small data....")
    index.learn(bucket, "small", "v1", 10, False, NOW)
    index.hold(bucket, "small", "v1", None, 1, 4, 0, NOW)
    Path(files.path(2)).write_bytes(BIG)
    index.learn(bucket, "big", "v1", len(BIG), False, NOW)
    for block in range(len(BIG) // (4 << 20)):
        index.hold(bucket, "big", "v1", block, 2, 0, 0, NOW)
    certificate, key = authority.server()
    authorities = "" if client_ca is None else str(client_ca)
    front.set_tls(TlsContext(str(certificate), str(key), authorities, is_client_required))
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    here = Served(front, listener.getsockname()[1], authority.path)
    # Nobody needs to be known for `small`; what is told of certificates is the back's.
    front.set_rules(
        [(1, "", {"data": [""]}, "", "everyone"), (2, "", {"data": [""]}, "", "known")],
        {"data": (bucket, 100.0, 0)},
        {"everyone": 0.0, "known": 0.0},
        certificates={"CN:known": 2},
    )

    def answer(connection: int, asked: Asked) -> None:
        here.asked.append(asked)
        said = asked[7].encode()
        front.say(connection, b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(said), said))
        front.finish(connection)

    with answering(front, listener, answer):
        yield here


def is_over(link: socket.socket) -> bool:
    """Whether the front has ended it; waits for that."""
    try:
        while link.recv(65536):
            pass
    except OSError as error:
        return not isinstance(error, TimeoutError)
    return True


def test_hits_of_all_sizes_and_ranges_over_one_connection(tmp_path: Path) -> None:
    with served(tmp_path) as here, here.connect() as link:
        assert link.version() in ("TLSv1.2", "TLSv1.3")
        for _ in range(3):
            assert here.get(link, "small") == b"small data"
            assert here.get(link, "big") == BIG
            for start, stop in ((0, 1), (5000000, 5000010), (100, 15_460), (100, 16_500), (7, 1_000_007)):
                assert here.get(link, "big", f"Range: bytes={start}-{stop - 1}") == BIG[start:stop]
        figures = here.front.figures()
        assert (figures.accepted, figures.handed_over, here.asked) == (1, 0, [])


def test_many_requests_are_sent_before_an_answer_is_read(tmp_path: Path) -> None:
    with served(tmp_path) as here, here.connect() as link:
        ranges = [(start, start + 70_000) for start in range(0, 2_000_000, 50_000)]
        link.sendall(
            b"".join(
                b"GET /data/big HTTP/1.1\r\nHost: x\r\nRange: bytes=%d-%d\r\n\r\n" % (a, b - 1)
                for a, b in ranges
            )
        )
        for start, stop in ranges:
            assert body_of(link) == BIG[start:stop]


def test_the_older_protocols_are_refused(tmp_path: Path) -> None:
    with served(tmp_path) as here:
        context = ssl.create_default_context(cafile=here.ca)
        context.set_alpn_protocols(["h2", "http/1.1"])
        with context.wrap_socket(here.plain(), server_hostname="localhost") as link:
            assert link.selected_alpn_protocol() == "http/1.1"
        context.set_ciphers("DEFAULT@SECLEVEL=0")
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
        with context.wrap_socket(here.plain(), server_hostname="localhost") as link:
            assert here.get(link, "small") == b"small data"
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(OSError, match=r"(?i)version|closed|reset|protocol"):
            context.wrap_socket(here.plain(), server_hostname="localhost")


def test_a_handshake_that_stalls_is_cut_off(tmp_path: Path) -> None:
    with served(tmp_path, head_s=5.0, idle_s=1000) as here, here.connect() as ready:
        assert here.get(ready, "small") == b"small data"
        with here.plain() as silent, here.plain() as link:
            link.sendall(HELLO_BEGUN)
            assert is_over(silent)
            assert is_over(link)
        wait_for(lambda: here.front.figures().timed_out == 2, timeout_s=60)
        assert here.get(ready, "small") == b"small data", "what is ready may be silent for longer"


def test_what_is_no_handshake_ends_the_connection_alone(tmp_path: Path) -> None:
    with served(tmp_path) as here, here.connect() as other:
        for garbage in (
            b"\x00" * 300,
            b"\x16\x03\x01\xff\xff" + b"x" * 70_000,
            b"\x80\x2e\x01\x00\x02",
            b"SSH-2.0-x\r\n",
        ):
            with here.plain() as link:
                with contextlib.suppress(OSError):  # it may be over by then
                    link.sendall(garbage)
                    link.shutdown(socket.SHUT_WR)
                assert is_over(link)
        with here.plain() as link:
            link.sendall(b"GET /data/small HTTP/1.1\r\nHost: x\r\n\r\n")
            said = link.recv(65536)
            assert said.startswith(b"HTTP/1.1 400 ")
            assert b"https://" in said
            assert b"small data" not in said
        # Within a connection: what comes is no record.
        with here.connect() as link:
            raw = socket.socket(fileno=socket.dup(link.fileno()))
            raw.sendall(b"GET /data/small HTTP/1.1\r\nHost: x\r\n\r\n")
            assert is_over(link)
            raw.close()
        assert here.get(other, "small") == b"small data"
        assert here.front.figures().handed_over == 0


def test_readers_that_go_in_the_middle_leave_nothing_behind(tmp_path: Path) -> None:
    with served(tmp_path) as here:
        for _ in range(20):
            link = here.connect()
            link.sendall(b"GET /data/big HTTP/1.1\r\nHost: x\r\n\r\n" * 3)
            assert link.recv(1000)
            link.close()
        wait_for(lambda: here.front.figures().connections == 0, timeout_s=60)
        with here.connect() as link:
            assert here.get(link, "small") == b"small data"


@pytest.mark.parametrize("limit", ["egress_bytes_per_s", "connection_bytes_per_s"])
def test_limits_hold_for_what_is_sealed(tmp_path: Path, limit: str) -> None:
    """What could not go out at once is begun again with less than it was allowed then: nothing is lost or doubled."""
    size = 3_000_000
    with served(tmp_path, **{limit: 4e6}) as here:
        with contextlib.ExitStack() as stack:
            links = [stack.enter_context(here.connect()) for _ in range(3)]
            for link in links:
                link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 100_000)
            began = time.monotonic()
            for link in links:
                link.sendall(b"GET /data/big HTTP/1.1\r\nHost: x\r\nRange: bytes=0-%d\r\n\r\n" % (size - 1))
            for link in links:
                assert body_of(link) == BIG[:size]
            taken_s = time.monotonic() - began
        together = 3 if limit == "egress_bytes_per_s" else 1
        assert taken_s > 0.8 * together * size / 4e6


def test_a_certificate_of_a_peer_says_who_asks(tmp_path: Path) -> None:
    ours, others = Authority(tmp_path / "clients"), Authority(tmp_path / "others")
    cases = {
        "URI:spiffe://site/vision": ours.client("a", uri="spiffe://site/vision", dns="a.site"),
        "DNS:a.site": ours.client("b", dns="a.site"),
        "CN:trainer": ours.client("trainer"),
        "": None,
    }
    with served(tmp_path, ours.path) as here:
        for name, files in cases.items():
            with here.connect(files) as link:
                assert here.get(link, "missing") == name.encode()
                handed_over = here.front.figures().handed_over
                # An unknown name is for the back to find out about; who shows none is known.
                assert here.get(link, "small") == (name.encode() or b"small data")
                assert here.front.figures().handed_over == handed_over + (name != "")
        with here.connect(ours.client("known")) as link:
            assert here.get(link, "small") == b"small data"
            assert here.get(link, "missing") == b"CN:known"
            assert here.asked[-1][4] == 2
        stranger = others.client("known")
        with pytest.raises(OSError, match=r"(?i)alert|closed|reset|broken"), here.connect(stranger) as link:
            here.get(link, "small")


def test_a_certificate_can_be_required_of_peers(tmp_path: Path) -> None:
    ours, others = Authority(tmp_path / "clients"), Authority(tmp_path / "others")
    with served(tmp_path, ours.path, is_client_required=True) as here:
        with here.connect(ours.client("known")) as link:
            assert here.get(link, "small") == b"small data"
        for number, files in enumerate((None, others.client("known")), 1):
            with pytest.raises(OSError, match=r"(?i)alert|closed|reset|broken"), here.connect(files) as link:
                here.get(link, "small")
            wait_for(lambda number=number: here.front.tally().failed_handshakes == number)
        assert here.asked == []
    certificate, key = map(str, ours.server())
    with pytest.raises(RuntimeError, match="nobody signs the certificates that clients must have"):
        TlsContext(certificate, key, "", True)


def test_handshakes_that_fail_are_counted(tmp_path: Path) -> None:
    with served(tmp_path) as here:
        stranger = ssl.create_default_context()
        with pytest.raises(ssl.SSLCertVerificationError):
            stranger.wrap_socket(here.plain(), server_hostname="127.0.0.1")
        wait_for(lambda: here.front.tally().failed_handshakes == 1)
        for count, garbage in ((2, b"GET /data/small HTTP/1.1\r\nHost: x\r\n\r\n"), (3, b"\x00" * 300)):
            with here.plain() as link:
                link.sendall(garbage)
                assert is_over(link)
            wait_for(lambda count=count: here.front.tally().failed_handshakes == count)
        with here.connect() as link:
            assert here.get(link, "small") == b"small data"
            raw = socket.socket(fileno=socket.dup(link.fileno()))
            raw.sendall(b"no record")
            assert is_over(link)
            raw.close()
        here.plain().close()  # as those do that only look whether a port is open
        with here.connect() as link:
            assert here.get(link, "small") == b"small data"
        assert here.front.tally().failed_handshakes == 3


def test_what_is_said_before_a_reset_is_heard(tmp_path: Path) -> None:
    def send_and_reset(port: int, data: bytes) -> None:
        link = socket.create_connection(("127.0.0.1", port), 60)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if data:
            link.sendall(data)
        link.close()

    with served(tmp_path) as here:
        for _ in range(50):
            send_and_reset(here.port, b"\x00" * 300)
            send_and_reset(here.port, b"")
        wait_for(lambda: here.front.tally().failed_handshakes >= 50)
        with here.connect() as link:
            assert here.get(link, "small") == b"small data"
        assert here.front.tally().failed_handshakes == 50


def test_who_reads_late_is_told_of_the_end_all_the_same(tmp_path: Path) -> None:
    """Were it not sealed, it might as well be somebody on the way who cuts the answer off."""
    with served(tmp_path) as here, contextlib.ExitStack() as stack:
        context, links = ssl.create_default_context(cafile=here.ca), []
        for size in range(100_000, 4_000_000, 150_001):
            plain = here.plain()
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 262_144)
            link = context.wrap_socket(plain, server_hostname="127.0.0.1", suppress_ragged_eofs=False)
            links.append((size, stack.enter_context(link)))
            range_of = f"Range: bytes=0-{size - 1}\r\nConnection: close\r\n"
            link.sendall(f"GET /data/big HTTP/1.1\r\nHost: x\r\n{range_of}\r\n".encode())
        time.sleep(0.3)
        for size, link in links:
            assert body_of(link) == BIG[:size]
            assert link.recv(1) == b"", "an end that is not sealed is an error here"


def test_another_certificate_is_for_new_connections(tmp_path: Path) -> None:
    with served(tmp_path) as here, here.connect() as before:
        assert here.get(before, "small") == b"small data"
        other = Authority(tmp_path / "other")
        certificate, key = other.server()
        here.front.set_tls(TlsContext(str(certificate), str(key)))
        with pytest.raises(ssl.SSLCertVerificationError):
            here.connect()
        here.ca = other.path
        with here.connect() as link:
            assert here.get(link, "big") == BIG
        assert here.get(before, "big") == BIG


def test_files_that_are_no_certificate_and_key_are_refused(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = map(str, authority.server("one"))
    _, other = map(str, authority.server("two"))
    nothing = tmp_path / "nothing"
    nothing.write_text("no certificate")
    for files, why in (
        ((str(nothing), key), "nothing holds no chain of certificates"),
        ((str(tmp_path / "none"), key), "none holds no chain of certificates: No such file"),
        ((certificate, str(nothing)), "nothing holds no private key"),
        ((certificate, other), r"two\.key .* key"),
        ((certificate, key, str(nothing)), "nothing holds no certificates"),
    ):
        with pytest.raises(RuntimeError, match=why):
            TlsContext(*files)
