"""The flags of `stoker run` that are about hosts, and what follows from them."""

from __future__ import annotations

import argparse
import fnmatch
import os
import shlex
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stoker.base.units import parse_duration_s
from stoker.cli.endpoint import ANY_ADDRESS, Endpoint, Nodes, is_this_machine, outward_address
from stoker.cli.hosts_discovery import HostScript, HostSource, StaticHosts
from stoker.cli.policy import parsed
from stoker.errors import ConfigError
from stoker.job.hosts_events import HostPolicy
from stoker.job.hosts_list import HostList, parse_hosts_flag
from stoker.platform.remote import DEFAULT_REMOTE_SHELL, RemoteShell
from stoker.settings import Timeouts
from stoker.wire.hosts import OptionValue

FORWARDED = (
    "STOKER_*",
    "PYTHON*",
    "PATH",
    "LD_LIBRARY_PATH",
    "NCCL_*",
    "GLOO_*",
    "OMP_*",
    "CUDA_*",
)
"""Variables that agents on other hosts get from the driver."""
OWN = frozenset({"STOKER_JOB_TOKEN", "STOKER_AGENT_SOCKET", "STOKER_WORKER_ID", "STOKER_NODE_ADDRESS"})
"""These belong to one process."""
AT_START = ("LD_LIBRARY_PATH", "PYTHON*")
"""What Python itself needs to come up; the other variables go over standard input, where nobody else sees them."""
ANY_NUMBER = 1024
"""The most hosts, where a script names them and no number is given."""

FAILURES_LIMIT = 10
"""Failures that ban a host for good."""


@dataclass(frozen=True)
class HostOptions:
    """The flags, checked."""

    hosts: HostList | None
    """`--hosts`."""
    script: tuple[str, ...]
    """argv of `--host-discovery-script`; empty with `--hosts`."""
    shell: RemoteShell
    forward: Mapping[str, str]
    """Variables named by `--forward-env`."""
    default_slots: int
    interval_s: float = 1.0
    python: str = sys.executable
    """The Python that has Stoker, on the hosts."""
    backoff_first_s: float = 10.0
    backoff_limit_s: float = 300.0
    failures_limit: int = FAILURES_LIMIT
    reset_limit: int | None = None

    def nodes(self, given: Nodes | None) -> Nodes:
        """How many nodes the job has: as given; else as many as `--hosts` lists, or any number for a script."""
        if given is not None:
            return given
        if self.hosts is not None:
            return Nodes(len(self.hosts.hosts), len(self.hosts.hosts))
        return Nodes(1, ANY_NUMBER)

    def policy(self, nodes: Nodes, timeouts: Timeouts) -> HostPolicy:
        """All waiting times derive from the one timeout. Raises ConfigError."""
        return HostPolicy(
            min_hosts=nodes.minimum,
            max_hosts=nodes.maximum,
            timeout_s=timeouts.user_s,
            start_s=timeouts.user_s / 2,
            rejoin_s=min(30.0, timeouts.user_s / 2),
            leave_grace_s=timeouts.park_s + timeouts.stop_grace_s,
            backoff_first_s=self.backoff_first_s,
            backoff_limit_s=self.backoff_limit_s,
            good_after_s=max(60.0, self.backoff_limit_s / 5),
            failures_limit=self.failures_limit,
            reset_limit=self.reset_limit,
        )

    def source(self, environment: Mapping[str, str], timeouts: Timeouts) -> HostSource:
        """Where the list comes from."""
        if self.hosts is not None:
            return StaticHosts(self.hosts)
        return HostScript(
            self.script,
            environment=environment,
            default_slots=self.default_slots,
            timeout_s=min(30.0, timeouts.user_s / 2),
        )


def add_host_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that make `stoker run` a driver of agents on other hosts."""
    group = parser.add_argument_group("hosts: start the agents from here, through a remote shell")
    group.add_argument("--hosts", metavar="LIST", help="run on these hosts: h1:2,h2:4 (host:slots)")
    group.add_argument(
        "--host-discovery-script",
        metavar="COMMAND",
        help="run on the hosts that this command prints, host[:slots] per line; asked again and again",
    )
    group.add_argument(
        "--discovery-interval", metavar="TIME", default="1s", help="time between two questions (1s)"
    )
    group.add_argument(
        "--remote-shell",
        metavar="TEMPLATE",
        default=DEFAULT_REMOTE_SHELL,
        help=f"how to run a command on {{host}} ({DEFAULT_REMOTE_SHELL.replace('%', '%%')})",
    )
    group.add_argument(
        "--remote-shell-quotes",
        metavar="HOW",
        default="auto",
        help="whether a shell on the way takes the command apart: yes (as with ssh), no, auto (yes for ssh)",
    )
    group.add_argument(
        "--remote-python",
        metavar="PATH",
        default=sys.executable,
        help="the Python with Stoker on the hosts (this one)",
    )
    group.add_argument(
        "--forward-env",
        metavar="NAME[=VALUE]",
        action="append",
        default=[],
        help=f"a variable for the hosts, besides {', '.join(FORWARDED)}; may be repeated",
    )
    group.add_argument(
        "--reset-limit", metavar="N", type=int, default=None, help="fail after N changes of the world (none)"
    )
    group.add_argument(
        "--blacklist-cooldown-range",
        metavar=("SHORTEST", "LONGEST"),
        nargs=2,
        default=["10s", "5m"],
        help="how long a failing host is left out: doubled each time, between these (10s 5m)",
    )
    group.add_argument(
        "--blacklist-limit",
        metavar="N",
        type=int,
        default=None,
        help="failures that ban a host for good (10)",
    )


HOST_FLAGS = frozenset(
    {
        "hosts",
        "host_discovery_script",
        "discovery_interval",
        "remote_shell",
        "remote_shell_quotes",
        "remote_python",
        "forward_env",
        "reset_limit",
        "blacklist_cooldown_range",
        "blacklist_limit",
    }
)


def host_options_of(
    arguments: argparse.Namespace, default_slots: int, environment: Mapping[str, str]
) -> HostOptions | None:
    """What the flags say; None without `--hosts` and `--host-discovery-script`. Raises ConfigError."""
    if arguments.hosts is None and arguments.host_discovery_script is None:
        return None
    if arguments.hosts is not None and arguments.host_discovery_script is not None:
        raise ConfigError("--hosts and --host-discovery-script: give one of them")
    interval_s = parsed("--discovery-interval", parse_duration_s, arguments.discovery_interval)
    first_s, limit_s = (
        parsed("--blacklist-cooldown-range", parse_duration_s, text)
        for text in arguments.blacklist_cooldown_range
    )
    script = tuple(parsed("--host-discovery-script", shlex.split, arguments.host_discovery_script or ""))
    if interval_s <= 0:
        raise ConfigError(f"--discovery-interval {arguments.discovery_interval} must be above 0")
    if arguments.hosts is None and not script:
        raise ConfigError("--host-discovery-script is empty: give a command that prints host:slots lines")
    options = HostOptions(
        hosts=None if arguments.hosts is None else parse_hosts_flag(arguments.hosts, default_slots),
        script=script,
        shell=RemoteShell(arguments.remote_shell, quotes=arguments.remote_shell_quotes),
        forward=forwarded_by_name(arguments.forward_env, environment),
        default_slots=default_slots,
        interval_s=interval_s,
        python=arguments.remote_python,
        backoff_first_s=first_s,
        backoff_limit_s=limit_s,
        failures_limit=FAILURES_LIMIT if arguments.blacklist_limit is None else arguments.blacklist_limit,
        reset_limit=arguments.reset_limit,
    )
    options.policy(Nodes(1, 1), Timeouts())  # wrong limits are said before anything starts
    return options


def forwarded_by_name(flags: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """`--forward-env NAME` and `NAME=VALUE`. Raises ConfigError for a name that is not set here."""
    found = {}
    for flag in flags:
        name, equals, value = flag.partition("=")
        if not name or (not equals and name not in environment):
            raise ConfigError(f"--forward-env {flag!r}: no such variable is set here; give NAME=VALUE")
        found[name] = value if equals else environment[name]
    return found


def forwarded(environment: Mapping[str, str], more: Mapping[str, str]) -> dict[str, str]:
    """The variables that an agent on another host gets. Relative folders of PYTHONPATH are made absolute."""
    chosen = {n: v for n, v in environment.items() if _matches(n, FORWARDED) and n not in OWN} | dict(more)
    if "PYTHONPATH" in chosen:
        folders = chosen["PYTHONPATH"].split(os.pathsep)
        chosen["PYTHONPATH"] = os.pathsep.join(os.path.abspath(folder) for folder in folders)
    return chosen


def agent_command(python: str, variables: Mapping[str, str]) -> list[str]:
    """argv of an agent on a host: no secret is in it, nor anything that Python can do without at its start."""
    first = [f"{name}={value}" for name, value in sorted(variables.items()) if _matches(name, AT_START)]
    return [*(["env", *first] if first else []), python, "-P", "-m", "stoker.cli.agent", "--from-stdin"]


def agent_options(arguments: argparse.Namespace) -> dict[str, OptionValue]:
    """The flags of `stoker run`, without those that are the driver's own."""
    return {n: v for n, v in vars(arguments).items() if n not in HOST_FLAGS and n != "handler"}


def is_local(host: str) -> bool:
    """Whether a listed host is this very machine, by its name or an address of its: no name server is asked."""
    if host in ("localhost", socket.gethostname()):
        return True
    is_address = ":" in host or host.replace(".", "").isdigit()
    return is_address and host not in ANY_ADDRESS and is_this_machine(host)


def meeting_point(given: Endpoint | None, options: HostOptions) -> tuple[Endpoint, Callable[[str], str]]:
    """Where the master listens, and its address as seen from each host: what was given; the loopback if all hosts are
    this machine; else every address, of which each host gets the one on the way to it."""
    if given is not None and given.host not in ANY_ADDRESS:
        return given, lambda _: given.host
    if given is None and options.hosts is not None and all(is_local(h.host) for h in options.hosts.hosts):
        return Endpoint("127.0.0.1", 0), lambda _: "127.0.0.1"
    return given or Endpoint("0.0.0.0", 0), outward_address


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
