"""CPUs and memory under sharing: the jobs that have GPUs of a host now divide it by the allocation.

Synergy's allocations (OSDI'22, §4) know one job a GPU, so each host is a case of its own with the jobs that hold
GPUs there at this moment; packed jobs count once and split what they get, and a job of several hosts has its
proportional share of each. A job that does not run keeps its memory, so as long as one waits on a host, nobody has
more memory than it asked for; CPUs are all the holders'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cadenza.policies.allocation.proportional import proportional
from cadenza.policies.case import Allocate, Case, Server, proportional_share
from cadenza.policies.model import Job, JobKey, Place, Placement, Share, Tune
from cadenza.policies.sharing.hosts import Ask, HostBook, Tenant


@dataclass(frozen=True, slots=True)
class Sharing:
    """One round's division of the hosts."""

    now_s: float
    allocate: Allocate
    jobs: Mapping[JobKey, Job]
    """Managed jobs, those about to start included."""
    holders: frozenset[JobKey]
    """Who has GPUs once this round is done."""
    units: Mapping[JobKey, JobKey]
    """For a packed job the least key of its pack."""
    order: Mapping[JobKey, int]
    """Rank of each job; those without one come last, by key."""

    def divide(self, hosts: Mapping[str, HostBook]) -> dict[JobKey, Placement]:
        """Return what every job should have that has its place on one host only."""
        found: dict[JobKey, Placement] = {}
        for host in hosts.values():
            found |= self._on(host)
        return found

    def _on(self, host: HostBook) -> dict[JobKey, Placement]:
        there = [host.tenants[key] for key in sorted(host.tenants)]
        holding = [t for t in there if t.job.key in self.holders]
        wide = [t for t in holding if len(t.job.nodes) > 1]
        found: dict[JobKey, Placement] = {t.job.key: (lean,) for t in there if (lean := self._too_much(t)) is not None}
        units = self._by_unit([t for t in holding if len(t.job.nodes) <= 1 and t.job.key in self.jobs])
        server = _rest(host, [*wide, *(t for t in holding if t.job.key not in self.jobs and t not in wide)])
        if not units or sum(unit[0].ask.gpus for unit in units) > server.gpus:
            return found
        cases = tuple(_as_one(unit, server) for unit in units)
        case = Case(self.now_s, (server,), cases, len(cases))
        plan = self.allocate(case)
        if len(plan.placements) < len(cases):  # it leaves jobs out, but theirs are the GPUs now
            plan = proportional(case)
        shared = len(holding) < len(there)
        return found | {
            tenant.job.key: (_own(tenant, part, shared=shared),)
            for unit in units
            for placement in [plan.placements[unit[0].job.key]]
            for tenant, part in zip(unit, _split(placement[0], len(unit)), strict=True)
        }

    def _too_much(self, tenant: Tenant) -> Share | None:
        """Return what a job that waits is left with when it has more memory than it needs, else None."""
        key, had = tenant.job.key, tenant.job.placement
        if len(had) != 1 or had[0].memory_mb <= tenant.ask.memory_mb or had[0].node != tenant.lane:
            return None
        if key in self.holders or key not in self.jobs:
            return None
        return had[0]._replace(memory_mb=tenant.ask.memory_mb)

    def _by_unit(self, tenants: Sequence[Tenant]) -> list[list[Tenant]]:
        """Return packed jobs together, in the order of the round."""
        last = len(self.order)
        found: dict[JobKey, list[Tenant]] = {}
        for tenant in sorted(tenants, key=lambda t: (self.order.get(t.job.key, last), t.job.submit_s, t.job.key)):
            key = tenant.job.key
            found.setdefault(self.units.get(key, key), []).append(tenant)
        return list(found.values())


def _rest(host: HostBook, apart: Sequence[Tenant]) -> Server:
    """Return a host without the proportional shares of some jobs."""
    node = host.lanes[0]
    server = Server(node.name, node.gpus, node.cpus, host.memory_mb, node.gpu_type)
    taken = [proportional_share(server, tenant.ask.gpus) for tenant in apart]
    return server._replace(
        gpus=server.gpus - sum(share.gpus for share in taken),
        cpus=server.cpus - sum(share.cpus for share in taken),
        memory_mb=server.memory_mb - sum(share.memory_mb for share in taken),
    )


def _as_one(unit: Sequence[Tenant], server: Server) -> Job:
    """Return a unit as a job of the server, with what all its members have."""
    had = [share for tenant in unit for share in tenant.job.placement]
    first = unit[0]
    whole = Share(server.name, first.ask.gpus, sum(s.cpus for s in had), sum(s.memory_mb for s in had))
    return replace(first.job, gpus=first.ask.gpus, num_nodes=1, placement=(whole,) if had else ())


def _split(share: Share, parts: int) -> list[Share]:
    """Return a share in equal parts, the first ones with what is left over; each has all its GPUs."""
    return [
        share._replace(
            cpus=max(share.cpus * (i + 1) // parts - share.cpus * i // parts, 1),
            memory_mb=share.memory_mb // parts,
        )
        for i in reversed(range(parts))
    ]


def _own(tenant: Tenant, share: Share, *, shared: bool) -> Share:
    """Return a job's share on its own lane."""
    memory_mb = min(share.memory_mb, tenant.ask.memory_mb) if shared else share.memory_mb
    return Share(tenant.lane, tenant.ask.gpus, share.cpus, memory_mb)


def tunes(jobs: Mapping[JobKey, Job], wanted: Mapping[JobKey, Placement]) -> tuple[Tune, ...]:
    """Return a tune for every running job that is to have something else than it has, in order of keys."""
    return tuple(
        Tune(key, wanted[key], _why(wanted[key][0], jobs[key].placement[0]))
        for key in sorted(wanted)
        if key in jobs and jobs[key].placement and jobs[key].placement != wanted[key]
    )


def _why(wanted: Share, had: Share) -> str:
    return (
        f"its host is shared out among those that have GPUs: {wanted.cpus} CPUs and {wanted.memory_mb} MB "
        f"instead of {had.cpus} and {had.memory_mb}"
    )


def with_shares(
    placed: Sequence[Place], wanted: Mapping[JobKey, Placement], jobs: Mapping[JobKey, Job]
) -> tuple[Place, ...]:
    """Return the placements with shares: those of the allocation for who starts on free GPUs, else what it needs."""
    return tuple(
        replace(action, shares=wanted.get(action.job) or _needed(jobs[action.job], action.nodes)) for action in placed
    )


def _needed(job: Job, nodes: Sequence[str]) -> Placement:
    ask = Ask.lean(job)
    return tuple(Share(node, ask.gpus, ask.cpus, ask.memory_mb) for node in sorted(nodes))
