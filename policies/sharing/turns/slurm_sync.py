"""Turns on a live cluster and Slurm's allocation: yields, resumes, suspends, requeues and releases.

Every round compares the snapshot with the jobs that should hold GPUs and emits what is missing; it remembers
only what the snapshot cannot show (whose suspend, hold or drain it was), so a lost action is sent again.

Before maintenance, that is once lane 0 of a host is drained, its further lanes are drained too, its jobs go
on taking turns until they end, and none of them stays suspended in Slurm, because Slurm shows a node with
nothing but suspended jobs as drained, that is ready to be switched off. One whose word is not enough is suspended
while others have its GPUs, and so run on that host.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from functools import partial

from cadenza.policies.core.actions import (
    Action,
    Release,
    Requeue,
    Resize,
    Resume,
    SetFactor,
    Suspend,
    Unsuspend,
    Yield,
)  # fmt: skip
from cadenza.policies.core.decision import Memory, Sentences
from cadenza.policies.core.model import MAX_REFUSALS, ClusterSnapshot, Gpu, Job, JobKey, Lease
from cadenza.policies.core.move import Ordered
from cadenza.policies.core.text import gpu_names, job_names, jobs_called, lost_text
from cadenza.policies.sharing.state.groups import partners
from cadenza.policies.sharing.state.pending import our_pins, pins_over
from cadenza.policies.sharing.state.settings import SharingSettings, exclusion_reason, held_for_us
from cadenza.policies.sharing.state.sharing_state import SharingState, holds
from cadenza.policies.sharing.turns.contender import preferred
from cadenza.policies.sharing.turns.debts import with_debts
from cadenza.policies.sharing.turns.fair_queue import Contender, groups, next_turn
from cadenza.policies.sharing.turns.lane0_queue import Lane0Queue
from cadenza.policies.sharing.turns.lanes import hosts_to_leave, waits_for_lane

MAX_NAMED = 6
"""Number of jobs of a group that a reason names."""
LAST_PRIORITY = -(10**9)
"""Priority of a job on a further lane that came after an unmanaged job which queues for lane 0."""
HOLD_OVER = "the move or suspend that it was held for is over"
NOT_ASKED = "has started without its lease, as its option `late` says, and has not asked for it yet"


def take_turns(state: SharingState) -> None:
    """Decide which jobs have GPUs once this round is done, and which leave their hosts."""
    settings = state.settings
    # 1. The jobs that use GPUs or wait for them, packed ones with their partners. A job that has its GPUs alone keeps
    #    them, which is all that a turn would say.
    co_runners = partners(state.groups)
    alone = state.alone = _alone(state)
    state.holders |= alone.keys()
    contenders = [
        _contender(job, priority, state, co_runners.get(job.key, frozenset()))
        for job, priority in _by_priority(state, alone)
        if (lease := job.lease) is not None
        and not lease.late
        and (job.state in ("RUNNING", "SUSPENDED") or lease.state in ("held", "stopping"))
    ]
    contenders = [replace(c, state="stopping") if c.key in state.stopping else c for c in contenders]
    contenders = with_debts(contenders, state)
    # 2. Where turns follow the ordering, the first in it comes first on its GPUs.
    if settings.turns == "order":
        first = preferred(contenders, state.ranks)
        contenders = [replace(c, preferred=True) if c.key in first else c for c in contenders]
    # 3. One turn for each group of jobs that share GPUs.
    kinds = ("RUNNING", "SUSPENDED") if contenders else ()
    resumable = {job.key for kind in kinds for job, _ in state.managed(kind)}
    for group in groups(contenders):
        turn = next_turn(
            group,
            slice_s=settings.slice_s,
            share_between_users=settings.share_between_users,
            min_run_s=settings.min_run_s,
        )
        names = [str(member.key) for member in group]
        for number, member in enumerate(group):
            others = _others(names[:number] + names[number + 1 :])
            state.turn_reasons[member.key] = turn.reasons[member.key] + others
        state.holders |= turn.holders
        state.yields += [Yield(key, turn.reasons[key]) for key in turn.yields]
        # An unmanaged job gets its lease from the agent alone.
        coming = [key for key in (*turn.resumes, *turn.upcoming) if key in resumable]
        state.resumes += [Resume(key, turn.reasons[key]) for key in coming]
    asked = {action.job for action in state.yields}
    state.yields += [action for action in _halves(state) if action.job not in asked]
    list_departures(state)


def list_departures(state: SharingState) -> None:
    """List the jobs that leave their hosts: they stay where they are until they have left."""
    snapshot, jobs = state.snapshot, state.all_jobs
    drained, host = hosts_to_leave(snapshot), snapshot.host_of
    leaving = (j.key for j in jobs if any(host.get(name) in drained for name in j.nodes)) if drained else ()
    state.leaving = frozenset(leaving)
    # On lane 0 alone only a job that is lost gives its place back.
    able = state.leased if state.further else [j for j in state.leased if j.lease is not None and j.lease.lost]
    state.giving_back = {j.key: reason for j in able if (reason := _requeue_reason(j, state))}
    state.fixed |= state.leaving | state.giving_back.keys()


def sync_slurm(state: SharingState) -> None:
    """Order what the turns need of agents and of Slurm, in the order in which it is to be done."""
    settings, memory = state.settings, state.memory
    running = state.managed("RUNNING")
    moved = {action.job for action in state.moves} | {key for way in state.ways for key in way.jobs}
    resized = {action.job for action in state.moves if isinstance(action, Resize)}
    # 1. Slurm's resume comes before the yields, so that a job stands ready when its GPUs are free. Whatever the reason,
    #    a job whose word is not enough for that comes later: it stays suspended until they are free.
    suspended = [job for job in state.started if _suspended_by_us(job, state)]
    frozen = {job.key for job in suspended if state.stays_frozen(job)}
    saving = {move.job for move in memory.moves if isinstance(move.phase, Ordered)}
    unsuspends = [
        Unsuspend(job.key, reason)
        for job in suspended
        if job.key not in frozen and (reason := _unsuspend_reason(job, state, moved, saving))
    ]
    # 2. Yields, but for jobs that stop anyway to be resized.
    yields = [action for action in state.yields if action.job not in resized]
    # 3. Suspends of jobs whose turn is over, but for those that move: they may get GPUs at once where they go.
    going = {job.key for job, _ in running if job.relocating is not None}
    staying = {job.key for job, _ in running if job.key in state.leaving and not state.stays_frozen(job)}
    spared = state.holders | staying | state.giving_back.keys() | moved | going
    suspends = [
        Suspend(job.key, "its turn is over, so Slurm stops its time limit and frees its CPUs")
        for job, lease in running
        if settings.suspend and job.key not in spared and _may_be_suspended(job, lease, state)
    ]
    # 4. Requeues of jobs that cannot go on, or that give their lane back. Slurm brings a suspended one back held, so it
    #    is resumed before, unless others have its GPUs.
    requeues = [
        Requeue(job.key, hold=False, reason=state.giving_back[job.key])
        for job in (*(job for job, _ in running), *suspended)
        if job.key in state.giving_back and (job.state == "RUNNING" or job.key in frozen)
    ]
    # 5. Releases: holds of moves and suspends that are over, jobs whose lane is back, and pins that have ended.
    unpinned, held = pins_over(state), [job for job in state.queue if not job.slurm_priority]
    releases = [
        Release(
            job.key,
            exclusion_reason(job, settings) or HOLD_OVER,
            unpin=job.key.restart > 0,  # an earlier incarnation may carry the nodes that we chose for it
        )
        for job in held
        if held_for_us(job, memory)
    ]
    releases += [
        Release(job.key, "the lane that it needs is there again")
        for job in held
        if waits_for_lane(job, state.snapshot) and not held_for_us(job, memory)
    ]
    releases += [Release(key, reason, unpin=True) for key, reason in unpinned.items()]
    for key, reason in unpinned.items():
        state.placement_reasons.setdefault(key, reason)
    state.slurm_actions = (*unsuspends, *yields, *state.resumes, *suspends, *requeues, *releases)


def release_all(state: SharingState) -> None:
    """Undo our suspends, holds and pins, because jobs do not share."""
    state.slurm_actions = release_plan(state.snapshot, state.memory, "sharing is off")


def explain(state: SharingState) -> None:
    """Give every job that opted in a sentence; an action on a job says more than its turn."""
    waiting, state.waiting_reasons = state.waiting_reasons, dict  # the state of a round is in no cycle
    state.reasons = Sentences(partial(_sentences, state, waiting))


def _sentences(state: SharingState, waiting: Callable[[], Mapping[JobKey, str]]) -> dict[JobKey, str]:
    state.placement_reasons |= waiting()
    for key, own in state.alone.items():
        state.turn_reasons[key] = f"holds {gpu_names(own.gpus)} for {own.held_s:.0f} s; no job waits for it"
    found: dict[JobKey, str] = {}
    further = [more for more in (state.stranded, state.size_reasons, state.keeps_cpus) if more]
    owed_s = {debt[:2]: debt.owed_s for debt in state.memory.sharing.debts}
    for job in state.snapshot.jobs:
        if job.options is not None:
            reason = _reason(job, state, owed_s.get(job.key, 0.0))
            if further:
                reason = "; ".join(filter(None, (reason, *(more.get(job.key) for more in further))))
            found[job.key] = reason
    for key, reason in (
        *state.pack_reasons.items(),
        *((action.job, action.reason) for action in state.moves),
        *((key, way.reason) for way in state.ways for key in way.jobs),
        *state.repair_reasons.items(),
    ):
        if key in found:
            found[key] = reason
    return found


# --- Turns ---------------------------------------------------------------------------------------------


def _alone(state: SharingState) -> dict[JobKey, Lease]:
    """Return the leases of running jobs that have their GPUs to themselves; none where hosts have further lanes."""
    found: dict[JobKey, Lease] = {}
    if state.further:
        return found
    gpus = [gpu for job in state.leased for gpu in job.leased_gpus]
    by_gpu = state.by_gpu if len(set(gpus)) < len(gpus) else None  # as a rule no GPU has two
    for job in state.jobs.values():
        lease = job.lease
        if lease is not None and lease.state == "held" and job.state == "RUNNING" and job.num_nodes == 1:
            stays = not lease.exclusive and job.key not in state.stopping and job.key not in state.packed
            own = by_gpu is None or all(len(by_gpu[gpu]) == 1 for gpu in lease.gpus)
            if stays and not lease.late and own:
                found[job.key] = lease
    return found


def _by_priority(state: SharingState, but: Container[JobKey]) -> list[tuple[Job, int]]:
    """Return each job that has a lease, with its priority.

    It is the last on a further lane, if the job came after one that queues for lane 0.
    """
    further, settings = state.further, state.settings
    last: set[JobKey] = set()
    if further:
        queue = Lane0Queue(state.snapshot, settings)
        last = {job.key for job in state.all_jobs if not further.isdisjoint(job.nodes) and queue.is_before(job)}
    return [
        (job, LAST_PRIORITY if job.key in last else settings.priority(job))
        for job in state.leased
        if job.key not in but
    ]


def _others(names: list[str]) -> str:
    if not names:
        return ""
    return f" (takes turns with {jobs_called(names) if len(names) <= MAX_NAMED else f'{len(names)} jobs'})"


def _contender(job: Job, priority: int, state: SharingState, partners: frozenset[JobKey]) -> Contender:
    """Return a job as a contender; one that is not ours to stop or start is only in the others' way.

    Only on lane 0 a job that does not share has its GPUs for itself: there Slurm has given them to it alone.
    """
    lease = job.lease or Lease("waiting", ())
    ours = job.state == "RUNNING" or (job.state == "SUSPENDED" and job.key in state.memory.suspended)
    managed, first = state.settings.manages(job), state.further.isdisjoint(job.nodes)
    return Contender(
        key=job.key,
        gpus=frozenset(lease.gpus) | _unreported_gpus(job, lease, state),
        user=job.user,
        state=lease.state,
        priority=priority,
        weight=lease.weight,
        vtime_s=lease.vtime_s,
        held_s=lease.held_s,
        waited_s=lease.waited_s,
        ready=lease.ready and ours and managed,
        exclusive=(lease.exclusive or not managed) and first,
        iteration_s=lease.iteration_s,
        eligible=ours and (managed or first) and not lease.no_room,
        packed_with=partners,
    )


def _unreported_gpus(job: Job, lease: Lease, state: SharingState) -> frozenset[Gpu]:
    """Return the GPUs of a job of several hosts where no step of it has come yet: the lowest free ones of its lane.

    Its script may begin on any of its hosts. Two such jobs that begin on different hosts would each get the GPUs that
    the other one lacks, and neither could start or be stopped.
    """
    if job.num_nodes == 1:
        return frozenset()
    reported, host_of = {gpu.host for gpu in lease.gpus}, state.snapshot.host_of
    if all(host_of.get(name) in reported for name in job.nodes):
        return frozenset()
    here = [state.by_node.get(name) for name in job.nodes]
    missing = [host for host in here if host is not None and host.name not in reported and job.key in host.residents]
    return frozenset(Gpu(host.name, index) for host in missing for index in host.expected_gpus(job.key))


def _halves(state: SharingState) -> list[Yield]:
    """Return the yields that a job lacks which has its GPUs on one host already and waits on another.

    It counts as a holder, so no turn is taken for it; but it cannot run, and meets a holder that can be stopped.
    """
    running = state.managed("RUNNING")
    halves = [job for job, lease in running if job.num_nodes > 1 and lease.state == "held" and not lease.ready]
    held = [(job, lease) for job, lease in running if lease.state == "held"] if halves else []
    priority = state.settings.priority
    blocking = {
        job.key: half.key
        for half in reversed(halves)
        for job, lease in held
        if lease.ready and _meet(job, half) and priority(job) <= priority(half)
    }
    return [
        Yield(key, f"makes way for job {half}, which has its GPUs on other hosts already")
        for key, half in sorted(blocking.items())
    ]


# --- Slurm's allocation --------------------------------------------------------------------------------


def _may_be_suspended(job: Job, lease: Lease, state: SharingState) -> bool:
    """Return True for a job that has yielded and saves no checkpoint now, or that waits for its first turn."""
    return (lease.state == "yielded" and not lease.saving) or _waits_long(job, lease, state)


def _waits_long(job: Job, lease: Lease, state: SharingState) -> bool:
    """Return True if a job that never ran is past its launch, in which Slurm should not be asked to suspend it."""
    started = job.start_s if job.start_s is not None else state.now_s
    return lease.state == "waiting" and not lease.late and state.now_s - started > state.settings.min_run_s


def _suspended_by_us(job: Job, state: SharingState) -> bool:
    return job.state == "SUSPENDED" and job.key in state.memory.suspended


def _unsuspend_reason(job: Job, state: SharingState, moved: set[JobKey], saving: set[JobKey]) -> str | None:
    """Return why Slurm resumes a job that we suspended, None if it stays suspended.

    ``moved``: jobs that begin a move in this round; ``saving``: those on their way that are to save a checkpoint.
    """
    settings = state.settings
    checks = (
        (not settings.enforce or not settings.suspend, "jobs are not to be suspended any more"),
        (not settings.manages(job), exclusion_reason(job, settings) or "left alone: the job does not opt in any more"),
        (job.lease is None, "no agent knows the job any more, so none would give it a turn"),
        (job.lease is not None and job.lease.state in ("held", "stopping"), "its turn has come"),
        (job.key in state.holders, "its turn has come"),
        (job.key in state.leaving, "its host is drained, which must not look finished while the job is there"),
        (job.key in state.giving_back, "it gives its place back"),
        (job.key in moved, "it moves, and saves its checkpoint before"),
        (job.key in saving, "is to save a checkpoint, for which its processes must run"),
        (job.lease is not None and job.lease.saving, "its state goes to a disk, for which its processes must run"),
    )
    return next((reason for applies, reason in checks if applies), None)


def _requeue_reason(job: Job, state: SharingState) -> str | None:
    """Return why a job that cannot go on, or that gives its further lane back, is requeued; None if it stays."""
    lease, snapshot, settings = job.lease, state.snapshot, state.settings
    if lease is None or lease.late or not job.requeueable or not settings.manages(job):
        return None
    if lease.lost or state.further.isdisjoint(job.nodes):
        return lost_text(lease, requeueable=True) if lease.lost else None
    near = dict(rival for gpu in lease.gpus for rival in state.by_gpu[gpu] if rival[1].key != job.key)
    rivals = [near[place] for place in sorted(near) if not near[place].starts_unleased]
    # It never ran, and has waited too long behind a job that cannot be stopped.
    if lease.state == "waiting":
        waited_s = snapshot.time_s - (job.start_s if job.start_s is not None else snapshot.time_s)
        late = waited_s > settings.lease_wait_s
        met = [other.key for other in rivals if late and _cannot_stop(other, settings)]
        return f"gives its place back after {waited_s:.0f} s: {job_names(met)} cannot be stopped" if met else None
    # It refuses to stop, and another job waits for its GPUs.
    waiting = [other.key for other in rivals if not holds(other)]
    if holds(job) and lease.refusals >= MAX_REFUSALS and waiting:
        return f"gives its place back: it did not stop {lease.refusals} times, and {job_names(waiting)} waited"
    # It cannot be stopped, and another job has waited long enough for it.
    stuck = _cannot_stop(job, settings)
    if kept := [other.key for other in rivals if stuck and _waits_unmanaged(other.lease, settings)]:
        return f"cannot be stopped and is in the way of job {min(kept)}, which did not opt in"
    started = lease.held_s > settings.lease_wait_s  # before, it may only not have attached yet
    behind = [other.key for other in rivals if stuck and started and _waits_too_long(other, state)]
    return f"gives its place back: it cannot be stopped, and {job_names(behind)} waited" if behind else None


def _waits_unmanaged(lease: Lease | None, settings: SharingSettings) -> bool:
    waits = lease is not None and lease.exclusive and lease.state == "waiting"
    return waits and lease is not None and lease.waited_s > settings.unmanaged_wait_s


def _waits_too_long(job: Job, state: SharingState) -> bool:
    """Return True if a job that keeps its place, because it ran there or has lane 0, is past the longest wait."""
    lease = job.lease
    stays = lease is not None and (lease.state == "yielded" or state.further.isdisjoint(job.nodes))
    ours = job.state == "RUNNING" or _suspended_by_us(job, state)
    waits = lease is not None and not holds(job) and lease.waited_s > state.settings.lease_wait_s
    return stays and ours and waits and state.settings.manages(job)


def _cannot_stop(job: Job, settings: SharingSettings) -> bool:
    held = job.lease is not None and job.lease.state == "held"
    return held and not (job.lease is not None and job.lease.ready and settings.manages(job))


def _meet(job: Job, other: Job) -> bool:
    mine, theirs = job.lease, other.lease
    return (
        job.key != other.key and mine is not None and theirs is not None and not set(mine.gpus).isdisjoint(theirs.gpus)
    )


def release_plan(
    snapshot: ClusterSnapshot, memory: Memory, reason: str, *, everything: bool = False
) -> tuple[Action, ...]:
    """Return the actions that undo our suspends, holds and pins (pure); those of others stay.

    Suspends come first: their jobs have GPU state in host memory, the others have nothing yet. ``everything``: also
    the SiteFactors of all jobs that live.
    """
    jobs = sorted(snapshot.jobs, key=lambda job: job.key)
    ours = [job for job in jobs if job.state == "SUSPENDED" and job.key in memory.suspended]
    held = [job for job in jobs if held_for_us(job, memory)]
    return (
        *(Unsuspend(job.key, reason) for job in ours),
        *(Release(job.key, reason) for job in held),
        *(Release(job.key, reason, unpin=True) for job in our_pins(snapshot, memory)),
        *(SetFactor(job.key, 0, reason) for job in jobs if everything and memory.factors.get(job.key.id)),
    )


# --- Reasons -------------------------------------------------------------------------------------------


def _reason(job: Job, state: SharingState, owed_s: float) -> str:
    """Return the sentence of a job by its state, when no action says more."""
    reason = exclusion_reason(job, state.settings) or state.placement_reasons.get(job.key)
    if reason is not None:
        return reason
    if job.held:
        return "left alone: held by its owner or an admin"
    if job.state == "PENDING":
        return f"pending in Slurm ({job.state_reason or 'no reason given'}), which starts it on a free lane"
    if job.state == "SUSPENDED" and not _suspended_by_us(job, state):
        return "left alone: suspended by its owner or an admin"
    if job.lease is None:
        return "no agent knows the job, so it runs as without Cadenza"
    turn = state.turn_reasons.get(job.key, "left alone: neither pending, running nor suspended")
    turn = NOT_ASKED if job.lease.late else turn
    turn = f"{turn}; {job.lease.no_room}" if job.lease.no_room else turn
    early = f"; {job.lease.early}: it waits at the start from now on" if job.lease.early else ""
    turn += early + _in_debt(owed_s) + _not_ready(job, job.lease) + _taken(job, job.lease, state.snapshot)
    return state.giving_back.get(job.key, turn)


def _in_debt(owed_s: float) -> str:
    return f"; its last start had its GPUs for {owed_s:.0f} s while others waited, which counts" if owed_s else ""


def _taken(job: Job, lease: Lease, snapshot: ClusterSnapshot) -> str:
    """Name the processes without a lease on the hosts of a job that waits for its GPUs."""
    if lease.state == "held":
        return ""
    taken, host_of = snapshot.taken, snapshot.host_of
    found = [taken[host] for host in sorted({host_of.get(name, "") for name in job.nodes}) if host in taken]
    return f"; {found[0]}" if found else ""


def _not_ready(job: Job, lease: Lease) -> str:
    if lease.lost:
        return f"; {lost_text(lease, requeueable=job.requeueable)}"
    return f"; cannot be stopped: {lease.why_not_ready}" if lease.why_not_ready and not lease.ready else ""
