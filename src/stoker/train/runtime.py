"""One worker's runtime: its settings, its device, and the parts that speak, enter worlds and commit."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path

import torch

from stoker.data.session import Session, session
from stoker.errors import ConfigError
from stoker.settings import WorkerSettings, survive_nccl_errors, worker_settings
from stoker.train.accelerator import choose_device
from stoker.train.channel import AgentChannel
from stoker.train.collector import set_aside_from_collector
from stoker.train.member import MemberCore
from stoker.train.member_link import MemberLink
from stoker.train.shards_session import ServiceCaller, shard_session
from stoker.train.stack_signal import prepare_to_be_looked_at
from stoker.train.steps import Steps
from stoker.train.worlds import Worlds


class Runtime:
    """Puts the parts together and connects them to the agent.

    `link` speaks with the agent, `steps` commits, `worlds` enters and leaves.
    """

    worlds: Worlds
    """From `connect` on."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.session: Session = session()
        self.session.rank, self.session.world_size = settings.rank, settings.world_size
        self.link = MemberLink(settings.worker, self.session)
        self.steps = Steps(settings, self.session, self.link)
        self.session.check = self.link.check
        self.session.on_batch = self.steps.note_batch
        self._connected = False
        self._turns: dict[str, int] = {}
        self._turns_of = 0

    def connect(self) -> None:
        """Say hello to the agent, if there is one, and take the device.

        Raises ConfigError, EnvironmentProblem when there is no such device.
        """
        if self._connected:
            return
        self._connected = True
        if self.settings.agent_socket is None:
            self._go_alone()
        else:
            self._go_with_agent(self.settings.agent_socket)
        # Not before: now the agent can be told if there is no such device.
        self.worlds = Worlds(self.settings, self.session, self.link, self.steps, self.device)

    @functools.cached_property
    def device(self) -> torch.device:
        """What this worker trains on."""
        return choose_device(self.settings.accelerator, self.settings.local_rank)

    @property
    def channel(self) -> AgentChannel | None:
        """To the agent; None: the script runs alone."""
        return self.link.channel

    @property
    def core(self) -> MemberCore:
        """What this worker is."""
        return self.link.core

    # -- services -----------------------------------------------------------------------------------------

    def report(self, metrics: dict[str, float]) -> None:
        """Take over figures of the script, to be said with the next words."""
        self.link.report(metrics)

    def call(self, service: str, body: bytes) -> bytes:
        """Ask a service of the master's. Raises WorldChanged where the world ends meanwhile, JobError,
        MasterUnreachable."""
        return self.link.call(service, body)

    def next_turn(self, barrier: str) -> int:
        """How often this worker has been at a barrier in the present world."""
        generation = self.session.generation
        if self._turns_of != generation:
            self._turns_of = generation
            self._turns.clear()
        turn = self._turns[barrier] = self._turns.get(barrier, -1) + 1
        return turn

    # -- start --------------------------------------------------------------------------------------------

    def _go_alone(self) -> None:
        if self.settings.world_size > 1:
            raise ConfigError(
                f"WORLD_SIZE={self.settings.world_size} is set, but no agent of Stoker has started this process: "
                "start the script with `stoker run` in place of torchrun, or unset it to run it alone"
            )
        self.session.rank, self.session.world_size = 0, 1

    def _go_with_agent(self, socket_path: str) -> None:
        # For the first optimizer PyTorch imports as much again, of which a fifth would go into collections.
        set_aside_from_collector()
        survive_nccl_errors()
        if self.settings.stack_file is not None:
            with contextlib.suppress(OSError):
                prepare_to_be_looked_at(Path(self.settings.stack_file))
        calls = shard_session()
        link = self.link
        calls.caller = ServiceCaller(link.call, link.lease, link.call_through, link.lease_ahead)
        calls.waiting = link.waiting
        calls.is_interrupted = self.link.is_interrupted
        self.link.connect(self.settings, socket_path)


@functools.cache
def runtime() -> Runtime:
    """The process's one runtime: a process is one worker."""
    return Runtime(worker_settings())
