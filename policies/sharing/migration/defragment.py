"""Defragmentation (Gandiva, OSDI'18, §4.2): jobs move together so that hosts have their GPUs free for large jobs.

For a job that waits for GPUs the fewest migrations are made after which one host has room for it (``room``). Two kinds
wait: jobs that nobody can start, and those on a further lane that wait for a lease. While none is in a queue, the host
in use that has the most free GPUs is emptied: its jobs go to hosts that have no more free GPUs, until every host in
use has less than 3 of 4 of its GPUs free, or no job can go. Either way a job only moves where it loses next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import inf

from cadenza.policies.core.model import Job, JobKey
from cadenza.policies.sharing.migration.move_search import Mover, Plan, Wish, free_seat, room
from cadenza.policies.sharing.state.budget import Moves, crowd
from cadenza.policies.sharing.state.host import Ask, HostBook, Seat, Tenant
from cadenza.policies.sharing.state.pending import lacks_lease

SEARCHES = 8
"""Waiting jobs that room is looked for in one round."""


@dataclass(slots=True)
class Rooms:
    """Where room is made in this round, and for whom."""

    moves: Moves
    settled: bool = True
    """False while a move is under way whose job may still be in the books of the node that it leaves: no room then."""
    made: dict[JobKey, str] = field(default_factory=dict)
    """A sentence for each job that room is made for."""
    _left: int = SEARCHES

    @property
    def on(self) -> bool:
        """Whether room is made at all."""
        functions = self.moves.gandiva
        return functions.introspective and functions.defrag and self.settled and self.moves.left > 0 and self._left > 0

    def make_for(self, job: Job) -> str:
        """Make room for a job that nobody can start, and return a sentence; "" where that cannot be."""
        ask = Ask.under(job, self.moves.sharing)
        if not self.on or ask.nodes > 1 or not ask.gpus or self.moves.home(job) is not None:
            return ""
        return self._make(Wish(job, ask))

    def make_for_queued(self, jobs: Iterable[Job]) -> None:
        """Make room for jobs that Slurm would start if it had the resources; those with room already keep it."""
        for job in jobs:
            stuck = job.state_reason == "Resources" and self.moves.sharing.manages(job)
            if stuck and self.on and not _served(self.moves, job):
                self.make_for(job)

    def make_for_lanes(self) -> None:
        """Make room for jobs that stand without a lease where Slurm started them: others leave their GPUs."""
        for host in self.moves.hosts.values() if self.on else ():
            for key in sorted(host.tenants):
                tenant = host.tenants.get(key)
                if tenant is not None and self.on and _waits_for_lease(self.moves, host, tenant):
                    self._make(Wish(tenant.job, tenant.ask, host))

    def _make(self, wish: Wish) -> str:
        self._left -= 1
        plan = room(self.moves, wish, list(_movers(self.moves, wish)))
        if plan is None:
            return ""
        self.made[wish.job.key] = _carry_out(self.moves, wish, plan)
        return self.made[wish.job.key]


# --- Room for those that wait --------------------------------------------------------------------------


def _waits_for_lease(moves: Moves, host: HostBook, tenant: Tenant) -> bool:
    key = tenant.job.key
    ours = key in moves.jobs and key not in moves.fixed and key not in moves.packed and len(tenant.job.nodes) == 1
    return ours and lacks_lease(tenant) and key not in moves.holders and crowd(host, tenant) > 1


def _served(moves: Moves, job: Job) -> bool:
    """Whether a job has room already; it is kept for it then."""
    ask = Ask.under(job, moves.sharing)
    for host in moves.hosts.values():
        seat = free_seat(host, job, ask) if host.usable else None
        if seat is not None:
            host.enter(job, ask, seat)
            return True
    return False


def _movers(moves: Moves, wish: Wish) -> Iterator[Mover]:
    """Return who may move for a job: those that lose next to nothing; out of turns with it, none of higher priority."""
    most = moves.sharing.priority(wish.job) if wish.home is not None else inf
    for host in moves.hosts.values():
        for tenant in moves.tenants(host):
            key = tenant.job.key
            fits = key != wish.job.key and key not in moves.packed and _negligible(moves, tenant)
            if fits and moves.sharing.priority(tenant.job) <= most:
                yield Mover(host, tenant)


def _carry_out(moves: Moves, wish: Wish, plan: Plan) -> str:
    """Order the moves of a plan, and keep the GPUs for the waiting job."""
    for mover, _, _ in plan.steps:
        mover.home.leave(mover.tenant)
    if plan.seat is not None:
        plan.host.enter(wish.job, wish.ask, plan.seat)
    for mover, target, seat in plan.steps:
        why = f"moves from {mover.tenant.lane} to {seat.node.name}, so that job {wish.job.key} gets GPUs of "
        moves.migrate(mover.tenant.job, target, seat, mover.tenant.ask, f"{why}{plan.host.name}")
    movers = ", ".join(str(mover.tenant.job.key) for mover, _, _ in plan.steps)
    return f"waits until room is made for it on {plan.host.name}: job {movers} moves to other hosts"


def _negligible(moves: Moves, tenant: Tenant) -> bool:
    return moves.gandiva.move_s <= moves.gandiva.loss * moves.left_s(tenant.job)


# --- Nobody waits ---------------------------------------------------------------------------------------


def empty_hosts(moves: Moves) -> None:
    """Empty the hosts with the most free GPUs; each move makes a fuller host fuller, so they end."""
    if not (moves.gandiva.introspective and moves.gandiva.defrag):
        return
    for source in sorted(moves.hosts.values(), key=lambda host: (-_free(host), host.name)):
        if source.sizes and _free(source) >= moves.gandiva.free_share * source.gpus:
            _empty(moves, source)


def _free(host: HostBook) -> int:
    return host.gpus - host.given


def _empty(moves: Moves, source: HostBook) -> None:
    """Move what can go from a host."""
    for tenant in list(moves.tenants(source)):
        found = _fuller(moves, source, tenant) if _negligible(moves, tenant) else None
        if found is not None:
            target, seat = found
            why = f"moves from {tenant.lane} to {seat.node.name}, so that {source.name} is free for larger jobs"
            moves.migrate(tenant.job, target, seat, tenant.ask, why)


def _fuller(moves: Moves, source: HostBook, tenant: Tenant) -> tuple[HostBook, Seat] | None:
    """Return idle GPUs on the host with the fewest free ones, hosts of the job's class first."""
    found = [
        ((host.affinity != tenant.ask.gpus, _free(host), host.name), host, seat)
        for host in moves.hosts.values()
        if host.sizes and host is not source and tenant.ask.gpus <= _free(host) <= _free(source)
        for seat in [moves.seat(host, tenant.ask)]
        if seat is not None and seat.crowd == 0 and moves.suits(tenant.job, source, host)
    ]
    return min(found, key=lambda row: row[0])[1:] if found else None
