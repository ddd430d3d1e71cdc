"""The agent's decisions: directives in, starts, stops and orders out."""

from __future__ import annotations

from stoker.agent.core import GiveAnswer, GiveOrder, Leave, NodeCore, PassCall, Spawn, Stop
from stoker.wire.exits import ExitFacts
from stoker.wire.job import (
    Answer,
    Beat,
    Call,
    Directive,
    Member,
    NodeReport,
    Outcome,
    WorkerCall,
    WorkerSpec,
    WorkerState,
    WorldView,
)


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


def test_a_directive_of_an_older_mastership_changes_nothing_however_high_its_number() -> None:
    core = started()
    core.on_directive(Directive(seq=9, generation=2, run=(spec("w0"), spec("w1", 1)), epoch=1))
    assert core.on_directive(Directive(seq=99, generation=3, epoch=0)) == []
    assert (core.directive.epoch, core.directive.generation) == (1, 2)
    taken = core.on_directive(Directive(seq=1, generation=4, run=(spec("w0"), spec("w1", 1)), epoch=2))
    assert {e.order.generation for e in taken if isinstance(e, GiveOrder)} == {4}


def test_who_was_in_a_world_saves_in_its_turn_where_no_master_says_who_does() -> None:
    core = started()
    member = Member("w1", "n", 3, 1, 2, 1, False)
    assert core.turn_to_save() == (None, "it was in no world")
    core.on_directive(Directive(seq=2, generation=1, world=WorldView(1, 4, (member,), 0, 0, "")))
    assert core.turn_to_save() == (1, "there is no master to say who is left")
    core.on_directive(Directive(seq=3, generation=2, run=(spec("w0"), spec("w1", 1))))
    assert core.turn_to_save()[0] == 1, "while another world forms it still has what it took in the last one"
    core.on_directive(Directive(seq=4, generation=2, outcome=Outcome(False, 1, "failed"), saves=True))
    assert core.turn_to_save() == (None, "the master has said who writes")


def test_who_leaves_does_not_save_beside_others() -> None:
    core = started()
    member = Member("w1", "n", 3, 1, 2, 1, False)
    core.on_directive(Directive(seq=2, generation=1, world=WorldView(1, 4, (member,), 0, 0, "")))
    core.leave("SIGTERM")
    assert core.turn_to_save()[0] is None


def test_a_worker_is_started_once_even_if_it_ended_meanwhile() -> None:
    core = started()
    core.on_exit("w1", ExitFacts(code=None, signal=9))
    again = core.on_directive(Directive(seq=2, generation=1, run=(spec("w0"), spec("w1", 1))))
    assert not [e for e in again if isinstance(e, Spawn)]
    assert {w.worker: w.exit is None for w in core.report(0, 1.0).workers} == {"w0": True, "w1": False}
    core.on_directive(Directive(seq=3, generation=2, run=(spec("w0"),)))
    assert [w.worker for w in core.report(0, 1.0).workers] == ["w0"], "its end was seen, so it is forgotten"


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
    assert core.on_exit("w1", ExitFacts(code=None, signal=15)) == []
    assert core.on_exit("w0", ExitFacts(code=0, signal=None)) == [Leave(over)]
    assert core.on_exit("w0", ExitFacts(code=0, signal=None)) == [], "it leaves once"


def test_a_leaving_node_goes_when_its_workers_are_gone() -> None:
    core = started()
    core.leaving = "preempted"
    assert core.report(0, 1.0).leaving == "preempted"
    effects = core.on_directive(Directive(seq=2, generation=2, run=()))
    assert {(e.worker, e.at_once) for e in effects if isinstance(e, Stop)} == {("w0", False), ("w1", False)}
    core.on_exit("w0", ExitFacts(code=None, signal=15))
    assert core.on_exit("w1", ExitFacts(code=None, signal=15)) == [Leave(None)]


def test_giving_up_stops_every_worker() -> None:
    assert {e.worker for e in started().stop_all() if isinstance(e, Stop)} == {"w0", "w1"}


def test_being_asked_to_leave_is_leaving() -> None:
    core = started()
    core.on_directive(Directive(seq=2, generation=1, run=(spec("w0"), spec("w1", 1)), leave="drained"))
    assert core.report(0, 1.0).leaving == "drained"


def test_a_beat_is_short_while_nothing_changes() -> None:
    core = started()
    report = core.report(0, 1.0)
    assert core.beat(0, 2.0) == Beat(core.node, report.seq, 1)
    core.on_state("w0", WorkerState(phase="parked", elastic=True))
    assert isinstance(core.beat(0, 3.0), NodeReport)
    said = [core.beat(0, 3.0) for _ in range(10)]
    assert any(isinstance(s, NodeReport) for s in said), (
        "now and then all of it, should a report have got lost"
    )


def test_a_stopped_worker_is_reported_with_the_time_that_it_stands() -> None:
    core = started()
    core.on_stopped("w1", 10.0)
    core.on_stopped("w1", 12.0)
    assert [w.stopped_s for w in core.report(0, 13.0).workers] == [0.0, 3.0]
    core.on_continued("w1")
    assert [w.stopped_s for w in core.report(0, 14.0).workers] == [0.0, 0.0]


def test_a_stopped_worker_has_no_use_for_the_grace_time() -> None:
    """Continued within it, it could commit in a world that the others have left."""
    core = started()
    core.leaving = "preempted"
    core.on_stopped("w1", 10.0)
    effects = core.on_directive(Directive(seq=2, generation=2))
    assert {(e.worker, e.at_once) for e in effects if isinstance(e, Stop)} == {("w0", False), ("w1", True)}
    assert core.on_stopped("w0", 11.0) == [Stop("w0", at_once=True)], "stopped after its end was asked for"
    assert core.on_stopped("w0", 12.0) == []


def test_after_the_end_nobody_waits_for_a_stopped_worker() -> None:
    core = started()
    core.on_state("w0", WorkerState(phase="finished", elastic=True))
    core.on_state("w1", WorkerState(phase="finished", elastic=True))
    core.on_stopped("w1", 10.0)
    over = Outcome(success=True, exit_code=0, why="done")
    core.on_directive(Directive(seq=2, generation=1, run=(spec("w0"), spec("w1", 1)), outcome=over))
    assert core.on_tick(12.0, 5.0) == []
    assert core.on_tick(16.0, 5.0) == [Stop("w1", at_once=True)]


def test_a_call_is_repeated_until_it_is_answered() -> None:
    core = started()
    call = Call(number=7, service="shards", body=b"x")
    assert core.on_call("w0", call) == [PassCall(WorkerCall("w0", call))]
    assert core.open_calls() == [WorkerCall("w0", call)]
    answer = Answer(number=7, body=b"y")
    assert core.on_answer("w0", answer) == [GiveAnswer("w0", answer)]
    assert core.on_answer("w0", answer) == [], "the same answer once more, after a new stream"
    assert core.open_calls() == []
    core.on_call("w1", call)
    core.on_exit("w1", ExitFacts(code=None, signal=9))
    assert core.open_calls() == [], "who asked is gone"


def test_reports_are_numbered() -> None:
    core = started()
    assert core.report(7, 1.0).seq + 1 == core.report(7, 1.0).seq


def test_a_worker_that_could_not_be_started_has_ended_and_is_not_waited_for() -> None:
    core = NodeCore("n")
    core.on_directive(Directive(seq=1, generation=1, run=(spec("w0"), spec("w1", 1))))
    core.on_spawned("w0", 1)
    assert core.on_not_started("w1", "cannot start it") == []
    said = core.report(0, 1.0)
    assert said.problem == "cannot start it"
    ended = {w.worker: w.exit for w in said.workers}
    assert ended["w0"] is None
    assert ended["w1"] is not None
    assert (ended["w1"].message, ended["w1"].verdict) == ("cannot start it", "not-ready")
    over = Outcome(success=False, exit_code=5, why="cannot start it")
    effects = core.on_directive(Directive(seq=2, generation=1, run=(spec("w0"), spec("w1", 1)), outcome=over))
    assert effects == [Stop("w0", at_once=False)]
    assert core.on_exit("w0", ExitFacts(code=None, signal=15)) == [Leave(over)]


def test_a_problem_is_over_when_a_worker_is_to_be_started_again() -> None:
    core = NodeCore("n")
    core.on_directive(Directive(seq=1, generation=1, run=(spec("w0"),)))
    core.on_not_started("w0", "too many processes")
    core.on_directive(Directive(seq=2, generation=1, run=()))
    assert core.report(0, 1.0).problem == "too many processes", "nothing has been tried since"
    assert core.on_directive(Directive(seq=3, generation=1, run=(spec("w1"),))) == [Spawn(spec("w1"))]
    assert core.report(0, 1.0).problem == ""
