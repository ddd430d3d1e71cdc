"""`stoker.barrier` and `stoker.sync`: workers that wait for each other by name, without a collective."""

from __future__ import annotations

import msgspec

from stoker.errors import ConfigError
from stoker.train.member_link import WorldChanged
from stoker.train.runtime import Runtime, runtime
from stoker.wire.meeting import NAME_CHARS_MAX, Arrive, decode_met


def barrier(name: str) -> None:
    """Wait until every worker of the world has come to the barrier of this name.

    For use inside the `@stoker.elastic` function. It passes through the master, so it needs no collective and no
    device. When the world changes meanwhile, it ends as a step does: the function is called again. A barrier may be
    used any number of times; all workers have to come equally often.

    Raises ConfigError outside the function or for a name that is empty or too long, JobError when the master refuses,
    MasterUnreachable when this worker's agent is gone.
    """
    owner = runtime()
    if not _has_master(owner, "barrier", name):
        return
    if owner.core.phase not in ("member", "finished"):
        raise ConfigError(
            "stoker.barrier is for use inside the @stoker.elastic function: there is no world yet"
        )
    generation = owner.session.generation
    turn = owner.next_turn(name)
    met = decode_met(owner.call("meeting", msgspec.msgpack.encode(Arrive("barrier", name, generation, turn))))
    if not met.all_there:
        raise WorldChanged


def sync(name: str) -> bool:
    """Say that this worker has come to the point of this name; whether by now every worker of the world has.

    Returns at once. A point is passed once in a job: workers that join later have to come there, too. Before there is
    a world all workers of the job are meant.

    Raises ConfigError for a name that is empty or too long and after the `@stoker.elastic` function, JobError when the
    master refuses, MasterUnreachable when this worker's agent is gone.
    """
    owner = runtime()
    if not _has_master(owner, "sync", name):
        return True
    return decode_met(owner.call("meeting", msgspec.msgpack.encode(Arrive("sync", name)))).all_there


def _has_master(owner: Runtime, function: str, name: str) -> bool:
    """Whether there is anybody to wait for; False in a script that runs alone. Raises ConfigError."""
    if not isinstance(name, str) or not 0 < len(name) <= NAME_CHARS_MAX:
        raise ConfigError(
            f"stoker.{function} takes a name of 1 to {NAME_CHARS_MAX} characters, not {name!r:.60}"
        )
    if owner.channel is None and owner.settings.agent_socket is not None:
        raise ConfigError(
            f"call stoker.init() before stoker.{function}: this process is not connected to its agent yet"
        )
    return owner.channel is not None
