"""Sentences for jobs that stay in Slurm's queue: who has the GPUs, who of them could make way, and why not yet."""

from __future__ import annotations

from collections import Counter

from cadenza.policies.core.model import Job
from cadenza.policies.core.text import job_names
from cadenza.policies.sharing.preemption.node_room import NodeRequest, NodeRoom
from cadenza.policies.sharing.preemption.standing import Standings

MAX_NAMED = 3


def waits_because(job: Job, request: NodeRequest, room: NodeRoom, standings: Standings) -> str:
    """Return why a job waits, for its user: in Slurm's words, then the jobs on the nodes that it may have."""
    state = standings.state
    if not state.settings.manages(job):
        return ""
    names = frozenset(room.admitting(request))
    waits = f"waits in Slurm's queue ({job.state_reason or 'not looked at yet'}) for {job.gpus} GPUs"
    if not names:
        return f"{waits}: no node of partition {job.partition} that takes jobs meets its request"
    claim = standings.claim(job)
    counted: Counter[str] = Counter()
    soon: list[tuple[float, Job]] = []
    for other in standings.running_on(names):
        if reason := standings.stays_because(other):
            counted[_plain(reason)] += 1
        elif standings.outranks(other, job):
            counted["has a higher class or more of its fair share left"] += 1
        elif standings.level(other) <= claim:
            counted["has had no more GPU time than this job counts with"] += 1
        elif (left_s := standings.quantum_left_s(other)) > 0:
            soon.append((left_s, other))
        else:
            counted["could make way, but not enough of them on one place"] += 1
    parts = [f"{count} that {reason}" for reason, count in counted.most_common()]
    if soon:
        left_s, first = min(soon, key=lambda one: (one[0], one[1].key))
        named = job_names([other.key for _, other in sorted(soon, key=lambda one: one[0])[:MAX_NAMED]])
        parts.insert(0, f"{named} could make way, job {first.key} in {left_s:.0f} s, when its quantum is over")
    held = f"; the GPUs are held by jobs: {'; '.join(parts)}" if parts else ""
    hint = ""
    if not standings.can_leave_later(job):
        hint = "; no job of this name was seen with checkpoints, so it counts by its time limit: a shorter --time helps"
    return f"{waits}, level {claim}{held}{hint}"


def _plain(reason: str) -> str:
    """Return a reason without the detail of one job, so that equal ones are counted together."""
    return reason.partition(":")[0]
