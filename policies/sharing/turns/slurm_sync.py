"""Gandiva's reactive mode with time slices on a live cluster: turns, Slurm's books, lanes and placement.

Every round compares what the snapshot shows with who should hold GPUs and emits what is missing; it remembers
only what the snapshot cannot show (whose suspend, hold or drain it was), so a lost action is sent again.

Before maintenance, that is once lane 0 of a host is drained, its further lanes are drained too, its jobs go
on taking turns until they end, and none of them stays suspended in Slurm, because Slurm shows a node with
nothing but suspended jobs as drained, that is ready to be switched off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cadenza.policies.core.actions import Action, Release, Requeue, Resume, Suspend, Unsuspend, Yield
from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.model import ClusterSnapshot, Job, JobKey, Lease
from cadenza.policies.core.text import job_names, jobs_called, why_lost
from cadenza.policies.sharing.placement.affinity import place
from cadenza.policies.sharing.state.settings import SharingSettings, held_for_us, left_alone
from cadenza.policies.sharing.turns.fair_queue import Contender, Turn, groups, next_turn
from cadenza.policies.sharing.turns.lanes import hosts_to_leave, lane_actions
from cadenza.policies.sharing.turns.preferred import favoured

MAX_NAMED = 6
"""How many jobs of a group a reason names."""
AFTER_ALL = -(10**9)
"""Priority of a job on a further lane that came after an unmanaged job which still waits for GPUs."""
WAITING_REASONS = frozenset({"", "None", "Resources", "Priority"})
"""Slurm's reasons of a pending job that only lacks free resources."""


def decide(snapshot: ClusterSnapshot, memory: Memory, settings: SharingSettings) -> Decision:
    """Return one round's actions and a reason for every job that opted in.

    In observe-only (``enforce`` False) the decision is what would be done; the guard keeps it from leaving,
    except for what undoes our own suspends, holds and open lanes.
    """
    view = View.of(snapshot, memory, settings)
    placed = place(snapshot, memory, settings)
    actions = (*lane_actions(snapshot, memory, settings), *turn_actions(view), *placed.actions)
    return Decision(actions, memory, view_reasons(view, placed.reasons))


@dataclass(frozen=True, slots=True)
class View:
    """The snapshot as the rules below need it, with this round's turns."""

    snapshot: ClusterSnapshot
    memory: Memory
    settings: SharingSettings
    jobs: tuple[Job, ...]
    """In order of keys."""
    turns: tuple[Turn, ...]
    reasons: dict[JobKey, str]
    holders: frozenset[JobKey]
    """Who should have GPUs once this round's turns are done."""
    leaving: frozenset[JobKey]
    """Jobs with a part on a host that is to be left."""
    giving_back: frozenset[JobKey]

    @classmethod
    def of(
        cls,
        snapshot: ClusterSnapshot,
        memory: Memory,
        settings: SharingSettings,
        partners: Mapping[JobKey, frozenset[JobKey]] | None = None,
        stopping: frozenset[JobKey] = frozenset(),
        ranks: Mapping[JobKey, int] | None = None,
    ) -> View:
        """Return the view.

        ``partners``: whom a packed job runs with; ``stopping``: holders that other actions stop; ``ranks``: the jobs'
        places in the ordering, where turns follow it.
        """
        jobs = tuple(sorted(snapshot.jobs, key=lambda job: job.key))
        further = further_lanes(snapshot)
        contenders = [
            _contender(job, priority, memory, settings, (partners or {}).get(job.key, _NOBODY))
            for job, priority in _by_priority(jobs, further, settings)
            if _takes_part(job)
        ]
        contenders = [replace(c, state="stopping") if c.key in stopping else c for c in contenders]
        first = favoured(contenders, ranks or {})
        contenders = [replace(c, favoured=True) if c.key in first else c for c in contenders]
        turns, reasons = _turns(contenders, settings)
        drained, host = hosts_to_leave(snapshot), {node.name: node.host for node in snapshot.nodes}
        return cls(
            snapshot,
            memory,
            settings,
            jobs,
            turns,
            reasons,
            holders=frozenset().union(*(turn.holders for turn in turns)),
            leaving=frozenset(j.key for j in jobs if any(host.get(name) in drained for name in j.nodes)),
            giving_back=frozenset(j.key for j in jobs if _gives_back(j, snapshot, settings, further)),
        )

    def managed(self, state: str) -> list[tuple[Job, Lease]]:
        """Return the managed jobs in this Slurm state that an agent knows, in order of keys."""
        return [
            (job, job.lease)
            for job in self.jobs
            if job.state == state and job.lease is not None and self.settings.manages(job)
        ]

    @property
    def further(self) -> frozenset[str]:
        """Return the nodes that are further lanes."""
        return further_lanes(self.snapshot)

    def ours(self, job: Job) -> bool:
        """Whether the job is suspended and we did that."""
        return job.state == "SUSPENDED" and job.key in self.memory.suspended


_NOBODY: frozenset[JobKey] = frozenset()


def turn_actions(view: View) -> tuple[Action, ...]:
    """Return what the turns ask for, of agents and in Slurm's books, in the order in which it is to be done."""
    return (
        # Before the yields: a job that is still stopped when its GPUs are free loses them to whoever has just left.
        *_unsuspends(view),
        *_yields(view),
        *_resumes(view),
        *_suspends(view),
        *_requeues(view),
        *_releases(view),
    )


def view_reasons(view: View, placed: Mapping[JobKey, str]) -> dict[JobKey, str]:
    """Return a sentence for every job that opted in; ``placed`` has those of held jobs."""
    return {job.key: _reason(job, view, placed) for job in view.jobs if job.options is not None}


def further_lanes(snapshot: ClusterSnapshot) -> frozenset[str]:
    """Return the names of the nodes that are further lanes of their host."""
    return frozenset(node.name for node in snapshot.nodes if node.lane > 0)


# --- Turns ---------------------------------------------------------------------------------------------


def _by_priority(jobs: tuple[Job, ...], further: frozenset[str], settings: SharingSettings) -> list[tuple[Job, int]]:
    """Return each job with its priority.

    Unmanaged jobs queue for lane 0 only. A job that came after one of those and started on a further lane would
    prolong lane 0, and so the wait of a job that never agreed to it: it only gets GPUs that nobody wants.
    """
    queued = [job for job in jobs if _queues_unmanaged(job, settings)]
    first = {name: min(_age(j) for j in queued if j.partition == name) for name in {j.partition for j in queued}}
    return [
        (
            job,
            AFTER_ALL
            if first and _age(job) > first.get(job.partition, _age(job)) and not further.isdisjoint(job.nodes)
            else settings.priority(job),
        )
        for job in jobs
    ]


def _age(job: Job) -> tuple[float, JobKey]:
    """Return the order of submission: Slurm's times are whole seconds, its ids tell jobs of one second apart."""
    return job.submit_s, job.key


def _queues_unmanaged(job: Job, settings: SharingSettings) -> bool:
    waits = job.state == "PENDING" and not job.held and job.state_reason in WAITING_REASONS
    return waits and job.gpus > 0 and not settings.manages(job)


def _takes_part(job: Job) -> bool:
    lease = job.lease
    return lease is not None and (job.state in ("RUNNING", "SUSPENDED") or lease.state in ("held", "stopping"))


def _turns(contenders: list[Contender], settings: SharingSettings) -> tuple[tuple[Turn, ...], dict[JobKey, str]]:
    turns, reasons = [], {}
    for group in groups(contenders):
        turn = next_turn(
            group,
            slice_s=settings.slice_s,
            share_between_users=settings.share_between_users,
            min_run_s=settings.min_run_s,
        )
        turns.append(turn)
        names = [str(member.key) for member in group]
        for number, member in enumerate(group):
            reasons[member.key] = turn.reasons[member.key] + _others(names[:number] + names[number + 1 :])
    return tuple(turns), reasons


def _others(names: list[str]) -> str:
    if not names:
        return ""
    return f" (takes turns with {jobs_called(names) if len(names) <= MAX_NAMED else f'{len(names)} jobs'})"


def _contender(
    job: Job, priority: int, memory: Memory, settings: SharingSettings, partners: frozenset[JobKey]
) -> Contender:
    """Return a job as a contender; one that is not ours to stop or start is only in the others' way."""
    lease = job.lease or Lease("waiting", ())
    ours = job.state == "RUNNING" or (job.state == "SUSPENDED" and job.key in memory.suspended)
    return Contender(
        key=job.key,
        gpus=frozenset(lease.gpus),
        user=job.user,
        state=lease.state,
        priority=priority,
        weight=lease.weight,
        vtime_s=lease.vtime_s,
        held_s=lease.held_s,
        waited_s=lease.waited_s,
        ready=lease.ready and ours,
        exclusive=lease.exclusive or not settings.manages(job),
        iteration_s=lease.iteration_s,
        eligible=ours,
        packed_with=partners,
    )


def _yields(view: View) -> list[Yield]:
    asked = [Yield(key, turn.reasons[key]) for turn in view.turns for key in turn.yields]
    return asked + [extra for extra in _halves(view) if all(extra.job != action.job for action in asked)]


def _halves(view: View) -> list[Yield]:
    """Return the yields that a job lacks which has its GPUs on one host already and waits on another.

    It counts as a holder, so no turn is taken for it; but it cannot run, and meets a holder that can be stopped.
    """
    held = [(job, lease) for job, lease in view.managed("RUNNING") if lease.state == "held"]
    halves = [job for job, lease in held if not lease.ready and job.num_nodes > 1]
    priority = view.settings.priority
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


def _resumes(view: View) -> list[Resume]:
    """Return what the agents should give next; an unmanaged job gets its lease from the agent alone."""
    known = {job.key for state in ("RUNNING", "SUSPENDED") for job, _ in view.managed(state)}
    return [
        Resume(key, turn.reasons[key]) for turn in view.turns for key in (*turn.resumes, *turn.upcoming) if key in known
    ]


# --- Slurm's books -------------------------------------------------------------------------------------


def _suspends(view: View) -> list[Suspend]:
    if not view.settings.suspend:
        return []
    spared = view.holders | view.leaving | view.giving_back
    return [
        Suspend(job.key, "its turn is over, so Slurm stops its time limit and frees its CPUs")
        for job, lease in view.managed("RUNNING")
        if job.key not in spared and (lease.state == "yielded" or _waits_long(job, lease, view))
    ]


def _waits_long(job: Job, lease: Lease, view: View) -> bool:
    """Whether a job that never ran is past its launch, in which Slurm should not be asked to suspend it."""
    started = job.start_s if job.start_s is not None else view.snapshot.time_s
    return lease.state == "waiting" and view.snapshot.time_s - started > view.settings.min_run_s


def _unsuspends(view: View) -> list[Unsuspend]:
    found = ((job, _why_unsuspend(job, view)) for job in view.jobs if view.ours(job))
    return [Unsuspend(job.key, why) for job, why in found if why]


def _why_unsuspend(job: Job, view: View) -> str:
    if not view.settings.enforce or not view.settings.suspend:
        return "jobs are not to be suspended any more"
    if not view.settings.manages(job):
        return left_alone(job, view.settings) or "left alone: the job does not opt in any more"
    if job.lease is None:
        return "no agent knows the job any more, so nobody would give it a turn"
    if job.lease.state in ("held", "stopping") or job.key in view.holders:
        return "its turn has come"
    if job.key in view.leaving:
        return "its host is drained, which must not look finished while the job is there"
    return "it gives its place back" if job.key in view.giving_back else ""


def _requeues(view: View) -> list[Requeue]:
    hold = view.settings.places
    return [
        Requeue(job.key, hold, _gives_back(job, view.snapshot, view.settings, view.further))
        for job, _ in view.managed("RUNNING")
        if job.key in view.giving_back
    ]


def _gives_back(job: Job, snapshot: ClusterSnapshot, settings: SharingSettings, further: frozenset[str]) -> str:
    """Return why a job that cannot go on, or that gives its further lane back, is to be requeued, else ""."""
    if job.lease is None or not job.requeueable or not settings.manages(job):
        return ""
    if job.lease.lost:
        return why_lost(job.lease, requeueable=True)
    if further.isdisjoint(job.nodes):
        return ""
    if job.lease.state == "waiting":
        return _waits_in_vain(job, snapshot, settings)
    return _in_the_way(job, snapshot, settings) if _cannot_stop(job, settings) else ""


def _in_the_way(job: Job, snapshot: ClusterSnapshot, settings: SharingSettings) -> str:
    """Return why a job that cannot be stopped goes: an unmanaged one has had to wait for it long enough."""
    waiting = ((other, other.lease) for other in snapshot.jobs if other.lease is not None and _meet(job, other))
    kept = [
        other.key
        for other, lease in waiting
        if lease.exclusive and lease.state == "waiting" and lease.waited_s > settings.unmanaged_wait_s
    ]
    return f"cannot be stopped and is in the way of job {min(kept)}, which did not opt in" if kept else ""


def _waits_in_vain(job: Job, snapshot: ClusterSnapshot, settings: SharingSettings) -> str:
    """Return why a job that never ran goes: it waited ``lease_wait_s`` behind one that cannot be stopped."""
    waited = snapshot.time_s - (job.start_s if job.start_s is not None else snapshot.time_s)
    if waited <= settings.lease_wait_s:
        return ""
    blockers = [other.key for other in snapshot.jobs if _cannot_stop(other, settings) and _meet(job, other)]
    if not blockers:
        return ""
    return f"gives its place back after {waited:.0f} s: {job_names(blockers)} cannot be stopped"


def _cannot_stop(job: Job, settings: SharingSettings) -> bool:
    held = job.lease is not None and job.lease.state == "held"
    return held and not (job.lease is not None and job.lease.ready and settings.manages(job))


def _meet(job: Job, other: Job) -> bool:
    mine, theirs = job.lease, other.lease
    return (
        job.key != other.key and mine is not None and theirs is not None and not set(mine.gpus).isdisjoint(theirs.gpus)
    )


def _releases(view: View) -> list[Release]:
    """Return the releases of jobs that were held for us and that we do not place."""
    return [
        Release(
            job.key,
            left_alone(job, view.settings) or "held for Cadenza, which does not place jobs now",
            unpin=job.key.restart > 0,  # an earlier incarnation may carry the nodes that we chose for it
        )
        for job in view.jobs
        if held_for_us(job, view.memory) and not (view.settings.places and view.settings.manages(job))
    ]


def release_plan(snapshot: ClusterSnapshot, memory: Memory, reason: str) -> tuple[Action, ...]:
    """Return what undoes our suspends and holds (pure); what others suspended or held stays as it is.

    Suspends come first: their jobs have GPU state in host memory, held jobs have nothing yet.
    """
    jobs = sorted(snapshot.jobs, key=lambda job: job.key)
    ours = [job for job in jobs if job.state == "SUSPENDED" and job.key in memory.suspended]
    held = [job for job in jobs if held_for_us(job, memory)]
    return (
        *(Unsuspend(job.key, reason) for job in ours),
        *(Release(job.key, reason) for job in held),
    )


# --- Reasons -------------------------------------------------------------------------------------------


def _reason(job: Job, view: View, placed: Mapping[JobKey, str]) -> str:
    alone = left_alone(job, view.settings)
    if alone:
        return alone
    if job.key in placed:
        return placed[job.key]
    if job.state == "PENDING":
        return _why_pending(job)
    if job.state == "SUSPENDED" and not view.ours(job):
        return "left alone: suspended by somebody else"
    if job.lease is None:
        return "no agent knows the job, so it runs as without Cadenza"
    return view.reasons.get(job.key, "left alone: neither pending, running nor suspended") + _not_ready(job, job.lease)


def _why_pending(job: Job) -> str:
    if job.held:
        return "left alone: held by its owner or an admin"
    return f"pending in Slurm ({job.state_reason or 'no reason given'}), which starts it on a free lane"


def _not_ready(job: Job, lease: Lease) -> str:
    if lease.lost:
        return f"; {why_lost(lease, requeueable=job.requeueable)}"
    return f"; cannot be stopped: {lease.why_not_ready}" if lease.why_not_ready and not lease.ready else ""
