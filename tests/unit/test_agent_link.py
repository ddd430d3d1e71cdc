"""An agent's way to its master: real sockets, one of them with nobody behind it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from stoker.agent.core import NodeCore
from stoker.agent.link import AgentConfig, MasterLink
from stoker.base.clock import Clock, SystemClock
from stoker.errors import AccessDenied, MasterUnreachable, WireError
from stoker.settings import Timeouts
from stoker.wire.frames import FrameCodec
from stoker.wire.job import Beat, Directive, Join, NodeReport, Outcome, ToMaster, WorkerSpec
from stoker.wire.stream import SWITCHING, read_head
from tests.clocks import HandClock

LONG_S = 600.0
SPEC = WorkerSpec("w0", 0, 0, 1, 0, 1, 0, 1, "127.0.0.1", 1, 0, 0)
T = TypeVar("T")
PATIENT = Timeouts(user_s=LONG_S, park_s=LONG_S, beat_timeout_s=LONG_S)


async def never(host: str, port: int) -> None:
    await asyncio.Event().wait()


def make_link(
    folder: Path,
    locate: Callable[[], Awaitable[tuple[str, int]]],
    moved: Callable[[str, int], Awaitable[object]] = never,
    clock: Clock | None = None,
    timeouts: Timeouts = PATIENT,
    apply: Callable[[object], None] = lambda _: None,
    is_hosted: Callable[[], bool] = lambda: False,
) -> MasterLink:
    config = AgentConfig(
        locate=locate, token="t", command=(), slots=1, host="h", address="127.0.0.1", run_id="none",
        log_dir=folder, runtime_dir=folder, environment={}, moved=moved, timeouts=timeouts,
        is_hosted=is_hosted,
    )  # fmt: skip
    core = NodeCore("node-a")
    return MasterLink(config, clock or SystemClock(), core, apply=apply, is_idle=lambda: True)


def test_a_dead_masters_socket_keeps_nobody_once_the_next_one_is_known(tmp_path: Path) -> None:
    """Its parent still holds the socket: whoever calls is connected by the kernel, and never answered."""

    async def story() -> list[int]:
        deserted = socket.create_server(("127.0.0.1", 0))
        has_left = asyncio.Event()

        async def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_head(reader)
            writer.write(SWITCHING)
            said.append(await reader.read())
            writer.close()
            await writer.wait_closed()
            has_left.set()

        server = await asyncio.start_server(welcome, "127.0.0.1", 0)
        ports = [deserted.getsockname()[1], server.sockets[0].getsockname()[1]]
        asked: list[int] = []
        said: list[bytes] = []
        is_named = asyncio.Event()

        async def locate() -> tuple[str, int]:
            asked.append(ports[1] if is_named.is_set() else ports[0])
            return "127.0.0.1", asked[-1]

        async def moved(host: str, port: int) -> None:
            if port == ports[1]:
                await asyncio.Event().wait()
            await is_named.wait()

        link = make_link(tmp_path, locate, moved)
        connecting = asyncio.create_task(link.connect(asyncio.get_running_loop().create_future()))
        deserted.setblocking(False)
        held, _ = await asyncio.get_running_loop().sock_accept(deserted)
        assert not connecting.done()
        is_named.set()
        assert await asyncio.wait_for(connecting, LONG_S / 10) is not None
        assert await asyncio.get_running_loop().sock_recv(held, 4096), "it had called the old one"
        held.close()
        deserted.close()
        assert link._opened is not None
        link.send(Beat("node-a", 0, 0))
        link._opened.close()
        await link._opened.wait_closed()
        await has_left.wait()
        server.close()
        assert said == [b""], "nothing is said before the join"
        return [ports.index(port) for port in asked]

    assert asyncio.run(story()) == [0, 1]


def test_the_last_words_of_an_agent_arrive_though_it_reads_no_more(tmp_path: Path) -> None:
    """A socket that is closed with something unread in it resets the connection, and what was on its way is lost."""

    async def story() -> list[ToMaster]:
        heard: list[ToMaster] = []
        ended = asyncio.get_running_loop().create_future()
        codec: FrameCodec[ToMaster] = FrameCodec(ToMaster)

        async def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_head(reader)
            directive = FrameCodec(Directive).encode(Directive(seq=1, generation=1, note="x" * 1000))
            writer.write(SWITCHING + directive * 1000)
            try:
                while (message := await codec.read_or_break(reader)) is not None:
                    heard.append(message)
                ended.set_result(None)
            except OSError as error:
                ended.set_exception(error)
            writer.close()

        server = await asyncio.start_server(welcome, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]

        async def locate() -> tuple[str, int]:
            return "127.0.0.1", port

        link = make_link(tmp_path, locate)
        reader = await link.connect(asyncio.get_running_loop().create_future())
        assert reader is not None
        await asyncio.sleep(0.2)  # the master's words fill what the kernel holds
        done: asyncio.Future[Outcome | None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        await link.session(reader, done)
        await asyncio.wait_for(ended, LONG_S / 10)
        server.close()
        return heard

    join, report = asyncio.run(story())
    assert isinstance(join, Join)
    assert isinstance(report, NodeReport)


def test_who_has_not_heard_of_a_master_for_the_timeout_gives_up_however_the_silence_began(
    tmp_path: Path,
) -> None:
    """The time counts from the master's last word, not from when its stream broke; the last try ends with it."""
    user_s, beat_s = 60.0, 15.0
    clock = HandClock()

    async def story() -> tuple[float, list[float]]:
        async def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_head(reader)
            writer.write(SWITCHING + FrameCodec(Directive).encode(Directive(seq=1, generation=1)))
            await is_heard.wait()
            clock.at += 20.0
            writer.close()

        server = await asyncio.start_server(welcome, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]

        async def locate() -> tuple[str, int]:
            return "127.0.0.1", port

        timeouts = Timeouts(user_s, beat_interval_s=beat_s, beat_timeout_s=beat_s, park_s=beat_s)
        is_heard = asyncio.Event()
        link = make_link(tmp_path, locate, clock=clock, timeouts=timeouts, apply=lambda _: is_heard.set())
        clock.at += 100.0
        reader = await link.connect(asyncio.get_running_loop().create_future())
        assert reader is not None
        heard_at = clock.at
        await link.session(reader, asyncio.get_running_loop().create_future())
        assert clock.at == heard_at + 20.0
        server.close()

        tried: list[float] = []

        async def unanswered(timeout_s: float) -> asyncio.StreamReader:
            tried.append(timeout_s)
            clock.at += timeout_s
            raise MasterUnreachable("it does not answer")

        link._open = unanswered  # type: ignore[method-assign]
        with pytest.raises(MasterUnreachable, match="for 60 s"):
            await link.connect(asyncio.get_running_loop().create_future())
        return clock.at - heard_at, tried

    silent_s, tried = asyncio.run(story())
    assert user_s <= silent_s < user_s + 1.0
    assert max(tried) == beat_s


class AgileLoop(asyncio.SelectorEventLoop):
    """Has its time jump to the next timer when nothing else is to be done, and else stand still: it is the clock of all
    that runs in it, however slowly that goes."""

    def __init__(self) -> None:
        self.skipped_s = 0.0
        super().__init__()
        self.began = super().time()

    def time(self) -> float:
        return self.began + self.skipped_s

    def now(self) -> float:
        return self.time()

    def wall(self) -> float:
        return self.time()

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            events = self._selector.select(0)  # type: ignore[attr-defined]
            if events:
                self._process_events(events)  # type: ignore[attr-defined]
            else:
                self.skipped_s += max(0.0, self._scheduled[0].when() - self.time())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def jump(story: Callable[[AgileLoop], Coroutine[Any, Any, T]]) -> T:
    with asyncio.Runner(loop_factory=AgileLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, AgileLoop)
        return runner.run(story(loop))


@pytest.mark.parametrize("seed", range(5))
def test_no_try_outlasts_the_time_after_which_the_master_starts_others(tmp_path: Path, seed: int) -> None:
    """Whoever names the master takes long to say that it knows of none, and the pauses come on top."""
    user_s, beat_s = 62.5 + seed, 15.0

    async def story(loop: AgileLoop) -> float:
        async def locate() -> tuple[str, int]:
            await asyncio.sleep(beat_s)
            raise MasterUnreachable("nobody knows of a master")

        timeouts = Timeouts(user_s, beat_interval_s=beat_s, beat_timeout_s=beat_s, park_s=beat_s)
        link = make_link(tmp_path, locate, clock=loop, timeouts=timeouts)
        began = loop.now()
        with pytest.raises(
            MasterUnreachable,
            match=r"(nobody knows of a master|nobody says where the master is), for \d+ s: start",
        ):
            await link.connect(loop.create_future())
        return loop.now() - began

    assert user_s <= jump(story) < user_s + 1.0


@pytest.mark.parametrize(("was_taken", "ends_at", "expected_s"), [
    (False, math.inf, 60.0), (False, 20.0, 20.0), (True, math.inf, 3.0),
])  # fmt: skip
def test_a_master_that_this_command_starts_may_take_its_time(
    tmp_path: Path, was_taken: bool, ends_at: float, expected_s: float
) -> None:
    """On a busy machine its imports alone outlast a short timeout. Where its process has ended, or this node is counted
    in the job, the timeout holds."""

    async def story(loop: AgileLoop) -> float:
        async def locate() -> tuple[str, int]:
            raise MasterUnreachable("the master does not answer")

        timeouts = Timeouts(3.0, beat_interval_s=0.5, beat_timeout_s=1.5, park_s=2.0)
        began = loop.now()
        link = make_link(
            tmp_path, locate, clock=loop, timeouts=timeouts, is_hosted=lambda: loop.now() - began < ends_at
        )
        link.core.directive = msgspec.structs.replace(link.core.directive, seq=int(was_taken))
        with pytest.raises(MasterUnreachable, match=r"the master does not answer, for \d+ s: start"):
            await link.connect(loop.create_future())
        return loop.now() - began

    assert expected_s <= jump(story) < expected_s + 1.5


ANSWERS = (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", b"HTTP/1.1 401 Unauthorized\r\n\r\n", SWITCHING)


@contextlib.asynccontextmanager
async def serving(answers: list[bytes]) -> AsyncIterator[Callable[[], Awaitable[tuple[str, int]]]]:
    """A server that gives each of these answers once; says where it is."""
    tasks: list[asyncio.Task[None]] = []

    async def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        await read_head(reader)
        writer.write(answers.pop(0))
        with contextlib.suppress(OSError):
            await reader.read()
        writer.close()

    server = await asyncio.start_server(welcome, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    async def locate() -> tuple[str, int]:
        return "127.0.0.1", port

    yield locate
    server.close()
    await asyncio.gather(*tasks)


def test_who_has_had_a_master_bears_with_what_stands_in_its_place(tmp_path: Path) -> None:
    """A proxy whose master restarts answers 503, another job's master 401."""

    async def story() -> list[bytes]:
        answers = list(ANSWERS)
        async with serving(answers) as locate:
            link = make_link(tmp_path, locate)
            link.core.on_directive(Directive(seq=1, generation=1))
            assert await link.connect(asyncio.get_running_loop().create_future()) is not None
            assert link._opened is not None
            link._opened.close()
        return answers

    assert asyncio.run(story()) == []


@pytest.mark.parametrize(("answer", "error"), [(ANSWERS[0], WireError), (ANSWERS[1], AccessDenied)])
def test_who_has_had_none_is_told_at_once(tmp_path: Path, answer: bytes, error: type[Exception]) -> None:
    async def story() -> None:
        async with serving([answer]) as locate:
            with pytest.raises(error):
                await make_link(tmp_path, locate).connect(asyncio.get_running_loop().create_future())

    asyncio.run(story())


def test_it_does_not_bear_with_that_for_longer_than_the_timeout(tmp_path: Path) -> None:
    clock = HandClock()

    async def story() -> None:
        async with serving([ANSWERS[1]]) as locate:
            link = make_link(tmp_path, locate, clock=clock)
            link.core.on_directive(Directive(seq=1, generation=1))
            clock.at += LONG_S + 1.0
            with pytest.raises(MasterUnreachable, match=r"refuses the job token.* for 600 s"):
                await link.connect(asyncio.get_running_loop().create_future())

    asyncio.run(story())


def test_after_the_training_no_master_is_missed(tmp_path: Path) -> None:
    """The scripts may go on for longer than it stays, and than anybody would look for it."""

    async def story(loop: AgileLoop) -> tuple[float, int]:
        async def locate() -> tuple[str, int]:
            raise MasterUnreachable("nobody knows of a master")

        link = make_link(tmp_path, locate, clock=loop)
        beats: list[float] = []
        link.on_beat = lambda: beats.append(loop.now())
        link.core.on_directive(Directive(seq=1, generation=1, run=(SPEC,)))
        link.core.on_directive(Directive(seq=2, generation=1, run=(SPEC,), outcome=Outcome(True, 0, "done")))
        done: asyncio.Future[Outcome | None] = loop.create_future()
        loop.call_later(2 * LONG_S, done.set_result, link.core.directive.outcome)
        began = loop.now()
        assert await link.connect(done) is None
        return loop.now() - began, len(beats)

    waited_s, beats = jump(story)
    assert waited_s == pytest.approx(2 * LONG_S, abs=1.0)
    assert beats > 100


def test_a_beat_that_fails_is_not_silent(tmp_path: Path) -> None:
    async def story(loop: AgileLoop) -> None:
        def fail() -> None:
            raise LookupError("what nobody has thought of")

        async with serving([SWITCHING]) as locate:
            link = make_link(tmp_path, locate)
            reader = await link.connect(loop.create_future())
            assert reader is not None
            link.on_beat = fail
            with pytest.raises(LookupError, match="nobody has thought of"):
                await link.session(reader, loop.create_future())

    jump(story)
