"""One Migrate or Resize on its way through a live cluster: what each phase waits for, does, and how it fails.

A move is kept in the memory, so that a service that was killed goes on where it was. Its phases::

    wanted    until the job holds its GPUs and can be stopped; then the Migrate or Resize itself orders the checkpoint
    warming   instead, if other hosts are to read its files first: it trains on until they have, then a Save orders it
    ordered   its ranks save at one boundary and stand; then it is requeued into a hold
    requeued  until Slurm shows the next incarnation held; then it is placed: changed, and released
    placed    until it runs
    leaving   something failed after the requeue: it is released as it is
    over      how it ended, for ``cadenza why``; kept while the job lives

Each phase has a time-out and a way out that leaves the job running or released. A step is taken only once its action
has left (the ledger calls ``acted``), and the job's owner wins at each point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from cadenza.policies.core.actions import Action, Migrate, Place, Release, Requeue, Resize, Resume, Save
from cadenza.policies.core.decision import Memory, Move, MovePhase
from cadenza.policies.core.model import ClusterSnapshot, Job, JobKey, Lease, Placement, Share

WANTED_S = 600.0
"""How long a move asked for by hand waits for a job that cannot be stopped yet."""
WARM_S = 20.0
"""How long the hosts that a job goes to may read its files before it is stopped; then it goes as it is."""
ORDER_S = 10.0
"""By when a job must be seen stopping for its checkpoint."""
SAVE_S = 1200.0
"""By when it must be saved; the agents give up earlier, each part with a time-out of its own."""
REQUEUE_S = 15.0
"""By when a requeued job must be seen leaving."""
LEAVE_S = 600.0
"""By when it must be gone from its nodes (KillWait, epilog)."""
HOLD_S = 5.0
"""By when a release is visible: what is held after that is held by somebody else."""
AGAIN_S = 2.0
"""How long a requeued job is kept because Slurm would not start it yet; beyond that Slurm itself sees to it."""
START_S = 300.0
"""By when a placed job must run, a requeue delay of Slurm's (about 121 s by default) included."""
CROWDED_S = 10.0
"""How long a resized job waits for the resources of its place, which others may have taken meanwhile."""
ELSEWHERE = "not moved: somebody else requeued it meanwhile"
CROWDED = frozenset({"Resources", "Priority"})
"""Slurm's reasons of a job that only lacks free resources."""
WITH = "was requeued with a checkpoint"
"""How a move to no nodes ends."""
TRIES = 2
"""How often a job is placed: once more after a failure, or after a service that died in between."""


class Step(NamedTuple):
    """What a round does for one move: how it stands now (None: forget it), its action, and a sentence."""

    move: Move | None
    action: Action | None = None
    sentence: str = ""

    def explain(self, reasons: dict[JobKey, str], before: Mapping[JobKey, str]) -> None:
        """Set the sentence of the move's job; how a move ended is added to what holds now."""
        move = self.move
        if move is None:
            return
        if move.phase != "over":
            reasons[move.successor if move.phase in ("placed", "leaving") else move.job] = self.sentence
        else:
            key = next((key for key in before if key.id == move.job.id), move.successor)
            reasons[key] = "; ".join(filter(None, (reasons.get(key, ""), move.outcome)))


Rule: TypeAlias = Callable[[Move, ClusterSnapshot, Memory], Step]


def cold(key: JobKey, shares: Placement, snapshot: ClusterSnapshot) -> tuple[str, ...]:
    """Return the hosts with an agent that a job goes to and is not on now."""
    host_of = {node.name: node.host for node in snapshot.nodes}
    job = snapshot.job(key)
    here = {host_of.get(node) for node in job.nodes} if job is not None else set()
    there = {host_of.get(share.node) for share in shares} - here
    return tuple(sorted(host.name for host in snapshot.hosts if host.agent_alive and host.name in there))


def acted(moves: Iterable[Move], actions: Iterable[Action], now_s: float) -> tuple[Move, ...]:
    """Return the moves once these actions have left."""
    by_job = {action.job: action for action in actions if isinstance(action, Migrate | Resize | Save | Requeue)}
    by_successor = {action.job: action for action in actions if isinstance(action, Place | Release)}
    return tuple(_acted(move, by_job.get(move.job), by_successor.get(move.successor), now_s) for move in moves)


def _acted(move: Move, first: Action | None, second: Action | None, now_s: float) -> Move:
    if move.phase == "wanted" and isinstance(first, Migrate | Resize):
        return replace(move, phase="warming" if first.warm else "ordered", since_s=now_s, began_s=now_s)
    if move.phase == "warming" and isinstance(first, Save):
        return replace(move, phase="ordered", since_s=now_s, began_s=now_s)
    if move.phase == "ordered" and isinstance(first, Requeue):
        return replace(move, phase="requeued", since_s=now_s)
    if move.phase in ("requeued", "placed") and isinstance(second, Place):
        return replace(move, phase="placed", since_s=now_s, tries=move.tries + 1)
    if move.phase in ("requeued", "placed") and isinstance(second, Release):
        return replace(move, phase="leaving", since_s=now_s)
    return move


def held_for_move(job: Job, memory: Memory) -> bool:
    """Whether a held job is one that a move has requeued and nobody has released since."""
    return (
        job.held
        and job.key not in memory.placed
        and any(
            move.successor == job.key and move.phase in ("ordered", "requeued", "placed", "leaving")
            for move in memory.moves
        )
    )


# --- Whether a job may be moved ------------------------------------------------------------------------------


def pinned_by_owner(job: Job, memory: Memory) -> bool:
    """Whether a job's owner wants it on the nodes that it requires; those where we placed it are not the owner's."""
    moved = any(move.job.id == job.key.id and move.nodes == job.required_nodes for move in memory.moves)
    return bool(job.required_nodes) and job.key not in memory.placed and not moved


def why_not(job: Job, before: Move | None = None, *, by_hand: bool = False, placed: bool = False) -> str:
    """Return why a job cannot be moved by checkpoint and requeue at all, else "".

    ``before``: an earlier move of it, whose pin to nodes is not its owner's; ``placed``: we have placed it.
    """
    lease = job.lease
    own = not placed and (before is None or before.nodes != job.required_nodes)
    pinned = bool(job.required_nodes) and own
    checks = (
        (not job.requeueable, "Slurm may not requeue it (no batch job, or --no-requeue)"),
        (lease is not None and lease.ready and not lease.checkpoints, "it saves no checkpoints (client.checkpoint)"),
        (pinned and not by_hand, f"its owner wants it on {','.join(job.required_nodes)}"),
    )
    found = next((str(why) for applies, why in checks if applies), "")
    return found or (before.outcome if before is not None and before.job == job.key else "")


# --- The phases ------------------------------------------------------------------------------------------------


def advance(move: Move, snapshot: ClusterSnapshot, memory: Memory) -> Step:
    """Return what to do for a move now (pure)."""
    if not any(job.key.id == move.job.id for job in snapshot.jobs):
        return Step(None)  # it has ended, or its owner has cancelled it
    return _RULES[move.phase](move, snapshot, memory)


def _wanted(move: Move, snapshot: ClusterSnapshot, memory: Memory) -> Step:
    del memory
    job = snapshot.job(move.job)
    if not move.by_hand or job is None:
        return Step(None)  # the guard kept it in: the policy decides anew
    if why := why_not(job, by_hand=True):
        return _over(move, snapshot, f"cannot be moved: {why}")
    if _age(move, snapshot) > WANTED_S:
        return _over(move, snapshot, f"not moved: it could not be stopped within {WANTED_S:.0f} s")
    if job.state != "RUNNING" or job.lease is None or job.lease.state != "held" or not job.lease.ready:
        return Step(move, sentence=f"is to go to {_goal(move)} as soon as it can be stopped{_not_ready(job.lease)}")
    order = Resize if move.resize else Migrate
    move = replace(move, pinned=job.required_nodes)
    return Step(move, order(move.job, move.shares, move.reason), f"{_goes(move)}: a checkpoint is ordered")


def _warming(move: Move, snapshot: ClusterSnapshot, memory: Memory) -> Step:
    del memory
    job = snapshot.job(move.job)
    if job is None:
        return _over(move, snapshot, ELSEWHERE)
    if job.state != "RUNNING" or job.lease is None or job.lease.state != "held" or not job.lease.ready:
        return Step(replace(move, phase="wanted") if move.by_hand else None, sentence=f"is to go to {_goal(move)}")
    warm = {host.name for host in snapshot.hosts if move.job in host.prefetched}
    if not warm.issuperset(cold(move.job, move.shares, snapshot)) and _age(move, snapshot) <= WARM_S:
        return Step(move, sentence=f"{_goes(move)}: its files are read there while it still runs")
    return Step(move, Save(move.job, f"{_goes(move)}: {move.reason}"), f"{_goes(move)}: a checkpoint is ordered")


def _ordered(move: Move, snapshot: ClusterSnapshot, memory: Memory) -> Step:
    del memory
    job = snapshot.job(move.job)
    if job is None:
        return _over(move, snapshot, ELSEWHERE)
    lease = job.lease
    if job.state == "RUNNING" and lease is not None and lease.saved:
        sentence = f"{_goes(move)}: its checkpoint is complete, it is requeued"
        return Step(replace(move, former=job.nodes), _requeue(move), sentence)
    stopping = lease is not None and lease.state == "stopping"
    if _age(move, snapshot) > (SAVE_S if stopping or lease is None else ORDER_S):
        return _over(move, snapshot, "not moved: its checkpoint failed or was refused, see its yields and resumes")
    return Step(move, sentence=f"{_goes(move)}: its checkpoint is being saved")


def _requeued(move: Move, snapshot: ClusterSnapshot, memory: Memory) -> Step:
    del memory
    old, job = snapshot.job(move.job), snapshot.job(move.successor)
    if old is not None and old.state == "RUNNING":
        return _still_there(move, old, snapshot)
    if job is not None and not job.held and not _settling(move, job, snapshot):
        return _over(move, snapshot, "not moved: it was released by its owner")
    if job is not None and job.held:
        return _back(move, job, snapshot)
    if _age(move, snapshot) > LEAVE_S or not _of(move, snapshot):
        return _over(move, snapshot, "not moved: it did not come back from its requeue as expected")
    return Step(move, sentence=f"{_goes(move)}: it leaves its nodes")


def _settling(move: Move, job: Job, snapshot: ClusterSnapshot) -> bool:
    """Whether a requeued job is still leaving its nodes: it has its new restart count before its hold."""
    return job.state == "OTHER" or (job.state == "PENDING" and _age(move, snapshot) <= HOLD_S)


def _back(move: Move, job: Job, snapshot: ClusterSnapshot) -> Step:
    """Return what to do with a job that is back in the queue, in its hold.

    Slurm tries to start a released job soon. One that must not start yet then waits for Slurm's next cycle, by default
    up to a minute (slurm.conf(5), sched_interval): so it is released when it may.
    """
    if job.required_nodes != move.pinned:
        return Step(move, Release(job.key, "its owner has changed it"), "was changed by its owner, so it is let go")
    if 0 < (job.eligible_s or 0.0) - snapshot.time_s <= AGAIN_S and not _elsewhere(move):
        return Step(move, sentence=f"{_goes(move)}: it has left its nodes, Slurm may start it within a second")
    return _place(move) if move.shares else _over(move, snapshot, f"{WITH}: {move.reason}")


def _still_there(move: Move, old: Job, snapshot: ClusterSnapshot) -> Step:
    """Requeue a job once more that did not leave, as after a service that died just then; then let it go on."""
    saved = old.lease is not None and old.lease.saved
    if _age(move, snapshot) > REQUEUE_S:
        action = Resume(move.job, "was not requeued, so it goes on") if saved else None
        return _over(move, snapshot, "not moved: Slurm did not requeue it", action)
    again = saved and _age(move, snapshot) > HOLD_S
    return Step(move, _requeue(move) if again else None, f"{_goes(move)}: it is requeued")


def _requeue(move: Move) -> Requeue:
    return Requeue(move.job, hold=True, reason=f"{_goes(move)}: {move.reason}")


def _place(move: Move) -> Step:
    place = Place(
        move.successor,
        move.nodes,
        f"goes to {_goal(move)}: {move.reason}",
        shares=move.shares if _sized(move) else (),
        resize=move.resize,
        elsewhere=_elsewhere(move),
    )
    return Step(move, place, f"goes to {_goal(move)}: it is placed there")


def _elsewhere(move: Move) -> bool:
    """Whether a job goes to nodes of which it had none; another lane of its host is another node."""
    return bool(move.former) and not set(move.former) & set(move.nodes)


def _sized(move: Move) -> bool:
    """Whether the job's CPUs and memory change with its nodes; an admin who names no size leaves them as they are."""
    known = all(share.cpus > 0 and share.memory_mb > 0 for share in move.shares)
    return move.resize or (known and not move.by_hand)


def _placed(move: Move, snapshot: ClusterSnapshot, memory: Memory) -> Step:
    job = snapshot.job(move.successor)
    if job is None:
        return _over(move, snapshot, "moved, and requeued by somebody else since")
    if job.state in ("RUNNING", "SUSPENDED"):
        seconds = snapshot.time_s - move.began_s
        return _over(move, snapshot, f"went to {','.join(job.nodes)} in {seconds:.0f} s: {move.reason}")
    if job.held:
        return _held_again(move, job, snapshot, memory)
    if move.resize and job.state_reason in CROWDED and _age(move, snapshot) > CROWDED_S:
        return _crowded_out(move, job)
    if _age(move, snapshot) > START_S:
        why = f"did not start on {','.join(move.nodes)} within {START_S:.0f} s"
        return Step(move, Release(job.key, why, unpin=True), f"{why}, so it may start anywhere")
    return Step(move, sentence=f"goes to {_goal(move)}: Slurm is to start it ({job.state_reason or 'no reason given'})")


def _crowded_out(move: Move, job: Job) -> Step:
    """Give a job whose place others have taken its former size there; if it has no more than that, let it go."""
    if len(move.shares) == 1 and 0 < move.former_gpus < move.shares[0].gpus:
        share, gpus = move.shares[0], move.former_gpus
        cpus, memory_mb = max(share.cpus * gpus // share.gpus, 1), share.memory_mb * gpus // share.gpus
        return _place(replace(move, shares=(Share(share.node, gpus, cpus, memory_mb),)))
    why = f"others have taken its place on {','.join(move.nodes)}"
    return Step(move, Release(job.key, why, unpin=True), f"{why}, so it may start anywhere")


def _held_again(move: Move, job: Job, snapshot: ClusterSnapshot, memory: Memory) -> Step:
    """Place a job again whose placement failed, and then release it; a hold after our release is its owner's."""
    if job.key in memory.placed:
        if _age(move, snapshot) > HOLD_S:
            return _over(move, snapshot, "not moved: held by its owner or an admin since")
        return Step(move, sentence=f"goes to {_goal(move)}: it is released")
    if move.tries < TRIES:
        return _place(move)
    return Step(move, Release(job.key, "could not be placed", unpin=True), "could not be placed, so it is let go")


def _leaving(move: Move, snapshot: ClusterSnapshot, memory: Memory) -> Step:
    job = snapshot.job(move.successor)
    if job is not None and job.held and job.key not in memory.placed:
        return Step(move, Release(job.key, "could not be moved", unpin=True), "could not be moved, so it is let go")
    return _over(move, snapshot, f"not moved to {_goal(move)}: it was released as it is")


def _was(move: Move, snapshot: ClusterSnapshot, memory: Memory) -> Step:
    """Keep an outcome while the job lives; a later requeue by others must not stay pinned to nodes of ours."""
    job = next((job for job in snapshot.jobs if job.key.id == move.job.id), None)
    if job is None or job.state != "PENDING" or job.held or job.key in (move.job, move.successor):
        return Step(move)
    if not move.shares or job.required_nodes != move.nodes or job.key in memory.placed:
        return Step(move)
    return Step(move, Release(job.key, "was requeued: the node that an earlier move gave it is cleared", unpin=True))


_RULES: Mapping[MovePhase, Rule] = {
    "wanted": _wanted, "warming": _warming, "ordered": _ordered,
    "requeued": _requeued, "placed": _placed, "leaving": _leaving, "over": _was,
}  # fmt: skip


def _over(move: Move, snapshot: ClusterSnapshot, outcome: str, action: Action | None = None) -> Step:
    return Step(replace(move, phase="over", since_s=snapshot.time_s, outcome=outcome), action)


def _age(move: Move, snapshot: ClusterSnapshot) -> float:
    return snapshot.time_s - move.since_s


def _of(move: Move, snapshot: ClusterSnapshot) -> bool:
    """Whether the job is still one of the two incarnations of a move."""
    return any(job.key in (move.job, move.successor) for job in snapshot.jobs)


def _goes(move: Move) -> str:
    return f"goes to {_goal(move)}" if move.shares else "makes way"


def _goal(move: Move) -> str:
    size = f" with {sum(share.gpus for share in move.shares)} GPUs" if move.resize else ""
    return ",".join(move.nodes) + size


def _not_ready(lease: Lease | None) -> str:
    return f" ({lease.why_not_ready})" if lease is not None and lease.why_not_ready else ""
