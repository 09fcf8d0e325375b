"""Placements between rounds: those that Slurm has still to start, those that must wait, and the GPUs that jobs get."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

from cadenza.policies.core.actions import Place
from cadenza.policies.core.decision import Memory
from cadenza.policies.core.model import ClusterSnapshot, Gpu, JobKey
from cadenza.policies.sharing.placement.affinity import Placed
from cadenza.policies.sharing.state.host import Ask, HostBook, books
from cadenza.policies.sharing.state.settings import SharingSettings


def book_starting(
    hosts: Mapping[str, HostBook],
    snapshot: ClusterSnapshot,
    memory: Memory,
    settings: SharingSettings,
    moving: Container[int],
) -> None:
    """Note the jobs that were placed and released, and that Slurm has not started yet, where they are to start."""
    for job in sorted(snapshot.jobs, key=lambda job: job.key):
        if job.state != "PENDING" or job.held or job.key not in memory.placed or job.key.id in moving:
            continue
        ask = Ask.under(job, settings)
        for host in hosts.values():
            seats = [seat for seat in host.seats(ask) if seat.node.name in job.required_nodes]
            if seats:
                host.enter(job, ask, seats[0])


def startable_now(placed: Placed, snapshot: ClusterSnapshot, settings: SharingSettings) -> Placed:
    """Return the placements that Slurm can start now; who waits until others have left stays held.

    The GPUs stay promised, for the next round looks ahead again. A job that were released before would be stuck on
    its node if a move failed.
    """
    now, jobs = books(snapshot, settings), snapshot.by_key
    actions: list[Place] = []
    reasons = dict(placed.reasons)
    for action in placed.actions:
        ask = Ask.of(jobs[action.job])
        nodes = [(host, node) for host in now.values() for node in host.lanes if node.name in action.nodes]
        if all(host.fits(node, ask) for host, node in nodes):
            actions.append(action)
            for host, node in nodes:
                host.add(ask, node)
        else:
            reasons[action.job] = f"waits until jobs have left {', '.join(action.nodes)}: their GPUs are promised to it"
    return replace(placed, actions=tuple(actions), reasons=reasons)


def seated(hosts: Mapping[str, HostBook], coming: Sequence[JobKey]) -> dict[JobKey, set[Gpu]]:
    """Return the GPUs that jobs get when they come in this order to where the books have them.

    Slurm gives the lowest free ones of a lane. The books may have planned the jobs in another order, and have seats
    for jobs that come later still.
    """
    found: dict[JobKey, set[Gpu]] = {}
    for host in hosts.values():
        taken = _taken(host, frozenset(coming))
        for tenant in [host.tenants[key] for key in coming if key in host.tenants]:
            there = taken.setdefault(tenant.lane, set())
            free = [index for index in range(host.gpus) if index not in there][: tenant.ask.gpus]
            there.update(free)
            found.setdefault(tenant.job.key, set()).update(Gpu(host.name, index) for index in free)
    return found


def _taken(host: HostBook, coming: Container[JobKey]) -> dict[str, set[int]]:
    """Return the GPUs that are given out on each lane to jobs that are there and stay."""
    taken: dict[str, set[int]] = {}
    for key, tenant in host.tenants.items():
        if key not in coming and tenant.lane in tenant.job.nodes:
            taken.setdefault(tenant.lane, set()).update(tenant.gpus)
    return taken
