"""Unmanaged jobs that queue for lane 0, and the jobs on further lanes that must not prolong their wait (pure).

Unmanaged jobs start on lane 0 only. A job that came after one of those and started on a further lane would prolong the
jobs of lane 0, and so the wait of a job that never agreed to it: it only gets GPUs that no other job wants. Whoever
submits a job that waits could so take the turns of many others. It therefore counts only while

- it is the first in Slurm's own order (reason ``Resources``; job_reasons(5)) and would fit on lane 0 if no job shared,
- it has waited for less than ``MAX_WAIT_S``, and
- it stands against jobs of the same user, or its user has less than an equal part of the partition's GPUs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from cadenza.policies.core.amounts import Amount
from cadenza.policies.core.model import ClusterSnapshot, Job, JobKey, Node
from cadenza.policies.sharing.board.node_room import lane0, left_beside
from cadenza.policies.sharing.state.settings import SharingSettings

MAX_WAIT_S = 86400.0
UNDECIDED_S = 60.0
"""Time that Slurm may take until it gives a new job a reason: its scheduler's default interval (sched_interval)."""


class Lane0Queue:
    """The unmanaged jobs that count, of one snapshot."""

    def __init__(self, snapshot: ClusterSnapshot, settings: SharingSettings) -> None:
        waiting = [job for job in snapshot.jobs if _is_next(job, snapshot.time_s) and not settings.manages(job)]
        nodes = [node for node in snapshot.nodes if node.lane == 0]
        unmanaged = (job for job in snapshot.jobs if waiting and not settings.manages(job))
        free = left_beside(unmanaged, lane0(nodes))
        counted: defaultdict[str, list[Job]] = defaultdict(list)
        fits: dict[tuple[str, int, int], bool] = {}
        for job in waiting:
            alike = job.partition, job.gpus, job.num_nodes
            if alike not in fits:
                fits[alike] = _fits(job, nodes, free)
            if fits[alike]:
                counted[job.partition].append(job)
        self._first: dict[str, tuple[float, JobKey]] = {}
        """Age of the first job of a partition that counts against the jobs of all users."""
        self._first_of_user: dict[tuple[str, str], tuple[float, JobKey]] = {}
        for partition, jobs in counted.items():
            within = _users_within_their_part(snapshot.jobs, partition, nodes)
            ages = [_age(job) for job in jobs if job.user in within]
            if ages:
                self._first[partition] = min(ages)
            for user in {job.user for job in jobs}:
                self._first_of_user[partition, user] = min(_age(job) for job in jobs if job.user == user)

    def is_before(self, job: Job) -> bool:
        """Return whether an unmanaged job that counts queues for lane 0 since before this job was submitted."""
        firsts = (self._first.get(job.partition), self._first_of_user.get((job.partition, job.user)))
        return any(first is not None and first < _age(job) for first in firsts)


def _age(job: Job) -> tuple[float, JobKey]:
    """Return the order of submission: Slurm's times are whole seconds, its ids tell jobs of one second apart."""
    return job.submit_s, job.key


def _is_next(job: Job, now_s: float) -> bool:
    """Return whether Slurm only lacks free resources to start a job, or has not decided about a new one."""
    if job.state != "PENDING" or job.held or job.gpus <= 0:
        return False
    limits_s = {"Resources": MAX_WAIT_S, "": UNDECIDED_S, "None": UNDECIDED_S}
    # Before its begin time, or behind a dependency, a job waits for no GPUs, however early it was submitted.
    since_s = job.submit_s if job.eligible_s is None else max(job.submit_s, job.eligible_s)
    return now_s - since_s < limits_s.get(job.state_reason, 0.0)


def _fits(job: Job, nodes: Iterable[Node], free: Mapping[str, Amount]) -> bool:
    count = max(job.num_nodes, 1)
    gpus, *_ = job.part(count)
    here = (free[node.name][0] for node in nodes if node.name in free and job.partition in node.partitions)
    return sum(left >= gpus for left in here) >= count


def _users_within_their_part(jobs: Iterable[Job], partition: str, nodes: Iterable[Node]) -> frozenset[str]:
    """Return the users that have less than an equal part of a partition's GPUs; those with jobs there count."""
    had: defaultdict[str, int] = defaultdict(int)
    for job in jobs:
        if job.partition == partition and job.state != "OTHER":
            had[job.user] += job.gpus if job.state == "RUNNING" else 0
    part = sum(node.gpus for node in nodes if partition in node.partitions) / max(len(had), 1)
    return frozenset(user for user, gpus in had.items() if gpus < part)
