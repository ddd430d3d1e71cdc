"""How many nodes the job should have, from its own speed: recommended, or applied. PURE."""

from __future__ import annotations

from stoker.job.scaling import AutoScaler, Policy
from stoker.job.scaling_advice import Advice
from stoker.job.scaling_model import Measured
from stoker.job.state import JobState

DECIDE_EVERY_S = 5.0


class Growth:
    """Feeds an `AutoScaler` with one job's progress and carries out what it decides."""

    def __init__(self, state: JobState) -> None:
        config = state.config
        self.state = state
        self.scaler = AutoScaler(
            Policy(
                config.auto_scale,
                config.min_nodes,
                config.max_nodes,
                unit=config.node_unit,
                target_efficiency=config.target_efficiency,
            )
        )
        self.advice: Advice | None = None
        self._decided_at = 0.0
        self._is_begun = state.generations.number > 0 or state.target_nodes != config.max_nodes
        """The job has its size: at first the smallest, or what a master before has brought it to."""
        if self._is_begun:
            self.scaler.wanted = state.target_nodes

    @property
    def measured(self) -> tuple[Measured, ...]:
        """How fast the job was with each number of nodes, as far as that is known."""
        return self.scaler.measured()

    def on_progress(self, now: float) -> None:
        """News of commits may have come."""
        state = self.state
        if state.config.auto_scale == "off" or state.phase != "running":
            return
        nodes = state.generations.node_count
        self.scaler.note(
            generation=state.generations.number, nodes=nodes, commits=state.roster.highest_commit, now=now
        )

    def on_tick(self, now: float) -> None:
        """Time has passed: decide now and then."""
        state = self.state
        if state.config.auto_scale == "off" or state.phase == "ended":
            return
        if state.config.auto_scale == "apply" and not self._is_begun:
            self._is_begun = True
            self._change(self.scaler.wanted, "auto-scale begins with the smallest world")
        if state.phase != "running" or now - self._decided_at < DECIDE_EVERY_S:
            return
        self._decided_at = now
        before, nodes = self.advice, state.generations.node_count
        advice = self.scaler.decide(nodes=nodes, available=len(state.roster.usable()), now=now)
        self.advice = advice
        if before is None or (before.kind, before.nodes) != (advice.kind, advice.nodes):
            state.record("scale-advice", advice.why, nodes=advice.nodes, advice=advice.kind)
        if advice.change:
            self._change(advice.nodes, advice.why)

    def _change(self, nodes: int, why: str) -> None:
        state = self.state
        nodes = min(max(nodes, state.config.min_nodes), state.config.max_nodes)
        if nodes != state.target_nodes:
            state.record("scale", f"{state.target_nodes} -> {nodes} nodes: {why}")
            state.target_nodes = nodes
            state.is_news = state.is_roster_news = True
