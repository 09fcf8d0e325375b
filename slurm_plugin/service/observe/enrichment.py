"""What policies need beyond Slurm's books and the agents' leases: profiles, what jobs hold, and how far they are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TypeAlias

from cadenza.policies.core.actions import Action, Outcome, Tune
from cadenza.policies.core.model import ClusterSnapshot, Job, JobKey, Node, Placement, Share
from cadenza.policies.round import Gateway
from cadenza.slurm_plugin.service.agents.agent_registry import Agent
from cadenza.slurm_plugin.service.observe.progress import progress
from cadenza.slurm_plugin.service.profiles.library import Library, Shelf
from cadenza.slurm_plugin.service.profiles.refiner import Refiner

log = logging.getLogger(__name__)

Agents: TypeAlias = Callable[[], Mapping[str, Agent]]
"""What returns each agent's last report, by host."""


class EnrichedGateway:
    """``policies.round.Gateway`` over another one, whose snapshots it completes; one thread at a time."""

    def __init__(self, cluster: Gateway, agents: Agents, shelf: Shelf, before: ClusterSnapshot | None) -> None:
        """``before``: what the last round on record saw."""
        self._cluster = cluster
        self._agents = agents
        self._before = before
        self._ordered = {job.key: job.placement for job in before.jobs} if before is not None else {}
        self.shelf = shelf
        self.gpu_memory_gb: Mapping[str, float] = {}
        self.refiner: Refiner | None = None
        """None: profiles stay as the files say."""

    def read(self) -> ClusterSnapshot:
        """Return the completed snapshot; errors of the gateway pass through."""
        if self.shelf.refresh():
            for problem in self.shelf.library.problems:
                log.warning("profile not used: %s", problem)
        snapshot = self._cluster.read()
        tunes = in_force(self._ordered, self._agents())
        found = enriched(snapshot, self.shelf.library, tunes, self.gpu_memory_gb, self._before, self.refiner)
        if self.refiner is not None:
            self.refiner.watch(found)
        self._before, self._ordered = found, tunes
        return found

    def apply(self, action: Action) -> Outcome:
        """Carry out one action."""
        outcome = self._cluster.apply(action)
        if isinstance(action, Tune) and outcome.ok:
            self._ordered = {**self._ordered, action.job: action.shares}
        return outcome


def in_force(ordered: Mapping[JobKey, Placement], agents: Mapping[str, Agent]) -> dict[JobKey, Placement]:
    """Return the tunes that agents still know of: what was ordered, which they may have met in part only."""
    tuned = {
        JobKey(lease.job, lease.restart)
        for agent in agents.values()
        for lease in agent.report.leases
        if lease.tuned is not None
    }
    return {key: placement for key, placement in ordered.items() if key in tuned}


def enriched(
    snapshot: ClusterSnapshot,
    library: Library,
    tunes: Mapping[JobKey, Placement],
    gpu_memory_gb: Mapping[str, float],
    before: ClusterSnapshot | None,
    refiner: Refiner | None = None,
) -> ClusterSnapshot:
    """Return a snapshot with each job's profile, placement and progress where it opted in, and GPU memory (pure).

    ``tunes``: what is in force; ``gpu_memory_gb``: by GPU type, "" for the types that are not there; ``before``: the
    last round's snapshot; ``refiner``: what running jobs have shown.
    """
    default = gpu_memory_gb.get("")
    nodes = tuple(
        replace(node, gpu_memory_gb=gpu_memory_gb.get(node.gpu_type, default)) if node.gpus else node
        for node in snapshot.nodes
    )
    known = {job.key.id: job for job in before.jobs} if before is not None else {}
    by_name = {node.name: node for node in nodes}
    types = {node.name: node.gpu_type for node in nodes}
    every = frozenset(types.values())
    jobs = []
    for job in snapshot.jobs:
        found = job
        if job.options is not None and job.gpus:
            placement = placement_of(job, by_name, tunes.get(job.key, ()))
            found = replace(job, placement=placement)
            profile = library.of(job, _types_of(job, nodes), every)
            if refiner is not None:
                node = by_name.get(job.nodes[0]) if job.nodes else None
                profile = refiner.found(found, profile, node, file=profile.profile is None and library.has(job))
            found = replace(found, profile=profile.profile, profile_note=profile.note)
            found = replace(found, progress=progress(found, known.get(job.key.id), snapshot.time_s, types))
        jobs.append(found)
    return replace(snapshot, nodes=nodes, jobs=tuple(jobs))


def _types_of(job: Job, nodes: Iterable[Node]) -> frozenset[str]:
    """Return the GPU types of the nodes that a job has or, while it waits, may get."""
    names = job.nodes or job.required_nodes
    if names:
        return frozenset(node.gpu_type for node in nodes if node.name in names)
    return frozenset(node.gpu_type for node in nodes if node.gpus and job.partition in node.partitions)


def placement_of(job: Job, nodes: Mapping[str, Node], tune: Placement = ()) -> Placement:
    """Return what a job has on each of its nodes, by name: as it is tuned, else as Slurm's books say.

    Books show totals, which are taken to be spread evenly; where agents say how many GPUs it has, that counts.
    """
    names = sorted(job.nodes)
    if any(name not in nodes for name in names):
        return ()
    if names and [share.node for share in tune] == names:
        return tune
    found = []
    for index, name in enumerate(names):
        gpus, cpus, memory_mb = (_part(total, index, len(names)) for total in (job.gpus, job.cpus, job.memory_mb))
        held = sum(gpu.host == nodes[name].host for gpu in job.lease.gpus) if job.lease is not None else 0
        found.append(Share(name, held or gpus, cpus, memory_mb))
    return tuple(found)


def _part(total: int, index: int, count: int) -> int:
    return total * (index + 1) // count - total * index // count

