"""Carries out a node check: the check program with the environment of a worker, once for each of the node's devices."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from stoker.agent.accelerators import AUTO, Machine, may_have_devices
from stoker.agent.environment import check_environment
from stoker.agent.link import AgentConfig
from stoker.agent.programs import run_program
from stoker.wire.health import CheckResult, CheckTask

PROGRAM = (sys.executable, "-m", "stoker.train.node_check")
PROGRAM_GRACE_S = 5.0
"""Seconds that the check program may take beyond its own timeout to end."""
STAGES = ("start", "matmul", "meet", "allreduce", "done")


class Place(NamedTuple):
    """What one process of the check stands for."""

    slot: int
    local_rank: int
    """Which of the devices that it sees it is to try."""
    environment: Mapping[str, str]


class NodeChecker:
    """Checks this node. The first place's process is in the group of nodes, those of the others try their device."""

    def __init__(
        self,
        places: Sequence[Place],
        *,
        device: str = "",
        program: Sequence[str] = PROGRAM,
    ) -> None:
        """`device`: its kind; empty: what there is."""
        self.places = places
        self._device = device
        self._program = program

    async def check(self, task: CheckTask) -> CheckResult:
        """What the programs found, as one result. Failures are results."""
        results = await asyncio.gather(*(self._try(place, task) for place in self.places))
        return combine([(place.slot, result) for place, result in zip(self.places, results, strict=True)])

    async def _try(self, place: Place, task: CheckTask) -> CheckResult:
        in_group = place is self.places[0]
        command = [
            *self._program,
            *("--rank", str(task.rank if in_group else 0)),
            *("--world-size", str(task.world_size if in_group else 1)),
            *(
                "--store",
                task.store,
                "--timeout",
                f"{task.timeout_s:g}",
                "--local-rank",
                str(place.local_rank),
            ),
            *(("--device", self._device) if self._device else ()),
        ]
        try:
            output = await run_program(
                *command, timeout_s=task.timeout_s + PROGRAM_GRACE_S, environment=place.environment
            )
            return msgspec.json.decode(output.stdout.strip().rpartition(b"\n")[2], type=CheckResult)
        except msgspec.MsgspecError:
            said = output.stderr.strip().rpartition("\n")[2]
            why = f"the check program gave no result (exit code {output.code}){': ' if said else ''}{said}"
        except TimeoutError:
            why = f"the check program did not end within {task.timeout_s + PROGRAM_GRACE_S:g} s"
        except OSError as error:
            why = f"the check program failed: {error}"
        return CheckResult(ok=False, why=why, stage="start")


def checker_of(config: AgentConfig) -> NodeChecker:
    """The checker for an agent's node."""
    return NodeChecker(places_of(config, Machine(config.environment)), device=config.device)


def places_of(config: AgentConfig, machine: Machine) -> list[Place]:
    """One for each slot where workers may have devices of their own, else one: there is but one CPU."""
    slots = config.slots if may_have_devices(config.device or AUTO, machine) else 1
    places: list[Place] = []
    for slot in range(max(1, slots)):
        own = (
            config.slot_environments[slot % len(config.slot_environments)] if config.slot_environments else {}
        )
        environment = check_environment(
            config.environment, address=config.address, extra=config.extra, by_slot=own
        )
        if not own:
            places.append(Place(slot, slot, environment))
        elif environment not in [place.environment for place in places]:
            places.append(Place(slot, 0, environment))  # it sees none but its own
    return places


def combine(results: Sequence[tuple[int, CheckResult]]) -> CheckResult:
    """One result for the node, of those of its slots: the failure that came earliest, the times of the slowest."""
    everything = [result for _, result in results]
    worst_slot, worst = min(results, key=lambda one: (one[1].ok, STAGES.index(one[1].stage)))
    return CheckResult(
        ok=worst.ok,
        matmul_s=max(result.matmul_s for result in everything),
        allreduce_s=max(result.allreduce_s for result in everything),
        elapsed_s=max(result.elapsed_s for result in everything),
        why=f"slot {worst_slot}: {worst.why}" if worst.why and len(results) > 1 else worst.why,
        stage=worst.stage,
    )
