"""Pending jobs: the demand that growing and shrinking follow, and the jobs that the service pins to nodes.

A job waits for GPUs when

- it is pending in Slurm for lack of free resources only (reason Resources or Priority, or none yet) and asks for
  GPUs of managed hosts, whether it is ours or not, or
- Slurm has started it, as it does on a further lane when lane 0 is full, and it stands without a lease because
  another job has its GPUs: it never had one, or it waits for its next turn.

A job that is being moved does not wait: its new place is kept for it. Nor does one that Slurm is about to start where
we have placed it, unless that node takes no jobs any more or has others on its GPUs: then it is placed anew.

**Where the service places jobs** it pins managed jobs of Slurm's queue to nodes (ReqNodeList) and holds none. The pin
ends with the job's incarnation, when Slurm's reason is not about nodes, and when its nodes take no jobs: then Slurm
starts the job wherever it fits.
"""

from __future__ import annotations

from collections import Counter
from math import inf

from cadenza.policies.core.decision import Memory
from cadenza.policies.core.idle_gpus import queues_for_gpus
from cadenza.policies.core.model import WAITING_REASONS, ClusterSnapshot, Job, JobKey
from cadenza.policies.relocation.phases import MAX_START_S
from cadenza.policies.sharing.board.host import Resident
from cadenza.policies.sharing.state.round_state import RoundState
from cadenza.policies.sharing.state.settings import SharingSettings

OTHERS = "has been given to other jobs by Slurm"
BARRED = "is reserved or does not meet its constraint any more"
NODE_TAKEN = "ReqNodeNotAvail"
"""Beginning of Slurm's reason of a job whose required nodes are promised to an earlier job, or are away."""
REQUEUED = "was requeued: it is not pinned any more to the nodes that it was placed on before"
NOT_PLACED = "is not placed by the service any more: Slurm chooses its nodes"


def queued(snapshot: ClusterSnapshot, settings: SharingSettings) -> list[Job]:
    """Return the jobs that wait in Slurm's queue for GPUs of managed hosts, by priority, submission and key."""
    hosts = (node.partitions for node in snapshot.nodes if not settings.partitions.isdisjoint(node.partitions))
    shared = frozenset().union(*hosts)
    waiting = [job for job in snapshot.jobs if job.partition in shared and queues(job)]
    return sorted(waiting, key=lambda job: (-job.slurm_priority, job.submit_s, job.key))


def awaits_place(job: Job) -> bool:
    """Return True if a pending job lacks free resources only, and requires no nodes: its owner's choice stands."""
    return queues(job) and not job.required_nodes


def queues(job: Job) -> bool:
    """Return True if a job is in Slurm's queue and lacks free resources only."""
    return queues_for_gpus(job.state, job.gpus, job.slurm_priority, job.state_reason)


def waits_for_nodes(job: Job, now_s: float) -> bool:
    """Return True if a pinned job waits for its nodes only, or for the moment after a requeue until it may start.

    With any other reason (a limit, a license, a dependency, its begin time) it has no claim on them.
    """
    # A requeued job may not start before Slurm's requeue_delay is over; its reason is BeginTime until then.
    reason, soon = job.state_reason, (job.eligible_s or 0.0) <= now_s + MAX_START_S
    return reason in WAITING_REASONS or reason.startswith(NODE_TAKEN) or (reason == "BeginTime" and soon)


def starts(job: Job, state: RoundState) -> bool:
    """Return True if Slurm starts a job as soon as the nodes that we have pinned it to have its GPUs for it."""
    pinned = job.state == "PENDING" and not job.held and bool(job.required_nodes) and job.key in state.memory.placed
    return pinned and waits_for_nodes(job, state.now_s)


def our_pins(snapshot: ClusterSnapshot, memory: Memory) -> list[Job]:
    """Return the pending jobs that require nodes of our choice, in this incarnation or since an earlier one.

    The pin of a move is the move's (``relocation.phases``).
    """
    # Slurm keeps the required nodes of a job that it requeues.
    first: dict[int, int] = {}
    for key in (*memory.placed, *memory.departed):
        first[key.id] = min(key.restart, first.get(key.id, key.restart))
    if not first:
        return []
    moves = {move.job.id: move for move in memory.moves if move.nodes}
    pinned = (job for job in snapshot.jobs if job.state == "PENDING" and not job.held and job.required_nodes)
    found = []
    for job in pinned:
        move = moves.get(job.key.id)
        by_move = move is not None and (not move.over or move.successor == job.key or move.nodes == job.required_nodes)
        if not by_move and first.get(job.key.id, inf) <= job.key.restart:
            found.append(job)
    return sorted(found, key=lambda job: job.key)


def pins_over(state: RoundState) -> dict[JobKey, str]:
    """Return the jobs whose pin of ours has ended, each with the reason; not those that this round pins anew."""
    settings, placed = state.settings, {action.job for action in state.outcome.placements}
    found: dict[JobKey, str] = {}
    for job in our_pins(state.snapshot, state.memory):
        if job.key in placed:
            continue
        if job.key not in state.memory.placed:
            found[job.key] = REQUEUED
        elif not (settings.places and settings.manages(job)):
            found[job.key] = NOT_PLACED
        elif job.key in state.slurm.stranded:
            found[job.key] = f"{state.outcome.reasons[job.key]['stranded']}, so Slurm chooses its nodes"
        elif not starts(job, state):
            found[job.key] = unpinned_for(job)
    return found


def unpinned_for(job: Job) -> str:
    """Return why a job whose reason is not about nodes is pinned no more."""
    return f"waits in Slurm ({job.state_reason}), so it has no claim on {','.join(job.required_nodes)} any more"


def stranded(state: RoundState) -> dict[JobKey, str]:
    """Return the jobs that Slurm cannot start where we have placed them, each with the reason.

    The nodes take no jobs any more, or not this one, or Slurm has given their GPUs to other jobs that stay there.
    """
    nodes = {node.name: node for node in state.snapshot.nodes}
    given: Counter[str] = Counter()
    for job in state.jobs.all if state.settings.places else ():
        # A suspended job keeps its GPUs in Slurm's allocation (slurm.conf(5): suspended jobs do not release GRES).
        if job.state in ("RUNNING", "SUSPENDED") and job.key.id not in state.where.relocating:
            given.update({name: amount[0] for name, amount in job.amounts.items()})
    found: dict[JobKey, str] = {}
    for job in state.jobs.all if state.settings.places else ():
        ours = job.key in state.memory.placed and state.settings.manages(job)
        if ours and job.key.id not in state.where.relocating and starts(job, state):
            pins = [nodes[name] for name in job.required_nodes if name in nodes]
            gone = [(node.name, node.closed_reason) for node in pins if node.closed_reason]
            gone += [(node.name, BARRED) for node in pins if node.name in job.barred]
            gone += [(node.name, OTHERS) for node in pins if given[node.name] + job.gpus // job.num_nodes > node.gpus]
            if gone:
                found[job.key] = f"{gone[0][0]}, where it was placed, {gone[0][1]}"
    return found


def lacks_lease(resident: Resident) -> bool:
    """Return True if a job stands without a lease where Slurm started it."""
    lease = resident.job.lease
    return lease is not None and lease.state in ("waiting", "yielded") and not lease.late
