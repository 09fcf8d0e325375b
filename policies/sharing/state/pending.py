"""Which jobs wait for GPUs, and which are on their way to some: what growing and shrinking go by.

A job waits for GPUs when

- it is held for us to place (held admission), or
- it is pending in Slurm for lack of free resources only (reason Resources or Priority, or none yet) and asks for
  GPUs of managed hosts, whether it is ours or not, or
- Slurm has started it, as it does on a further lane when lane 0 is full, and it stands without a lease because
  another job has its GPUs: it never had one, or it waits for its next turn.

A job that is being moved does not wait: its new place is kept for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cadenza.policies.core.decision import Move
from cadenza.policies.core.model import ClusterSnapshot, Job, Share
from cadenza.policies.sharing.state.host import Ask, HostBook, Tenant
from cadenza.policies.sharing.state.settings import SharingSettings
from cadenza.policies.sharing.turns.slurm_sync import WAITING_REASONS


def queued(snapshot: ClusterSnapshot, settings: SharingSettings) -> list[Job]:
    """Return the jobs that wait in Slurm's queue for GPUs of managed hosts, by priority, submission and key."""
    hosts = (node.partitions for node in snapshot.nodes if not settings.partitions.isdisjoint(node.partitions))
    shared = frozenset().union(*hosts)
    found = [job for job in snapshot.jobs if job.gpus > 0 and job.partition in shared and _lacks_room(job)]
    return sorted(found, key=lambda job: (-job.slurm_priority, job.submit_s, job.key))


def _lacks_room(job: Job) -> bool:
    return job.state == "PENDING" and not job.held and job.state_reason in WAITING_REASONS


def lacks_lease(tenant: Tenant) -> bool:
    """Whether a job stands without a lease where Slurm started it."""
    lease = tenant.job.lease
    return lease is not None and lease.state in ("waiting", "yielded")


def under_way(moves: Iterable[Move]) -> dict[int, Move]:
    """Return the moves whose jobs have a place that they go to and are not there yet, by job."""
    return {m.job.id: m for m in moves if m.shares and m.phase in ("warming", "ordered", "requeued", "placed")}


def book_moves(hosts: Mapping[str, HostBook], snapshot: ClusterSnapshot, moving: Mapping[int, Move]) -> None:
    """Note the jobs that are on their way where they go to, not where they are."""
    for job in sorted(snapshot.jobs, key=lambda job: job.key):
        move = moving.get(job.key.id)
        if move is None or (move.phase == "placed" and job.state != "PENDING"):
            continue
        for host in hosts.values():
            for tenant in [tenant for key, tenant in host.tenants.items() if key.id == job.key.id]:
                host.leave(tenant)
            for share in move.shares:
                if any(node.name == share.node for node in host.lanes):
                    _book(host, job, share)


def _book(host: HostBook, job: Job, share: Share) -> None:
    ask = sized(Ask.of(job), share.gpus)._replace(cpus=share.cpus, memory_mb=share.memory_mb)
    seat = next((seat for seat in host.seats(ask) if seat.node.name == share.node), None)
    host.stay(Tenant(job, ask, share.node, seat.gpus if seat is not None else frozenset()))


def sized(ask: Ask, gpus: int) -> Ask:
    """Return a job's needs on one node with another number of GPUs there: as much more as it has more of those."""
    had = max(ask.gpus, 1)
    return ask._replace(
        gpus=gpus,
        cpus=max(ask.cpus * gpus // had, 1),
        memory_mb=ask.memory_mb * gpus // had,
        state_mb=ask.state_mb * gpus // had,
    )
