"""The native front and its tenants: what is counted of each, limits that change, and bodies of who is not known yet."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest

from tests.e2e.run_helpers import wait_for
from tests.e2e.test_native_bodies import AUTHORIZATION
from tests.e2e.test_native_bodies import served as backed
from tests.e2e.test_native_front import BIG, Served, request, served, until_end

pytestmark = pytest.mark.real

SLOW, FAST = (
    (7, "secret-token", {"*": [""]}, "", "slow"),
    (8, "other-token", {"*": [""]}, "", "fast"),
)
MIB = 1024 * 1024


def set_rates(here: Served, **rates: float) -> None:
    here.front.set_rules([SLOW, FAST], {"data": (here.bucket, 100.0, 0)}, rates)


def test_what_each_tenant_was_sent_is_counted(tmp_path: Path) -> None:
    with served(tmp_path) as here:
        set_rates(here, slow=BIG_PER_S, fast=0.0, idle=0.0)
        sizes = dict.fromkeys(("slow", "fast", ""), 0)
        took_s = 0.0
        for key in ("small", "big", "small"):
            began = time.monotonic()
            sizes["slow"] += len(here.get(key))
            took_s += time.monotonic() - began
            with here.connect() as link:
                asked = request(key, b"Connection: close\r\n").replace(b"secret-token", b"other-token")
                link.sendall(asked)
                sizes["fast"] += len(until_end(link))
        with here.connect() as link:
            link.sendall(request("small").replace(b"secret-token", b"wrong-token"))
            sizes[""] += len(until_end(link))
        wait_for(lambda: here.front.figures().sent_bytes == sum(sizes.values()), 60)
        said = here.front.tenant_figures()
        assert {name: (hits, sent) for name, (hits, sent, _) in said.items()} == {
            "": (0, sizes[""]),
            "slow": (3, sizes["slow"]),
            "fast": (3, sizes["fast"]),
            "idle": (0, 0),
        }
        waited = {name: throttled_s for name, (_, _, throttled_s) in said.items()}
        assert waited["fast"] == waited[""] == 0
        assert 0.5 < waited["slow"] <= took_s, "BIG takes a second at its rate"


BIG_PER_S = float(len(BIG))


def test_a_limit_that_changes_holds_for_what_is_being_sent(tmp_path: Path) -> None:
    with served(tmp_path) as here:
        set_rates(here, slow=BIG_PER_S / 100, fast=0.0)
        with here.connect() as link:
            link.sendall(request("big", b"Connection: close\r\n"))
            link.recv(1)
            before = here.front.tenant_figures()["slow"]
            began = time.monotonic()
            set_rates(here, slow=0.0, fast=0.0)
            assert len(until_end(link)) > len(BIG)
            assert time.monotonic() - began < 50, "it went on at a hundredth of its size each second"
        set_rates(here, slow=2 * BIG_PER_S, fast=0.0)
        with here.connect() as link:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
            link.sendall(request("big", b"Connection: close\r\n"))
            link.recv(1)
            # However late: half of it at least is still to come, as the buffers on the way hold no more.
            began = time.monotonic()
            set_rates(here, slow=BIG_PER_S / 4, fast=0.0)
            assert len(until_end(link)) > len(BIG)
            assert time.monotonic() - began > 1.2, "it went on with twice its size each second"
        after = here.front.tenant_figures()["slow"]
        assert after[0] - before[0] == 1, "the same tenant goes on counting"


def test_the_back_hears_from_where_a_request_comes(tmp_path: Path) -> None:
    with backed(tmp_path) as back:
        link, connection, asked = back.connect(b"GET /data/x HTTP/1.1\r\n")
        with link:
            assert asked[8] == "127.0.0.1"
            back.answer(connection)


def test_no_body_is_gathered_before_it_is_known_who_asks(tmp_path: Path) -> None:
    with backed(tmp_path) as back:
        tokens = [(7, "secret-token", {"*": [""]}, "", "")]
        back.front.set_rules(tokens, {}, {}, False, True)
        # Of who is known all of it comes with the request, as ever.
        link, connection, asked = back.connect(b"POST /-/x HTTP/1.1\r\nContent-Length: 0\r\n")
        with link:
            assert asked[4] == 7
            back.answer(connection)
        head = b"POST /-/x HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: %d\r\n" % (4 * MIB)
        unknown = AUTHORIZATION.replace(b"secret-token", b"who-knows-this")
        links = []
        for _ in range(20):
            link = socket.create_connection(("127.0.0.1", back.port), 60)
            links.append(link)
            # It sends its body without waiting to be told to.
            link.sendall(b"%b%b\r\n" % (head, unknown))
            sender = threading.Thread(target=_send, args=(link, bytes(4 * MIB)), daemon=True)
            sender.start()
        for _ in links:
            connection, asked = back.asked.get(timeout=60)
            assert asked[3] == b""
            assert (asked[4], asked[6]) == (-3, 4 * MIB)
            refusal = b"HTTP/1.1 401 Unauthorized\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
            back.front.say(connection, refusal)
            back.front.finish(connection)
        for link in links:
            with link:
                assert (
                    until_end(link)
                    == b"HTTP/1.1 401 Unauthorized\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
                )


def _send(link: socket.socket, data: bytes) -> None:
    try:
        link.sendall(data)
    except OSError:
        return


def test_tokens_come_and_go_beside_the_others(tmp_path: Path) -> None:
    with served(tmp_path) as here:
        set_rates(here, slow=0.0, fast=0.0)

        def status(token: bytes) -> bytes:
            with here.connect() as link:
                link.sendall(request("small", b"Connection: close\r\n").replace(b"secret-token", token))
                return until_end(link)[9:12]

        many = [(number, f"token-number-{number}", {"*": [""]}, "", "slow") for number in range(10, 2000)]
        here.front.change_tokens(many, [], {"slow": 0.0})
        assert [status(token) for token in (b"secret-token", b"token-number-10", b"token-number-1999")] == [
            b"200"
        ] * 3
        assert status(b"token-number-2000") == b"401"
        with here.connect() as link:
            link.sendall(request("small").replace(b"secret-token", b"token-number-11"))
            assert link.recv(12)[9:] == b"200"
            here.front.change_tokens(
                [(2000, "token-number-2000", {"*": ["other/"]}, "", "fast")],
                [8, *range(11, 2000)],
                {"fast": 0.0},
            )
            link.sendall(
                request("small", b"Connection: close\r\n").replace(b"secret-token", b"token-number-11")
            )
            assert b"HTTP/1.1 401" in until_end(link), "also on a connection that is open"
        said = [
            status(token)
            for token in (b"secret-token", b"token-number-10", b"token-number-11", b"other-token")
        ]
        assert said == [b"200", b"200", b"401", b"401"]
        assert status(b"token-number-2000") == b"404", "the back is asked: it may not read that"
        here.front.change_tokens([], [7, 10], {})
        assert status(b"secret-token") == status(b"token-number-10") == status(b"") == b"401"
