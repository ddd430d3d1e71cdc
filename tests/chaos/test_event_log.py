"""What the chaos harness reads from the job's event log."""

from __future__ import annotations

from stoker.wire.control import JobEvent
from tests.chaos.job import EventLog


def told(*events: tuple[str, str, dict[str, object]]) -> EventLog:
    """Event n was told at second n."""
    log = EventLog()
    log.take(JobEvent(n, float(n), kind, why, details) for n, (kind, why, details) in enumerate(events))
    return log


def test_a_host_is_in_the_world_with_the_agent_that_joined() -> None:
    began: list[tuple[str, str, dict[str, object]]] = [
        ("node-joined", "h1 at 10.0.0.1", {"node": "a"}),
        ("node-joined", "h2 at 10.0.0.2", {"node": "b"}),
        ("worker-started", "", {"node": "a", "worker": "w1"}),
        ("worker-started", "", {"node": "b", "worker": "w2"}),
        ("world", "", {"workers": ["w1", "w2"]}),
    ]
    log = told(*began)
    assert log.members == {1: 0.0, 2: 1.0}
    assert [event.host for event in log.events] == [1, 2, 1, 2, 0]
    log = told(*began, ("generation", "", {}))
    assert log.members == {}, "one is being formed"
    again: list[tuple[str, str, dict[str, object]]] = [
        ("node-lost", "", {"node": "a"}),
        ("node-joined", "h1 at 10.0.0.1", {"node": "c"}),
        ("worker-started", "", {"node": "c", "worker": "w3"}),
        ("world", "", {"workers": ["w3", "w2"]}),
    ]
    assert told(*began, *again).members == {1: 6.0, 2: 1.0}
