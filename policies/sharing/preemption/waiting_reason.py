"""Sentences for jobs that stay in Slurm's queue: who has the GPUs, who of them could make way, and why not yet."""

from __future__ import annotations

from collections import Counter
from heapq import nsmallest

from cadenza.policies.core.model import Job
from cadenza.policies.core.text import job_names
from cadenza.policies.sharing.board.node_room import NodeRequest, NodeRoom
from cadenza.policies.sharing.preemption.standing import Standings

MAX_NAMED = 3
MAX_EXPLAINED = 6
"""Kinds of waiting jobs for which the running ones are looked through in one round: those at the head of the queue."""
BEHIND_OTHERS = "; jobs before it in Slurm's queue wait for GPUs, too"
LEAVES_FOR_OTHERS = "could make way, but not enough of them on one place, or for a job before this one"


class WaitingReasons:
    """The sentences of one round; jobs that ask alike share what is said of the jobs that run."""

    def __init__(self, room: NodeRoom, standings: Standings) -> None:
        self.room = room
        self.standings = standings
        self._holders: dict[tuple[object, ...], str] = {}

    def of(self, job: Job, request: NodeRequest) -> str:
        """Return why a job waits, for its user: in Slurm's words, who has the GPUs, and what its user can do."""
        names, claim = self.room.admitting(request), self.standings.claim(job)
        waits = f"waits in Slurm's queue ({job.state_reason or 'not looked at yet'}) for {job.gpus} GPUs"
        if not names:
            return f"{waits}: no node of partition {job.partition} that takes jobs meets its request"
        alike = (names, claim, job.partition, job.qos, job.account, job.user)
        if alike not in self._holders and len(self._holders) < MAX_EXPLAINED:
            self._holders[alike] = self._holders_of(job, names, claim)
        hint = ""
        if not self.standings.can_leave_later(job):
            hint = "; no job of this name was seen with checkpoints, so it counts by its limit: a shorter --time helps"
        return f"{waits}, level {claim}{self._holders.get(alike, BEHIND_OTHERS)}{hint}"

    def _holders_of(self, job: Job, names: tuple[str, ...], claim: int) -> str:
        """Return a clause on the jobs that have the GPUs of some nodes."""
        standings = self.standings
        counted: Counter[str] = Counter()
        soon: list[tuple[float, Job]] = []
        for other in standings.running_on(names):
            if reason := standings.stays_because(other):
                counted[reason.partition(":")[0]] += 1  # without the detail of one job
            elif standings.outranks(other, job):
                counted["has a higher class, or more of its fair share left"] += 1
            elif standings.level(other) <= claim:
                counted["has had no more GPU time than this job counts with"] += 1
            elif (left_s := standings.quantum_left_s(other)) > 0:
                soon.append((left_s, other))
            else:
                counted[LEAVES_FOR_OTHERS] += 1
        parts = [f"{count} job{'s' if count > 1 else ''} ({reason})" for reason, count in counted.most_common()]
        if soon:
            first = nsmallest(MAX_NAMED, soon, key=lambda one: (one[0], one[1].key))
            named = job_names([other.key for _, other in first])
            parts.insert(0, f"{named} (can make way once its quantum is over, the first in {first[0][0]:.0f} s)")
        return f"; the GPUs are held by {', '.join(parts)}" if parts else ""
