"""A job's status as Prometheus text (exposition format 0.0.4)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import get_args

from stoker.base.exposition import Labels, Sample, family
from stoker.wire.control import JobPhase, JobStatus, NodeState, WorkerStatus


def prometheus_text(status: JobStatus) -> str:
    """The figures of a job, its nodes and its workers."""
    job = {"job": status.job}
    states = Counter(node.state for node in status.nodes)
    lines = [
        _family("job_generation", "gauge", "Number of the newest generation.", [(job, status.generation)]),
        _family("job_world_size", "gauge", "Workers in the newest world.", [(job, status.world_size)]),
        _family("job_commits", "gauge", "Steps committed since the run began.", [(job, status.commits)]),
        _family(
            "job_steps_per_second", "gauge", "Commits per second, lately.", [(job, status.steps_per_s)]
        ),
        _family(
            "job_restarts_total", "counter", "Workers started in another's place.", [(job, status.restarts)]
        ),
        _family(
            "job_restart_budget_used", "gauge", "Restarts on the job's budget that are not forgiven yet.",
            [(job, status.restarts_used)],
        ),
        _family("job_nodes", "gauge", "Nodes by state.", [
            ({**job, "state": state}, states[state]) for state in get_args(NodeState)
        ]),
        _family("job_nodes_target", "gauge", "Nodes that the job should have.", [(job, status.nodes_target)]),
        _family("job_phase", "gauge", "1 for the phase that the job is in.", [
            ({**job, "phase": phase}, float(status.phase == phase)) for phase in get_args(JobPhase)
        ]),
        _family("job_start_time_seconds", "gauge", "When the job began.", [(job, status.started_wall_s)]),
        _family(
            "master_start_time_seconds", "gauge", "When this master started.", [(job, status.master.started_wall_s)]
        ),
        _family(
            "master_incarnation", "gauge", "Masters that this job had before.", [(job, status.master.incarnation)]
        ),
        *_of_workers(status, job),
    ]  # fmt: skip
    if status.since_commit_s is not None:
        help_text = "Seconds since the last commit."
        lines.append(_family("job_seconds_since_commit", "gauge", help_text, [(job, status.since_commit_s)]))
    return "".join(lines)


def _of_workers(status: JobStatus, job: Labels) -> Iterable[str]:
    workers = [
        ({**job, "node": node.node, "worker": worker.worker, "rank": _rank(worker)}, worker)
        for node in status.nodes
        for worker in node.workers
    ]
    yield _family(
        "worker_commits", "gauge", "Steps that a worker's state stands at.", [(b, w.commits) for b, w in workers]
    )  # fmt: skip
    yield _family(
        "worker_straggler_score", "gauge", "How much slower than the median rank; 1 is as fast.",
        [(labels, w.straggler_score) for labels, w in workers if w.straggler_score is not None],
    )  # fmt: skip
    yield _family(
        "worker_memory_bytes", "gauge", "Resident memory of a worker.",
        [(labels, w.memory_bytes) for labels, w in workers if w.memory_bytes is not None],
    )  # fmt: skip
    yield _family(
        "worker_report", "gauge", "What a script reported last, by name.",
        [
            ({**labels, "name": name}, math.nan if value is None else value)
            for labels, worker in workers
            for name, value in worker.metrics.items()
        ],
    )  # fmt: skip


def _rank(worker: WorkerStatus) -> str:
    return "" if worker.rank is None else str(worker.rank)


def _family(name: str, kind: str, help_text: str, samples: list[Sample]) -> str:
    return family(f"stoker_{name}", kind, help_text, samples)
