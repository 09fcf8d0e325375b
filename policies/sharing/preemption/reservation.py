"""Jobs that cannot leave their GPUs, by their time limits: their rank, and GPUs that are reserved for one that waits.

A job that keeps checkpoints makes way when a better one comes. One that keeps none has its GPUs until it ends, and a
wide one would wait for ever while small ones take each GPU that comes free. Slurm ends a job at its time limit, so the
limits say when GPUs are free at the latest (EASY backfill: Lifka, 1995; Mu'alem and Feitelson, 2001).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Self

from cadenza.policies.core.model import Job, JobKey
from cadenza.policies.sharing.preemption.seat_map import HostSeats
from cadenza.policies.sharing.state.host import ResourceRequest
from cadenza.policies.sharing.state.sharing_state import SharingState

RESERVED_AFTER_S = 3600.0
"""Wait since its submission after which a job that cannot leave its GPUs may have some reserved, in seconds."""
MOST_SERVED_S = 64 * 3600.0
"""GPU seconds that a job which cannot leave counts with at most: longer ones start first come, first served.

Without it the mean completion time of jobs that cannot move was longer on a sample of the Philly trace
(docs/measurements).
"""
NO_LIMIT_S = 366 * 86400.0
"""A job without a time limit counts as one with this: the longest that Slurm knows, in seconds."""


def can_leave(job: Job) -> bool:
    """Return True for a job that keeps checkpoints, or may: its ranks say so once they are ready, before that its user.

    Jobs that wait on the GPUs of such a job can go on elsewhere, or have it leave.
    """
    lease, options = job.lease, job.options
    if lease is not None and lease.ready:
        return lease.checkpoints and job.requeueable
    return job.requeueable and not (options is not None and options.checkpoints is False)


def latest_end_s(job: Job, now_s: float) -> float:
    """Return the time at which Slurm ends a job at the latest, if it starts now or where it runs; infinite without one.

    Seconds, on the clock of ``now_s``.
    """
    if job.time_limit_s is None:
        return inf
    if job.run_s is None and job.start_s is not None:
        return max(job.start_s + job.time_limit_s, now_s)
    return now_s + max(job.time_limit_s - (job.run_s or 0.0), 0.0)


def attained_by_limit_s(job: Job) -> float | None:
    """Return the seconds on GPUs that a waiting job counts with at least, because it leaves them at its limit only.

    None for every other job. Least attained service lets a newcomer go first because it can be stopped once it has had
    more than others. Nothing stops this one.
    """
    if job.state != "PENDING" or can_leave(job):
        return None
    limit_s = NO_LIMIT_S if job.time_limit_s is None else job.time_limit_s
    return min(limit_s, MOST_SERVED_S / max(job.gpus, 1))


def longest_waiting(state: SharingState) -> JobKey | None:
    """Return the job that GPUs are reserved for: of those that cannot leave and wait long, the first submitted."""
    waits = [
        (-state.settings.priority(job), job.submit_s, job.key)
        for job in state.pending
        if state.now_s >= job.submit_s + RESERVED_AFTER_S and not can_leave(job)
    ]
    return min(waits)[-1] if waits else None


@dataclass(slots=True)
class Reservation:
    """Hosts that a job is to have, when it does at the latest, and the GPUs there that it leaves to others then."""

    at_s: float
    spare: dict[int, int]
    """By position of the host."""

    @classmethod
    def of(cls, hosts: Sequence[HostSeats], request: ResourceRequest, lasting: Mapping[JobKey, float]) -> Self | None:
        """Return the earliest reservation on the hosts; None where limits do not tell when GPUs become free.

        ``lasting``: latest ends of the jobs that stay until then; all others make way at once.
        """
        found = []
        for host in hosts:
            if not host.state.usable or not any(lane.admits(request) for lane in host.lanes):
                continue
            frees = sorted(_free_s(host, bit, lasting) for bit in range(host.every.bit_length()))
            if len(frees) >= request.gpus and frees[request.gpus - 1] < inf:
                found.append((frees[request.gpus - 1], host.position, frees))
        chosen = sorted(found)[: request.nodes]
        if len(chosen) < request.nodes:
            return None
        at_s = max(free_s for free_s, _, _ in chosen)
        spare = {at: sum(free_s <= at_s for free_s in frees) - request.gpus for _, at, frees in chosen}
        return cls(at_s, spare)

    def delayed(self, position: int, gpus: int, ends_s: float) -> bool:
        """Return True if a job of so many GPUs on a host, with this latest end, would delay the reserved start."""
        return ends_s > self.at_s and gpus > self.spare.get(position, gpus)

    def use(self, positions: Iterable[int], gpus: int, ends_s: float) -> None:
        """Note a job that was placed and outlasts the reserved start."""
        for position in positions:
            if ends_s > self.at_s and position in self.spare:
                self.spare[position] -= gpus


def _free_s(host: HostSeats, bit: int, lasting: Mapping[JobKey, float]) -> float:
    """Return the latest time at which a GPU is free of jobs that stay until their end; now or earlier: 0."""
    return max((lasting[one.key] for one in host.on(1 << bit) if one.key in lasting), default=0.0)
