"""One move on its way through a live cluster: the condition, the action and the time limit of each phase.

A move is kept in the memory, so that a service that was killed goes on where it was. Its phases::

    wanted       until the job holds its GPUs and can be stopped; then the Migrate or Resize orders the checkpoint
    prefetching  instead, if other hosts read its files first: it trains on until they have, then a Save orders it
    ordered      its ranks save at one boundary and stand; then it is requeued, into a hold if it goes to nodes that are
                 named. Jobs that make way for one job wait for each other here and are requeued together
    requeued     until Slurm shows the next incarnation; one that is held is placed: changed, and released
    placed       until it runs
    leaving      something failed after the requeue: it is released as it is
    over         how it ended, for ``cadenza why``; kept while the job lives

Each phase has a time limit and a way out that leaves the job running or released. A step is taken only once its action
has left (the ledger calls ``acted``), and the job's owner wins at each point.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from cadenza.policies.core.actions import Action, MakeWay, Migrate, Place, Release, Requeue, Resize, Resume, Save
from cadenza.policies.core.decision import Memory
from cadenza.policies.core.model import LACKS_RESOURCES, ClusterSnapshot, Job, JobKey, Lease, Placement, Share
from cadenza.policies.core.move import Leaving, Move, Ordered, Over, Phase, Placed, Prefetching, Requeued, Wanted

MAX_WANTED_S = 600.0
"""Time that a move asked for by hand waits for a job that cannot be stopped yet."""
MAX_PREFETCH_S = 20.0
"""Time for the hosts that a job goes to to read its files before it is stopped; then it goes as it is."""
MAX_ORDER_S = 10.0
"""Time until a job must be stopping for its checkpoint."""
MAX_SAVE_S = 1200.0
"""Time until the checkpoint must be complete; the agents give up earlier, each part with a time limit of its own."""
MIN_SAVE_S, SAVE_FACTOR = 60.0, 4.0
"""A job whose last move is known has so many times its cost to save, 60 s at least: a file server that hangs must not
keep the GPUs of all jobs that make way idle."""
LOST_PART = 0.1
"""Part of the time that a job has had its GPUs which counts as lost at most: whoever says more would keep them."""
MAX_REQUEUE_S = 15.0
"""Time until a requeued job must be leaving."""
MAX_LEAVE_S = 600.0
"""Time until it must be gone from its nodes (KillWait, epilog)."""
HOLD_S = 5.0
"""Time until a release is visible: a job that is held after that is held by its owner or an admin."""
RESTART_GRACE_S = 2.0
"""Time that a requeued job is kept because Slurm would not start it yet; beyond that Slurm itself sees to it."""
MAX_START_S = 300.0
"""Time until a placed job must run, a requeue delay of Slurm's (about 121 s by default) included."""
MAX_CROWDED_S = 10.0
"""Time that a resized job waits for the resources of its place, which others may have taken since."""
REQUEUED_BY_OTHERS = "not moved: its owner or an admin requeued it"
MADE_WAY = "was requeued with a checkpoint"
"""Outcome of a move to no nodes."""
MAX_PLACEMENTS = 2
"""Number of times that a job is placed: once more after a failure, or after a service that died in between."""


class Step(NamedTuple):
    """One round of one move: the move as it stands now (None: forget it), its action, and a sentence."""

    move: Move | None
    action: Action | None = None
    sentence: str = ""

    def explain(self, reasons: dict[JobKey, str], keys: Mapping[int, JobKey]) -> None:
        """Set the sentence of the move's job; the outcome of a move that is over follows the job's own sentence.

        ``keys``: of the jobs that have a sentence, by id.
        """
        move = self.move
        if move is None:
            return
        if not move.over:
            arrives = isinstance(move.phase, Placed | Leaving)
            reasons[move.successor if arrives else move.job] = self.sentence
        else:
            key = keys.get(move.job.id, move.successor)
            reasons[key] = "; ".join(filter(None, (reasons.get(key, ""), move.outcome)))


def goal(move: Move) -> str:
    """Return the purpose of a move for its job's own output: a predicate of what the job does once it has saved."""
    asked = " as asked for by hand" if move.by_hand else f" ({move.reason})"
    if move.resize:
        gpus, had = sum(share.gpus for share in move.shares), move.former_gpus
        verb = "grows" if gpus > had else "shrinks" if gpus < had else "goes on"
        count = f"{verb} from {had} to {gpus} GPUs" if gpus != had and had else f"goes on with {gpus} GPUs"
        return f"{count} on {','.join(move.nodes)}{asked}"
    if move.shares:
        return f"moves to {','.join(move.nodes)}{asked}"
    if move.for_job is not None:
        return f"gives its GPUs up for job {move.for_job}"
    return f"gives its GPUs up{asked}"


def saved_within_s(move: Move) -> float:
    """Return the longest time that a job's ordered checkpoint may take, in seconds."""
    return max(MIN_SAVE_S, SAVE_FACTOR * move.cost_s) if move.cost_s else MAX_SAVE_S


def lost_s(job: Job, now_s: float) -> float:
    """Return the training that a running job would repeat after a move, as far as its own word counts, in seconds."""
    if job.lease is None or not job.lease.lost_s:
        return 0.0
    had_s = job.run_s if job.run_s is not None else now_s - (now_s if job.start_s is None else job.start_s)
    return min(job.lease.lost_s, LOST_PART * max(had_s, 0.0))


def hosts_to_prefetch(key: JobKey, shares: Placement, snapshot: ClusterSnapshot) -> tuple[str, ...]:
    """Return the hosts with an agent that a job goes to and is not on now."""
    host_of = snapshot.host_of
    job = snapshot.job(key)
    here = {host_of.get(node) for node in job.nodes} if job is not None else set()
    there = {host_of.get(share.node) for share in shares} - here
    return tuple(sorted(host.name for host in snapshot.hosts if host.agent_alive and host.name in there))


def acted(moves: Iterable[Move], actions: Iterable[Action], now_s: float) -> tuple[Move, ...]:
    """Return the moves once these actions have left."""
    by_job: dict[JobKey, Action] = {}
    for action in actions:
        if isinstance(action, Migrate | Resize | Save | Requeue):
            by_job[action.job] = action
        elif isinstance(action, MakeWay):
            by_job.update(dict.fromkeys(action.jobs, action))
    by_successor = {action.job: action for action in actions if isinstance(action, Place | Release)}
    if not by_job and not by_successor:
        return tuple(moves)
    return tuple([move if move.over else _acted(move, by_job, by_successor, now_s) for move in moves])


def _acted(move: Move, by_job: Mapping[JobKey, Action], by_successor: Mapping[JobKey, Action], now_s: float) -> Move:
    phase: Phase = move.phase
    match phase, by_job.get(move.job), by_successor.get(move.successor):
        case Wanted(), (Migrate(prefetch=(_, *_)) | Resize(prefetch=(_, *_))), _:
            phase = Prefetching(now_s)
        case (Wanted(), (Migrate() | Resize()), _) | (Prefetching(), Save(), _):
            phase = Ordered(now_s)
        case Ordered(since_s=began_s, former=former), Requeue() | MakeWay(), _:
            phase = Requeued(now_s, began_s, former)
        case Requeued(began_s=began_s, former=former), _, Place():
            phase = Placed(now_s, began_s, former, saved_s=phase.since_s - began_s)
        case Placed(began_s=began_s, former=former, attempts=attempts, saved_s=saved_s), _, Place():
            phase = Placed(now_s, began_s, former, attempts + 1, saved_s)
        case ((Requeued() | Placed()), _, Release()):
            phase = Leaving(now_s)
    return move if phase is move.phase else replace(move, phase=phase)


# --- Conditions of a move --------------------------------------------------------------------------------------


def pinned_by_owner(job: Job, memory: Memory) -> bool:
    """Return True if a job's owner wants it on the nodes that it requires; those where we placed it do not count."""
    if not job.required_nodes or job.key in memory.placed:
        return False
    return not any(move.job.id == job.key.id and move.nodes == job.required_nodes for move in memory.moves)


def follows_size(job: Job) -> bool:
    """Return True for a job that said that its script takes its size from Slurm at each start."""
    return job.options is not None and (job.options.min_gpus or job.options.max_gpus) is not None


def refusal_reason(job: Job, before: Move | None = None, *, by_hand: bool = False, placed: bool = False) -> str | None:
    """Return why a job cannot be moved by checkpoint and requeue at all, None if it can.

    ``before``: an earlier move of it, whose pin to nodes is not its owner's; ``placed``: we have placed it.
    """
    lease = job.lease
    own = not placed and (before is None or before.nodes != job.required_nodes)
    if not job.requeueable:
        return "Slurm may not requeue it (no batch job, or --no-requeue)"
    if lease is not None and lease.unrestored:
        return f"{lease.unrestored}, so it is not moved again"
    if lease is not None and lease.ready and not lease.checkpoints:
        if lease.unready:
            return f"it can save no checkpoint yet: {lease.unready}"
        return "it saves no checkpoints (client.checkpoint)"
    if job.required_nodes and own and not by_hand:
        return f"its owner wants it on {','.join(job.required_nodes)}"
    return (before.outcome or None) if before is not None and before.job == job.key else None


# --- The phases ------------------------------------------------------------------------------------------------


def advance(move: Move, snapshot: ClusterSnapshot, memory: Memory) -> Step:
    """Return the next step of a move (pure)."""
    if move.job.id not in snapshot.by_id:
        return Step(None)  # it has ended, or its owner has cancelled it
    age_s = snapshot.time_s - move.phase.since_s
    match move.phase:
        case Over() as phase:
            step = _over(move, phase, snapshot, memory)
        case Wanted():
            step = _wanted(move, snapshot, age_s)
        case Prefetching():
            step = _prefetching(move, snapshot, age_s)
        case Ordered():
            step = _ordered(move, snapshot, age_s)
        case Requeued() as phase:
            step = _requeued(move, phase, snapshot, age_s)
        case Placed() as phase:
            step = _placed(move, phase, snapshot, memory)
        case Leaving():
            step = _leaving(move, snapshot, memory)
    return step


def _wanted(move: Move, snapshot: ClusterSnapshot, age_s: float) -> Step:
    job = snapshot.job(move.job)
    if not move.by_hand or job is None:
        return Step(None)  # the guard kept it in: the policy decides anew
    if reason := refusal_reason(job, by_hand=True):
        return _end(move, snapshot, f"cannot be moved: {reason}")
    if job.absent or job.prolog_lost:
        return _end(move, snapshot, "not moved: a killed slurmd or slurmctld left it, and it is requeued")
    if age_s > MAX_WANTED_S:
        return _end(move, snapshot, f"not moved: it could not be stopped within {MAX_WANTED_S:.0f} s")
    if not _stoppable(job):
        detail = f" ({job.lease.why_not_ready})" if job.lease is not None and job.lease.why_not_ready else ""
        return Step(move, sentence=f"is to go to {_goal(move)} as soon as it can be stopped{detail}")
    order = Resize if move.resize else Migrate
    move = replace(move, pinned=job.required_nodes)
    action = order(move.job, move.shares, move.reason, goal=goal(move), save_s=saved_within_s(move))
    return Step(move, action, f"{_goes(move)}: a checkpoint is ordered")


def _prefetching(move: Move, snapshot: ClusterSnapshot, age_s: float) -> Step:
    job = snapshot.job(move.job)
    if job is None:
        return _end(move, snapshot, REQUEUED_BY_OTHERS)
    if not _stoppable(job):
        again = replace(move, phase=Wanted(move.phase.since_s)) if move.by_hand else None
        return Step(again, sentence=f"is to go to {_goal(move)}")
    read = {host.name for host in snapshot.hosts if move.job in host.prefetched}
    if not read.issuperset(hosts_to_prefetch(move.job, move.shares, snapshot)) and age_s <= MAX_PREFETCH_S:
        return Step(move, sentence=f"{_goes(move)}: its files are read there while it still runs")
    save = Save(move.job, f"{_goes(move)}: {move.reason}", goal(move), saved_within_s(move))
    return Step(move, save, f"{_goes(move)}: a checkpoint is ordered")


def _ordered(move: Move, snapshot: ClusterSnapshot, age_s: float) -> Step:
    job = snapshot.job(move.job)
    if job is None:
        return _end(move, snapshot, REQUEUED_BY_OTHERS)
    lease = job.lease
    if job.state == "RUNNING" and lease is not None and lease.saved:
        sentence = f"{_goes(move)}: its checkpoint is complete, it is requeued"
        saved = Ordered(move.phase.since_s, job.nodes)
        lost = lost_s(job, snapshot.time_s)
        return Step(replace(move, phase=saved, lost_s=lost), _requeue(move), sentence)
    stopping = lease is not None and (lease.state == "stopping" or lease.saving)
    if age_s > (saved_within_s(move) if stopping or lease is None else MAX_ORDER_S):
        return _end(move, snapshot, "not moved: its checkpoint failed or was refused, see its yields and resumes")
    return Step(move, sentence=f"{_goes(move)}: its checkpoint is being saved")


def _requeued(move: Move, phase: Requeued, snapshot: ClusterSnapshot, age_s: float) -> Step:  # noqa: PLR0911 (a way out each)
    old, job = snapshot.job(move.job), snapshot.job(move.successor)
    # 1. It has not left, as after a service or slurmctld that died just then: requeue it once more, then let it go on.
    #    A slurmctld that forgot its last seconds may show it as suspended, although it was resumed to save.
    if old is not None and old.state in ("RUNNING", "SUSPENDED"):
        saved = old.lease is not None and old.lease.saved
        if age_s > MAX_REQUEUE_S:
            goes_on = saved and old.state == "RUNNING"
            action = Resume(move.job, "was not requeued, so it goes on") if goes_on else None
            return _end(move, snapshot, "not moved: Slurm did not requeue it", action)
        again = saved and age_s > HOLD_S
        return Step(move, _requeue(move) if again else None, f"{_goes(move)}: it is requeued")
    # 2. It is back in the queue: one that made way is Slurm's from here on, the others are in their hold.
    if job is not None and not move.shares and job.state != "OTHER":
        return _end(move, snapshot, f"{MADE_WAY}: {move.reason}", saved_s=phase.since_s - phase.began_s)
    if job is not None and job.held:
        return _back(move, phase, job, snapshot)
    # 3. It is still leaving its nodes: it has its new restart count before its hold. A slurmctld that forgot its start,
    #    too, shows it in the queue as it was before that.
    settling = job is None or job.state == "OTHER" or (job.state == "PENDING" and age_s <= HOLD_S)
    if not settling:
        return _end(move, snapshot, "not moved: it was released by its owner")
    forgotten = old is not None and old.state == "PENDING" and age_s > HOLD_S
    if forgotten or age_s > MAX_LEAVE_S or (old is None and job is None):
        return _end(move, snapshot, "not moved: it did not come back from its requeue as expected")
    return Step(move, sentence=f"{_goes(move)}: it leaves its nodes")


def _back(move: Move, phase: Requeued, job: Job, snapshot: ClusterSnapshot) -> Step:
    """Return the step of a job that is back in the queue, in its hold."""
    # A requeue keeps the list of required nodes: another list is its owner's update.
    if job.required_nodes != move.pinned:
        return Step(move, Release(job.key, "its owner has changed it"), "was changed by its owner, so it is let go")
    # Slurm tries to start a released job soon. One that must not start yet then waits for Slurm's next cycle, up to a
    # minute by default (slurm.conf(5), sched_interval): so it is released when it may start.
    soon = 0 < (job.eligible_s or 0.0) - snapshot.time_s <= RESTART_GRACE_S
    if soon and not _elsewhere(move, phase):
        return Step(move, sentence=f"{_goes(move)}: it has left its nodes, Slurm may start it within a second")
    return _place(move, phase)


def _placed(move: Move, phase: Placed, snapshot: ClusterSnapshot, memory: Memory) -> Step:
    job, age_s = snapshot.job(move.successor), snapshot.time_s - phase.since_s
    if job is None:
        return _end(move, snapshot, "moved, and requeued by its owner or an admin since")
    # 1. It runs.
    if job.state in ("RUNNING", "SUSPENDED"):
        seconds = snapshot.time_s - phase.began_s
        outcome = f"went to {','.join(job.nodes)} in {seconds:.0f} s: {move.reason}"
        return _end(move, snapshot, outcome, saved_s=phase.saved_s)
    # 2. It is held again.
    if job.held:
        return _held_again(move, phase, job, snapshot, released=job.key in memory.placed)
    # 3. Others have taken its place.
    # Between a requeue and the next start Slurm keeps no GPUs for a job.
    if move.resize and job.state_reason in LACKS_RESOURCES and age_s > MAX_CROWDED_S:
        return _crowded_out(move, phase, job)
    # 4. It waits for Slurm, up to a limit.
    if age_s > MAX_START_S:
        return _let_go(move, job, f"did not start on {','.join(move.nodes)} within {MAX_START_S:.0f} s")
    return Step(move, sentence=f"goes to {_goal(move)}: Slurm is to start it ({job.state_reason or 'no reason given'})")


def _held_again(move: Move, phase: Placed, job: Job, snapshot: ClusterSnapshot, *, released: bool) -> Step:
    """Place a job again whose placement failed, and then release it; a hold after our release is its owner's."""
    if released and snapshot.time_s - phase.since_s > HOLD_S:
        return _end(move, snapshot, "not moved: held by its owner or an admin since")
    if released:
        return Step(move, sentence=f"goes to {_goal(move)}: it is released")
    if phase.attempts < MAX_PLACEMENTS:
        return _place(move, phase)
    return Step(move, Release(job.key, "could not be placed", unpin=True), "could not be placed, so it is let go")


def _crowded_out(move: Move, phase: Placed, job: Job) -> Step:
    """Give a job whose place others have taken its former size there; if it has no more than that, let it go."""
    if len(move.shares) == 1 and 0 < move.former_gpus < move.shares[0].gpus:
        share, gpus = move.shares[0], move.former_gpus
        cpus, memory_mb = max(share.cpus * gpus // share.gpus, 1), share.memory_mb * gpus // share.gpus
        return _place(replace(move, shares=(Share(share.node, gpus, cpus, memory_mb),)), phase)
    return _let_go(move, job, f"others have taken its place on {','.join(move.nodes)}")


def _leaving(move: Move, snapshot: ClusterSnapshot, memory: Memory) -> Step:
    job = snapshot.job(move.successor)
    if job is not None and job.held and job.key not in memory.placed:
        return Step(move, Release(job.key, "could not be moved", unpin=True), "could not be moved, so it is let go")
    return _end(move, snapshot, f"not moved to {_goal(move)}: it was released as it is")


def _over(move: Move, phase: Over, snapshot: ClusterSnapshot, memory: Memory) -> Step:
    """Keep an outcome while the job lives, and complete its cost; no later requeue may stay pinned to nodes of ours."""
    job = snapshot.by_id.get(move.job.id)
    starts = job.key.restart - move.job.restart if job is not None else 0
    if phase.saved_s and job is not None and starts == 1 and job.start_s is not None:
        lease = job.lease
        if lease is not None and lease.ready:  # every rank has restored, and stands or trains
            cost_s = phase.saved_s + max(snapshot.time_s - job.start_s, 0.0)
            move = replace(move, cost_s=cost_s, phase=Over(phase.since_s, phase.outcome))
    # Slurm keeps required nodes through its own requeues, too, also those of a job whose node it has lost.
    if job is None or job.state != "PENDING" or job.held or starts in (0, 1):
        return Step(move)
    if not move.shares or job.required_nodes != move.nodes or job.key in memory.placed:
        return Step(move)
    return Step(move, Release(job.key, "was requeued: the node that an earlier move gave it is cleared", unpin=True))


# --- Parts of a step -------------------------------------------------------------------------------------------


def _stoppable(job: Job) -> bool:
    lease: Lease | None = job.lease
    if job.state != "RUNNING" or lease is None:
        return False
    return lease.ready if lease.state == "held" else lease.state == "yielded" and lease.saves_away


def _requeue(move: Move) -> Requeue | MakeWay:
    """Return the requeue of a job whose checkpoint is complete: into a hold only if it is to be placed."""
    reason = f"{_goes(move)}: {move.reason}"
    if move.shares:
        # Slurm changes nodes and size of pending jobs only, and could start one that is not held before that is done.
        return Requeue(move.job, hold=True, reason=reason)
    return MakeWay((move.job,), (move.factor,), move.for_job or move.job, move.reason)


def _place(move: Move, phase: Requeued | Placed) -> Step:
    """Return the step that places a job; an admin who names no size leaves its CPUs and memory as they are."""
    sized = all(share.cpus > 0 and share.memory_mb > 0 for share in move.shares)
    place = Place(
        move.successor,
        move.nodes,
        f"goes to {_goal(move)}: {move.reason}",
        shares=move.shares if move.resize or (sized and not move.by_hand) else (),
        resize=move.resize,
        elsewhere=_elsewhere(move, phase),
    )
    return Step(move, place, f"goes to {_goal(move)}: it is placed there")


def _elsewhere(move: Move, phase: Requeued | Placed) -> bool:
    """Return True if a job goes to nodes of which it had none; another lane of its host is another node."""
    return bool(phase.former) and not set(phase.former) & set(move.nodes)


def _let_go(move: Move, job: Job, reason: str) -> Step:
    return Step(move, Release(job.key, reason, unpin=True), f"{reason}, so it may start anywhere")


def _end(
    move: Move, snapshot: ClusterSnapshot, outcome: str, action: Action | None = None, *, saved_s: float = 0.0
) -> Step:
    return Step(replace(move, phase=Over(snapshot.time_s, outcome, saved_s)), action)


def _goes(move: Move) -> str:
    return f"goes to {_goal(move)}" if move.shares else "makes way"


def _goal(move: Move) -> str:
    size = f" with {sum(share.gpus for share in move.shares)} GPUs" if move.resize else ""
    return ",".join(move.nodes) + size
