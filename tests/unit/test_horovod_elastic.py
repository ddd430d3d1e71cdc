"""Horovod's elastic loop and states in a process that is alone."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from stoker.cli.run import horovod_environment
from stoker.compat.horovod.basics import ranks_with_the_state_first
from stoker.compat.horovod.held import on_host
from stoker.wire.job import Member, WorldView

pytestmark = pytest.mark.real
BEGIN = """
import torch
import horovod.torch as hvd
hvd.init()
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1))
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
def step():
    optimizer.zero_grad()
    model(torch.randn(4, 2)).pow(2).sum().backward()
    optimizer.step()
    scheduler.step()
def look():
    return str((model.state_dict(), optimizer.state_dict(), scheduler.state_dict()))
"""


def alone(script: str, *, expected: int = 0, begin: str = BEGIN) -> str:
    """What a script says, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", begin + textwrap.dedent(script)],
        env={"PATH": "", "OMP_NUM_THREADS": "1", **horovod_environment({"PYTHONPATH": ":".join(sys.path)})},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == expected, done.stderr
    return done.stdout + done.stderr


def test_a_failure_brings_back_all_that_was_committed() -> None:
    said = alone("""
        from stoker.train.runtime import runtime

        seen = []
        state = hvd.elastic.TorchState(model, optimizer, scheduler=scheduler, batch=0, names=["a"])
        assert state.model is model and state.optimizer is optimizer
        state.register_reset_callbacks([lambda: seen.append("reset")])

        @hvd.elastic.run
        def train(state, word, *, end):
            seen.append((state.batch, list(state.names)))
            if len(seen) > 1:
                assert look() == committed, "model, optimizer and scheduler as they were"
                assert runtime().core.commits == 1, "what it says that it holds is what was saved, not the checks since"
                return word + end
            step()
            state.batch = 1
            state.commit()
            globals()["committed"] = look()
            step()  # half-way: the optimizer has stepped, and there was no commit
            state.batch = 2
            state.names.append("b")
            state.check_host_updates()
            raise hvd.HorovodInternalError("as if a collective had failed")

        assert train(state, "do", end="ne") == "done"
        assert seen == [(0, ["a"]), "reset", (1, ["a"])], seen
        print("well")
        """)
    assert said == "well\n"


def test_a_script_may_say_itself_that_hosts_have_changed() -> None:
    alone("""
        state = hvd.elastic.ObjectState(calls=0)

        @hvd.elastic.run
        def train(state):
            state.calls += 1
            state.commit()
            if state.calls < 3:
                raise hvd.HostsUpdatedInterrupt(skip_sync=True)
            return state.calls

        assert train(state) == 3
        """)


def test_a_state_of_the_scripts_own() -> None:
    alone("""
        told = []

        class Own(hvd.elastic.State):
            value = saved = 0
            def save(self): self.saved = self.value
            def restore(self): told.append("restore"); self.value = self.saved
            def sync(self): told.append("sync"); self.value = hvd.broadcast_object(self.value)
            def reset(self): told.append("reset")

        @hvd.elastic.run
        def train(state):
            if state.value:
                return state.value
            state.value = 7
            state.commit()
            state.value = 8
            raise hvd.HorovodInternalError

        assert train(Own()) == 7
        assert told == ["sync", "restore", "reset", "sync"], told
        """)


def test_a_state_that_passes_on_horovods_own_arguments() -> None:
    alone("""
        class Own(hvd.elastic.State):
            def __init__(self, value):
                super().__init__(hvd.broadcast_object, hvd.rank)
                self.value = value
            def save(self): pass
            def restore(self): pass
            def sync(self): pass

        assert hvd.elastic.run(lambda state: state.value)(Own(3)) == 3
        """)


def test_what_is_assigned_anew_is_what_a_failure_brings_back() -> None:
    alone("""
        calls = []

        @hvd.elastic.run
        def train(state):
            calls.append(state.model.weight.shape)
            if len(calls) == 1:
                state.model = torch.nn.Linear(3, 3)
                globals()["weight"] = state.model.weight.detach().clone()
                torch.nn.init.zeros_(state.model.weight)
                raise hvd.HorovodInternalError
            assert torch.equal(state.model.weight, weight)

        train(hvd.elastic.TorchState(model=torch.nn.Linear(2, 2)))
        assert calls == [(2, 2), (3, 3)]
        """)


def test_the_scripts_own_errors_are_its_own() -> None:
    text = """
        @hvd.elastic.run
        def train(state):
            raise RuntimeError("this is wrong")

        train(hvd.elastic.TorchState(model=model))
        """
    assert "RuntimeError: this is wrong" in alone(text, expected=1)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("hvd.allreduce(torch.ones(1))\nhvd.elastic.run(lambda state: 0)(hvd.elastic.ObjectState(a=1))",
         "has used a collective before @hvd.elastic.run"),
        ("hvd.elastic.run(lambda state: 0)(3)", "is an hvd.elastic.State, not int"),
        ("run = hvd.elastic.run(lambda state: 0)\nrun(hvd.elastic.ObjectState(a=1))\nrun(hvd.elastic.ObjectState(a=1))",
         "one @hvd.elastic.run function, once"),
        ("hvd.elastic.ObjectState(commit=1)", "cannot hold 'commit'"),
        ("hvd.elastic.TorchState(model=model).model = 3", "is a Sequential, not a int"),
        ("hvd.no_such_thing", "hvd.no_such_thing is not there in Stoker"),
        ("hvd.shutdown()\nhvd.rank()", "call hvd.init() first"),
    ],
)  # fmt: skip
def test_refusals(script: str, words: str) -> None:
    assert words in alone(textwrap.dedent(script), expected=1)


def test_a_static_script_alone() -> None:
    alone("""
        assert (hvd.rank(), hvd.size(), hvd.join()) == (0, 1, 0)
        assert hvd.allreduce(torch.tensor([4.0])).item() == 4.0
        rows, received = hvd.alltoall(torch.arange(3), splits=[3])
        assert rows.tolist() == [0, 1, 2] and received.tolist() == [3]
        assert hvd.allgather(torch.ones(2, 2)).shape == (2, 2)
        step()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        hvd.shutdown()
        hvd.init()
        hvd.barrier()
        """)


# -- the switch --------------------------------------------------------------------------------------------


def test_names_that_scripts_import() -> None:
    alone("""
        import horovod, horovod.torch
        from horovod.torch.elastic import ElasticSampler, TorchState, run
        from horovod.common.exceptions import HorovodInternalError
        from horovod.common.process_sets import ProcessSet
        from horovod.common.util import nccl_built
        from horovod.torch.compression import Compression
        from horovod.torch.elastic.sampler import ElasticSampler as Sampler
        from horovod.torch.elastic.state import ObjectState
        from horovod.torch.functions import broadcast_object
        from horovod.torch.mpi_ops import Average, allreduce_async, rank, size, synchronize
        from horovod.torch.optimizer import DistributedOptimizer
        import horovod.torch.mpi_ops as ops
        assert ops.rank is hvd.rank is hvd.mpi_ops.rank and Sampler is ElasticSampler
        assert tuple(map(int, horovod.__version__.split("."))) >= (0, 28) and not nccl_built()
        try:
            horovod.run(print, np=2)
        except Exception as error:
            assert "stoker run --horovod" in str(error)
        else:
            raise AssertionError
        assert horovod.torch is hvd and hvd.elastic.run is run
        assert hvd.HorovodInternalError is HorovodInternalError
        try:
            import horovod.tensorflow
        except ModuleNotFoundError as error:
            assert error.name == "horovod.tensorflow"
        else:
            raise AssertionError
        """)


def test_install_in_the_script_itself(tmp_path: Path) -> None:
    begin = "import stoker.compat.horovod as compat\ncompat.install()\ncompat.install()\n"
    alone("import horovod.torch as hvd\nhvd.init()", begin=begin)


def test_a_real_horovod_that_was_imported_first(tmp_path: Path) -> None:
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("")
    begin = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport horovod\n"
    said = alone("import stoker.compat.horovod as c\nc.install()", begin=begin, expected=1)
    assert f"another horovod is imported already, from {tmp_path}/horovod/__init__.py" in said


# -- parts -------------------------------------------------------------------------------------------------


def world(source: int, *receivers: int, size: int = 4) -> WorldView:
    members = tuple(Member(f"w{i}", "n", i, i, size, 0, i in receivers) for i in range(size))
    everybody = len(receivers) == size - 1
    return WorldView(2, size, members, source, 7, "", () if everybody else receivers, everybody)


def test_rank_0_has_the_state_and_newcomers_come_last() -> None:
    assert ranks_with_the_state_first(world(0)) == (0, 1, 2, 3)
    assert ranks_with_the_state_first(world(1, 0)) == (1, 2, 3, 0)
    assert ranks_with_the_state_first(world(2, 0, 1, 3)) == (2, 0, 1, 3)
    assert ranks_with_the_state_first(world(0, 1, 3)) == (0, 2, 1, 3)


def test_copies_share_nothing_and_take_no_new_memory() -> None:
    weight = torch.ones(3)
    held = {"weight": weight, "groups": [{"lr": 0.1, "betas": (1, 2)}], "step": torch.tensor(1.0)}
    first = on_host(held)
    kept = first["weight"]
    weight.fill_(5.0)
    assert kept.tolist() == [1.0] * 3
    second = on_host(held, first)
    assert second["weight"] is kept
    assert kept.tolist() == [5.0] * 3
    assert second["groups"] == held["groups"]
    assert second["groups"][0] is not held["groups"][0]  # type: ignore[index]
    assert on_host({"weight": torch.ones(4)}, second)["weight"].shape == (4,)
