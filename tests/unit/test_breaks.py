"""What a worker says of worlds that break: a peer's death is quiet, what breaks world after world is told once."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
from torch.optim.optimizer import _global_optimizer_pre_hooks

from stoker.data.session import Session
from stoker.settings import worker_settings
from stoker.train import worlds as worlds_module
from stoker.train.breaks import WHY_CHARS, Breaks, in_one_line
from stoker.train.member_link import MemberLink, WorldChanged, world_of_one
from stoker.train.steps import Steps
from stoker.train.worlds import Worlds
from stoker.wire.job import Order
from tests.unit.queued_backend import QueuedGroup, queued_backend, queued_group, world

NCCL = "NCCL error in: ncclInvalidUsage:\n  Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1b000\n"
CLOSED = "[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:{port}"


def closed(port: int) -> RuntimeError:
    return RuntimeError(CLOSED.format(port=port))


def test_the_same_reason_again_is_told_once_at_each_commit() -> None:
    breaks = Breaks()
    told = [breaks.note(closed(port), commits=7).importance for port in (38011, 5, 41000, 41001)]
    assert told == ["quiet", "loud", "known", "known"], "ports are others each time"
    assert breaks.note(dist.DistBackendError(NCCL), commits=7).importance == "quiet", "another reason"
    assert breaks.note(closed(1), commits=8).importance == "quiet", "a step lies between"
    assert breaks.note(closed(1), commits=8).importance == "loud"


def test_a_reason_is_one_line_and_names_what_the_script_has_wrapped() -> None:
    inner = dist.DistBackendError(NCCL)
    told = "DistBackendError: NCCL error in: ncclInvalidUsage: Duplicate GPU detected : rank 0 and rank 1 both on CUDA "
    assert in_one_line(inner) == f"{told}device 1b000"
    outer = LookupError("step 20 failed")
    outer.__cause__ = inner
    assert in_one_line(outer) == f"LookupError: step 20 failed, from {told}device 1b000"
    assert len(in_one_line(RuntimeError("x" * 2000))) == WHY_CHARS


def make_worlds() -> Worlds:
    live = Session()
    link = MemberLink("w0", live)
    return Worlds(worker_settings(), live, link, Steps(worker_settings(), live, link), torch.device("cpu"))


def test_a_worker_warns_of_what_breaks_its_worlds_again_and_again(caplog: pytest.LogCaptureFixture) -> None:
    worlds = make_worlds()
    caplog.set_level(logging.INFO, "stoker.train")
    worlds.note_broken(WorldChanged(), 1)
    for generation in range(2, 6):
        worlds.note_broken(dist.DistBackendError(NCCL), generation)
    told = [(record.levelname, record.getMessage().partition(" NCCL")[0]) for record in caplog.records]
    assert told == [
        ("INFO", "generation 2 broke at commit 0: DistBackendError:"),
        (
            "WARNING",
            "generation 3 broke at commit 0 as others did before, with no step between: DistBackendError:",
        ),
    ]


@pytest.mark.parametrize(
    ("error", "stop_at_commit", "aborts"),
    [
        (dist.DistBackendError(NCCL), -1, True),
        (dist.DistBackendError(NCCL), 7, True),
        (WorldChanged(), -1, True),
        (WorldChanged(), 7, False),
    ],
)
def test_a_group_that_can_abort_is_shut_down_only_where_all_that_was_queued_has_ended(
    error: BaseException, stop_at_commit: int, aborts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a commit that was agreed on."""
    with queued_backend():
        group = queued_group()
        monkeypatch.setattr(worlds_module, "ProcessGroup", lambda *_, **__: group)
        worlds = make_worlds()
        worlds._open_group().open(world(2, group.endpoint), 0)
        core = worlds._link.core
        core.enter(world_of_one("w0", 7))
        core.on_order(Order(generation=2, stop_at_commit=stop_at_commit))
        worlds.note_broken(error, 1)
        assert group.is_broken == aborts
        group.break_off()
        assert QueuedGroup.every[0].aborted.wait(20)
        group.close()
    _global_optimizer_pre_hooks.clear()
