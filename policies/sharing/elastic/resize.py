"""Grow and shrink (Gandiva, OSDI'18, §3.4): jobs that can use idle GPUs of their host take them, and give them back.

Only jobs with ``min_gpus`` or ``max_gpus`` change: those of one host within it, in steps of powers of two; those that
asked for several nodes by whole hosts (``multi_node``). They grow when no job waits (see ``state.pending``) and GPUs
have been idle for ``idle_s``, the one with the higher progress rate first. They shrink at once when a job has come that
finds no free GPUs: in Slurm's queue or, where Slurm has started it on a further lane, behind the lease of a job that
could do with fewer. A job that growing has not made faster goes back to its former size (see ``feedback``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from cadenza.policies.core.decision import Growth
from cadenza.policies.core.model import Job, JobKey
from cadenza.policies.sharing.board.host import HostState, Resident, Seat
from cadenza.policies.sharing.board.resource_request import ResourceRequest, sized
from cadenza.policies.sharing.elastic.multi_node import give_back, grow_by_hosts, multi_node_job
from cadenza.policies.sharing.state.pending import lacks_lease
from cadenza.policies.sharing.state.round_state import RoundState

Plan: TypeAlias = list[tuple[Resident, int]]
"""Jobs that shrink on a host, with their new number of GPUs there; 0: the job leaves the host."""
UNDECIDED_S = 5.0
"""Slurm looks at a new job within 3 s (``batch_sched_delay``), and gives a reason if it does not start it."""

# --- Shrink --------------------------------------------------------------------------------------------


def shrink_for_pending(state: RoundState) -> None:
    """Take GPUs from jobs that can do with fewer: for the pending jobs, in order, then for those without a lease."""
    if not any(state.sizes(job)[0] < job.gpus for job in state.jobs.ours.values()):
        return
    promised: dict[str, int] = {}
    for job in (*state.slurm.to_place, *state.slurm.queued):
        _shrink_for(state, job, promised)
    for host in state.where.hosts.values():
        for key in sorted(host.residents):
            resident = host.residents.get(key)  # it may have left for one before it
            free = key in state.jobs.ours and key not in state.where.fixed and key not in state.who.packed
            if resident is not None and free and lacks_lease(resident):
                _shrink_beside(state, host, resident)


def _shrink_for(state: RoundState, job: Job, promised: dict[str, int]) -> None:
    """Make room for a job where that takes the fewest; nothing is done where it would not suffice."""
    if any(job.key in host.residents for host in state.where.hosts.values()):
        return  # it has been placed, and Slurm is to start it
    if job.state_reason in ("", "None") and state.now_s - job.submit_s < UNDECIDED_S:
        return  # Slurm has not looked at it yet: it may start it on a lane, and the lane decides who shrinks
    request = ResourceRequest.under(job, floor=state.settings.floor)
    plans = [(host, _room(state, host, request, promised.get(host.name, 0))) for host in _open_to(state, job)]
    chosen = _chosen(state, [(host, plan) for host, plan in plans if plan is not None], request.nodes)
    leaving: dict[JobKey, list[HostState]] = {}
    for host, plan in chosen:
        for resident, size in plan:
            if size:
                _resize(state, host, resident, size, f"gives GPUs of {host.name} back: job {job.key} needs them")
            else:
                leaving.setdefault(resident.job.key, []).append(host)
        promised[host.name] = promised.get(host.name, 0) + request.gpus
    for key, hosts in leaving.items():
        _leave(state, state.jobs.ours[key], hosts, f"job {job.key} needs them")


def _chosen(state: RoundState, plans: Iterable[tuple[HostState, Plan]], count: int) -> list[tuple[HostState, Plan]]:
    """Return ``count`` hosts on which the fewest jobs shrink, or none; no job leaves more hosts than it can spare."""
    chosen: list[tuple[HostState, Plan]] = []
    left: Counter[JobKey] = Counter()
    for host, plan in sorted(plans, key=lambda row: (len(row[1]), row[0].name)):
        leaving = [resident.job for resident, size in plan if not size]
        if len(chosen) < count and all(left[job.key] < _spare(state, job) for job in leaving):
            chosen.append((host, plan))
            left.update(job.key for job in leaving)
    return chosen if len(chosen) == count else []


def _open_to(state: RoundState, job: Job) -> list[HostState]:
    """Return the hosts on which a job may start."""
    return [
        host
        for host in state.where.hosts.values()
        if host.usable
        and job.partition in host.lanes[0].partitions
        and (not job.required_nodes or any(node.name in job.required_nodes for node in host.lanes))
    ]


def _room(state: RoundState, host: HostState, request: ResourceRequest, promised: int) -> Plan | None:
    """Return the fewest jobs to shrink on a host for a job to fit, the largest first; None when it cannot."""
    plan: Plan = []
    lacking = host.gpus_allocated + promised + request.gpus - host.gpus
    residents = [(resident, sizes) for resident in host.residents.values() if (sizes := _sizes_on(state, resident))]
    for resident, sizes in sorted(residents, key=lambda row: (-row[0].request.gpus, row[0].job.key)):
        fitting = [size for size in sizes if size <= resident.request.gpus - lacking]
        size = fitting[-1] if fitting else sizes[0]
        if lacking > 0 and size < resident.request.gpus:
            plan.append((resident, size))
            lacking -= resident.request.gpus - size
    return plan if lacking <= 0 else None


def _sizes_on(state: RoundState, resident: Resident) -> tuple[int, ...]:
    """Return with how many GPUs of a host a job can run: none, if it can spare the host; () if its size stays."""
    sizes = state.sizes(resident.job)
    if sizes[0] >= resident.job.gpus:
        return ()
    if _resizable(state, resident):
        return sizes
    return (0,) if _spare(state, resident.job) > 0 else ()


def _spare(state: RoundState, job: Job) -> int:
    """Return how many hosts a job can give back now."""
    wide = multi_node_job(state, job) if _stoppable(state, job) else None
    return wide.spare if wide is not None else 0


def _leave(state: RoundState, job: Job, hosts: Sequence[HostState], reason: str) -> None:
    """Take hosts from a job that can spare them."""
    wide = multi_node_job(state, job)
    if wide is not None:
        give_back(state, wide, hosts, f"gives GPUs of {', '.join(host.name for host in hosts)} back: {reason}")


def _shrink_beside(state: RoundState, host: HostState, waiting: Resident) -> None:
    """Shrink all jobs that have GPUs of a job without a lease to GPUs of their own, if they all can."""
    rivals = [t for t in host.residents.values() if t.job.key != waiting.job.key and t.gpus & waiting.gpus]
    if not rivals or not host.usable or not all(_sizes_on(state, rival) for rival in rivals):
        return
    # Slurm chose the waiting job's own GPUs at its start, so those of the others change, on any lane.
    narrow = [rival for rival in rivals if _resizable(state, rival)]
    for rival in rivals:
        host.leave(rival)
    seated: list[tuple[Resident, ResourceRequest, Seat]] = []
    for rival in sorted(narrow, key=lambda rival: (-rival.request.gpus, rival.job.key)):
        smaller = _smaller(state, host, rival)
        if smaller is None:
            break
        seated.append((rival, *smaller))
        host.enter(rival.job, *smaller)
    for rival, _, _ in seated:
        host.leave(host.residents[rival.job.key])
    for rival in rivals:
        host.stay(rival)
    if len(seated) == len(narrow):
        reason = f"job {waiting.job.key} waits for them"
        for rival, request, seat in seated:
            state.resize(rival.job, host, seat, request, f"gives GPUs of {host.name} back: {reason}")
        for rival in [rival for rival in rivals if rival not in narrow]:
            _leave(state, rival.job, (host,), reason)


def _smaller(state: RoundState, host: HostState, resident: Resident) -> tuple[ResourceRequest, Seat] | None:
    """Return the largest smaller size of a job for which a lane has GPUs that no other job has."""
    for size in reversed(state.sizes(resident.job)):
        request = sized(resident.request, size)
        seat = (
            next((seat for seat in host.seats(request) if seat.sharers == 0), None)
            if size < resident.request.gpus
            else None
        )
        if seat is not None:
            return request, seat
    return None


def _resizable(state: RoundState, resident: Resident) -> bool:
    """Return True if a job may be resized within its host, however recently it was: a grown job gives back at once."""
    job = resident.job
    return len(job.nodes) == 1 and state.asked_nodes(job) == 1 and _stoppable(state, job)


def _stoppable(state: RoundState, job: Job) -> bool:
    """Return True if a job is ours to stop, with a checkpoint, and to start again."""
    lease = job.lease
    return (
        job.key in state.jobs.ours
        and job.key not in state.where.fixed
        and job.key not in state.who.packed
        and job.requeueable
        and lease is not None
        and lease.checkpoints
        and lease.state in ("held", "yielded")
        and (lease.ready or lease.state == "yielded")
    )


def explain_sizes(state: RoundState) -> None:
    """Say why jobs that could run with other numbers of GPUs are not resized."""
    for key, job in state.jobs.ours.items():
        if reason := _fixed_size_reason(state, job):
            state.outcome.say("size", key, reason)


def _fixed_size_reason(state: RoundState, job: Job) -> str | None:
    """Return why a job that could run with other numbers of GPUs is not resized, None if it may be."""
    lease = job.lease
    if lease is None or len(state.sizes(job)) == 1:
        return None
    checks = (
        (len(job.nodes) > 1 and multi_node_job(state, job) is None, "its nodes do not all have the same"),
        (not job.requeueable, "Slurm may not requeue it (no batch job, or --no-requeue)"),
        (bool(lease.requeue_owner), f"{lease.requeue_owner} requeues it"),
        (
            lease.ready and lease.state == "held" and not lease.checkpoints,
            "it saves no checkpoints (client.checkpoint)",
        ),
    )
    return next((f"its size stays: {reason}" for applies, reason in checks if applies), None)


# --- Grow ----------------------------------------------------------------------------------------------


def grow(state: RoundState) -> None:
    """Give jobs the GPUs of their host that have been idle long enough, as long as no job waits in a queue."""
    before = dict(state.memory.sharing.spare_s)
    spare = tuple((host.name, before.get(host.name, state.now_s)) for host in state.where.hosts.values() if host.idle())
    state.remember(spare_s=spare)
    if state.slurm.to_place or state.slurm.queued:
        return
    hosts = state.where.hosts.values()
    if any(host.overcommit > 1 or any(map(lacks_lease, host.residents.values())) for host in hosts):
        return
    idle = [state.where.hosts[name] for name, since_s in spare if state.now_s - since_s >= state.gandiva.idle_s]
    for host in idle:
        _grow_on(state, host)
    if idle:
        _grow_over(state, idle)


def undo_growth(state: RoundState) -> None:
    """Give jobs that gained nothing by growing their former size back; what they gained is in the memory."""
    vain = _grown_in_vain(state)
    if not vain:
        return
    grown = [(host, t) for host in state.where.hosts.values() for t in host.residents.values() if t.job.key.id in vain]
    for host, resident in grown:
        row = vain[resident.job.key.id]
        if resident.request.gpus > row.gpus and row.gpus in state.sizes(resident.job) and _resizable(state, resident):
            _resize(state, host, resident, row.gpus, f"goes back to {row.gpus} GPUs: {row.vain}")
    for job in [job for job in state.jobs.ours.values() if job.key.id in vain and _spare(state, job)]:
        row, wide = vain[job.key.id], multi_node_job(state, job)
        hosts = wide.hosts[row.gpus // wide.request.gpus :] if wide is not None else ()
        if wide is not None and hosts:
            give_back(state, wide, hosts, f"goes back to {row.gpus} GPUs: {row.vain}")


def _grown_in_vain(state: RoundState) -> dict[int, Growth]:
    return {row.id: row for row in state.memory.sharing.growths if row.vain}


def _grow_on(state: RoundState, host: HostState) -> None:
    vain = _grown_in_vain(state)
    residents = [t for t in host.residents.values() if _resizable(state, t) and state.may(t.job)]
    for resident in sorted(residents, key=lambda resident: (-_rate(resident.job), resident.job.key)):
        spare = host.idle()
        most = resident.request.gpus + spare
        if resident.job.key.id in vain:
            most = min(most, vain[resident.job.key.id].gpus)
        size = max((size for size in state.sizes(resident.job) if size <= most), default=resident.request.gpus)
        if size > resident.request.gpus:
            _resize(state, host, resident, size, f"grows to {size} GPUs: those of {host.name} have been idle")


def _grow_over(state: RoundState, idle: Sequence[HostState]) -> None:
    """Give jobs of several hosts more of them, of those that have been idle long enough."""
    vain = _grown_in_vain(state)
    able = [job for job in state.jobs.ours.values() if _stoppable(state, job)]
    for job in sorted(able, key=lambda job: (-_rate(job), job.key)):
        wide = multi_node_job(state, job) if state.may(job) else None
        if wide is not None:
            most = vain[job.key.id].gpus // wide.request.gpus if job.key.id in vain else wide.most
            grow_by_hosts(state, wide, idle, most)


def _rate(job: Job) -> float:
    """Return iterations a second."""
    seconds = job.lease.iteration_s if job.lease is not None else None
    return 1.0 / seconds if seconds else 0.0


def _resize(state: RoundState, host: HostState, resident: Resident, size: int, reason: str) -> None:
    """Resize a job within its host, if a lane has the GPUs; a job that grows gets only GPUs that no other job has."""
    wanted, grows = sized(resident.request, size), size > resident.request.gpus
    host.leave(resident)
    known = all(
        resident.gpus for resident in host.residents.values()
    )  # where an agent has not named some, which are free?
    room = known and host.usable and host.has_host_memory_for(wanted)
    seats = host.seats(wanted) if room or not grows else []
    host.stay(resident)
    if seats and (seats[0].sharers == 0 or not grows):
        state.resize(resident.job, host, seats[0], wanted, reason)
