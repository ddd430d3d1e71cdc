"""`stoker.State`: everything that a commit seals and a newcomer copies."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeVar

import torch

from stoker.data.session import session
from stoker.errors import ConfigError
from stoker.train.checkpoints.checkpointer import Checkpointer
from stoker.train.context import Context
from stoker.train.dtensors import refuse_divided
from stoker.train.exact.mode import ExactMode
from stoker.train.keras_state import refuse_keras_step, weights_of
from stoker.train.packing import normalised, pack
from stoker.train.random_states import random_states, restore_random_states
from stoker.train.runtime import Runtime, runtime
from stoker.train.state_contents import Contents, sort_out
from stoker.train.state_seal import Seal
from stoker.train.step_watch import watch_steps
from stoker.train.tuning_batches import micro_batches
from stoker.train.world_changes import Callback, WorldChanges
from stoker.train.wrappers import Wrappers

Rule = TypeVar("Rule", bound=Callable[[Context], object])


class State:
    """The training state: modules, optimizers, objects with `state_dict()`, random generators, tensors, plain values.

    Every keyword becomes an attribute: `State(model=model, optimizer=opt, epoch=0).epoch`. Plain values may be
    assigned (`state.epoch += 1`) and belong to the next commit.

    `checkpointer`: a `stoker.Checkpointer`, which keeps copies of it in memory and in a storage, and starts from the
    newest. `checkpoint_dir`, `checkpoint_every`: the same as `Checkpointer(checkpoint_dir, every_s=None,
    every_commits=checkpoint_every)`; by default what `stoker run --checkpoint-dir` says. `ddp_options`: keyword
    arguments for torch's DistributedDataParallel. `undo_steps`: keep parameters and optimizers' slots aside at each
    commit, too, so that a step is undone after an optimizer has stepped: for several optimizers with backward passes
    between their steps, and LBFGS. `exact_threads`: for each operation of exact mode (`Loader(virtual_ranks=…)`), on
    every worker alike: bits depend on it.

    Raises ConfigError for anything else than the kinds above, and for `checkpoint_every` below 1.
    """

    def __init__(
        self,
        *,
        checkpoint_dir: str | None = None,
        checkpoint_every: int | None = None,
        checkpointer: Checkpointer | None = None,
        ddp_options: dict[str, Any] | None = None,
        undo_steps: bool = False,
        exact_threads: int = 1,
        **items: Any,
    ) -> None:
        put = super().__setattr__
        for name in items:
            if name.startswith("_") or hasattr(type(self), name):
                raise ConfigError(f"State cannot hold {name!r}: the name is taken")
        contents = sort_out(items)
        put("_contents", contents)
        put("_modules", contents.modules)
        put("_optimizers", contents.optimizers)
        put("_objects", contents.objects)
        put("_values", contents.values)
        put("_ddp_options", dict(ddp_options or {}))
        put("_wrappers", Wrappers(contents.modules))
        put("_runtime", runtime())
        self._runtime.connect()
        put("_stepped", False)
        put("_in_doubt", False)
        put("_rehearses", False)
        put("_seal", Seal(contents, self._runtime.device, undo_steps=undo_steps))
        put("_changes", WorldChanges())
        put("_exact", ExactMode(session(), self._runtime.device, exact_threads, contents))
        watch_steps(self, contents, self._on_optimizer_step)
        self._runtime.steps.checkpoint_to(checkpoint_dir, checkpoint_every, checkpointer)

    _contents: Contents
    _modules: dict[str, torch.nn.Module]
    _optimizers: dict[str, torch.optim.Optimizer]
    _objects: dict[str, Any]
    _values: dict[str, Any]
    _ddp_options: dict[str, Any]
    _wrappers: Wrappers
    _runtime: Runtime
    _stepped: bool
    _in_doubt: bool
    _rehearses: bool
    _seal: Seal
    _changes: WorldChanges
    _exact: ExactMode

    def __getattr__(self, name: str) -> Any:
        for held in self.__dict__.get("_contents", ()):
            if name in held:
                return self._exact.face(held[name])
        raise AttributeError(
            f"State has no {name!r}; it holds {', '.join(self._contents.names()) or 'nothing'}"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        elif name in self._values:
            pack(value, [], f"state.{name}")
            self._values[name] = value
        else:
            raise ConfigError(
                f"state.{name} cannot be assigned: name values when the State is made, State({name}=…); modules "
                "and optimizers are not replaced"
            )

    # -- training ---------------------------------------------------------------------------------------

    @property
    def ddp(self) -> torch.nn.Module:
        """The model in torch's DistributedDataParallel over the current generation's group (exact mode: Stoker's own).

        Gradients are weighted by each rank's share of the global batch, so that every step's gradient is the
        mean over the global batch whatever the shares (the loss being a mean over the local batch).
        """
        if not self._modules:
            raise ConfigError("state.ddp needs a module: State(model=…)")
        module = self._contents.main_module()
        if module is None:
            names = ", ".join(self._modules)
            raise ConfigError(
                f"state.ddp needs one module or one named `model`, not {names}: use state.wrap(module)"
            )
        return self.wrap(module)

    def wrap(self, module: torch.nn.Module) -> torch.nn.Module:
        """`module` in DistributedDataParallel over the current group, made once in a generation; see `ddp`.

        Raises ConfigError for a module of which the State does not hold all parameters.
        """
        if self._exact.is_on:
            return self._exact.wrap(module)
        wrap = functools.partial(self._runtime.worlds.wrap, options=self._ddp_options)
        return self._wrappers.of(module, wrap)

    def micro_batches(self, batch: Any, records: int) -> Iterator[tuple[Any, float]]:
        """The pieces of this rank's share of a global batch, of so many records each, and the weight of each.

            for (x, y), weight in state.micro_batches(batch, 8):
                (loss_fn(state.ddp(x), y) * weight).backward()

        leaves the gradient of the whole share, the loss being a mean over its records; gradients are reduced in the
        last piece only. Pieces are of the same size at every world size; auto-tune may choose a larger one. With a
        `stoker.Sharded`, whose forward passes are collectives, every rank has as many pieces, some of weight 0.

        Raises ConfigError for a batch that cannot be cut, and for a number below 1.
        """
        if records < 1:
            raise ConfigError(f"state.micro_batches takes pieces of at least 1 record, not {records}")
        if self._exact.is_on:
            raise ConfigError(
                "exact mode divides batches by itself: raise virtual_ranks to have smaller pieces"
            )
        tuning = self._runtime.steps.tuning
        if tuning is not None:
            tuning.begin_with(records)
            records = tuning.setting.micro_batch
        main = self._contents.main_module()
        if main is not None:
            self.wrap(main)  # before the first piece, which is not to reduce either
        pieces = 1
        share = session().share
        if share is not None and not self._runtime.steps.sharded.is_empty:
            largest_share = math.ceil(share.batch_records / session().world_size)
            pieces = math.ceil(largest_share / records)
        return micro_batches(batch, records, *self._wrappers.all(), at_least=pieces)

    def commit(self) -> bool:
        """Seal this step: model, optimizer, loader positions, RNG and values together. False: in exact mode there are
        more micro-batches of the global batch to come on this rank, and nothing was done.

        Local: it issues no collective and cannot fail because a peer died (but that auto-tune brings the ranks
        together now and then, and a `stoker.Sharded` each time). The world may change here.
        """
        if self._rehearses:
            raise ConfigError("warm_up must not commit: what it does is undone, and no step of the training")
        if not self._exact.commits_now():
            return False
        self._changes.committed_size = session().world_size
        self._runtime.steps.commit(self)
        return True

    @property
    def commits(self) -> int:
        """Steps committed since the run began."""
        return self._runtime.core.commits

    # -- changes of the world -----------------------------------------------------------------------------

    def restore(self) -> None:
        """Undo what the step under way has done: buffers, gradients, values, random generators, loaders' positions.

        Raises ConfigError where an optimizer has stepped since the last commit and no copy is kept of parameters.
        """
        if not self.stands_at_commit:
            raise ConfigError(
                "state.restore() cannot undo an optimizer's step: no copy of the parameters is kept; look whether the "
                "step is good (its loss or gradients) before optimizer.step(), or have State(undo_steps=True) keep one"
            )
        self._exact.leave()
        self.roll_back()
        self._runtime.steps.sharded.put_back()

    def sync(self, source: int = 0) -> None:
        """Copy all of it from one rank to all others. Every rank of the world has to call this: it is a collective.

        Seldom needed: who joins copies the state before the training function is called. Raises ConfigError for a rank
        that is not in the world.
        """
        self._exact.check_between("state.sync()")
        positions = self._seal.positions
        self._runtime.worlds.share_state(self, source)
        self.seal()
        self._seal.positions = positions  # a batch that was handed out is not committed yet

    def check_host_updates(self) -> None:
        """Leave the step under way here if the world is to change at once; `commit` looks by itself."""
        self._runtime.link.check()

    def register_reset_callbacks(self, callbacks: Iterable[Callback]) -> None:
        """Functions to call, without arguments, in each new world of this process but its first."""
        self._changes.add_reset(callbacks)

    def on_world_change(self, rule: Rule) -> Rule:
        """Call `rule(ctx)` in each new world, the first included, before the training function: for learning rates.

            @state.on_world_change
            def scale(ctx):
                for group in state.optimizer.param_groups:
                    group["lr"] *= ctx.world_size / (ctx.previous_world_size or 1)

        `ctx.previous_world_size` is that of the last commit; what a rule does is undone with a world that ends before
        its first commit. It may change hyperparameters and values, not parameters. Returns the rule.
        """
        self._changes.add_rule(functools.partial(rule, Context(self._runtime, self._changes)))
        return rule

    # -- for the runtime ----------------------------------------------------------------------------------

    @property
    def stands_at_commit(self) -> bool:
        """Whether `roll_back` makes it that of the last commit: no optimizer has stepped since, or that is undone."""
        return not self._in_doubt and (not self._stepped or self._seal.undoes_steps)

    def doubt(self) -> None:
        """Until it is sealed or loaded, it stands at no commit."""
        self._in_doubt = True

    def seal(self) -> None:
        """Put aside what a broken step could have changed."""
        refuse_divided(self._modules)
        self._seal.renew()
        self._stepped = self._in_doubt = False

    def roll_back(self) -> None:
        """Undo what happened since the last commit, parameters excepted unless they are kept; train or eval mode is as
        it was at first."""
        self._seal.put_back(undo_step=self._stepped or self._in_doubt)
        self._stepped = self._stepped and not self._seal.undoes_steps

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Undo what happens within: buffers, gradients, values, RNG, positions, train or eval mode.

        Parameters cannot be put back, for no copy of them is kept: an optimizer's step is refused, and so is any other
        change of them. Raises ConfigError.
        """
        self.seal()
        versions = [(p, p._version) for top in self._modules.values() for p in weights_of(top)]
        self._rehearses = True
        try:
            yield
        finally:
            self._rehearses = False
        if any(parameter._version != version for parameter, version in versions):
            raise ConfigError(
                "warm_up has changed parameters of the model, which is not undone: a forward and backward pass is "
                "enough; leave steps of optimizers and the loading of weights to the training"
            )
        self.roll_back()

    def export(self) -> dict[str, Any]:
        """All of it, as nested plain values and tensors, such as a copy or a checkpoint holds. Raises ConfigError."""
        every = self._contents.export() | {
            "positions": session().positions(),
            "random": random_states(session().rank, self._runtime.device),
            "world": {"size": self._changes.committed_size, "exact": self._exact.export()},
        }
        return {kind: normalised(held, f"state[{kind!r}]") for kind, held in every.items()}

    def export_committed(self) -> dict[str, Any] | None:
        """As `export` was at the last commit: values, objects and how far loaders had come are those that were put
        aside then. None where parameters are not as they were."""
        if self._stepped or self._in_doubt or not self._seal.is_there:
            return None
        every = (
            self._contents.export()
            | self._seal.put_aside()
            | {
                "random": random_states(session().rank, self._runtime.device),
                "world": {"size": self._changes.committed_size, "exact": self._exact.export()},
            }
        )
        return {kind: normalised(held, f"state[{kind!r}]") for kind, held in every.items()}

    def load(self, state: dict[str, Any], but: Collection[str] = ()) -> None:
        """Take over an exported state `but` for such parts, each tensor on the device of its own. The random generators
        stay this rank's own; see `restore_random`. Raises ConfigError when it is another script's."""
        self._runtime.steps.settle()
        self._contents.check_names(state)
        is_peer = self._runtime.core.phase != "starting"
        self._exact.adopt(state.get("world", {}).get("exact", {}), is_peer=is_peer)
        self._contents.load(state)
        if "positions" not in but:
            session().restore(state["positions"])
        world = state.get("world", {})
        self._changes.committed_size = world.get("size", 0)
        self._stepped = self._in_doubt = False

    def restore_random(self, state: dict[str, Any]) -> None:
        """Go on with the random generators of an exported state, if it is of this very rank."""
        restore_random_states(state.get("random"), session().rank, self._runtime.device)

    def stable_tensors(self) -> Iterator[torch.Tensor]:
        """Tensors that only an optimizer's step changes, beside what optimizers keep."""
        return (parameter for module in self._modules.values() for parameter in module.parameters())

    def entered_world(self) -> None:
        """Call what is to be called in each new world."""
        self._exact.enter(self.commits, auto_tune=self._runtime.settings.auto_tune)
        self._changes.entered()

    def forget_group(self) -> None:
        """Drop every wrapper of the group that is going away."""
        self._wrappers.forget()
        self._exact.leave()

    def _on_optimizer_step(self, optimizer: Any) -> None:
        if self._rehearses:
            raise ConfigError(
                "warm_up must not step an optimizer: it would change parameters, which is not undone; leave it out, a "
                "forward and backward pass is enough"
            )
        refuse_keras_step(optimizer, session(), uses_ddp=bool(self._wrappers.all()))
        self._runtime.steps.confirm()
        self._exact.check_optimizer_step()
        self._stepped = True
        self._runtime.steps.settle()
        self._runtime.steps.accumulation.forget()
