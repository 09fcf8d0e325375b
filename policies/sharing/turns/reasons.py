"""Reasons: the sentence that each job's user reads, of all that the stages of a round have said of the job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from cadenza.policies.core.decision import Sentences
from cadenza.policies.core.model import ClusterSnapshot, Job, JobKey, Lease
from cadenza.policies.core.text import gpu_names, lost_text
from cadenza.policies.sharing.state.outcome import Topic
from cadenza.policies.sharing.state.round_state import RoundState
from cadenza.policies.sharing.state.settings import exclusion_reason

NOT_ASKED = "has started without its lease, as its option `late` says, and has not asked for it yet"
ADDED: tuple[Topic, ...] = ("stranded", "size", "cpus")
"""Further limits on a job: added to each sentence but that on an order."""
Said = Mapping[Topic, str]
NOTHING: Said = {}
"""Sentences of the stages on most jobs, because most wait."""


def explain(state: RoundState) -> None:
    """Give every job that opted in a sentence, once it is read: a simulation reads none."""
    outcome = state.outcome
    waiting, outcome.waiting_reasons = outcome.waiting_reasons, dict  # the state of a round is in no cycle
    outcome.sentences = Sentences(partial(_sentences, state, waiting))


def _sentences(state: RoundState, waiting: Callable[[], Mapping[JobKey, str]]) -> dict[JobKey, str]:
    outcome = state.outcome
    for key, text in waiting().items():
        outcome.say("queue", key, text)
    for action in outcome.moves:
        outcome.say("order", action.job, action.reason)
    for way in outcome.ways:
        for key in way.jobs:
            outcome.say("order", key, way.reason)
    return _chosen(state)


def _chosen(state: RoundState) -> dict[JobKey, str]:
    """Return the first of these sentences that there is for each job, because it is what its user can act on."""
    settings, reasons = state.settings, state.outcome.reasons
    owed_s = {debt[:2]: debt.owed_s for debt in state.memory.sharing.debts}
    found: dict[JobKey, str] = {}
    for job in state.snapshot.jobs:
        if job.options is None:
            continue
        # 1. Why it is left alone. Slurm's queue is looked at with the jobs of all, so stages speak of such a job, too.
        excluded, said = exclusion_reason(job, settings), reasons.get(job.key, NOTHING)
        # 2. What is done to it in this round. A repair comes first, because a job that is repaired gets no other order;
        #    a move or a requeue ends a pack, so that comes last.
        if first := excluded or (said and (said.get("repair") or said.get("order") or said.get("pack"))):
            found[job.key] = first
            continue
        # 3. Its place in Slurm's queue as this round found it, which says more than that a pin of it has ended.
        # 4. Its state in Slurm, and its turn.
        own = (said and (said.get("queue") or said.get("pin"))) or _as_it_is(job, state, said, owed_s)
        if said:
            for topic in ADDED:
                if topic in said:
                    own += f"; {said[topic]}"
        found[job.key] = own
    return found


def _as_it_is(job: Job, state: RoundState, said: Said, owed_s: Mapping[tuple[int, int], float]) -> str:
    """Return the sentence on a job by its state: what keeps it from turns, else why it leaves, else its turn."""
    if job.held:
        return "left alone: held by its owner or an admin"
    if job.state == "PENDING":
        return f"waits in Slurm's queue ({job.state_reason or 'no reason given'})"
    if job.state == "SUSPENDED" and job.key not in state.memory.suspended:
        return "left alone: suspended by its owner or an admin"
    if job.lease is None:
        # A node may have to boot first, and Slurm shows the job's state as running all that time.
        waits = "its nodes are not ready yet: Slurm starts it then (CONFIGURING)"
        return waits if job.starting else "no agent knows the job, so it runs as without Cadenza"
    return said.get("back") or _turn(job, job.lease, state, said.get("turn"), owed_s.get(job.key))


def _turn(job: Job, lease: Lease, state: RoundState, turn: str | None, debt_s: float | None) -> str:
    """Return the sentence on a job's turn with all that bears on it; ``debt_s``: what its last start had too much."""
    if lease.late:
        turn = NOT_ASKED
    elif own := state.who.alone.get(job.key):
        turn = f"holds {gpu_names(own.gpus)} for {own.held_s:.0f} s; no job waits for it"
    parts = [
        turn or "left alone: neither pending, running nor suspended",
        lease.no_room,
        f"{lease.early}: it waits at the start from now on" if lease.early else "",
    ]
    if debt_s:
        parts.append(f"its last start had its GPUs for {debt_s:.0f} s while others waited, which counts")
    if lease.lost:
        parts.append(lost_text(lease, requeueable=job.requeueable))
    elif lease.why_not_ready and not lease.ready:
        parts.append(f"cannot be stopped: {lease.why_not_ready}")
    if lease.state != "held":
        parts.append(_taken(job, state.snapshot))
    return "; ".join(filter(None, parts))


def _taken(job: Job, snapshot: ClusterSnapshot) -> str:
    """Name the processes without a lease on the hosts of a job that waits for its GPUs."""
    taken, host_of = snapshot.taken, snapshot.host_of
    found = [taken[host] for host in sorted({host_of.get(name, "") for name in job.nodes}) if host in taken]
    return found[0] if found else ""
