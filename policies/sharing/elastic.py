"""Grow and shrink (Gandiva, OSDI'18, §3.4): jobs that say they can use idle GPUs of their host, and give them back.

Only jobs with ``min_gpus`` or ``max_gpus``, in steps of powers of two, within one host. They grow when nobody
waits and GPUs of the host have been idle for ``idle_s``, the one with the higher progress rate first; they shrink
at once when a job has come that finds no free GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cadenza.policies.model import Job
from cadenza.policies.sharing.hosts import Ask, HostBook, Tenant
from cadenza.policies.sharing.moves import Moves

# --- Shrink --------------------------------------------------------------------------------------------


def shrink(moves: Moves, waiting: Sequence[Job]) -> None:
    """Take GPUs from grown jobs for those of ``waiting`` that find none free, in their order."""
    if not (moves.gandiva.introspective and moves.gandiva.elastic) or not any(_grown(moves)):
        return
    promised: dict[str, int] = {}
    for job in waiting:
        ask = Ask.under(job, moves.sharing)
        if ask.nodes > 1 or _give(moves, ask, promised):
            continue
        plans = ((host, _room(host, ask, moves)) for host in moves.hosts.values())
        found = [(len(plan), host.name, host, plan) for host, plan in plans if plan]
        if found:
            _, name, host, plan = min(found, key=lambda row: row[:2])
            for tenant, size in plan:
                _resize(moves, host, tenant, size, f"gives GPUs of {host.name} back: job {job.key} needs them")
            promised[name] = promised.get(name, 0) + ask.gpus


def _grown(moves: Moves) -> Iterable[bool]:
    return (moves.sizes(job)[0] < job.gpus for job in moves.jobs.values())


def _give(moves: Moves, ask: Ask, promised: dict[str, int]) -> bool:
    """Whether a job finds free GPUs beside those promised before; they are promised to it then."""
    for host in moves.hosts.values():
        if host.usable and host.given + promised.get(host.name, 0) + ask.gpus <= host.gpus:
            promised[host.name] = promised.get(host.name, 0) + ask.gpus
            return True
    return False


def _room(host: HostBook, ask: Ask, moves: Moves) -> list[tuple[Tenant, int]]:
    """Return the fewest jobs to shrink on a host for a job to fit, the largest first; none when it cannot."""
    lacking, plan = host.given + ask.gpus - host.gpus, []
    tenants = [tenant for tenant in host.tenants.values() if _resizable(moves, tenant)]
    for tenant in sorted(tenants, key=lambda tenant: (-tenant.ask.gpus, tenant.job.key)):
        fitting = [size for size in moves.sizes(tenant.job) if size <= tenant.ask.gpus - lacking]
        size = fitting[-1] if fitting else moves.sizes(tenant.job)[0]
        if lacking > 0 and size < tenant.ask.gpus:
            plan.append((tenant, size))
            lacking -= tenant.ask.gpus - size
    return plan if lacking <= 0 and host.usable else []


def _resizable(moves: Moves, tenant: Tenant) -> bool:
    """Whether a job may be resized, however lately it was: whoever grew gives back at once."""
    job = tenant.job
    lease = job.lease
    return (
        job.key in moves.jobs
        and job.key not in moves.fixed
        and job.key not in moves.packed
        and job.requeueable
        and len(job.nodes) == 1
        and lease is not None
        and lease.state in ("held", "yielded")
        and (lease.ready or lease.state == "yielded")
    )


# --- Grow ----------------------------------------------------------------------------------------------


def spare_since(moves: Moves) -> tuple[tuple[str, float], ...]:
    """Return since when each host has had idle GPUs, as of now."""
    before = dict(moves.memory.spare_s)
    return tuple((host.name, before.get(host.name, moves.now_s)) for host in moves.hosts.values() if host.idle())


def grow(moves: Moves, spare: Iterable[tuple[str, float]]) -> None:
    """Give jobs the GPUs of their host that have been idle long enough; for when no job waits for GPUs."""
    if not (moves.gandiva.introspective and moves.gandiva.elastic):
        return
    if any(host.height > 1 for host in moves.hosts.values()):
        return
    for name, since_s in spare:
        if moves.now_s - since_s >= moves.gandiva.idle_s:
            _grow_on(moves, moves.hosts[name])


def _grow_on(moves: Moves, host: HostBook) -> None:
    tenants = [t for t in host.tenants.values() if _resizable(moves, t) and moves.may(t.job)]
    for tenant in sorted(tenants, key=lambda tenant: (-_rate(tenant.job), tenant.job.key)):
        spare = host.idle()
        most = tenant.ask.gpus + spare
        size = max((size for size in moves.sizes(tenant.job) if size <= most), default=tenant.ask.gpus)
        if size > tenant.ask.gpus:
            _resize(moves, host, tenant, size, f"grows to {size} GPUs: those of {host.name} have been idle")


def _rate(job: Job) -> float:
    """Return iterations a second."""
    seconds = job.lease.iteration_s if job.lease is not None else None
    return 1.0 / seconds if seconds else 0.0


def _resize(moves: Moves, host: HostBook, tenant: Tenant, size: int, why: str) -> None:
    """Resize a job within its host, if a lane has the GPUs."""
    ask = tenant.ask
    wanted = ask._replace(
        gpus=size,
        cpus=max(ask.cpus * size // ask.gpus, 1),
        memory_mb=ask.memory_mb * size // ask.gpus,
        state_mb=ask.state_mb * size // ask.gpus,
    )
    host.leave(tenant)
    seat = moves.seat(host, wanted)
    host.stay(tenant)
    if seat is not None and (seat.crowd == 0 or size < ask.gpus):
        moves.resize(tenant.job, host, seat, wanted, why)
