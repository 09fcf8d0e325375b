"""Turns on a live cluster and Slurm's allocation: yields, resumes, suspends, requeues and releases.

Every round compares the snapshot with the jobs that should hold GPUs and emits what is missing; it remembers
only what the snapshot cannot show (whose suspend, hold or drain it was), so a lost action is sent again.

Before maintenance, that is once lane 0 of a host is drained, its further lanes are drained too, its jobs go
on taking turns until they end, and none of them stays suspended in Slurm, because Slurm shows a node with
nothing but suspended jobs as drained, that is ready to be switched off. One whose word is not enough is suspended
while others have its GPUs, and so run on that host.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from itertools import chain

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
from cadenza.policies.core.decision import Memory
from cadenza.policies.core.model import MAX_REFUSALS, ClusterSnapshot, Gpu, Job, JobKey, Lease
from cadenza.policies.core.move import Ordered
from cadenza.policies.core.text import job_names, jobs_called, lost_text
from cadenza.policies.sharing.state.groups import partners
from cadenza.policies.sharing.state.pending import our_pins, pins_over
from cadenza.policies.sharing.state.round_state import RoundState, holds, meet
from cadenza.policies.sharing.state.settings import SharingSettings, exclusion_reason, held_for_us
from cadenza.policies.sharing.turns.contender import preferred
from cadenza.policies.sharing.turns.debts import with_debts
from cadenza.policies.sharing.turns.fair_queue import Contender, groups, next_turn
from cadenza.policies.sharing.turns.lane0_queue import Lane0Queue
from cadenza.policies.sharing.turns.lanes import hosts_to_leave

MAX_NAMED = 6
"""Number of jobs of a group that a reason names."""
LAST_PRIORITY = -(10**9)
"""Priority of a job on a further lane that came after an unmanaged job which queues for lane 0."""
HOLD_OVER = "the move or suspend that it was held for is over"


def take_turns(state: RoundState) -> None:
    """Decide which jobs have GPUs once this round is done, and which leave their hosts."""
    settings, who = state.settings, state.who
    # 1. The jobs that use GPUs or wait for them, packed ones with their partners. A job that has its GPUs alone keeps
    #    them, which is all that a turn would say.
    co_runners = partners(who.groups)
    alone = who.alone = _alone(state)
    who.holders |= alone.keys()
    contenders = [
        _contender(job, priority, state, co_runners.get(job.key, frozenset()))
        for job, priority in _by_priority(state, alone)
        if (lease := job.lease) is not None and not lease.late and (job.state in ("RUNNING", "SUSPENDED") or holds(job))
    ]
    contenders = [replace(c, state="stopping") if c.key in who.stopping else c for c in contenders]
    contenders = with_debts(contenders, state)
    # 2. Where turns follow the ordering, the first in it comes first on its GPUs.
    if settings.turns == "order":
        first = preferred(contenders, state.ranks)
        contenders = [replace(c, preferred=True) if c.key in first else c for c in contenders]
    # 3. One turn for each group of jobs that share GPUs.
    managed = state.managed if contenders else ()
    resumable = {job.key for job, _ in managed if job.state in ("RUNNING", "SUSPENDED")}
    for group in groups(contenders):
        turn = next_turn(
            group,
            slice_s=settings.slice_s,
            share_between_users=settings.share_between_users,
            min_run_s=settings.min_run_s,
        )
        names = [str(member.key) for member in group]
        for number, member in enumerate(group):
            others = names[:number] + names[number + 1 :]
            called = jobs_called(others) if len(others) <= MAX_NAMED else f"{len(others)} jobs"
            with_others = f" (takes turns with {called})" if others else ""
            state.outcome.say("turn", member.key, turn.reasons[member.key] + with_others)
        who.holders |= turn.holders
        who.yields += [Yield(key, turn.reasons[key]) for key in turn.yields]
        # An unmanaged job gets its lease from the agent alone, as soon as the others have stopped: no order of the
        # service may depend on a job that never agreed to obey one.
        coming = [key for key in (*turn.resumes, *turn.upcoming) if key in resumable]
        who.resumes += [Resume(key, turn.reasons[key]) for key in coming]
    # 4. Two jobs of several hosts that each hold a part of the other's GPUs would wait for each other for good.
    asked = {action.job for action in who.yields}
    who.yields += [action for action in _halves(state) if action.job not in asked]
    # 5. Jobs that leave stay where they are until they have left.
    list_departures(state)


def list_departures(state: RoundState) -> None:
    """List the jobs that leave their hosts; no other stage moves them."""
    snapshot, jobs = state.snapshot, state.jobs.all
    drained, host = hosts_to_leave(snapshot), snapshot.host_of
    leaving = (j.key for j in jobs if any(host.get(name) in drained for name in j.nodes)) if drained else ()
    state.who.leaving = frozenset(leaving)
    # On lane 0 Slurm has given each GPU to one job, so a job there is in no other's way: only one that is lost gives
    # its place back.
    leased = state.jobs.leased
    able = leased if state.where.further else [j for j in leased if j.lease is not None and j.lease.lost]
    giving_back = {j.key: reason for j in able if (reason := _requeue_reason(j, state))}
    for key, reason in giving_back.items():
        state.outcome.say("back", key, reason)
    state.who.giving_back = frozenset(giving_back)
    state.where.fixed |= state.who.leaving | state.who.giving_back


def sync_slurm(state: RoundState) -> None:
    """Order what the turns need of agents and of Slurm, in the order in which it is to be done."""
    settings, memory, who, outcome = state.settings, state.memory, state.who, state.outcome
    running = [(job, lease) for job, lease in state.managed if job.state == "RUNNING"]
    moved = {action.job for action in outcome.moves} | {key for way in outcome.ways for key in way.jobs}
    resized = {action.job for action in outcome.moves if isinstance(action, Resize)}
    # 1. Slurm's resume comes before the yields, so that a job stands ready when its GPUs are free: it looks at no free
    #    resources. Whatever the reason, a job whose word is not enough for that comes later: it stays suspended until
    #    its GPUs are free.
    suspended = [job for job in state.jobs.started if _suspended_by_us(job, state)] if memory.suspended else []
    frozen = {job.key for job in suspended if state.stays_frozen(job)}
    saving = {move.job for move in memory.moves if isinstance(move.phase, Ordered)} if suspended else set()
    unsuspends = [
        Unsuspend(job.key, reason)
        for job in suspended
        if job.key not in frozen and (reason := _unsuspend_reason(job, state, moved, saving))
    ]
    # 2. Yields, but for jobs that stop anyway to be resized.
    yields = [action for action in who.yields if action.job not in resized]
    # 3. Suspends of jobs whose turn is over, but for those that move: they may get GPUs at once where they go. Slurm
    #    stops the time limit of a suspended job and frees its CPUs; its GPUs and memory stay its own in Slurm's books.
    standing = [(job, lease) for job, lease in running if lease.state in ("waiting", "yielded") and settings.suspend]
    spared = who.holders | who.giving_back | moved
    suspends = [
        Suspend(job.key, "its turn is over, so Slurm stops its time limit and frees its CPUs")
        for job, lease in standing
        if job.key not in spared and job.relocating is None and _may_be_suspended(job, lease, state)
        if job.key not in who.leaving or state.stays_frozen(job)
    ]
    # 4. Requeues of jobs that cannot go on, or that give their lane back. A suspend sets the priority to 0, so Slurm
    #    brings a suspended one back held: it is resumed before, unless others have its GPUs.
    requeues = [
        Requeue(job.key, hold=False, reason=outcome.reasons[job.key]["back"])
        for job in (*(job for job, _ in running), *suspended)
        if job.key in who.giving_back and (job.state == "RUNNING" or job.key in frozen)
    ]
    # 5. Releases: holds of moves and suspends that are over, and pins that have ended. Slurm never ends a hold, nor a
    #    list of required nodes, by itself: what is ours in a job's way is ours to take out.
    unpinned, held = pins_over(state), [job for job in state.jobs.queue if not job.slurm_priority]
    releases = [
        Release(
            job.key,
            exclusion_reason(job, settings) or HOLD_OVER,
            unpin=job.key.restart > 0,  # an earlier incarnation may carry the nodes that we chose for it
        )
        for job in held
        if held_for_us(job, memory)
    ]
    releases += [Release(key, reason, unpin=True) for key, reason in unpinned.items()]
    for key, reason in unpinned.items():
        outcome.say("pin", key, reason)
    outcome.slurm_actions = (*unsuspends, *yields, *who.resumes, *suspends, *requeues, *releases)


def release_all(state: RoundState) -> None:
    """Undo our suspends, holds and pins, because jobs do not share."""
    state.outcome.slurm_actions = release_plan(state.snapshot, state.memory, "sharing is off")


# --- Turns ---------------------------------------------------------------------------------------------


def _alone(state: RoundState) -> dict[JobKey, Lease]:
    """Return the leases of running jobs that have their GPUs to themselves; none where hosts have further lanes."""
    found: dict[JobKey, Lease] = {}
    if state.where.further:
        return found
    gpus = [*chain.from_iterable([job.leased_gpus for job in state.jobs.leased])]
    by_gpu = state.jobs.by_gpu if len(set(gpus)) < len(gpus) else None  # as a rule no GPU has two
    # A job of several hosts may get GPUs of others on those that have not reported it yet.
    wide = [job for job in state.jobs.leased if job.num_nodes > 1]
    known = not state.memory.sharing.debts and not any(_unreported_hosts(job, state) for job in wide)
    stopping, packed = state.who.stopping, state.who.packed
    for key, job in state.jobs.ours.items():
        lease = job.lease
        if lease is not None and lease.state == "held" and job.state == "RUNNING" and (job.num_nodes == 1 or known):
            stays = not (lease.exclusive or lease.late or key in stopping or key in packed)
            if stays and (by_gpu is None or all(len(by_gpu[gpu]) == 1 for gpu in lease.gpus)):
                found[key] = lease
    return found


def _by_priority(state: RoundState, but: Container[JobKey]) -> list[tuple[Job, int]]:
    """Return each job that has a lease, with its priority.

    It is the last on a further lane, if the job came after one that queues for lane 0.
    """
    further, settings = state.where.further, state.settings
    last: set[JobKey] = set()
    if further:
        queue = Lane0Queue(state.snapshot, settings)
        last = {job.key for job in state.jobs.all if not further.isdisjoint(job.nodes) and queue.is_before(job)}
    return [
        (job, LAST_PRIORITY if job.key in last else settings.priority(job))
        for job in state.jobs.leased
        if job.key not in but
    ]


def _contender(job: Job, priority: int, state: RoundState, partners: frozenset[JobKey]) -> Contender:
    """Return a job as a contender; one that is not ours to stop or start is only in the others' way.

    Only on lane 0 a job that does not share has its GPUs for itself: there Slurm has given them to it alone.
    """
    lease = job.lease or Lease("waiting", ())
    ours = job.state == "RUNNING" or (job.state == "SUSPENDED" and job.key in state.memory.suspended)
    managed, first = state.settings.manages(job), state.where.further.isdisjoint(job.nodes)
    return Contender(
        key=job.key,
        gpus=frozenset(lease.gpus) | _unreported_gpus(job, state),
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


def _unreported_gpus(job: Job, state: RoundState) -> frozenset[Gpu]:
    """Return the GPUs of a job of several hosts where no step of it has come yet: the lowest free ones of its lane.

    Slurm's snapshot does not name the GPUs of a job, and of each node it gives the lowest that are free there. The
    script may begin on any of its hosts. Two such jobs that begin on different hosts would each get the GPUs that
    the other one lacks, and neither could start or be stopped.
    """
    names = _unreported_hosts(job, state) if job.num_nodes > 1 else ()
    here = [state.where.by_node.get(name) for name in names]
    missing = [host for host in here if host is not None and job.key in host.residents]
    return frozenset(Gpu(host.name, index) for host in missing for index in host.expected_gpus(job.key))


def _unreported_hosts(job: Job, state: RoundState) -> list[str]:
    """Return the nodes of a job on hosts whose GPUs its lease does not name."""
    reported, host_of = {gpu.host for gpu in job.leased_gpus}, state.snapshot.host_of
    return [name for name in job.nodes if host_of.get(name) not in reported]


def _halves(state: RoundState) -> list[Yield]:
    """Return the yields that a job lacks which has its GPUs on one host already and waits on another.

    It counts as a holder, so no turn is taken for it; but it cannot run, and meets a holder that can be stopped.
    """
    wide = [(job, lease) for job, lease in state.managed if job.num_nodes > 1 and job.state == "RUNNING"]
    halves = [job for job, lease in wide if lease.state == "held" and not lease.ready]
    running = ((job, lease) for job, lease in state.managed if job.state == "RUNNING")
    held = [(job, lease) for job, lease in running if lease.state == "held"] if halves else []
    priority = state.settings.priority
    blocking = {
        job.key: half.key
        for half in reversed(halves)
        for job, lease in held
        if lease.ready and meet(job, half) and priority(job) <= priority(half)
    }
    return [
        Yield(key, f"makes way for job {half}, which has its GPUs on other hosts already")
        for key, half in sorted(blocking.items())
    ]


# --- Slurm's allocation --------------------------------------------------------------------------------


def _may_be_suspended(job: Job, lease: Lease, state: RoundState) -> bool:
    """Return True for a job that has yielded and saves no checkpoint now, or that waits for its first turn.

    One that never ran must be past its launch: a step that Slurm suspends while it starts may never come up.
    """
    if lease.state == "waiting" and not lease.late:
        started_s = job.start_s if job.start_s is not None else state.now_s
        return state.now_s - started_s > state.settings.min_run_s
    return lease.state == "yielded" and not lease.saving


def _suspended_by_us(job: Job, state: RoundState) -> bool:
    return job.state == "SUSPENDED" and job.key in state.memory.suspended


def _unsuspend_reason(job: Job, state: RoundState, moved: set[JobKey], saving: set[JobKey]) -> str | None:
    """Return why Slurm resumes a job that we suspended, None if it stays suspended.

    ``moved``: jobs that begin a move in this round; ``saving``: those on their way that are to save a checkpoint.
    """
    settings = state.settings
    checks = (
        (not settings.enforce or not settings.suspend, "jobs are not to be suspended any more"),
        (not settings.manages(job), exclusion_reason(job, settings) or "left alone: the job does not opt in any more"),
        (job.lease is None, "no agent knows the job any more, so none would give it a turn"),
        (holds(job), "its turn has come"),
        (job.key in state.who.holders, "its turn has come"),
        (job.key in state.who.leaving, "its host is drained, which must not look finished while the job is there"),
        (job.key in state.who.giving_back, "it gives its place back"),
        (job.key in moved, "it moves, and saves its checkpoint before"),
        (job.key in saving, "is to save a checkpoint, for which its processes must run"),
        (job.lease is not None and job.lease.saving, "its state goes to a disk, for which its processes must run"),
    )
    return next((reason for applies, reason in checks if applies), None)


def _requeue_reason(job: Job, state: RoundState) -> str | None:
    """Return why a job that cannot go on, or that gives its further lane back, is requeued; None if it stays."""
    lease, snapshot, settings = job.lease, state.snapshot, state.settings
    if lease is None or lease.late or not job.requeueable or not settings.manages(job):
        return None
    if lease.lost or state.where.further.isdisjoint(job.nodes):
        return lost_text(lease, requeueable=True) if lease.lost else None
    near = dict(rival for gpu in lease.gpus for rival in state.jobs.by_gpu[gpu] if rival[1].key != job.key)
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
    unmanaged = [(o.key, o.lease) for o in rivals if stuck and o.lease is not None and o.lease.exclusive]
    # Slurm has given lane 0's GPUs to a job that did not opt in, as on any other host: it waits for seconds, no turn.
    if kept := [k for k, o in unmanaged if o.state == "waiting" and o.waited_s > settings.unmanaged_wait_s]:
        return f"cannot be stopped and is in the way of job {min(kept)}, which did not opt in"
    started = lease.held_s > settings.lease_wait_s  # before, it may only not have attached yet
    behind = [other.key for other in rivals if stuck and started and _waits_too_long(other, state)]
    return f"gives its place back: it cannot be stopped, and {job_names(behind)} waited" if behind else None


def _waits_too_long(job: Job, state: RoundState) -> bool:
    """Return True if a job that keeps its place, because it ran there or has lane 0, is past the longest wait."""
    lease = job.lease
    stays = lease is not None and (lease.state == "yielded" or state.where.further.isdisjoint(job.nodes))
    ours = job.state == "RUNNING" or _suspended_by_us(job, state)
    waits = lease is not None and not holds(job) and lease.waited_s > state.settings.lease_wait_s
    return stays and ours and waits and state.settings.manages(job)


def _cannot_stop(job: Job, settings: SharingSettings) -> bool:
    held = job.lease is not None and job.lease.state == "held"
    return held and not (job.lease is not None and job.lease.ready and settings.manages(job))


def release_plan(
    snapshot: ClusterSnapshot, memory: Memory, reason: str, *, everything: bool = False
) -> tuple[Action, ...]:
    """Return the actions that undo our suspends, holds and pins (pure); those of others stay.

    Suspends come first: their jobs have GPU state in host memory, the others have nothing yet. ``everything``: also
    the SiteFactors of all jobs that live.
    """
    jobs = sorted(snapshot.jobs, key=lambda job: job.key)
    # Slurm does not show who suspended a job: a suspend that is not on our record is an admin's.
    ours = [job for job in jobs if job.state == "SUSPENDED" and job.key in memory.suspended]
    held = [job for job in jobs if held_for_us(job, memory)]
    return (
        *(Unsuspend(job.key, reason) for job in ours),
        *(Release(job.key, reason) for job in held),
        *(Release(job.key, reason, unpin=True) for job in our_pins(snapshot, memory)),
        *(SetFactor(job.key, 0, reason) for job in jobs if everything and memory.factors.get(job.key.id)),
    )
