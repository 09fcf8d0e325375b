"""Placements between rounds: those that Slurm has still to start, and those that must wait until others have left."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace

from cadenza.policies.actions import Place
from cadenza.policies.decision import Memory
from cadenza.policies.model import ClusterSnapshot
from cadenza.policies.sharing.hosts import Ask, HostBook, books
from cadenza.policies.sharing.placement import Placed
from cadenza.policies.sharing.settings import SharingSettings


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
