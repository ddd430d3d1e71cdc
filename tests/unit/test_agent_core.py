"""The agent's decisions: directives in, starts, stops and orders out."""

from __future__ import annotations

from stoker.agent.core import GiveOrder, Leave, NodeCore, Spawn, Stop
from stoker.wire.job import Directive, Outcome, WorkerExit, WorkerSpec, WorkerState


def spec(worker: str, slot: int = 0) -> WorkerSpec:
    return WorkerSpec(worker, slot, slot, 2, slot, 2, 0, 1, "127.0.0.1", 1, 0, 0)


def started() -> NodeCore:
    core = NodeCore("n")
    assert core.on_directive(Directive(seq=1, generation=1, run=(spec("w0"), spec("w1", 1)))) == [
        Spawn(spec("w0")),
        Spawn(spec("w1", 1)),
    ]
    for name in ("w0", "w1"):
        core.on_spawned(name, 1)
        core.on_hello(name)
    return core


def test_a_late_or_doubled_directive_changes_nothing() -> None:
    core = started()
    assert core.on_directive(Directive(seq=1, generation=9)) == []
    assert core.on_directive(Directive(seq=0, generation=9)) == []
    assert core.directive.generation == 1


def test_a_worker_is_started_once_even_if_it_ended_meanwhile() -> None:
    core = started()
    core.on_exit("w1", WorkerExit(code=None, signal=9))
    again = core.on_directive(Directive(seq=2, generation=1, run=(spec("w0"), spec("w1", 1))))
    assert not [e for e in again if isinstance(e, Spawn)]
    assert {w.worker: w.exit is None for w in core.report(0).workers} == {"w0": True, "w1": False}
    core.on_directive(Directive(seq=3, generation=2, run=(spec("w0"),)))
    assert [w.worker for w in core.report(0).workers] == ["w0"], "its end was seen, so it is forgotten"


def test_a_worker_that_should_not_run_is_stopped_once() -> None:
    core = started()
    first = core.on_directive(Directive(seq=2, generation=2, run=(spec("w0"),)))
    assert Stop("w1", at_once=True) in first
    second = core.on_directive(Directive(seq=3, generation=3, run=(spec("w0"),)))
    assert not [e for e in second if isinstance(e, Stop)]


def test_orders_go_to_connected_workers_when_they_change() -> None:
    core = started()
    effects = core.on_directive(
        Directive(seq=2, generation=2, stop_at_commit=5, run=(spec("w0"), spec("w1", 1)))
    )
    orders = [e for e in effects if isinstance(e, GiveOrder)]
    assert [o.worker for o in orders] == ["w0", "w1"]
    assert {(o.order.generation, o.order.stop_at_commit) for o in orders} == {(2, 5)}
    assert (
        core.on_directive(Directive(seq=3, generation=2, stop_at_commit=5, run=(spec("w0"), spec("w1", 1))))
        == []
    )


def test_success_releases_the_finished_and_stops_the_others() -> None:
    core = started()
    core.on_state("w0", WorkerState(phase="finished", elastic=True))
    over = Outcome(success=True, exit_code=0, why="done")
    effects = core.on_directive(Directive(seq=2, generation=1, run=(spec("w0"), spec("w1", 1)), outcome=over))
    assert Stop("w1", at_once=False) in effects
    assert Stop("w0", at_once=False) not in effects
    assert any(isinstance(e, GiveOrder) and e.worker == "w0" and e.order.released for e in effects)
    assert core.on_exit("w1", WorkerExit(code=None, signal=15)) == []
    assert core.on_exit("w0", WorkerExit(code=0, signal=None)) == [Leave(over)]
    assert core.on_exit("w0", WorkerExit(code=0, signal=None)) == [], "it leaves once"


def test_a_leaving_node_goes_when_its_workers_are_gone() -> None:
    core = started()
    core.leaving = "preempted"
    assert core.report(0).leaving == "preempted"
    effects = core.on_directive(Directive(seq=2, generation=2, run=()))
    assert {(e.worker, e.at_once) for e in effects if isinstance(e, Stop)} == {("w0", False), ("w1", False)}
    core.on_exit("w0", WorkerExit(code=None, signal=15))
    assert core.on_exit("w1", WorkerExit(code=None, signal=15)) == [Leave(None)]


def test_a_lost_stream_stops_every_worker() -> None:
    assert {e.worker for e in started().on_stream_lost() if isinstance(e, Stop)} == {"w0", "w1"}


def test_reports_are_numbered() -> None:
    core = started()
    assert core.report(7).seq + 1 == core.report(7).seq
