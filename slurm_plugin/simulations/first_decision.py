"""The policy's first decision for a cluster as if the service were there and all its jobs took part (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import msgspec

from cadenza.policies.core.actions import MakeWay, Migrate
from cadenza.policies.core.decision import Memory
from cadenza.policies.core.model import (
    ClusterSnapshot,
    Gpu,
    Host,
    Job,
    JobKey,
    Lease,
    Node,
    Options,
    Share,
    SiteRules,
)
from cadenza.policies.guard import GuardOptions
from cadenza.policies.sharing.preemption.standing import checkpoint_name
from cadenza.slurm_plugin.gateway.site_rules import weights_of
from cadenza.slurm_plugin.history.cluster_nodes import Hosts
from cadenza.slurm_plugin.history.queue_answer import QueueJob
from cadenza.slurm_plugin.service.observe.enrichment import with_progress
from cadenza.slurm_plugin.service.settings import ServiceTable, Settings, policy

HIDDEN_IDS = 2**62
"""Ids from which the jobs are numbered that stand for GPUs of jobs that this user may not see."""


def shipped_settings(nodes: Sequence[Node]) -> Settings:
    """Return the settings as they ship, with the service acting on all partitions of the nodes."""
    partitions = frozenset(name for node in nodes for name in node.partitions)
    return Settings(service=ServiceTable(mode="apply"), guard=GuardOptions(partitions=partitions))


def site_of(config: Mapping[str, str]) -> SiteRules:
    """Return the rules of Slurm's configuration that a user may read; tiers, QOS and shares are not among them."""
    multifactor = config.get("PriorityType", "priority/multifactor") == "priority/multifactor"
    return SiteRules(multifactor=multifactor, weights=weights_of(config))


def hidden_gpus(jobs: Sequence[QueueJob], hosts: Hosts) -> dict[str, int]:
    """Return the GPUs of each host that Slurm has given to jobs which this user may not see."""
    shown: Counter[str] = Counter()
    for job in jobs:
        for name, gpus in job.placement if job.state is not None else ():
            shown[hosts.host_of.get(name, "")] += gpus
    return {node.host: node.gpus_used - shown[node.host] for node in hosts.nodes if node.gpus_used > shown[node.host]}


def as_if_managed(
    jobs: Sequence[QueueJob], hosts: Hosts, hidden: Mapping[str, int], now_s: float, site: SiteRules
) -> ClusterSnapshot:
    """Return the cluster as the service would see it, had all jobs opted in and kept checkpoints.

    Jobs that run have their GPUs by a lease; jobs that wait are in Slurm's queue, as they are.
    """
    by_host = {node.host: node for node in hosts.nodes}
    given: Counter[str] = Counter()
    found = []
    for job in sorted(jobs, key=lambda job: job.record.job):
        places = [(hosts.host_of[name], gpus) for name, gpus in job.placement if name in hosts.host_of]
        names = [(host, min(gpus, by_host[host].gpus)) for host, gpus in places]
        if job.waits or (job.state == "RUNNING" and job.record.gpus and names):
            found.append(_job(job, names, given, now_s))
    for at, (host, gpus) in enumerate(sorted(hidden.items())):
        lease, partition = _lease(((host, gpus),), given, 0.0), next(iter(by_host[host].partitions), "")
        found.append(
            Job(
                JobKey(HIDDEN_IDS + at, 0), "", "", partition, "", "RUNNING", gpus, 0, 0, 1, 0.0,
                start_s=0.0, nodes=(host,), lease=replace(lease, exclusive=True), placement=(Share(host, gpus, 0, 0),),
            )
        )  # fmt: skip
    machines = tuple(
        Host(node.host, agent_alive=True, memory_mb=node.memory_mb, memory_free_mb=node.memory_mb - node.memory_used_mb)
        for node in hosts.nodes
    )
    return with_progress(ClusterSnapshot(now_s, hosts.nodes, tuple(found), machines, site), None)


def _job(job: QueueJob, names: Sequence[tuple[str, int]], given: Counter[str], now_s: float) -> Job:
    record, count = job.record, max(len(names), 1)
    held_s = max(now_s - record.start_s, 0.0) if record.start_s is not None else 0.0
    memory_mb = round(record.memory_mb or 0)
    base = Job(
        JobKey(record.job, 0), record.user, record.account, record.partition, record.qos, "PENDING", record.gpus,
        record.cpus, memory_mb, job.num_nodes, record.submit_s, state_reason=job.reason, time_limit_s=record.limit_s,
        options=Options(checkpoints=True), slurm_priority=job.priority, gpu_type=record.gpu_type, barred=job.barred,
    )  # fmt: skip
    if not names:
        return base
    return replace(
        base, state="RUNNING", start_s=record.start_s, run_s=held_s,
        nodes=tuple(name for name, _ in names), lease=_lease(names, given, held_s),
        placement=tuple(Share(name, gpus, record.cpus // count, memory_mb // count) for name, gpus in names),
    )  # fmt: skip


def _lease(names: Sequence[tuple[str, int]], given: Counter[str], held_s: float) -> Lease:
    """Return a lease on the next GPUs of each host."""
    gpus = []
    for name, count in names:
        gpus += [Gpu(name, given[name] + index) for index in range(count)]
        given[name] += count
    return Lease("held", tuple(gpus), held_s, held_s, ready=True, checkpoints=True, saves_away=True)


class Step(msgspec.Struct, frozen=True):
    """One action of the policy on a job that runs, with its reason."""

    job: int
    action: str
    reason: str


def steps(snapshot: ClusterSnapshot, settings: Settings) -> Iterator[Step]:
    """Yield the first decision of a service that starts now; nothing is carried out."""
    known = {checkpoint_name(job): snapshot.time_s for job in snapshot.jobs if job.options is not None}
    for action in policy(settings)(snapshot, Memory(keep_checkpoints=known)).actions:
        if isinstance(action, MakeWay):
            yield from (Step(key.id, "make way", action.reason) for key in action.jobs)
        elif isinstance(action, Migrate):  # without a destination it saves, to make way then
            there = ", ".join(share.node for share in action.shares)
            yield Step(action.job.id, f"move to {there}" if there else "make way", action.reason)
