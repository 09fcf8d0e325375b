"""Placements between rounds: those that Slurm has still to start, those that must wait, and the GPUs that jobs get."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from cadenza.policies.core.model import Gpu, Job, JobKey, Placement
from cadenza.policies.sharing.board.host import HostState, Resident, observe_hosts
from cadenza.policies.sharing.board.resource_request import ResourceRequest, sized
from cadenza.policies.sharing.state.pending import starts, stranded
from cadenza.policies.sharing.state.round_state import RoundState


def reserve_pending_moves(state: RoundState) -> None:
    """Count jobs that are on their way, or pinned and not started yet, where they go to and not where they are."""
    for job in state.jobs.all if state.where.relocating else ():
        move = state.where.relocating.get(job.key.id)
        if move is not None and not (move.arriving and job.state != "PENDING"):
            _reserve(state, job, move.destination)
    found = stranded(state)
    for key, reason in found.items():
        state.outcome.say("stranded", key, reason)
    state.slurm.stranded = frozenset(found)
    closed = {node.name for node in state.snapshot.nodes if not node.takes_jobs}
    for job in state.jobs.all if state.memory.placed else ():
        if job.key.id in state.where.relocating or job.key in state.slurm.stranded or not starts(job, state):
            continue
        if not closed.isdisjoint(job.required_nodes):
            continue  # Slurm starts it on none of its nodes while one of them takes no jobs
        request = ResourceRequest.under(job, floor=state.settings.floor)
        there = {state.where.by_node[name].name for name in job.required_nodes if name in state.where.by_node}
        for host in [state.where.hosts[name] for name in sorted(there)]:
            seats = {seat.node.name: seat.gpus for seat in host.seats(request)}
            pins = [node.name for node in host.lanes if node.name in job.required_nodes]
            pins.sort(key=lambda name: name not in seats)
            # A job has the nodes that it is pinned to also while others are still there.
            host.stay(Resident(job, request, pins[0], seats.get(pins[0], frozenset())))


def _reserve(state: RoundState, job: Job, destination: Placement) -> None:
    for host in state.where.hosts.values():
        for resident in [resident for key, resident in host.residents.items() if key.id == job.key.id]:
            host.leave(resident)
        for share in [share for share in destination if any(node.name == share.node for node in host.lanes)]:
            request = sized(ResourceRequest.of(job), share.gpus)._replace(cpus=share.cpus, memory_mb=share.memory_mb)
            seat = next((seat for seat in host.seats(request) if seat.node.name == share.node), None)
            host.stay(Resident(job, request, share.node, seat.gpus if seat is not None else frozenset()))


def hold_until_startable(state: RoundState) -> None:
    """Keep those placements back that Slurm could not start now, because jobs have not left their GPUs yet."""
    if not state.outcome.placements or not (state.where.relocating or state.slurm.room_made):
        return
    now, kept = observe_hosts(state.snapshot, state.settings.manages, floor=state.settings.floor), []
    for action in state.outcome.placements:
        request = ResourceRequest.of(state.snapshot.by_key[action.job])
        nodes = [(host, node) for host in now.values() for node in host.lanes if node.name in action.nodes]
        # A job that were pinned before the others have left would be stuck on its node if a move failed.
        if all(host.fits(node, request) for host, node in nodes):
            kept.append(action)
            for host, node in nodes:
                host.add(request, node)
        else:
            reason = f"waits until jobs have left {', '.join(action.nodes)}: their GPUs are promised to it"
            state.outcome.say("queue", action.job, reason)
    state.outcome.placements = tuple(kept)


def seated(hosts: Mapping[str, HostState], coming: Sequence[JobKey]) -> dict[JobKey, set[Gpu]]:
    """Return the GPUs that jobs get when they come in this order to where the round has planned them.

    The round may have planned the jobs in another order, with seats for jobs that come later still.
    """
    gpus_of: dict[JobKey, set[Gpu]] = {}
    for host in hosts.values():
        taken = _taken(host, frozenset(coming))
        for resident in [host.residents[key] for key in coming if key in host.residents]:
            there = taken.setdefault(resident.lane, set())
            free = host.next_gpus(resident.request.gpus, there)
            there.update(free)
            gpus_of.setdefault(resident.job.key, set()).update(Gpu(host.name, index) for index in free)
    return gpus_of


def _taken(host: HostState, coming: Container[JobKey]) -> dict[str, set[int]]:
    """Return the GPUs that are given out on each lane to jobs that are there and stay."""
    taken: dict[str, set[int]] = {}
    for key, resident in host.residents.items():
        if key not in coming and resident.lane in resident.job.nodes:
            taken.setdefault(resident.lane, set()).update(resident.gpus)
    return taken
