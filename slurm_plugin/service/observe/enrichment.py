"""Profiles, placements and progress added to a snapshot of Slurm and the agents (pure)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from cadenza.policies.core.model import ClusterSnapshot, Job, JobKey, Node, Placement, Share, changed
from cadenza.policies.supervision import each
from cadenza.sidecar.orders import LeaseReport
from cadenza.slurm_plugin.service.observe.progress import progress
from cadenza.slurm_plugin.service.profiles.library import Library
from cadenza.slurm_plugin.service.profiles.refiner import Refiner


def tunes_in_force(
    ordered: Mapping[JobKey, Placement], parts: Mapping[JobKey, Mapping[str, LeaseReport]]
) -> dict[JobKey, Placement]:
    """Return the ordered tunes of jobs that agents report as tuned, even if an agent could set only a part."""
    tuned = {key for key, hosts in parts.items() if any(lease.tuned is not None for lease in hosts.values())}
    return {key: placement for key, placement in ordered.items() if key in tuned}


def with_profiles(
    snapshot: ClusterSnapshot,
    library: Library,
    tunes: Mapping[JobKey, Placement],
    gpu_memory_gb: Mapping[str, float],
    refiner: Refiner | None = None,
) -> ClusterSnapshot:
    """Return a snapshot with GPU memory, and with placement and profile of the jobs that opted in.

    ``tunes``: those in force; ``gpu_memory_gb``: by GPU type, "" for the types that are not named; ``refiner``:
    corrects the profiles by observations of running jobs.
    """
    default = gpu_memory_gb.get("")
    nodes = tuple(
        replace(node, gpu_memory_gb=size)
        if node.gpus and (size := gpu_memory_gb.get(node.gpu_type, default)) != node.gpu_memory_gb
        else node
        for node in snapshot.nodes
    )
    by_name = {node.name: node for node in nodes}
    every_type = frozenset(node.gpu_type for node in nodes)
    types_in: defaultdict[str, set[str]] = defaultdict(set)
    for node in nodes:
        for partition in node.partitions if node.gpus else ():
            types_in[partition].add(node.gpu_type)

    def profiled(job: Job) -> Job:
        if job.options is None or not job.gpus:
            return job
        placement = placement_of(job, by_name, tunes.get(job.key, ()))
        placed = changed(job, placement=placement) if placement != job.placement else job
        names = job.nodes or job.required_nodes
        given = {by_name[name].gpu_type for name in names if name in by_name}
        choice = library.choose(job, given if names else types_in.get(job.partition, ()), every_type)
        if refiner is not None:
            node = by_name.get(job.nodes[0]) if job.nodes else None
            choice = refiner.refine(placed, choice, node, file=choice.profile is None and library.has(job))
        if choice.profile is None and not choice.note:
            return placed
        return changed(placed, profile=choice.profile, profile_note=choice.note)

    return replace(snapshot, nodes=nodes, jobs=each(snapshot.jobs, profiled))


def with_progress(snapshot: ClusterSnapshot, before: ClusterSnapshot | None) -> ClusterSnapshot:
    """Return a snapshot with the progress of the jobs that opted in; ``before``: the last round's snapshot."""
    earlier = {job.key.id: job for job in before.jobs} if before is not None else {}
    types = {node.name: node.gpu_type for node in snapshot.nodes}

    def progressed(job: Job) -> Job:
        if job.options is None or not job.gpus:
            return job
        return changed(job, progress=progress(job, earlier.get(job.key.id), snapshot.time_s, types))

    return replace(snapshot, jobs=each(snapshot.jobs, progressed))


def placement_of(job: Job, nodes: Mapping[str, Node], tune: Placement = ()) -> Placement:
    """Return a job's share of each of its nodes, by name: as it is tuned, else by Slurm's allocation.

    The number of GPUs that agents report counts before Slurm's.
    """
    names = sorted(job.nodes)
    if any(name not in nodes for name in names):
        return ()
    if names and [share.node for share in tune] == names:
        return tune
    shares = []
    for index, name in enumerate(names):
        # Slurm shows a job's totals over its nodes only.
        gpus, cpus, memory_mb = (
            total * (index + 1) // len(names) - total * index // len(names)
            for total in (job.gpus, job.cpus, job.memory_mb)
        )
        held = sum(gpu.host == nodes[name].host for gpu in job.lease.gpus) if job.lease is not None else 0
        shares.append(Share(name, held or gpus, cpus, memory_mb))
    return tuple(shares)
