"""All that `stoker run`'s flags say, as one value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from stoker.agent.agent import Agent
from stoker.agent.output import StreamChoice
from stoker.cli.endpoint import Endpoint, Nodes
from stoker.job.relaunch import RelaunchConfig
from stoker.job.scaling import Mode
from stoker.job.scaling_advice import DEFAULT_TARGET_EFFICIENCY
from stoker.settings import Timeouts


@dataclass(frozen=True)
class Launch:
    """A whole `stoker run`, as its flags say."""

    command: list[str]
    nodes: Nodes
    slots: int
    endpoint: Endpoint
    timeouts: Timeouts
    accelerator: str = "auto"
    """What workers train on: `auto`, `cpu` or a kind of device."""
    slot_environments: tuple[dict[str, str], ...] = ()
    """More variables for the worker of each slot; empty: none needs any."""
    auto_tune: bool = False
    node_rank: int | None = None
    local_address: str | None = None
    job: str = "none"
    relaunch: RelaunchConfig = field(default_factory=RelaunchConfig)
    check_nodes: bool = False
    exclude_stragglers: bool = False
    hang_after_s: float = 60.0
    auto_scale: Mode = "off"
    target_efficiency: float = DEFAULT_TARGET_EFFICIENCY
    log_dir: str = "stoker-logs"
    tee: StreamChoice = StreamChoice("--tee", "0")
    redirects: StreamChoice = StreamChoice("--redirects", "0")
    token_file: str | None = None
    buckets: dict[str, str] = field(default_factory=dict)
    cache_dir: str | None = None
    cache_capacity_bytes: int | None = None
    cache_endpoint: str | None = None
    no_cache: bool = False
    checkpoint_dir: str | None = None
    checkpoint_every: int = 100
    audit: bool = False
    show: Callable[[int, str, bytes], None] | None = None
    """Where worker lines go; None: to this process's own output, with the rank in front."""
    environment: dict[str, str] = field(default_factory=dict)
    """More variables for the workers."""
    on_start: Callable[[Agent], None] | None = None
    """Called once everything runs."""
    journal: str | None = None
    """Where the master keeps what it must remember; None: in the log folder."""
    drives: bool = False
    """This command has the master and starts the agents on other hosts."""
    node_unit: int = 1
    host: str = ""
    """This node's name; empty: the machine's."""
    verbose: bool = False

    @property
    def journal_is_shared(self) -> bool:
        """Whether a master may come up on any node, which the journal then names."""
        return self.journal is not None and self.journal.startswith("etcd:") and not self.drives
