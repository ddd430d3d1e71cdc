"""A journal in etcd, with a member on each of three hosts, any of which may host the master."""

from __future__ import annotations

import base64
import contextlib
import json
import subprocess
import sys
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.faults import job_over
from tests.e2e.hosts import Host, Hosts, needs_hosts

pytestmark = [pytest.mark.real, needs_hosts, pytest.mark.timeout(400)]
URL = "etcd://10.77.1.1:2379,10.77.1.2:2379,10.77.1.3:2379"
KEY = b"/stoker/jobs/none/master"
ETCD_AWAY_S = 8.0
"""Longer than the master's lease."""


class EtcdOnHosts:
    """One member on each host."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.members: dict[Host, subprocess.Popen[Any]] = {}

    def start(self) -> None:
        cluster = ",".join(f"{host.name}=http://{host.address}:2380" for host in self.hosts)
        for host in self.hosts:
            client, peer = f"http://{host.address}:2379", f"http://{host.address}:2380"
            with (host.folder / "etcd.log").open("ab") as log:
                self.members[host] = host.popen(
                    *("etcd", "--name", host.name, "--data-dir", "etcd-data", "--log-level", "warn"),
                    *("--listen-client-urls", client, "--advertise-client-urls", client),
                    *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                    *("--initial-cluster", cluster),
                    stdout=log,
                    stderr=log,
                )

    def kill(self) -> None:
        for member in self.members.values():
            member.kill()
            member.wait()

    def master(self, host: Host) -> str:
        """The endpoint of the job's master, as this host's member knows it; empty: there is none."""
        asked = json.dumps({"key": base64.b64encode(KEY).decode()})
        with contextlib.closing(HTTPConnection(host.address, 2379, timeout=5)) as connection:
            try:
                host.call(lambda: connection.request("POST", "/v3/kv/range", asked))
                found = json.loads(connection.getresponse().read()).get("kvs", [])
            except OSError:
                return ""
            return base64.b64decode(found[0]["value"]).decode() if found else ""

    def kinds(self, host: Host) -> list[str]:
        """The kinds of all events so far, asked of the master from this host; empty: it does not answer."""
        if not (master := self.master(host)):
            return []
        argv = (sys.executable, "-m", "stoker.cli.main", "job", "events", master, "--json")
        done = host.run(*argv, timeout_s=60)
        return [json.loads(line)["kind"] for line in done.out.splitlines()] if done.code == 0 else []


def test_etcd_is_away_and_then_the_host_of_the_master_is_cut_off(tmp_path: Path) -> None:
    with job_over(tmp_path, 3, "2:3", "--journal", URL, timeout="40s") as job:
        etcd = EtcdOnHosts(job.hosts)
        etcd.start()
        job.start(*job.hosts)
        generation, before = job.wait_for_world(3), job.pids()

        etcd.kill()
        newest = job.commits()
        time.sleep(ETCD_AWAY_S)
        assert job.commits() > newest, "the training goes on without etcd"
        etcd.start()
        job.wait(lambda: etcd.kinds(job.hosts[0]).count("node-back") == 3, "all nodes to come back")
        job.wait_for_steps(60)
        assert job.pids() == before
        assert job.worlds() == [(generation, 3)]

        old_master = etcd.master(job.hosts[0])
        cut_off = next(host for host in job.hosts if old_master.startswith(f"{host.address}:"))
        left = [host for host in job.hosts if host is not cut_off]
        survivors = job.pids(*left)
        told_before = job.wait(lambda: etcd.kinds(left[0]), "what was told so far")
        job.hosts.partition([cut_off], left)
        job.wait(lambda: etcd.master(left[0]) not in ("", old_master), "a new master")
        job.wait_for_world(2)
        assert job.pids(*left) == survivors, "the majority keeps its processes"
        assert job.runs[cut_off].finish().code == 3
        job.wait(lambda: not cut_off.workers(), "end of the workers that were cut off")
        told = job.wait(lambda: etcd.kinds(left[0]), "what is told")[len(told_before) :]
        assert told.count("master-restored") == told.count("world") == 1
        assert told.count("node-lost") == 1
        assert "node-silent" not in told, "the journal says at once where the new master is"
        job.finish(*left)
        etcd.kill()
        job.hosts.assert_nothing_left()
        job.assert_exact(steps_lost=1)
