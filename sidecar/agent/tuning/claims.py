"""Claims of all jobs on the host's CPUs and memory, from the leases, the service's facts and Slurm's groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cadenza.policies.core.model import JobKey
from cadenza.sidecar.agent.ipc import cgroup_paths
from cadenza.sidecar.agent.ipc.slurm_steps import steps
from cadenza.sidecar.agent.jobs.host_state import Host
from cadenza.sidecar.agent.leases.lease_table import Lease
from cadenza.sidecar.agent.state_files import Wish
from cadenza.sidecar.agent.tuning.limits import Limits
from cadenza.sidecar.agent.tuning.planner import MILLI, Claim, Grant
from cadenza.sidecar.agent.tuning.topology import Topology
from cadenza.sidecar.orders import JobFacts


@dataclass
class Part:
    """One tuned job, or one that is held to its own CPUs while others are tuned."""

    wish: Wish
    limits: Limits | None
    grant: Grant | None = None
    ordered: bool = True
    """False: held to its own CPUs without an order."""


@dataclass(frozen=True)
class Scale:
    """Conversion of Slurm's CPUs to the host's: with config_overrides Slurm may count others than exist."""

    topology: Topology
    slurm_cpus: int

    @property
    def factor(self) -> float:
        """Real CPUs for each of Slurm's."""
        return len(self.topology.cpus) / self.slurm_cpus if self.slurm_cpus else 1.0

    def milli(self, cpus: float) -> int | None:
        """Return Slurm's CPUs in 1/1000 of real ones; None for 0, which means unknown."""
        return max(1, round(cpus * MILLI * self.factor)) if cpus > 0 else None

    def cpus(self, milli: int) -> float:
        """Return 1/1000 real CPUs as Slurm's."""
        return round(milli / MILLI / self.factor, 3)


def claims(host: Host, scale: Scale, parts: Mapping[JobKey, Part], unregistered: frozenset[int]) -> Iterator[Claim]:
    """Yield one claim for each job on the host: registered ones, those that the service names, and ``unregistered``.

    Of unregistered jobs only the groups are known: they may need any amount.
    """
    facts = {JobKey(fact.job, fact.restart): fact for fact in host.facts.jobs}
    for lease in host.leases:
        yield _claim(lease, facts.get(lease.key), scale, parts.get(lease.key))
    for key, fact in facts.items():
        if host.leases.get(key) is None:
            running = not fact.suspended
            yield Claim(key, scale.milli(fact.cpus), fact.memory_mb or None, running=running)
    listed = {key.id for key in facts} | {lease.job for lease in host.leases}
    for job in unregistered - listed:
        yield Claim(JobKey(job, 0), None, None)


def _claim(lease: Lease, fact: JobFacts | None, scale: Scale, part: Part | None) -> Claim:
    """Return the claim of a job with a lease; Slurm's present values go before those of its registration."""
    limits = part.limits if part else None
    wish = part.wish if part else None
    return Claim(
        key=lease.key,
        floor_milli=scale.milli((fact and fact.cpus) or lease.cpus),
        floor_mb=(fact and fact.memory_mb) or lease.memory_mb or None,
        wish_milli=scale.milli(wish.cpus) if wish else None,
        wish_mb=wish.memory_mb or None if wish else None,
        ceiling_mb=limits.ceiling_mb if limits else None,
        own=limits.own if limits else frozenset(),
        has=part.grant.cpus if part and part.grant else frozenset(),
        near=scale.topology.nodes_of(lease.gpus),
        running=lease.occupying,
    )


def unregistered_jobs(host: Host) -> frozenset[int]:
    """Return all of Slurm's jobs on this host by their control groups, found from any registered process."""
    pid = next((process.pid for lease in host.leases for process in lease.processes), None)
    if pid is None:
        return frozenset()
    folders = tuple(cgroup_paths.of(pid).all_jobs())
    named = {folder.name.removeprefix("job_") for folder in folders if folder.name.startswith("job_")}
    jobs = {int(number) for number in named if number.isdigit()}
    if len(named) < len(folders):  # the others are called by their SLUID: slurmstepd has the number
        jobs.update(step.job for step in steps())
    return frozenset(jobs)
