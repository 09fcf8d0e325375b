"""The policy's decision for a cluster as if its hosts had lanes and all its jobs took part (pure)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import msgspec

from cadenza.policies.core.actions import Migrate, Place, Resume, Yield
from cadenza.policies.core.decision import Memory
from cadenza.policies.core.model import ClusterSnapshot, Gpu, Host, Job, JobKey, Lease, Node, Options, Share
from cadenza.slurm_plugin.cli.watch.queue_answer import QueueJob
from cadenza.slurm_plugin.cli.whatif.cluster_nodes import LiveHosts, with_lanes
from cadenza.slurm_plugin.service.observe.enrichment import with_progress
from cadenza.slurm_plugin.service.settings import GuardTable, ServiceTable, Settings, policy

HIDDEN_IDS = 2**62
"""Ids from which the jobs are numbered that stand for GPUs of jobs that this user may not see."""


def shipped_settings(nodes: Sequence[Node]) -> Settings:
    """Return the settings as they ship, with the service acting on all partitions of the nodes."""
    partitions = frozenset(name for node in nodes for name in node.partitions)
    return Settings(service=ServiceTable(mode="apply"), guard=GuardTable(partitions=partitions))


def hidden_gpus(jobs: Sequence[QueueJob], hosts: LiveHosts) -> dict[str, int]:
    """Return the GPUs of each host that Slurm has given to jobs which this user may not see."""
    shown: Counter[str] = Counter()
    for job in jobs:
        for name, gpus in job.placement if job.state is not None else ():
            shown[hosts.host_of.get(name, "")] += gpus
    return {node.host: node.gpus_used - shown[node.host] for node in hosts.nodes if node.gpus_used > shown[node.host]}


def with_virtual_lanes(
    jobs: Sequence[QueueJob], hosts: LiveHosts, hidden: Mapping[str, int], now_s: float, lanes: int = 2
) -> ClusterSnapshot:
    """Return the cluster as the service would see it, had all jobs opted in.

    Jobs that run have their GPUs by a lease, and those that wait for GPUs are held for the service.
    """
    nodes = tuple(
        replace(node, gpus_used=0, memory_used_mb=0) if node.lane else node for node in with_lanes(hosts.nodes, lanes)
    )
    by_host = {node.host: node for node in hosts.nodes}
    given: Counter[str] = Counter()
    found = []
    for job in sorted(jobs, key=lambda job: job.record.job):
        places = [(hosts.host_of[name], gpus) for name, gpus in job.placement if name in hosts.host_of]
        names = [(host, min(gpus, by_host[host].gpus)) for host, gpus in places]
        if job.waits or (job.state == "RUNNING" and job.record.gpus and names):
            found.append(_job(job, names, given, now_s))
    for at, (host, gpus) in enumerate(sorted(hidden.items())):
        lease = _lease(((host, gpus),), given, 0.0)
        found.append(
            Job(
                JobKey(HIDDEN_IDS + at, 0), "", "", by_host[host].partitions[0], "", "RUNNING", gpus, 0, 0, 1, 0.0,
                start_s=0.0, nodes=(host,), lease=replace(lease, exclusive=True), placement=(Share(host, gpus, 0, 0),),
            )
        )  # fmt: skip
    machines = tuple(
        Host(node.host, agent_alive=True, memory_mb=node.memory_mb, memory_free_mb=node.memory_mb - node.memory_used_mb)
        for node in hosts.nodes
    )
    return with_progress(ClusterSnapshot(now_s, nodes, tuple(found), machines), None)


def _job(job: QueueJob, names: Sequence[tuple[str, int]], given: Counter[str], now_s: float) -> Job:
    record, count = job.record, max(len(names), 1)
    held_s = max(now_s - record.start_s, 0.0) if record.start_s is not None else 0.0
    memory_mb = round(record.memory_mb or 0)
    base = Job(
        JobKey(record.job, 0), record.user, "", record.partition, "", "PENDING", record.gpus, record.cpus, memory_mb,
        job.num_nodes, record.submit_s, state_reason=job.reason, time_limit_s=record.limit_s, options=Options(),
        slurm_priority=1,
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
    return Lease("held", tuple(gpus), held_s, held_s, ready=True)


class Step(msgspec.Struct, frozen=True):
    """One action of the policy on a job, with its reason."""

    job: int
    action: str
    reason: str


def steps(snapshot: ClusterSnapshot, settings: Settings, *, movable: bool) -> Iterator[Step]:
    """Yield the starts, turns and moves that a service which starts now would decide first; none is carried out.

    ``movable``: all jobs keep checkpoints; else none does.
    """
    if movable:
        snapshot = replace(snapshot, jobs=tuple(map(_with_checkpoints, snapshot.jobs)))
    for action in policy(settings)(snapshot, Memory()).actions:
        if isinstance(action, Place):
            yield Step(action.job.id, f"start on {', '.join(action.nodes)}", action.reason)
        elif isinstance(action, Yield):
            yield Step(action.job.id, "yield its GPUs", action.reason)
        elif isinstance(action, Resume):
            yield Step(action.job.id, "take its turn", action.reason)
        elif isinstance(action, Migrate):
            yield Step(action.job.id, f"move to {', '.join(share.node for share in action.shares)}", action.reason)


def _with_checkpoints(job: Job) -> Job:
    if job.options is None:
        return job
    lease = replace(job.lease, checkpoints=True, saves_away=True) if job.lease is not None else None
    return replace(job, options=replace(job.options, checkpoints=True), lease=lease)


def who_could_share(snapshot: ClusterSnapshot, *, between_users: bool) -> dict[int, tuple[int, ...]]:
    """Return the waiting jobs that could take turns now, each with the running jobs that it would share GPUs with.

    It needs as many hosts of its partition as it asked for nodes, each with enough GPUs in all and enough memory left,
    and, unless users share with each other, no job of another user there.
    """
    residents: defaultdict[str, list[Job]] = defaultdict(list)
    for job in snapshot.jobs:
        for name in job.nodes:
            residents[name].append(job)
    hosts = [node for node in snapshot.nodes if node.takes_jobs and residents[node.name]]
    found = {}
    for job in snapshot.jobs:
        if job.state != "PENDING":
            continue
        nodes, names = max(job.num_nodes, 1), set(job.partition.split(","))
        fits = [
            residents[node.name]
            for node in hosts
            if node.gpus * nodes >= job.gpus
            and names & set(node.partitions)
            and (node.memory_mb - node.memory_used_mb) * nodes >= job.memory_mb
            and all(other.opted_in and (between_users or other.user == job.user) for other in residents[node.name])
        ]
        if len(fits) >= nodes:
            chosen = sorted(fits, key=len)[:nodes]
            found[job.key.id] = tuple(sorted({other.key.id for here in chosen for other in here}))
    return found
